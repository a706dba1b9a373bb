"""GIS: interleaving in groups of any size, with a short warm-up (PipeOffload, arXiv 2503.01328, section 4).

A step consists of turns: in each turn a device runs at most one forward, then one input gradient and directly after it
the weight gradient of the same pass, so that the previous device gets its gradient a third of a turn's work earlier
than from a full backward. All devices have the same turns: each is one turn behind the previous device in forwards, and
one turn ahead in backwards.

    turn of chunk c, index j in its group    spacing · c + j     spacing = group size, or a multiple of it when groups
                                                                 are smaller than half the devices
    lag of the backwards on device r         turn of the last chunk + devices - 1 - r

Chunk c of device r is stage c · devices + r. A backward takes the turn of its mirrored forward (first chunk for last),
plus the lag. A new group starts every group size · chunks turns.
"""

from __future__ import annotations

from math import ceil, gcd

from evenpipe.schedule.costs import Costs
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass, TransferKind
from evenpipe.schedule.placement import Placement
from evenpipe.words import refused

Turns = dict[int, tuple[int, int]]
"""Turn -> chunk and microbatch."""


def gis(
    devices: int,
    microbatches: int,
    *,
    stages_per_device: int = 2,
    group_size: int | None = None,
    costs: Costs | None = None,
) -> Order:
    """Interleaved stages in groups of `group_size` microbatches, by default as many as devices.

    Any devices >= 1 and microbatches >= 1, any group size >= 1; placement looped. Device r holds
    `group_size * (stages_per_device - 1) + devices - r` activations at its peak, and with equal stages (d devices, v
    stages per device, groups of g that divide the microbatches) the bubble is

        (d - 1) (F + I)  +  (v - 1) ((d - g) F + max(0, d I - g (I + W)))

    for ceil(d / 2) <= g <= d and W <= F + I, as long as g (F + I + W) >= d max(F, I); otherwise every group adds to the
    bubble.

    Smaller groups are spaced out: with K = ceil(h / g), where h is ceil(d / 2), or with `costs` the smallest group
    without such a bubble, chunks follow each other K · g turns apart, and device r holds `K g (v - 1) + d - r + g
    (gcd(K, v) - 1)` activations once m is large. Groups of one are the base of PipeOffload's offloading schedules: the
    share of an activation in the peak is proportional to its time in flight.

    Raises InputError for a group or a number of stages below 1.
    """
    group = devices if group_size is None else group_size
    if group < 1:
        raise refused("group_size", group, "a whole number of at least 1")
    placement = Placement.looped(devices, stages_per_device)
    half = ceil(devices / 2)
    spread = 1 if group >= half else ceil(smallest_group(placement, costs) / group)
    forwards, backwards, last_chunk = _turns(stages_per_device, microbatches, group, spread)
    rows = tuple(
        _row(placement.stages_of(device), forwards, backwards, last_chunk + devices - 1 - device)
        for device in range(devices)
    )
    return Order(placement, microbatches, rows)


def gis_h(devices: int, microbatches: int, *, stages_per_device: int = 2, costs: Costs | None = None) -> Order:
    """GIS in groups of half the devices: with many stages per device, little more than half the activations of 1F1B.

    As `gis` with `group_size = ceil(devices / 2)`. With `costs`, the smallest larger group, up to `devices`, that keeps
    the bubble from growing with every group.
    """
    group = smallest_group(Placement.looped(devices, stages_per_device), costs)
    return gis(devices, microbatches, stages_per_device=stages_per_device, group_size=group)


def smallest_group(placement: Placement, costs: Costs | None) -> int:
    """The smallest group, from ceil(devices / 2) to devices, whose bubble does not grow with the microbatches.

    The work of a group on the busiest device must take at least as long as the forward or backward of a microbatch
    through a chunk; otherwise the device waits for every group. Without `costs`, or if they lack F, I or W, all stages
    count as equal.
    """
    devices = placement.devices
    half = ceil(devices / 2)
    if costs is None:
        return half
    times = costs.stage_times(placement)
    forward, inputs, weights = times[Kind.F], times[Kind.I], times[Kind.W]
    if forward is None or inputs is None or weights is None:
        return half
    chunks = placement.stages // devices
    work = max(
        sum(forward[stage] + inputs[stage] + weights[stage] for stage in placement.stages_of(device))
        for device in range(devices)
    )
    chunk_time = max(
        sum(kind[chunk * devices : (chunk + 1) * devices]) for kind in (forward, inputs) for chunk in range(chunks)
    )
    chunk_time += devices * costs.transfer_time(TransferKind.SEND_F)
    fitting = (group for group in range(half, devices) if group * work / chunks >= chunk_time * (1 - 1e-9))
    return next(fitting, devices)


def _turns(chunks: int, microbatches: int, group: int, spread: int) -> tuple[Turns, Turns, int]:
    """The forwards of device 0 by turn, its backwards by turn without their lag, and the turn of the first
    forward of the last chunk."""
    # The pattern repeats after `group * chunks` turns; chunks that would share turns are shifted.
    ring = chunks // gcd(chunks, spread)
    start = [group * (spread * chunk + chunk // ring) for chunk in range(chunks)]
    forwards, backwards = {}, {}
    for microbatch in range(microbatches):
        group_index, offset = divmod(microbatch, group)
        for chunk in range(chunks):
            turn = group_index * group * chunks + offset + start[chunk]
            forwards[turn] = (chunk, microbatch)
            backwards[turn] = (chunks - 1 - chunk, microbatch)
    assert len(forwards) == chunks * microbatches, "two passes in one turn"
    return forwards, backwards, start[-1]


def _row(stages: tuple[int, ...], forwards: Turns, backwards: Turns, lag: int) -> tuple[Pass, ...]:
    """The passes of a device; `stages` by chunk."""
    row = []
    for turn in sorted(forwards.keys() | {turn + lag for turn in backwards}):
        if turn in forwards:
            chunk, microbatch = forwards[turn]
            row.append(Pass(Kind.F, stages[chunk], microbatch))
        if turn - lag in backwards:
            chunk, microbatch = backwards[turn - lag]
            row.append(Pass(Kind.I, stages[chunk], microbatch))
            row.append(Pass(Kind.W, stages[chunk], microbatch))
    return tuple(row)
