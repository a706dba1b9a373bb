"""A process dies, hangs or raises in the middle of a step: all others end soon, and say who and what was awaited."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
import torch
from harness import describe, run_outcomes
from test_gradients import described

from evenpipe import Pipeline, initialise_worker
from evenpipe.communication.communicator import Communicator
from evenpipe.schedule import Kind

SILENCE_SECONDS = 2.0
VICTIM = 1


def fail_in_the_middle(how: str) -> None:
    worker = initialise_worker(silence_seconds=SILENCE_SECONDS, timeout_seconds=600)
    pipeline = Pipeline(
        described(97, False, torch.float64), microbatches=6, parameter_dtype=torch.float64, self_check=False
    )
    ids = torch.randint(0, 97, (6, 8))
    pipeline.step(ids)
    if pipeline.device == VICTIM:
        backward = pipeline._walker._pass_handlers[Kind.B]

        def fail(item) -> None:
            if item.microbatch == 3:
                if how == "raises":
                    raise ArithmeticError("a bad number")
                os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
            backward(item)

        pipeline._walker._pass_handlers[Kind.B] = fail
        pipeline._walker._rows.clear()  # which know their handlers
    try:
        pipeline.step(ids)
    except BaseException as error:
        worker.watch.report_exception(error)
        raise


EXPECTED = {
    "dies": rf"process {VICTIM} .*has died",
    "hangs": rf"process {VICTIM} gave no sign of life",
    "raises": rf"process {VICTIM} failed: ArithmeticError: a bad number",
}


@pytest.mark.parametrize("how", EXPECTED)
@pytest.mark.sampled(1)
def test_all_others_end_and_name_the_pass_and_the_process(how: str) -> None:
    outcomes = run_outcomes(fail_in_the_middle, 3, how)
    waiting = []
    for outcome in outcomes:
        if outcome.rank == VICTIM:
            continue
        said = f"{outcome.exception} {outcome.printed}"
        assert outcome.exit_code not in (0, None), describe(outcomes)
        assert re.search(EXPECTED[how], said), describe(outcomes)
        waiting += re.findall(r"awaiting (\S+) for (\S+) from", said)
    # Whoever was in a wait says what it awaited and which pass needed it: "1RECV_B3 for 0B3".
    assert waiting, describe(outcomes)
    assert all(re.fullmatch(r"(\d+[A-Z_]+\d+|[A-Z_]+\d+)", text) for pair in waiting for text in pair)


# --- tensor ranks -----------------------------------------------------------------------------------------------------

COLLECTIVES = {
    # what is awaited: (its device in 1F1B on two, how often it begins before the victim fails)
    "sum of 0F2": (0, 1),  # the embedding
    "rows of 1F2": (1, 2),  # blocks of layers
    "sum of 1F2": (1, 2),
    "rows of 0F2": (0, 2),
    "rows of 0B1": (0, 3),
    "sum of 0B1": (0, 1),
    "rows of S2": (1, 1),
    "statistics of S2": (0, 1),
    "sum of C1": (1, 1),
    "gradients that tensor ranks share": (0, 1),
    "the norm of all gradients": (1, 1),
}
HOW = {
    "dies": r"{place}, pid \d+\) has died: killed, out of memory or crashed",
    "hangs": r"{place}\) gave no sign of life for 2 s \(pid \d+; it .*\)",
    "raises": r"{place}\) failed: ArithmeticError: a bad number",
}


def fail_in_a_collective(how: str, what: str, nth: int, victim: int, options: dict[str, Any]) -> None:
    """Two steps; in the second one the victim fails where it should begin a collective for the n-th time."""
    worker = initialise_worker(silence_seconds=SILENCE_SECONDS, timeout_seconds=600)
    pipeline = Pipeline(
        described(97, False, torch.float64),
        microbatches=4,
        parameter_dtype=torch.float64,
        self_check=False,
        **options,
    )
    ids = torch.randint(0, 97, (4, 8))
    pipeline.step(ids)
    pipeline.clip_gradients(1.0)
    start, left = Communicator._start, nth

    def fail(self, text, *arguments, **named):
        nonlocal left
        left -= text == what
        if left == 0:
            if how == "raises":
                raise ArithmeticError("a bad number")
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        return start(self, text, *arguments, **named)

    if worker.rank == victim:
        Communicator._start = fail
    try:
        pipeline.step(ids)
        pipeline.clip_gradients(1.0)
    except BaseException as error:
        worker.watch.report_exception(error)
        raise


CASES = [(how, what, devices, rank) for how in HOW for what in COLLECTIVES for devices in (1, 2) for rank in range(2)]


@pytest.mark.parametrize(("how", "what", "devices", "rank"), CASES)
@pytest.mark.sampled(4)
def test_a_tensor_rank_that_fails_is_named_with_its_place(how: str, what: str, devices: int, rank: int) -> None:
    device, nth = COLLECTIVES[what]
    device = device if devices == 2 else 0
    what = what.replace("1F2", "0F2") if devices == 1 else what  # all layers are on device 0
    victim, mate = 2 * device + rank, 2 * device + 1 - rank
    options = {"tensor_parallel": 2}
    outcomes = run_outcomes(fail_in_a_collective, 2 * devices, how, what, nth, victim, options)
    name = f"process {victim} \\(device {device}, tensor rank {rank}"
    said = {one.rank: f"{one.exception} {one.printed}" for one in outcomes if one.rank != victim}
    for one in outcomes:
        if one.rank != victim:
            assert one.exit_code not in (0, None, -9), describe(outcomes)
            assert re.search(HOW[how].format(place=name), said[one.rank]), describe(outcomes)
    peers = f"process {victim} \\(device {device}, tensor rank {rank}\\)"
    if what == "the norm of all gradients" and devices == 2:
        peers = r"processes \d .*"
    what = what.replace("sum of 0B1", "(rows|sum) of 0B1")  # in B the input is gathered again meanwhile
    awaited = f"process {mate} \\(device {device}, tensor rank {1 - rank}\\) was awaiting {what}.* from {peers}"
    assert re.search(awaited, said[mate]), describe(outcomes)


# --- context ranks ----------------------------------------------------------------------------------------------------

IN_ATTENTION = {
    # what is awaited: (its device in 1F1B on two, how often it begins before the victim fails, its pass, the exchange)
    "keys of 0F2": (0, 1, "0F2", "keys"),
    "values of 1F1": (1, 2, "1F1", "keys"),
    "keys of 1B1": (1, 2, "1B1", "keys"),
    "gradients of keys of 0B2": (0, 1, "0B2", "keys"),
    "gradients of values of 1B3": (1, 1, "1B3", "keys"),
    "heads of 0F2": (0, 3, "0F2", "heads"),
    "heads of 1B1": (1, 5, "1B1", "heads"),
    "keys of 0F2.1": (0, 1, "0F2.1", "keys"),
    "heads of 1B1.1": (1, 2, "1B1.1", "heads"),
}
IN_PIECES = [(how, what, rank) for how in HOW for what in IN_ATTENTION for rank in range(2)]


@pytest.mark.parametrize(("how", "what", "rank"), IN_PIECES)
@pytest.mark.sampled(4)
def test_a_context_rank_that_fails_in_attention_is_named_with_its_pass(how: str, what: str, rank: int) -> None:
    device, nth, needed_by, exchange = IN_ATTENTION[what]
    victim, mate = 2 * device + rank, 2 * device + 1 - rank
    options = {"context_parallel": 2, "context_exchange": exchange, "slices": 2 if "." in what else 1}
    outcomes = run_outcomes(fail_in_a_collective, 4, how, what, nth, victim, options)
    said = {one.rank: f"{one.exception} {one.printed}" for one in outcomes if one.rank != victim}
    name = f"process {victim} \\(device {device}, context rank {rank}"
    for one in outcomes:
        if one.rank != victim:
            assert one.exit_code not in (0, None, -9), describe(outcomes)
            assert re.search(HOW[how].format(place=name), said[one.rank]), describe(outcomes)
    what = re.sub("keys|values", "(keys|values)", what)  # both are under way
    awaited = (
        f"process {mate} \\(device {device}, context rank {1 - rank}\\) was awaiting {what} for {needed_by}"
        f" from {name}\\)"
    )
    assert re.search(awaited, said[mate]), describe(outcomes)
