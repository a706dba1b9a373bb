"""Faults before the program runs: imported into the fork server, or first of all under torchrun.

It replaces the steps of a process's start by ones that fail before or after, as the case in the environment says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evenpipe.processes import worker


def _with_fault(function: Callable[..., Any], place: str, before: float, after: float) -> Callable[..., Any]:
    """`function`, failing before or after it where the case's share is below these."""

    def run(*arguments: Any, **named: Any) -> Any:
        _fail_if(place, "before", before)
        result = function(*arguments, **named)
        _fail_if(place, "after", after)
        return result

    return run


def _fail_if(place: str, when: str, share: float) -> None:
    if "EVENPIPE_FAULT_CASE" not in os.environ:
        return
    from fault_case import Case
    from fault_program import fail

    case = Case.load(os.environ["EVENPIPE_FAULT_CASE"])
    is_here = share - 0.25 <= case.share < share
    if case.where == "start" and int(os.environ["RANK"]) == case.victim and is_here:
        fail(case.how, Path(os.environ["EVENPIPE_FAULT_FOLDER"]), f"{when} {place}")


worker.meet = _with_fault(worker.meet, "meeting", 0.25, 0.5)
dist.init_process_group = _with_fault(dist.init_process_group, "making the default group", 0.75, 1.0)
