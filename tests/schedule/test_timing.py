"""When passes run, and what a timeline reports: of simulated orders, and of measured steps."""

from __future__ import annotations

from itertools import product

import pytest
from traced_steps import two_devices

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    SCHEDULES,
    Cause,
    Costs,
    DeadlockError,
    Event,
    Order,
    Pass,
    Placement,
    Timeline,
    add_vocabulary,
    generate,
    plan_order,
    time_order,
)
from evenpipe.schedule.costs import HOST_COSTS, PassTimes
from evenpipe.schedule.effects import Kept, effect_of
from evenpipe.schedule.passes import parts_of

# --- the event model --------------------------------------------------------------------------------------------------


def starts(text: str, costs: Costs) -> list[dict[str, float]]:
    order = Order.from_csv(text)
    return [{str(event.item): event.start for event in row} for row in time_order(order, costs).events]


def test_an_example_by_hand() -> None:
    costs = Costs(F=1, B=2, p2p=0.5)
    assert starts("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", costs) == [
        {"0F0": 0, "0F1": 1, "0B0": 5, "0B1": 8},
        {"1F0": 1.5, "1B0": 2.5, "1F1": 4.5, "1B1": 5.5},
    ]


def test_an_example_with_collectives() -> None:
    costs = Costs(
        F=[1, 1], B=[2, 2], S=[1, 2], C=0.5, T=1, E=[0.25, 0.5], G=1,
        collectives={"broadcast": 0.1, "statistics": 0.2, "reduce": 0.4, "embedding": 0.3},
    )  # fmt: skip
    # ROWS are ready at 0.5 and there at 0.8, X at 2.8 and 2.9, statistics, when S of device 1 is done, at 4.8 and 5.0.
    found = starts("E0,0F0,S0,C0,T0,0B0,G0\nE0,1F0,S0,C0,1B0,T0,G0", costs)
    expected = [
        {"E0": 0, "0F0": 0.8, "S0": 2.9, "C0": 5.0, "T0": 5.5, "0B0": 7.9, "G0": 9.9},
        {"E0": 0, "1F0": 1.8, "S0": 2.8, "C0": 5.0, "1B0": 5.9, "T0": 7.9, "G0": 10.2},
    ]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted)


def test_passes_run_as_one_wait_and_feed_together() -> None:
    found = starts("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1", EQUAL_COSTS)
    assert [list(row.values()) for row in found] == [[0, 1, 5, 7], [1, 2, 5]]


def test_times_per_stage_and_device() -> None:
    costs = Costs(F=[1, 10], I=[2, 20], W=[3, 30], S=[1, 2])
    times = PassTimes(costs, Placement.linear(2))
    words = ["0F0", "1F0", "0B0", "1B0", "1I0", "1W0", "1R0", "1O0", "1D0", "1L0", "0UNSHARD", "(1F1;0B0)OVERLAP_F_B"]
    assert [times.of(Pass.parse(word), 0) for word in words] == [1, 10, 5, 50, 20, 30, 10, 0, 0, 0, 0, 15]
    assert [times.of(Pass.parse("S0"), device) for device in range(2)] == [1, 2]


def test_deadlock_shows_where_every_device_stands() -> None:
    order = Order.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(DeadlockError) as error:
        time_order(order, EQUAL_COSTS)
    assert str(error.value) == (
        "the order cannot complete: "
        "device 0 stops at position 1, 0B0, awaiting 1B0 of device 1; "
        "device 1 stops at position 1, 1F1, awaiting 0F1 of device 0\n"
        "  device 0: 0F0 [0B0] 0F1 0B1\n"
        "  device 1: 1F0 [1F1] 1B0 1B1"
    )
    assert error.value.positions == {0: 1, 1: 1}


def test_deadlock_names_what_is_nowhere_and_counts_idle_slots() -> None:
    order = Order.from_csv("0F0,,0B0\n1F0,1F1,1B1", microbatches=2)
    with pytest.raises(DeadlockError) as error:
        time_order(order, EQUAL_COSTS)
    assert "device 0 stops at position 2, 0B0, awaiting 1B0 of device 1 (which is in no row)" in str(error.value)
    assert "device 1 stops at position 1, 1F1, awaiting 0F1 of device 0 (which is in no row)" in str(error.value)
    assert "device 0: 0F0 . [0B0]" in str(error.value)


def test_deadlock_of_many_devices_is_still_readable() -> None:
    order = add_vocabulary(generate("1f1b", 20, 2), 1)
    rows = (tuple(item for item in order.rows[0] if str(item) != "S1"), *order.rows[1:])
    with pytest.raises(DeadlockError, match="and 12 more devices") as error:
        time_order(Order(order.placement, 2, rows, 1), EQUAL_COSTS)
    assert "S1 of device 0 (which is in no row)" in str(error.value)


def test_a_stage_that_does_not_exist() -> None:
    order = Order.from_csv("0F0,0B0,5F0", placement=Placement.linear(1))
    with pytest.raises(InputError, match="5F0 names a stage that does not exist; stages are 0 to 0"):
        time_order(order, EQUAL_COSTS)


# --- timelines --------------------------------------------------------------------------------------------------------


