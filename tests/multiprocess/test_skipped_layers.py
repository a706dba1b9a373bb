"""Stages whose result does not depend on their input, or on no parameter: layers that are skipped, gradients that are
stopped. Loss and gradients are those of one process, microbatch by microbatch."""

from __future__ import annotations

import torch
from harness import check_cases
from patched_layers import Case, faults_of


def without_grad(run, hidden, weight):
    with torch.no_grad():
        return run(hidden)


BEHAVIOURS = {
    "run": lambda run, hidden, weight: run(hidden),
    "skip": lambda run, hidden, weight: hidden,
    "above": lambda run, hidden, weight: run(hidden.detach()),  # itself trained, everything below is not
    "below": lambda run, hidden, weight: run(hidden).detach(),
    "no_grad": without_grad,
    "fresh": lambda run, hidden, weight: weight.expand_as(hidden) * 2,  # depends on a parameter only
    "constant": lambda run, hidden, weight: torch.ones_like(hidden),
}


def faults_of_cases(cases: list[Case]) -> list[str]:
    faults = []
    for case in cases:
        try:
            faults += faults_of(case, BEHAVIOURS)
        except Exception as error:
            faults.append(f"{case}: {type(error).__name__}: {error}")
            break
    return faults


RUN = ("run",) * 4
def at(place: int, kind: str) -> tuple[str, ...]:
    return (*RUN[:place], kind, *RUN[place + 1 :])


EVERYWHERE = [Case(at(place, kind), processes=1, plain=True) for kind in ("skip", "above","below","no_grad","fresh","constant") for place in range(4)]
EVERYWHERE += [Case((kind,)*4, processes=1, plain=True) for kind in ("skip", "above","below","no_grad","fresh","constant")]


def test_one() -> None:
    check_cases(faults_of_cases, EVERYWHERE)
