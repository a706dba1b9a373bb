"""A process dies, hangs or raises in the middle of a collective: all others end soon, and say who, where in the layout,
and what was awaited; also if a loop catches the error and goes on. Failures between devices are those of tests/faults.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import describe, run_outcomes
from small_llama import described
from torch import nn

from evenpipe import Pipeline, initialise_worker
from evenpipe.communication.communicator import Communicator
from evenpipe.errors import RunError

SILENCE_SECONDS = 4.0
HOW = {
    "dies": r"{place}, pid \d+\) has died: killed, out of memory or crashed",
    "hangs": rf"{{place}}\) gave no sign of life for {SILENCE_SECONDS:g} s \(pid \d+; it .*\)",
    "raises": r"{place}\) failed: ArithmeticError: a bad number",
}


@dataclass(frozen=True)
class Awaited:
    """What the other rank of a device awaits when one fails."""

    label: str
    device: int
    """In 1F1B on two."""
    nth: int
    """How often it begins in a step before the victim fails."""
    axis: str = "tensor"
    needed_by: str = ""
    """The pass that is named after it."""
    exchange: str = "keys"
    devices: int = 2


OF_TENSOR_RANKS = [
    Awaited("sum of 0F2", 0, 1),  # the embedding
    Awaited("rows of 1F2", 1, 2),  # blocks of layers
    Awaited("sum of 1F2", 1, 2),
    Awaited("rows of 0B1", 0, 3),
    Awaited("sum of 0B1", 0, 1),
    Awaited("rows of S2", 1, 1),
    Awaited("statistics of S2", 0, 1),
    Awaited("sum of C1", 1, 1),
    Awaited("gradients that tensor ranks share", 0, 1),
    Awaited("the norm of all gradients", 1, 1),
    # all layers on one device
    Awaited("rows of 0F2", 0, 2, devices=1),
    Awaited("rows of S2", 0, 1, devices=1),
    Awaited("the norm of all gradients", 0, 1, devices=1),
]
OF_CONTEXT_RANKS = [
    Awaited("keys of 0F2", 0, 1, "context", "0F2"),
    Awaited("values of 1F1", 1, 2, "context", "1F1"),
    Awaited("keys of 1B1", 1, 2, "context", "1B1"),
    Awaited("gradients of keys of 0B2", 0, 1, "context", "0B2"),
    Awaited("gradients of values of 1B3", 1, 1, "context", "1B3"),
    Awaited("heads of 0F2", 0, 3, "context", "0F2", "heads"),
    Awaited("heads of 1B1", 1, 5, "context", "1B1", "heads"),
    Awaited("keys of 0F2.1", 0, 1, "context", "0F2.1"),
    Awaited("heads of 1B1.1", 1, 2, "context", "1B1.1", "heads"),
]


def fail_in_a_collective(how: str, awaited: Awaited, victim: int, mate: int, begun: Path) -> None:
    """Two steps; in the second one the victim fails where it should begin a collective for the n-th time, when `mate`
    has begun it, which the file `begun` says."""
    worker = initialise_worker(silence_seconds=SILENCE_SECONDS, timeout_seconds=600)
    options: dict[str, Any] = {"tp": 2}
    if awaited.axis == "context":
        slices = 2 if "." in awaited.label else 1
        options = {"cp": 2, "context_exchange": awaited.exchange, "slices": slices}
    model = described(97, False, torch.float64)
    pipeline = Pipeline(model, microbatches=4, parameter_dtype=torch.float64, self_check=False, **options)
    ids = torch.randint(0, 97, (4, 8))
    pipeline.step(ids)
    pipeline.clip_grad_norm_(1.0)
    start, left = Communicator._start, awaited.nth

    def begin(self, text, *arguments, **named):
        nonlocal left
        left -= text == awaited.label
        if left == 0 and worker.rank == mate:
            begun.touch()
        elif left == 0:
            for _ in itertools.takewhile(lambda _: not begun.exists(), range(2000)):
                time.sleep(0.01)
            if how == "raises":
                raise ArithmeticError("a bad number")
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        return start(self, text, *arguments, **named)

    if worker.rank in (victim, mate):
        Communicator._start = begin
    try:
        pipeline.step(ids)
        pipeline.clip_grad_norm_(1.0)
    except BaseException as error:
        worker.watch.report_exception(error)
        raise


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("awaited", [*OF_TENSOR_RANKS, *OF_CONTEXT_RANKS], ids=str)
@pytest.mark.parametrize("rank", range(2))
@pytest.mark.sampled(1)
def test_a_rank_that_fails_is_named_with_its_place_and_what_was_awaited(
    how: str, awaited: Awaited, rank: int, tmp_path: Path
) -> None:
    victim, mate = 2 * awaited.device + rank, 2 * awaited.device + 1 - rank
    place = f"process {victim} \\(device {awaited.device}, {awaited.axis} rank {rank}"
    outcomes = run_outcomes(fail_in_a_collective, 2 * awaited.devices, how, awaited, victim, mate, tmp_path / "begun")
    said = {one.rank: f"{one.exception} {one.printed}" for one in outcomes if one.rank != victim}
    for rank_of_other, text in said.items():
        assert outcomes[rank_of_other].exit_code not in (0, None, -9), describe(outcomes)
        assert re.search(HOW[how].format(place=place), text), describe(outcomes)
    label, peers = awaited.label, f"{place}\\)"
    if label == "the norm of all gradients" and awaited.devices == 2:
        peers = r"processes \d .*"
    label = label.replace("sum of 0B1", "(rows|sum) of 0B1")  # in B the input is gathered again meanwhile
    if awaited.axis == "context":
        label = re.sub("keys|values", "(keys|values)", label) + f" for {awaited.needed_by}"  # both are under way
    own = f"process {mate} \\(device {awaited.device}, {awaited.axis} rank {1 - rank}\\)"
    assert re.search(f"{own} was awaiting {label}.* from {peers}", said[mate]), describe(outcomes)


# --- errors that a loop catches ---------------------------------------------------------------------------------------

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
