"""A process dies, hangs or raises in the middle of a step: all others end soon, and say who and what was awaited."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch
from harness import describe, run_outcomes
from test_gradients import described

from evenpipe import Pipeline, initialise_worker
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
