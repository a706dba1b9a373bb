"""PO-H and PO-F: what they hold, by the formula and the tables for PipeOffload's generator.

    R(n) = d (v - n)(v - n + 1) / (2 v)      chunks left after the n longest-lived ones went to the host
    R(n) <= peak <= ceil(R(n)) + max(3, gcd(ceil(d / 2), v) - n)

at a round trip of half a forward and backward (k = 0.5), copies under way counted. arXiv 2503.01328, sections 4.2 to
4.4; the band and the table are those of the generator of its artifact. Where ours holds less than that table, it is one
chunk: memory is given back as soon as the copy is over.
"""

from __future__ import annotations

from itertools import product
from math import ceil, gcd

import pytest

from evenpipe.schedule import Costs, check_order, generate, offloaded, plan_offload
from evenpipe.simulate import simulate

K = 0.5
HALF = Costs(F=1, I=1, W=1, O=1.5 * K, L=1.5 * K, bytes=1)
"""Equal chunks; copies there and back take half as long as forward and backward."""

TABLE = {
    # (d, v): the table's peaks by n, and ours
    (8, 4): ([23, 15, 9, 5, 3], [23, 14, 8, 4, 3]),
    (8, 8): ([39, 31, 24, 18, 13, 9, 6, 4, 3], [39, 31, 23, 17, 12, 8, 5, 4, 3]),
    (8, 16): (
        [71, 63, 56, 49, 42, 36, 31, 26, 21, 17, 14, 11, 8, 6, 5, 4, 3],
        [71, 63, 55, 48, 41, 35, 30, 25, 20, 16, 13, 10, 7, 6, 5, 4, 3],
    ),
    (16, 4): ([43, 27, 15, 7, 3], [43, 26, 14, 6, 3]),
}


def peaks(devices: int, stages_per_device: int, moved: range) -> list[float]:
    """The fullest device of the base with the first n chunks on the host, for each n."""
    count = 3 * devices
    base = generate("gis", devices, count, stages_per_device=stages_per_device, group_size=1)
    found = []
    for chunks in moved:
        forwards = list(product(range(chunks * devices), range(count)))
        plan = plan_offload(base, HALF, only=forwards)
        assert plan.peak_bytes is not None
        found.append(max(plan.peak_bytes))
    return found


@pytest.mark.parametrize(("size", "wanted"), TABLE.items())
@pytest.mark.sampled(1)
def test_the_table(size: tuple[int, int], wanted: tuple[list[int], list[int]]) -> None:
    theirs, ours = wanted
    found = peaks(*size, range(size[1] + 1))
    assert found == ours
    assert all(their - 1 <= our <= their for our, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("devices", [3, 4, 6, 7, 10])
@pytest.mark.parametrize("stages_per_device", [2, 3, 5, 6])
@pytest.mark.sampled(2)
def test_the_band(devices: int, stages_per_device: int) -> None:
    even = devices + devices % 2  # the formula is that of even numbers: half a device more
    for n, peak in enumerate(peaks(devices, stages_per_device, range(stages_per_device + 1))):
        rest = stages_per_device - n
        left = devices * rest * (rest + 1) / (2 * stages_per_device)
        above = even * rest * (rest + 1) / (2 * stages_per_device)
        room = max(3, gcd(ceil(devices / 2), stages_per_device) - n)
        assert left <= peak <= ceil(above) + room, (n, peak)


@pytest.mark.parametrize(
    ("devices", "stages_per_device", "microbatches"),
    [(2, 2, 8), (3, 2, 12), (4, 4, 16), (5, 3, 20), (8, 4, 16), (8, 4, 64), (8, 8, 32), (13, 2, 40), (16, 4, 48)],
)
@pytest.mark.sampled(1)
def test_everything_on_the_host_leaves_three_chunks_whatever_the_size(
    devices: int, stages_per_device: int, microbatches: int
) -> None:
    order = generate("po-f", devices, microbatches, stages_per_device=stages_per_device, costs=HALF)
    simulation = simulate(order, HALF)
    assert simulation.timeline.peak_bytes is not None
    assert max(simulation.timeline.peak_bytes) == (3 if stages_per_device > 2 else pytest.approx(2.5, abs=0.5))
    kept = simulate(generate("gis", devices, microbatches, stages_per_device=stages_per_device, group_size=1), HALF)
    assert simulation.makespan == kept.makespan


@pytest.mark.parametrize(("devices", "stages_per_device"), [(8, 4), (16, 4), (5, 3)])
@pytest.mark.sampled(1)
def test_copies_as_long_as_compute_leave_little_more(devices: int, stages_per_device: int) -> None:
    costs = Costs(F=1, I=1, W=1, O=1.5, L=1.5, bytes=1)
    order = generate("po-f", devices, 4 * devices, stages_per_device=stages_per_device, costs=costs)
    assert max(simulate(order, costs).timeline.peak_bytes or ()) == 4


@pytest.mark.parametrize("stages_per_device", [1, 2, 3, 4])
def test_the_first_half_is_moved(stages_per_device: int) -> None:
    devices, microbatches = 4, 16
    order = generate("po-h", devices, microbatches, stages_per_device=stages_per_device, costs=HALF)
    check_order(order).raise_if_faulty()
    assert 0 <= max(stage for stage, _ in offloaded(order)) < devices * ((stages_per_device + 1) // 2)
    whole = generate("po-f", devices, microbatches, stages_per_device=stages_per_device, costs=HALF)
    assert len(offloaded(whole)) >= len(offloaded(order))


def test_the_paper_s_share_of_memory() -> None:
    """(v + 2) / (8 v) M for PO-H, (v + 1) / (2 v) M with nothing on the host; up to what is under way."""
    devices, stages_per_device = 16, 8
    whole = devices * stages_per_device
    nothing, half = peaks(devices, stages_per_device, range(0, stages_per_device, stages_per_device // 2))
    assert nothing / whole == pytest.approx((stages_per_device + 1) / (2 * stages_per_device), abs=8 / whole)
    assert half / whole == pytest.approx((stages_per_device + 2) / (8 * stages_per_device), abs=3 / whole)
