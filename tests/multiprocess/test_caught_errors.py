"""An error in the middle of a step ends the run on all processes, also if the loop catches it and goes on."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from harness import describe, run_outcomes
from torch import nn

from evenpipe import Pipeline, initialise_worker
from evenpipe.errors import RunError

WIDTH, VOCABULARY, MICROBATCHES = 8, 31, 4


class Failing(nn.Linear):
    """Fails in one pass of the second step."""

    def __init__(self, fails: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.fails, self.calls = fails, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output = super().forward(hidden)
        if self.calls == MICROBATCHES + 2:
            if self.fails == "forward":
                raise ArithmeticError("a bad number")
            if self.fails == "backward" and output.requires_grad:
                output.register_hook(self._fail)
        return output

    def _fail(self, gradient: torch.Tensor) -> None:
        raise ArithmeticError("a bad number")


def catching(fails: str, place: int, schedule: str, owned: bool) -> list[str]:
    """Take four steps, or steps without end if evenpipe runs the process, and catch everything; return what was."""
    if owned:
        initialise_worker(timeout_seconds=600)
    torch.manual_seed(0)
    layers = [Failing(fails if index == place else "") for index in range(4)]
    ends = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    pipeline = Pipeline.from_modules(ends[0], layers, None, ends[1], schedule=schedule, microbatches=MICROBATCHES)
    ids, caught = torch.zeros(MICROBATCHES, 5, dtype=torch.int64), []
    for _ in itertools.count() if owned else range(4):
        try:
            float(pipeline.step(ids).loss)
        except Exception as error:
            caught.append(f"{type(error).__name__}: {error}")
    return caught


@pytest.mark.parametrize(
    ("fails", "place", "schedule"),
    [("forward", 0, "1f1b"), ("forward", 3, "zbv"), ("backward", 2, "1f1b"), ("backward", 0, "zbv")],
)
@pytest.mark.sampled(2)
def test_a_loop_that_catches_errors_ends_on_all_processes(fails: str, place: int, schedule: str) -> None:
    outcomes = run_outcomes(catching, 2, fails, place, schedule, False)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], describe(outcomes)
    said = [outcome.value for outcome in outcomes]
    (own,) = [caught for caught in said if caught[0] == "ArithmeticError: a bad number"]
    failed = r"RunError: process \d( \(.*\))? failed: ArithmeticError: a bad number"
    assert all(re.match(failed, text) for caught in said for text in (caught[1:] if caught is own else caught)), said
    assert [len(caught) for caught in said] == [3, 3], said  # the first step was right


def test_a_process_that_evenpipe_runs_ends_with_the_error() -> None:
    outcomes = run_outcomes(catching, 2, "backward", 1, "1f1b", True)
    for outcome in outcomes:
        assert outcome.exit_code == RunError.exit_code, describe(outcomes)
        assert "failed: ArithmeticError: a bad number" in outcome.printed, describe(outcomes)


def test_one_process_goes_on() -> None:
    caught = run_outcomes(catching, 1, "forward", 1, "1f1b", False)[0].value
    assert caught == ["ArithmeticError: a bad number"]
