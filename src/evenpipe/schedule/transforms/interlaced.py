"""The interlaced transform: synchronous vocabulary passes, as in tensor parallelism (nnScaler, OSDI'24).

All devices run S(i) and T(i) at the same time, one directly after the other, and wait for each other in between. A pass
that is running on some device at that instant delays all devices, so there should be none. With one stage per device
and full backwards, the `alternating` layout achieves this: its period is T = F + B of a microbatch, it starts with
the vocabulary passes, and no pass crosses its start. Within a period a device runs either B then F or F then B,
alternating along the pipeline, with B first on the last device, whose F(i+1) ends where S(i+1) starts:

    device p-1   | S T(i)   B(i)     F(i+1) |
    device p-2   | S T(i)   F(i+1)   B(i-1) |
    device p-3   | S T(i)   B(i-2)   F(i+2) |

With F = 1 and B = 2 forward hops cost 2, 1, 2, 1, ... from start to start and backward hops 4, 2, 4, 2, ...: a
microbatch lives 4.5 units per stage instead of 3 (arXiv 2411.05288, section 6). A device with d devices behind it holds
min(m, d + ceil(d / 2) + 1) activations, and the bubble is (p - 1) * (F + B), as in 1F1B.

Other orders are kept (`at_instants`): S(i) and T(i) are inserted when F(i) of the last stage ends, whatever is running.
Every order can be interlaced this way, without more memory. With equal F, I and W and split backwards no pass is
running at that instant, and no device waits (zb-h1, v-half, gis, ...). With several stages per device and full
backwards, some device is always in the middle of a pass: interleaved 1F1B on 8 devices waits for 1 unit of time, of
6.8, in every microbatch. No layout helps if stages take different times: synchronous passes wait for the slowest.
"""

from __future__ import annotations

from dataclasses import replace

from evenpipe.errors import InputError
from evenpipe.schedule.costs import Costs
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass, parts_of
from evenpipe.schedule.placement import Placement
from evenpipe.schedule.simplified_costs import simplified_costs
from evenpipe.schedule.vocabulary_mode import VocabularyMode

from .list_scheduling import Length
from .vocabulary import INTERVAL, split_joint_passes_at_loss, validate_base, virtual_times, with_vocabulary_times


def interlace(order: Order, costs: Costs | None = None) -> Order:
    """`order` with S and T of each microbatch next to each other on every device, and E and G an interval apart.

    The backward of the last stage waits for T. The alternating layout, for whole
    sequences, uses only the placement and the microbatches of `order`, not its rows. Times of F, B, I and W in `costs`
    (equal stages by default) decide which passes meet in a period. Raises InputError if the order already has
    vocabulary passes, only evaluates or has torch's sharding passes, and if costs are missing or all 0.
    """
    costs = with_vocabulary_times(costs)
    validate_base(order)
    if order.forward_only:
        raise InputError("an order that only evaluates cannot be interlaced")
    kinds = {item.kind for device in range(order.devices) for item in order.passes(device)}
    one_each = order.placement.is_chain and order.placement.stages == order.devices
    if kinds <= {Kind.F, Kind.B} and one_each and order.slices == 1:
        return alternating(order.placement, order.microbatches, costs)
    split_order = split_joint_passes_at_loss(order)
    best = at_instants(split_order, costs)
    for other_costs in simplified_costs(costs, order.placement) or ():  # which may be worth more
        candidate = at_instants(split_order, other_costs)
        best = candidate if Length.of(candidate, costs).better_than(Length.of(best, costs)) else best
    return best


