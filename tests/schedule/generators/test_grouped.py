"""GIS and GIS-H: bubbles and peaks of the closed forms, and the unsqueezed base of PipeOffload (arXiv 2503.01328)."""

from __future__ import annotations

from math import ceil, gcd

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import EQUAL_COSTS, Costs, Order, Placement, check_order, generate, time_order
from evenpipe.schedule.generators.grouped import gis, smallest_group

# All with F + I + W >= 2 max(F, I), so that half the devices are a large enough group, and W <= F + I.
TIMES = [(1, 1, 1), (3, 4, 2), (2, 3, 1), (4, 2, 3), (1, 1, 0), (10.4, 10.2, 7.7), (1, 2, 3), (5, 1, 4)]


def bubble(d: int, v: int, g: int, times: tuple[float, float, float]) -> float:
    F, I, W = times
    return (d - 1) * (F + I) + (v - 1) * ((d - g) * F + max(0, d * I - g * (I + W)))


@pytest.mark.parametrize("devices", [2, 3, 4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("stages_per_device", [2, 3, 4, 6])
@pytest.mark.sampled(5)
def test_bubble_and_peaks_of_every_group_size(devices: int, stages_per_device: int) -> None:
    for group in range(ceil(devices / 2), devices + 1):
        order = generate("gis", devices, 4 * group, stages_per_device=stages_per_device, group_size=group)
        for times in TIMES:
            timeline = time_order(order, Costs(**dict(zip("FIW", times, strict=True))))
            assert timeline.bubble == pytest.approx(bubble(devices, stages_per_device, group, times))
        peaks = tuple(group * (stages_per_device - 1) + devices - device for device in range(devices))
        assert timeline.peak_in_flight == peaks


@pytest.mark.parametrize(
    ("schedule", "devices", "microbatches", "options", "bubble_and_peak"),
    [
        ("gis", 4, 8, {}, (6, 8)),
        ("gis-h", 4, 8, {}, (8, 6)),
        ("gis", 8, 32, {}, (14, 16)),
        ("gis-h", 8, 32, {}, (18, 12)),
        ("gis-h", 8, 32, {"stages_per_device": 3}, (22, 16)),
        ("gis-h", 8, 32, {"stages_per_device": 4}, (26, 20)),
        ("gis-h", 8, 32, {"stages_per_device": 8}, (42, 36)),
        ("gis", 8, 32, {"group_size": 5}, (21, 13)),  # 5 does not divide 32: 4 more than the closed form
        ("gis", 8, 32, {"group_size": 1}, (23, 13)),
        ("gis", 8, 32, {"group_size": 1, "stages_per_device": 3}, (34, 16)),
        ("gis", 8, 32, {"group_size": 1, "stages_per_device": 4}, (41, 23)),
        ("gis", 8, 32, {"group_size": 1, "stages_per_device": 8}, (87, 39)),
        ("gis", 4, 16, {"group_size": 1}, (9, 7)),
        ("gis", 4, 16, {"group_size": 1, "stages_per_device": 3}, (14, 8)),
        ("gis", 16, 64, {"group_size": 1}, (51, 25)),
    ],
)
def test_goldens_at_equal_times(
    schedule: str,
    devices: int,
    microbatches: int,
    options: dict[str, int],
    bubble_and_peak: tuple[float, int],
) -> None:
    timeline = time_order(generate(schedule, devices, microbatches, **options), EQUAL_COSTS)
    assert (timeline.bubble, max(timeline.peak_in_flight)) == bubble_and_peak


@pytest.mark.parametrize("devices", range(2, 13))
@pytest.mark.parametrize("stages_per_device", range(2, 9))
def test_peaks_of_groups_of_one(devices: int, stages_per_device: int) -> None:
    spread = ceil(devices / 2)
    fixed = spread * (stages_per_device - 1) + gcd(spread, stages_per_device) - 1
    order = generate("gis", devices, 3 * devices, stages_per_device=stages_per_device, group_size=1)
    assert check_order(order).in_flight == tuple(fixed + devices - device for device in range(devices))


@pytest.mark.parametrize(("devices", "stages_per_device", "group"), [(8, 3, 2), (8, 4, 2), (12, 4, 3), (9, 2, 4)])
def test_peaks_of_small_groups(devices: int, stages_per_device: int, group: int) -> None:
    spread = ceil(ceil(devices / 2) / group)
    fixed = spread * group * (stages_per_device - 1) + group * (gcd(spread, stages_per_device) - 1)
    order = generate("gis", devices, 6 * devices, stages_per_device=stages_per_device, group_size=group)
    assert check_order(order).in_flight == tuple(fixed + devices - device for device in range(devices))


def test_a_small_one_by_hand() -> None:
    assert generate("gis", 2, 2) == Order.from_csv(
        "0F0,0F1,2F0,2F1,2I0,2W0,2I1,2W1,0I0,0W0,0I1,0W1\n1F0,1F1,3F0,3I0,3W0,3F1,3I1,3W1,1I0,1W0,1I1,1W1"
    )


@pytest.mark.parametrize("schedule", ["gis", "gis-h"])
@pytest.mark.parametrize("devices", [1, 2, 5])
@pytest.mark.parametrize("stages_per_device", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 7, 11])
def test_sound_at_any_size(schedule: str, devices: int, stages_per_device: int, microbatches: int) -> None:
    order = generate(schedule, devices, microbatches, stages_per_device=stages_per_device)
    assert check_order(order).ok
    assert order.placement == Placement.looped(devices, stages_per_device)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 9])
