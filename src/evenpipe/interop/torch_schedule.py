"""Schedules of `torch.distributed.pipelining` as objects: the order that an instance, or an instance of a class,
executes.

A schedule with several stages per rank has its rows in `pipeline_order`, and lowered rows in
`pipeline_order_with_comms`. A schedule with one stage per rank executes a loop, and reports rows for pictures only. For
the last rank of `Schedule1F1B`, torch 2.13 reports a different order from the one it executes (its row starts with
microbatch 1 and ends with one that does not exist). So we run the loop, for each rank in turn, on a stage that computes
nothing and records the calls.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

from evenpipe.errors import InputError
from evenpipe.schedule import Order, Program
from evenpipe.schedule.text import rows_to_csv
from evenpipe.words import count

from .torch_csv import from_torch

MODULE = "torch.distributed.pipelining.schedules"

Rows = Mapping[int, Sequence[Any]]
"""Rank -> actions, None for an idle slot."""


def is_torch_schedule(value: Any) -> bool:
    """Whether this is a schedule of torch, or a class of such schedules. Imports nothing, because the module of such an
    object is already loaded."""
    module = sys.modules.get(MODULE)
    if module is None:
        return False
    base = module._PipelineSchedule
    return isinstance(value, base) or (isinstance(value, type) and issubclass(value, base))


def from_torch_schedule(
    schedule: Any,
    devices: int,
    microbatches: int,
    *,
    stages_per_device: int | None = None,
) -> Order | Program:
    """The order that a schedule of torch executes, or its program if it was loaded from a lowered file.

    Args:
        schedule: an instance, which knows its size, or a class, which is instantiated with stand-in stages.
        stages_per_device: for a class; default 1 if it has one stage per rank, else 2.

    Raises InputError if torch has no such schedule of this size, with torch's own message, and for an instance of
    another size.
    """
    name = schedule.__name__ if isinstance(schedule, type) else type(schedule).__name__
    if isinstance(schedule, type):
        schedule = _built(schedule, devices, microbatches, stages_per_device)
    if _is_single(schedule):
        rows: Rows = _executed(schedule)
        _warn_if_reported_order_differs(name, schedule.pipeline_order, rows)
    else:
        rows = schedule.pipeline_order or getattr(schedule, "pipeline_order_with_comms", None) or {}
        if not rows:
            raise InputError(f"schedule {name} has no rows yet; expected one that has loaded or computed its order")
    order = from_torch(rows_to_csv(rows[rank] for rank in sorted(rows)))
    if (order.devices, schedule._n_microbatches) != (devices, microbatches):
        raise InputError(
            f"schedule {name} is for {count(order.devices, 'device')} and"
            f" {count(schedule._n_microbatches, 'microbatch')}, not {devices} and {microbatches}"
        )
    return order


def _built(schedule: type, devices: int, microbatches: int, stages_per_device: int | None) -> Any:
    """An instance of the class, with stand-in stages."""
    single = "stage" in inspect.signature(schedule).parameters
    per_device = stages_per_device or (1 if single else 2)
    if single and per_device != 1:
        raise InputError(f"schedule {schedule.__name__} has 1 stage per device, not {per_device}")
    sizes = {"num_stages": devices * per_device, "group_size": devices, "group_rank": 0, "submod": None}
    stages = [SimpleNamespace(stage_index=index * devices, **sizes) for index in range(per_device)]
    try:
        return schedule(stages[0] if single else stages, microbatches, loss_fn=_no_loss)
    except (ValueError, AssertionError) as error:
        raise InputError(
            f"schedule {schedule.__name__} with {count(devices, 'device')} and {count(microbatches, 'microbatch')}:"
            f" {error}"
        ) from None


def _is_single(schedule: Any) -> bool:
    return isinstance(schedule, sys.modules[MODULE].PipelineScheduleSingle)


class _NotingStage:
    """A stage that computes and sends nothing, and records the passes requested from it."""

    has_backward = True

    def __init__(self, index: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.passes: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.passes.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, *_: Any, full_backward: bool = True, **__: Any) -> None:
        self.passes.append(f"{self.stage_index}{'B' if full_backward else 'I'}{microbatch}")

    def backward_weight_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.passes.append(f"{self.stage_index}W{microbatch}")

    def get_fwd_recv_ops(self, _: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, _: float) -> None:
        pass


def _executed(schedule: Any) -> dict[int, list[str]]:
    """The passes of each rank of a schedule with one stage per rank, in the order in which its loop runs them."""
    rows = {}
    for rank in range(schedule._num_stages):
        stage = _NotingStage(rank, schedule._num_stages)
        loop = copy.copy(schedule)
        loop._stage = stage
        loop._initialize_stage = _nothing
        loop._maybe_compute_loss = loop._maybe_get_loss = loop._update_losses = _nothing
        loop._step_microbatches()
        rows[rank] = stage.passes
    return rows


def _warn_if_reported_order_differs(name: str, reported: Rows | None, executed: Rows) -> None:
    """Warn if the passes that a schedule reports differ from those it executes."""
    for rank, row in (reported or {}).items():
        reported_row = [str(action) for action in row if action is not None and "REDUCE_GRAD" not in str(action)]
        executed_row = [str(action) for action in executed[rank]]
        for position, (reported_pass, executed_pass) in enumerate(
            zip_longest(reported_row, executed_row, fillvalue="nothing")
        ):
            if reported_pass != executed_pass:
                warnings.warn(
                    f"pipeline_order of torch's {name} differs from the order it executes "
                    f"(device {rank}, position {position}: "
                    f"{reported_pass} instead of {executed_pass}); the executed order is used",
                    stacklevel=3,
                )
                return


def _nothing(*_: Any, **__: Any) -> None:
    """Replaces methods that only stages with tensors need."""


def _no_loss(*_: Any) -> None:
    raise AssertionError("nothing is computed here")