def at_instants(order: Order, costs: Costs) -> Order:
    """The base order with S and T inserted on every device when the last stage's forward ends."""
    walked, unit = virtual_times(order, costs)
    sequence = walked.sequence()
    first, last = order.placement.first_stage, order.placement.last_stage
    # Sorted by time. Inserted passes come before passes of the base order that start at the same time, except directly
    # after a pass without duration that they follow. They keep their position in the event model.
    base: list[list[tuple[int, int, float, Pass]]] = [[] for _ in range(order.devices)]
    inserted: list[tuple[int, int, float, Pass]] = []
    passes = (
        (device, number, item)
        for device, numbers in enumerate(walked.rows)
        for number, item in zip(numbers, order.passes(device), strict=True)
    )
    for device, number, item in passes:
        start, end = round(walked.start[number] * unit), round(walked.end[number] * unit)
        rank = sequence[number]
        for component in parts_of(item):
            base[device].append((start, 1, rank, component))
            unit_fields = component.microbatch, component.slice
            if component.kind is Kind.F and component.stage == first:
                inserted.append((start - INTERVAL, 0, rank, Pass(Kind.E, None, *unit_fields)))
            if component.kind is Kind.F and component.stage == last:
                tie_rank = int(start == end)
                inserted.append((end, tie_rank, rank + 0.2, Pass(Kind.S, None, *unit_fields)))
                inserted.append((end, tie_rank, rank + 0.3, Pass(Kind.T, None, *unit_fields)))
            if component.kind in {Kind.B, Kind.I} and component.stage == first:
                inserted.append((start + INTERVAL, 0, rank + 0.4, Pass(Kind.G, None, *unit_fields)))
    rows = tuple(tuple(item for *_, item in sorted([*row, *inserted], key=_sort_key)) for row in base)
    return replace(order, rows=rows, vocabulary=VocabularyMode.INTERLACED)


def alternating(placement: Placement, microbatches: int, costs: Costs) -> Order:
    """The alternating layout for a chain of stages, one per device."""
    forward, backward = costs.needed_times(placement, (Kind.F, Kind.B), "give a number or a list")
    period = max(f + b for f, b in zip(forward, backward, strict=True)) * (1 + 1e-9)
    # Number of periods from the vocabulary passes of a microbatch to its F and B, from the last stage to the first.
    stages = placement.stages
    f_period, b_period = [-1] * stages, [0] * stages
    for stage in reversed(range(placement.last_stage)):
        (successor,) = placement.successors(stage)
        if backward_first(successor, stages):
            f_period[stage] = f_period[successor] - (forward[stage] + forward[successor] > period)
            b_period[stage] = b_period[successor] + (backward[stage] + backward[successor] > period)
        else:
            f_period[stage] = f_period[successor] - 1
            b_period[stage] = b_period[successor] + 1
    # (period, position in it): 0 and 1 for S and T, then the two passes of the stage, then E and G.
    shared: list[tuple[float, float, Pass]] = []
    for i in range(microbatches):
        shared += [(i, 0, Pass(Kind.S, None, i)), (i, 1, Pass(Kind.T, None, i))]
        shared += [(i + f_period[0] - 1, 4, Pass(Kind.E, None, i)), (i + b_period[0] + 1, 5, Pass(Kind.G, None, i))]
    rows: list[tuple[Pass, ...]] = [()] * placement.devices
    for stage, device in enumerate(placement.stage_device):
        f_place, b_place = (3, 2) if backward_first(stage, stages) else (2, 3)
        row: list[tuple[float, float, Pass]] = [
            (i + f_period[stage], f_place, Pass(Kind.F, stage, i)) for i in range(microbatches)
        ]
        row += [(i + b_period[stage], b_place, Pass(Kind.B, stage, i)) for i in range(microbatches)]
        rows[device] = tuple(item for _, _, item in sorted([*row, *shared], key=_sort_key))
    return Order(placement, microbatches, tuple(rows), VocabularyMode.INTERLACED)


def backward_first(stage: int, stages: int) -> bool:
    """Whether a stage runs B then F in each period of the alternating layout: the last one does."""
    return (stages - 1 - stage) % 2 == 0


def _sort_key(placed: tuple[float, float, Pass] | tuple[int, int, float, Pass]) -> tuple[float | Pass, ...]:
    return placed[:-1]