def test_sound_with_any_group(group: int) -> None:
    assert check_order(generate("gis", 5, 13, stages_per_device=3, group_size=group)).ok


@pytest.mark.parametrize(
    ("F", "I", "W", "group"),
    [(1, 1, 1, 4), (3, 4, 2, 4), (3, 1, 0.5, 6), (1, 3, 1, 5), (10, 1, 1, 7), (1, 1, 0, 4), (1, 0, 0, 8)],
)
def test_gis_h_takes_the_smallest_group_whose_bubble_does_not_grow(F: float, I: float, W: float, group: int) -> None:
    costs = Costs(F=F, I=I, W=W)
    assert generate("gis-h", 8, 64, costs=costs) == generate("gis", 8, 64, group_size=group)

    def growth(group_size: int) -> float:
        few, many = (
            time_order(generate("gis", 8, groups * group_size, group_size=group_size), costs).bubble
            for groups in (4, 8)
        )
        return many - few

    assert growth(group) == pytest.approx(0)
    if group > 4:
        assert growth(group - 1) > 0.1


def test_the_group_covers_hops_and_uneven_stages() -> None:
    placement = Placement.looped(4, 2)
    assert smallest_group(placement, Costs(F=1, I=1, W=1)) == 2
    assert smallest_group(placement, Costs(F=1, I=1, W=1, p2p=1)) == 3
    assert smallest_group(placement, Costs(F=1, I=1, W=1, links={"p2p": {"latency": 1}})) == 3
    # The busiest device works 8 for each microbatch, 4 per chunk; the way through the second chunk takes 9.
    assert smallest_group(placement, Costs(F=[1, 1, 1, 1, 1, 1, 1, 6], I=0.5, W=0)) == 3
    assert smallest_group(placement, Costs(F=1, B=2)) == 2


def test_groups_of_one_are_spread_by_costs() -> None:
    costs = Costs(F=3, I=1, W=0.5)
    few, many = (time_order(generate("gis", 8, m, group_size=1, costs=costs), costs).bubble for m in (32, 64))
    assert few == pytest.approx(many)


def test_a_group_of_more_than_all_microbatches_keeps_the_order_of_one_that_none_fill() -> None:
    assert gis(4, 6, group_size=10**12) == gis(4, 6, group_size=100)


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("gis", {"group_size": 0}, "group_size must be a whole number of at least 1, not 0"),
        ("gis", {"group_size": 2.5}, "group_size must be a whole number of at least 1, not 2.5"),
        ("gis", {"stages_per_device": 0}, "stages_per_device must be a whole number of at least 1, not 0"),
        ("gis-h", {"stages_per_device": -1}, "stages_per_device must be a whole number of at least 1, not -1"),
        ("gis-h", {"group_size": 4}, "schedule 'gis-h' has no option 'group_size'; its options: stages_per_device"),
    ],
)
def test_impossible_options(schedule: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        generate(schedule, 4, 8, **options)
    assert message in str(error.value)
