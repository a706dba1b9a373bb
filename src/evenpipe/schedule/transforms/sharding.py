"""Place the passes that gather parameters and reduce gradients over replicas.

    gathered once       UNSHARD ... | passes ... last use  REDUCE_GRAD  RESHARD
    freed between       UNSHARD  passes  RESHARD  ...  UNSHARD  passes  REDUCE_GRAD  RESHARD

The gradients of a part (`schedule.sharding`) are reduced right after the last pass that adds to them. A part is
gathered `prefetch` parts ahead: before the pass that uses the part `prefetch` parts before it. If parts are freed
between uses, a device never holds more than `prefetch` + 1 parts at a time (joint passes may need more).
`torch.distributed.pipelining` (2.13) lowers an order in the same way, with three parts at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import REDUCING_KINDS, SHARDING_KINDS, Item, Kind, Pass
from evenpipe.schedule.program import Program
from evenpipe.schedule.sharding import ParameterUse, Part, part_of, parts_of_device, sharding_pass

Scheduled = TypeVar("Scheduled", Order, Program)


def add_sharding(
    schedule: Scheduled, *, gathers: bool, tied: bool, reshard: bool = False, prefetch: int | None = None
) -> Scheduled:
    """Add the passes that replicas need to an order or program, for parts that have none yet.

    gathers: whether parameters are sharded over replicas, so that they are gathered and freed; otherwise gradients are
        only reduced.
    tied: whether the embedding and the output layer share their matrix.
    reshard: whether a part is freed as soon as it is not among the next `prefetch` + 1 parts; otherwise it is freed
        after its last use.
    prefetch: number of parts. None: all parts are gathered at the start, or one part ahead with `reshard`.
    """
    ahead = 1 if prefetch is None and reshard else prefetch
    rows: list[Any] = []  # passes only, if the schedule is an order
    for device in range(schedule.devices):
        groups = parts_of_device(schedule.placement, schedule.vocabulary, device, tied=tied)
        rows.append(tuple(_sharded(schedule, device, groups, gathers=gathers, reshard=reshard, ahead=ahead)))
    return replace(schedule, rows=tuple(rows))


def without_sharding(schedule: Scheduled) -> Scheduled:
    """An order or program without passes of `SHARDING_KINDS`."""
    rows = tuple(
        tuple(item for item in row if item is None or item.kind not in SHARDING_KINDS) for row in schedule.rows
    )
    return replace(schedule, rows=rows)


def _sharded(
    schedule: Order | Program, device: int, groups: Collection[Part], *, gathers: bool, reshard: bool, ahead: int | None
) -> list[Item]:
    """The row of a device that has the parts `groups`. `ahead`: number of parts to gather ahead, None for all."""
    row = [item for item in schedule.rows[device] if item is not None]
    users = ParameterUse(schedule.placement, schedule.vocabulary, groups)
    uses = [users.parts(item) if isinstance(item, Pass) else () for item in row]
    last_use = {group: position for position, used in enumerate(uses) for group in used}
    existing = [item for item in row if isinstance(item, Pass) and item.kind in SHARDING_KINDS]
    summed = {part_of(item) for item in existing if item.kind in REDUCING_KINDS}
    placed = {part_of(item) for item in existing if item.kind not in REDUCING_KINDS}
    upcoming = _next_groups(uses, {group for group in groups if gathers and group not in placed}, ahead)
    gathered: list[Part] = []
    begun: set[Part] = set()
    result: list[Item] = []
    for position, item in enumerate(row):
        soon = upcoming[position] if uses[position] else ()
        if reshard and soon:
            for group in [group for group in gathered if group not in soon]:
                gathered.remove(group)
                result.append(sharding_pass(Kind.RESHARD, group))
        for group in soon:
            if group not in gathered and (reshard or group not in begun):
                gathered.append(group)
                begun.add(group)
                result.append(sharding_pass(Kind.UNSHARD, group))
        result.append(item)
        for group in groups:
            if last_use.get(group) == position:
                if not schedule.forward_only and group not in summed:
                    result.append(sharding_pass(Kind.REDUCE_GRAD, group))
                if group in gathered:
                    gathered.remove(group)
                    result.append(sharding_pass(Kind.RESHARD, group))
    return result


def _next_groups(
    uses: Sequence[tuple[Part, ...]], groups: Collection[Part], ahead: int | None
) -> list[tuple[Part, ...]]:
    """Return, by position, the parts in `groups` used from there on: all parts of the pass there, then others in the
    order of their next use, up to `ahead` (None: all)."""
    soon: list[Part] = []
    result = []
    for used in reversed(uses):
        current = [group for group in used if group in groups]
        soon = [*current, *(group for group in soon if group not in current)]
        result.append(tuple(soon if ahead is None else soon[: max(len(current), ahead + 1)]))
    return result[::-1]
