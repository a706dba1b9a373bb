"""ZB-H1 and ZB-H2: bubbles and peaks of arXiv 2401.10241, sections 2 and 3, in closed form."""

from __future__ import annotations

import pytest

from evenpipe.schedule import Costs, Order, Pass, check_order, generate, time_order
from evenpipe.schedule.passes import Kind

SIZES = [(d, m) for d in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 21)]
TIMES = [(1, 1, 1), (3, 4, 2), (4, 3, 2), (5, 3, 3), (3, 5, 3), (10, 10, 1)]  # F, I, W with W <= min(F, I)


def text(order: Order) -> list[str]:
    return [" ".join(str(item) for item in order.passes(device)) for device in range(order.devices)]


def whole_and_waiting(row: list[Pass]) -> tuple[int, int]:
    """The most activations that are whole, and, at the first such time, those that wait for W alone."""
    best = (0, 0)
    whole = waiting = 0
    for item in row:
        whole += (item.kind is Kind.F) - (item.kind is Kind.I)
        waiting += (item.kind is Kind.I) - (item.kind is Kind.W)
        if whole > best[0] or (whole == best[0] and waiting > best[1]):
            best = (whole, waiting)
    return best


def test_small_orders() -> None:
    assert text(generate("zb-h1", 2, 3)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert text(generate("zb-h2", 2, 3)) == [
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2",
    ]


@pytest.mark.parametrize(("name", "hop"), [("zb-h1", 1), ("zb-h2", 2)])
@pytest.mark.parametrize(("d", "m"), SIZES)
def test_bubble_and_peak(name: str, hop: int, d: int, m: int) -> None:
    order = generate(name, d, m)
    report = check_order(order)
    ahead = min(m, hop * (d - 1) + 1)
    assert report.faults == () and report.in_flight == (ahead,) * d
    for f, i, w in TIMES:
        timeline = time_order(order, Costs(F=f, I=i, W=w))
        assert timeline.bubble == (d - 1) * (f + i) - (ahead - 1) * w


@pytest.mark.parametrize(("name", "hop"), [("zb-h1", 1), ("zb-h2", 2)])
@pytest.mark.parametrize(("d", "m"), [(d, m) for d, m in SIZES if m <= d])
def test_few_microbatches(name: str, hop: int, d: int, m: int) -> None:
    for f, i, w in TIMES:
        assert time_order(generate(name, d, m), Costs(F=f, I=i, W=w)).span == (m + d - 1) * (f + i) + w
        assert time_order(generate("1f1b", d, m), Costs(F=f, I=i, W=w)).span == (m + d - 1) * (f + i + w)


@pytest.mark.parametrize(("name", "hop"), [("zb-h1", 1), ("zb-h2", 2)])
@pytest.mark.parametrize("d", [2, 3, 4, 8])
def test_what_is_held_whole_and_what_waits_for_w(name: str, hop: int, d: int) -> None:
    order = generate(name, d, 4 * d)
    for device in range(d):
        whole, waiting = whole_and_waiting(list(order.passes(device)))
        assert (whole, waiting) == (hop * (d - 1 - device) + 1, hop * device)


@pytest.mark.parametrize(("d", "m"), [(2, 3), (4, 8), (8, 32), (5, 9)])
def test_both_have_the_same_makespan(d: int, m: int) -> None:
    ones = Costs(F=1, I=1, W=1)
    h1, h2 = (time_order(generate(name, d, m), ones) for name in ("zb-h1", "zb-h2"))
    assert h1.makespan == h2.makespan == 3 * m + d - 1
    assert (h1.span, h1.skew) == (3 * m + d - 1, 0)
    assert (h2.span, h2.skew) == (3 * m, d - 1)


# arXiv 2401.10241, table of bubbles at equal times: (name, devices, microbatches) -> bubble, peak, bubble of 1f1b.
TABLE = [("zb-h1", 4, 8, 3, 4), ("zb-h1", 8, 32, 7, 8), ("zb-h2", 4, 8, 0, 7), ("zb-h2", 8, 32, 0, 15)]


@pytest.mark.parametrize(("name", "d", "m", "bubble", "peak"), TABLE)
def test_table_at_equal_times(name: str, d: int, m: int, bubble: int, peak: int) -> None:
    ones = Costs(F=1, I=1, W=1)
    timeline = time_order(generate(name, d, m), ones)
    assert (timeline.bubble, max(timeline.peak_in_flight)) == (bubble, peak)
    assert time_order(generate("1f1b", d, m), ones).bubble == 3 * (d - 1)