def example() -> Timeline:
    """Device 0 runs from 0 to 9 with 3 idle, device 1 from 1 to 11 with 2 idle."""
    table = [(0, "0F0", 0, 1), (0, "0F1", 1, 2), (0, "0B0", 5, 9), (1, "1F0", 1, 2), (1, "1B0", 4, 11)]
    events = [Event(device, Pass.parse(word), start, end) for device, word, start, end in table]
    return Timeline((tuple(events[:3]), tuple(events[3:])), stage_bytes=(10.0, 7.0))


def test_definitions() -> None:
    timeline = example()
    assert timeline.spans == (9, 10)
    assert timeline.span == 10
    assert timeline.makespan == 11
    assert timeline.skew == 1
    assert timeline.busy == (6, 8)
    assert timeline.busy_by_kind == ({"F": 2, "B": 4}, {"F": 1, "B": 7})
    assert timeline.bubble == 2
    assert timeline.bubble_rate == 0.2
    assert timeline.peak_in_flight == (2, 1)
    assert timeline.peak_bytes == (20.0, 7.0)


def test_bytes_are_reported_when_they_are_known() -> None:
    order = generate("1f1b", 3, 4)
    assert time_order(order, Costs(F=1, B=2)).peak_bytes is None
    assert time_order(order, Costs(F=1, B=2, bytes=5)).peak_bytes == (15.0, 10.0, 5.0)
    assert time_order(order, Costs(F=1, B=2, bytes=[1, 10, 100])).peak_bytes == (3.0, 20.0, 100.0)


def test_a_split_backward_releases_with_its_weight_gradient() -> None:
    order = Order.from_csv("0F0,0I0,0F1,0W0,0I1,0F2,0W1,0I2,0W2")
    assert time_order(order, Costs(F=1, I=1, W=1)).peak_in_flight == (2,)


def test_stages_of_a_device_count_together() -> None:
    order = Order.from_csv("0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1")
    assert time_order(order, Costs(F=1, B=1, bytes=[1, 2])).peak_in_flight == (4,)
    assert time_order(order, Costs(F=1, B=1, bytes=[1, 2])).peak_bytes == (6.0,)


def test_nothing_that_takes_time() -> None:
    timeline = time_order(generate("1f1b", 2, 2), Costs(F=0, B=0))
    assert (timeline.span, timeline.makespan, timeline.bubble_rate) == (0, 0, 0)


def test_a_device_without_events() -> None:
    timeline = Timeline((example().events[0], ()))
    assert (timeline.devices, timeline.spans, timeline.makespan) == (2, (9, 0), 9)


def test_a_step_leaves_nothing() -> None:
    """What passes keep is freed by the end of the row, of every kind and stage, and never freed before."""
    for name, mode in product(SCHEDULES, ["first-last", "vocab-1", "vocab-2"]):
        order = plan_order(name, 3, 4, mode, HOST_COSTS)
        for device in range(order.devices):
            held: dict[tuple[Kept, int | None], int] = {}
            for part in (part for item in order.passes(device) for part in parts_of(item)):
                effect = effect_of(part.kind, order.barriers)
                for kept in effect.frees:
                    held[kept, part.stage] -= 1
                    assert held[kept, part.stage] >= 0, (name, mode, part)
                for kept in effect.keeps:
                    held[kept, part.stage] = held.get((kept, part.stage), 0) + 1
            assert not any(held.values()), (name, mode)


# --- measured steps ---------------------------------------------------------------------------------------------------


def test_passes_say_what_they_waited_for() -> None:
    trace = two_devices()
    found = [[(str(e.item), e.start, e.end, e.cause) for e in row] for row in trace.timeline().events]
    send, receive = trace.devices[0].transfers[1].item, trace.devices[1].transfers[0].item
    second = Pass.parse("1F0")
    assert (str(send), str(receive)) == ("0RECV_B0", "1RECV_F0")
    assert found == [
        [
            ("0F0", 0.0, 2.0, Cause("start")),
            ("0B0", 9.5, 12.0, Cause("transfer", send, 0)),
        ],
        [
            ("1F0", 3.0, 5.0, Cause("transfer", receive, 1)),
            ("1B0", 5.25, 8.0, Cause("device", second, 1)),  # a gap without a wait: transfers were issued
        ],
    ]


def test_transfers_run_from_the_last_issue_to_where_they_were_found_complete() -> None:
    trace = two_devices()
    found = [[(str(e.item), e.start, e.end, str(e.cause.item)) for e in row] for row in trace.timeline().beside]
    assert found == [
        [("0SEND_F0", 2.0, 3.0, "0F0"), ("0RECV_B0", 8.5, 9.5, "1B0")],  # the sender itself asked at 10
        [("1RECV_F0", 2.0, 3.0, "0F0"), ("1SEND_B0", 8.5, 9.5, "1B0")],
    ]


def test_waits_passes_and_issuing_add_up_to_the_step() -> None:
    trace = two_devices()
    for device, row in enumerate(trace.devices):
        passes = sum(entry.end - entry.start for entry in row.passes)
        issuing = sum(gap.busy for gap in trace.gaps(device))
        assert passes + issuing + sum(trace.waiting[device].values()) == 12.0
    assert trace.waiting == ({"RECV_B": 7.0}, {"RECV_F": 3.0, "end": 4.0})
    assert trace.seconds == 12.5


def test_the_figures_are_those_of_any_timeline() -> None:
    timeline = two_devices().timeline()
    assert (timeline.makespan, timeline.span, timeline.busy) == (12.0, 12.0, (4.5, 4.75))
    assert timeline.peak_in_flight == (1, 1)
