"""What an order holds for a split of the layers, against every moment of its rows."""

from collections.abc import Callable
from operator import ge

from evenpipe.plan.in_flight import HeldByStage, Moment
from evenpipe.schedule import SCHEDULES, Kind, Order, Pass, generate
from evenpipe.schedule.transforms.offload import without_offload
from evenpipe.schedule.transforms.slices import add_slices


def moments(order: Order, device: int, layers: list[int]) -> list[Moment]:
    """Every moment of a device, from its passes up to there and those still to come."""
    row = [part for item in order.passes(device) for part in item.parts or (item,)]
    stages = order.placement.stages_of(device)

    def number(passes: list[Pass], stage: int, *kinds: Kind) -> int:
        return sum(one.stage == stage and one.kind in kinds for one in passes)

    found = []
    for place in range(1, len(row) + 1):
        done, left = row[:place], row[place:]
        sums = [0] * len(Moment._fields)
        for stage in stages:
            back = number(done, stage, Kind.B, Kind.I)
            counts = (
                number(done, stage, Kind.F) - back,
                number(done, stage, Kind.I) - number(done, stage, Kind.W),
                any(one.stage == stage and one.kind in (Kind.B, Kind.W) for one in done),
                any(one.stage == stage for one in done) and any(one.stage == stage for one in left),
                number(left, stage, Kind.F),
            )
            sums = [total + layers[stage] * count for total, count in zip(sums, counts, strict=True)]
        *others, ahead = sums
        found.append(Moment(*others, min(ahead, 2 * sum(layers[stage] for stage in stages))))
    return found


def test_moments_are_those_that_no_other_exceeds(sample: Callable[..., list[tuple[str, int]]]) -> None:
    cases = [(name, slices) for name in SCHEDULES for slices in (1, 2) if (name, slices) != ("dualpipe-v", 2)]
    for name, slices in sample(cases, 10):
        check_moments(name, slices)


def check_moments(name: str, slices: int) -> None:
    order = add_slices(without_offload(generate(name, 3, 6)), slices)
    for layers in ([1] * order.placement.stages, [stage % 3 for stage in range(order.placement.stages)]):
        found = HeldByStage(order).of(layers)
        for device, kept in enumerate(found.moments):
            every = moments(order, device, layers)
            assert set(kept) <= set(every)
            assert all(any(all(map(ge, other, one)) for other in kept) for one in every)
            assert not any(one is not other and all(map(ge, other, one)) for one in kept for other in kept)
