"""Schedules with full backwards: forwards ahead, then one forward and one backward in turn, then other backwards.

1F1B                                      0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
                                          1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
interleaved, 2 stages each, groups of 2   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ...
                                          1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass
from evenpipe.schedule.placement import Placement
from evenpipe.words import refused


def gpipe(devices: int, microbatches: int) -> Order:
    """All forwards, then all backwards in the same order; one stage per device.

    Any devices >= 1 and microbatches >= 1. Bubble (devices - 1) * (F + B) with equal stages; every device holds all
    `microbatches` activations at its peak (arXiv 1811.06965).
    """
    return looped_bfs(devices, microbatches, stages_per_device=1)


def looped_bfs(devices: int, microbatches: int, *, stages_per_device: int = 2) -> Order:
    """All microbatches through a device's first stage, then all through its second; backwards from the last.

    Looped placement: device r holds stages r, r + devices, and so on. Microbatches keep their order in the backward, as
    in gpipe, so the first loss is known long before it is needed. Any devices >= 1, microbatches >= 1 and
    stages_per_device >= 1 (breadth-first interleaving, arXiv 2211.05953).

    With equal stages the bubble is (devices - 1) * (F + B) if microbatches >= devices; for fewer, the last microbatch
    of a stage has passed before its first one returns, and each further stage of a device adds (devices - microbatches)
    * (F + B). Every device holds microbatches * stages_per_device activations at its peak, and runs each of its stages
    once per step and direction, which suits sharded parameters.
    """
    placement = Placement.looped(devices, stages_per_device)
    return _order(
        placement, microbatches, _Groups([microbatches], microbatches), lambda _: placement.stages * microbatches
    )


def one_f_one_b(devices: int, microbatches: int) -> Order:
    """A device with d successors runs d forwards, then alternates one forward and one backward.

    Any devices >= 1 and microbatches >= 1, one stage per device. Bubble (devices - 1) * (F + B) with equal stages;
    device r holds min(microbatches, devices - r) activations at its peak (PipeDream-Flush, arXiv 2006.09503; lag form
    of arXiv 2401.10241).
    """
    single_group = _Groups([microbatches], microbatches)
    return _order(Placement.linear(devices), microbatches, single_group, lambda device: devices - 1 - device)


def interleaved(devices: int, microbatches: int, *, stages_per_device: int = 2, group_size: int | None = None) -> Order:
    """1F1B over several stages per device: a group of microbatches runs through one stage, then through the next.

    Looped placement: device r holds stages r, r + devices, and so on. Any devices >= 1, microbatches >= 1 and
    stages_per_device >= 1; with one stage per device it is 1f1b (arXiv 2104.04473, section 2.2).

    `group_size` is the most microbatches in a group (Megatron's microbatch-group-size-per-virtual-pipeline-stage), at
    least `devices`: in a smaller group the first microbatch returns long after the last one has passed. By default
    microbatches // devices groups of nearly equal size, so each has at least `devices` and none leaves a bubble. A
    `group_size` that makes more groups saves memory: groups are still nearly equal, but some have fewer microbatches
    than devices, and leave gaps.

    With equal stages and default groups the bubble is (devices - 1) * (F + B), and
    (stages_per_device - 1) * (devices - microbatches) * (F + B) more when there are fewer microbatches than devices.
    With v = stages_per_device >= 2 and g microbatches in the largest group, device r holds
    min(microbatches * v, (v - 1) * g + 2 * (devices - 1 - r) + 1) stage activations at its peak.
    """
    if stages_per_device == 1:
        return one_f_one_b(devices, microbatches)
    placement = Placement.looped(devices, stages_per_device)
    groups = _groups(devices, microbatches, group_size)
    # A device runs as many forwards ahead as the last one, and two more for each hop there and back.
    last = (stages_per_device - 1) * groups.slots
    return _order(placement, microbatches, groups, lambda device: last + 2 * (devices - 1 - device))


class _Groups(NamedTuple):
    """Microbatches of each group, and slots that each takes."""

    sizes: list[int]
    slots: int


def _groups(devices: int, microbatches: int, group_size: int | None) -> _Groups:
    """The fewest groups that `group_size` allows, or by default the most groups without gaps."""
    if group_size is not None and group_size < devices:
        reason = "the number of devices: smaller groups do not keep all devices busy"
        raise refused("group_size", group_size, f"at least {devices}, {reason}")
    count = max(1, microbatches // devices) if group_size is None else -(-microbatches // group_size)
    small, larger = divmod(microbatches, count)
    if small >= devices or count == 1:
        return _Groups([small + 1] * larger + [small] * (count - larger), small + (larger > 0))
    # Groups that leave gaps get one slot per device; fuller groups come last, where they fill the end. This is the
    # shortest arrangement in nearly all small cases.
    return _Groups([small] * (count - larger) + [small + 1] * larger, devices)


def _order(placement: Placement, microbatches: int, groups: _Groups, ahead_of: Callable[[int], int]) -> Order:
    """The order whose devices run `ahead_of(device)` forwards ahead, then one forward and one backward in turn."""
    rows = []
    for device in range(placement.devices):
        stages = placement.stages_of(device)
        forward, backward = _one_way(Kind.F, stages, groups), _one_way(Kind.B, stages[::-1], groups)
        ahead = min(ahead_of(device), len(forward))
        steady: list[Pass | None] = [None] * (2 * (len(forward) - ahead))
        steady[0::2] = forward[ahead:]
        steady[1::2] = backward[: len(forward) - ahead]
        row = (*forward[:ahead], *steady, *backward[len(forward) - ahead :])
        rows.append(tuple([item for item in row if item]))
    return Order(placement, microbatches, tuple(rows))


def _one_way(kind: Kind, stages: Sequence[int], groups: _Groups) -> list[Pass | None]:
    """All forwards of a device, or all backwards, in turn; `stages` in the order in which each group visits
    them.

    None marks the missing microbatches of a short group: the row is one with full groups minus these microbatches, so
    it completes too.
    """
    turns: list[Pass | None] = []
    start = 0
    for size in groups.sizes:
        for stage in stages:
            turns += [Pass(kind, stage, microbatch) for microbatch in range(start, start + size)]
            turns += [None] * (groups.slots - size)
        start += size
    return turns
