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
            import traceback; traceback.print_exc(); break
    return faults


RUN = ("run",) * 4
def at(place: int, kind: str) -> tuple[str, ...]:
    return (*RUN[:place], kind, *RUN[place + 1 :])



KINDS = ("skip", "above", "below", "no_grad", "fresh", "constant")
EVERYWHERE = [Case(at(place, kind), processes=1, plain=True) for kind in KINDS for place in range(4)]
EVERYWHERE += [Case((kind,)*4, processes=1, plain=True) for kind in KINDS]
SCHED=("1f1b","zbv","zb-h1","dualpipe-v","interleaved")
TWO = [Case(at(place, kind+q), plain=plain, options={"schedule":SCHED[(place+i)%5]}) for i,kind in enumerate(KINDS) for place in range(4) for q in ("","?") for plain in (True,False)]
TWO += [Case((kind,)*4, plain=plain,options={"schedule":s}) for kind in KINDS for plain in (True,False) for s in ("1f1b","zbv")]
O=[]
for i,kind in enumerate(("skip?","above?","below","no_grad?","fresh?","above")):
    for opts in ({"checkpointing":"full"},{"checkpointing":"selective"},{"slices":2},{"slices":3,"schedule":"zbv"},{"compile_layers":True,"schedule":"zbv"},{"tied":True},{"vocabulary":"first-last"},{"vocabulary":"redistribute","schedule":"zb-h1"}):
        for place in (0,1,3):
            O.append(Case(at(place,kind),options=opts))
T=[]
for i,kind in enumerate(("skip?","above?","below","no_grad?","fresh?","above")):
    for place in (0,1,3):
        for opts in ({"tensor_parallel":2},{"tensor_parallel":2,"schedule":"zbv"},{"context_parallel":2},{"replicas":2,"data_parallel":"shard"},{"replicas":2}):
            T.append(Case(at(place,kind),processes=4,options=opts))

import os
def test_one() -> None:
    check_cases(faults_of_cases, {"E":EVERYWHERE,"TWO":TWO,"O":O,"T":T}[os.environ["W"]])
