"""When passes run, what a timeline reports of simulated orders and measured steps, and files of measured steps."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from traced_steps import measured, two_devices

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
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
    plan_program,
    time_order,
)
from evenpipe.schedule.trace import Allocations
from evenpipe.schedule.trace_file import read_trace, trace_from_dict, trace_to_dict, write_trace

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


def test_deadlock_shows_where_every_device_stands() -> None:
    order = Order.from_csv("0F0,,0B0\n1F0,1F1,1B1", microbatches=2)
    with pytest.raises(DeadlockError) as error:
        time_order(order, EQUAL_COSTS)
    assert str(error.value) == (
        "deadlock: "
        "device 0 stops at position 2 (0B0), waiting for 1B0 of device 1 (which is in no row); "
        "device 1 stops at position 1 (1F1), waiting for 0F1 of device 0 (which is in no row)\n"
        "  device 0: 0F0 . [0B0]\n"
        "  device 1: 1F0 [1F1] 1B1"
    )
    assert error.value.positions == {0: 2, 1: 1}
    order = add_vocabulary(generate("1f1b", 20, 2))
    rows = (tuple(item for item in order.rows[0] if str(item) != "S1"), *order.rows[1:])
    with pytest.raises(DeadlockError, match="and 12 more devices"):
        time_order(Order(order.placement, 2, rows, order.vocabulary), EQUAL_COSTS)
    with pytest.raises(InputError, match="5F0 names a stage that does not exist; stages are 0 to 0"):
        time_order(Order.from_csv("0F0,0B0,5F0", placement=Placement.linear(1)), EQUAL_COSTS)


# --- timelines --------------------------------------------------------------------------------------------------------


def test_definitions() -> None:
    """Device 0 runs from 0 to 9 with 3 idle, device 1 from 1 to 11 with 2 idle."""
    table = [(0, "0F0", 0, 1), (0, "0F1", 1, 2), (0, "0B0", 5, 9), (1, "1F0", 1, 2), (1, "1B0", 4, 11)]
    events = [Event(device, Pass.parse(word), start, end) for device, word, start, end in table]
    timeline = Timeline((tuple(events[:3]), tuple(events[3:])), stage_bytes=(10.0, 7.0))
    assert (timeline.spans, timeline.span, timeline.makespan, timeline.skew) == ((9, 10), 10, 11, 1)
    assert (timeline.busy, timeline.bubble, timeline.bubble_rate) == ((6, 8), 2, 0.2)
    assert timeline.busy_by_kind == ({"F": 2, "B": 4}, {"F": 1, "B": 7})
    assert (timeline.peak_in_flight, timeline.peak_bytes) == ((2, 1), (20.0, 7.0))
    alone = Timeline((timeline.events[0], ()))
    assert (alone.devices, alone.spans, alone.makespan) == (2, (9, 0), 9)
    nothing = time_order(generate("1f1b", 2, 2), Costs(F=0, B=0))
    assert (nothing.span, nothing.makespan, nothing.bubble_rate) == (0, 0, 0)


def test_peaks_in_activations_and_bytes() -> None:
    """A split backward releases with W; stages of a device count together; bytes are known if the costs have them."""
    one_stage, two_stages = "0F0,0I0,0F1,0W0,0I1,0F2,0W1,0I2,0W2", "0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1"
    three = generate("1f1b", 3, 4)
    for order, sizes, in_flight, peak_bytes in (
        (three, None, (3, 2, 1), None),
        (three, 5, (3, 2, 1), (15.0, 10.0, 5.0)),
        (three, [1, 10, 100], (3, 2, 1), (3.0, 20.0, 100.0)),
        (Order.from_csv(one_stage), None, (2,), None),
        (Order.from_csv(two_stages), [1, 2], (4,), (6.0,)),
    ):
        timeline = time_order(order, Costs(F=1, B=2, I=1, W=1, bytes=sizes))
        assert (timeline.peak_in_flight, timeline.peak_bytes) == (in_flight, peak_bytes)


# --- measured steps ---------------------------------------------------------------------------------------------------


def test_passes_say_what_they_waited_for() -> None:
    trace = two_devices()
    found = [[(str(e.item), e.start, e.end, e.cause) for e in row] for row in trace.timeline().events]
    send, receive = trace.devices[0].transfers[1].item, trace.devices[1].transfers[0].item
    second = Pass.parse("1F0")
    assert (str(send), str(receive)) == ("0RECV_B0", "1RECV_F0")
    assert found == [
        [("0F0", 0.0, 2.0, Cause("start")), ("0B0", 9.5, 12.0, Cause("transfer", send, 0))],
        [
            ("1F0", 3.0, 5.0, Cause("transfer", receive, 1)),
            ("1B0", 5.25, 8.0, Cause("device", second, 1)),  # a gap without a wait: transfers were issued
        ],
    ]


def test_transfers_run_from_the_last_issue_to_where_they_were_found_complete() -> None:
    trace = two_devices()
    found = [[(str(e.item), e.start, e.end, str(e.cause.item)) for e in row] for row in trace.timeline().concurrent]
    assert found == [
        [("0SEND_F0", 2.0, 3.0, "0F0"), ("0RECV_B0", 8.5, 9.5, "1B0")],  # the sender itself asked at 10
        [("1RECV_F0", 2.0, 3.0, "0F0"), ("1SEND_B0", 8.5, 9.5, "1B0")],
    ]


def test_the_figures_are_those_of_any_timeline_and_times_add_up_to_the_step() -> None:
    trace = two_devices()
    for device, row in enumerate(trace.devices):
        passes = sum(entry.end - entry.start for entry in row.passes)
        issuing = sum(gap.busy for gap in trace.gaps(device))
        assert passes + issuing + sum(trace.waiting[device].values()) == 12.0
    assert trace.waiting == ({"RECV_B": 7.0}, {"RECV_F": 3.0, "end": 4.0})
    timeline = trace.timeline()
    assert (timeline.makespan, timeline.span, timeline.busy) == (12.0, 12.0, (4.5, 4.75))
    assert (trace.seconds, timeline.peak_in_flight) == (12.5, (1, 1))


# --- trace files ------------------------------------------------------------------------------------------------------

COSTS = Costs(F=1, B=2, I=1, W=1, S=0.5, C=0.1, T=0.3, E=0.1, G=0.1, p2p=0.05, collectives={"reduce": 0.2})
SCHEDULES = [("1f1b", "first-last"), ("interleaved", "vocab-2"), ("zb-h1", "vocab-1"), ("dualpipe-v", "first-last")]


@pytest.mark.parametrize(("schedule", "mode"), SCHEDULES)
def test_a_trace_survives_its_file(tmp_path: Path, schedule: str, mode: str) -> None:
    _, program = plan_program(schedule, 2, 6, mode, COSTS)
    trace = measured(program, COSTS)
    write_trace(trace, tmp_path / "step.json")
    found = read_trace(tmp_path / "step.json")
    assert found.program == trace.program
    assert found.costs == COSTS
    assert trace_to_dict(found) == trace_to_dict(trace)
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]


def test_all_fields_survive_and_other_tensor_ranks_have_no_row_of_their_own() -> None:
    trace = two_devices()
    assert trace_from_dict(json.loads(json.dumps(trace_to_dict(trace)))) == trace
    first, second = trace.devices
    ranks = replace(trace, other_ranks=((replace(first, end=first.end + 1), second),))
    values = json.loads(json.dumps(trace_to_dict(ranks)))
    assert trace_from_dict(values) == ranks
    assert [one.devices for one in ranks.by_rank] == [trace.devices, ranks.other_ranks[0]]
    assert "row" not in values["other_ranks"][0][0] and "other_ranks" not in trace_to_dict(trace)
    for wrong, message in (
        ([[]], r"^other_ranks\[0\] is \[\]; it must be a list of 2 devices$"),
        ([[{}, {}]], r"^other_ranks\[0\]\[0\]\.start is missing; it must be a number"),
        ([values["other_ranks"][0][::-1]], r"^other_ranks\[0\]\[0\]\."),
        ({}, "^other_ranks is {}; it must be a list of lists"),
    ):
        with pytest.raises(InputError, match=message):
            trace_from_dict({**values, "other_ranks": wrong})


def test_allocations_survive_where_they_were_counted() -> None:
    trace = two_devices()
    first, second = trace.devices
    counted = Allocations(5140, 6, 4, 2).since(Allocations(20, 3, 2, 1))
    assert (counted, counted.device_calls) == (Allocations(5120, 3, 2, 1), 5)
    counting = replace(trace, devices=(first, replace(second, allocations=counted)))
    values = json.loads(json.dumps(trace_to_dict(counting)))
    assert trace_from_dict(values) == counting
    first, second = values["devices"]
    assert second["allocations"] == {"requests": 5120, "device_allocations": 3, "device_frees": 2, "retries": 1}
    assert "allocations" not in first  # as on a CPU, and in every file from before they were counted


def _without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values.pop(name)


def _device(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda values: change(values["devices"][1])


def _counts(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """Allocations of a device, with changes; None leaves one out."""
    counts = {"requests": 9, "device_allocations": 1, "device_frees": 0, "retries": 0, **changes}
    return _device(lambda device: device.update(allocations={k: v for k, v in counts.items() if v is not None}))


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another format": (lambda v: v.update(format="chrome"), 'not a trace of evenpipe; those begin with "format"'),
    "a later version": (lambda v: v.update(version=3), "version 3 of the format, but this evenpipe reads version 2"),
    "no order": (_device(_without("row")), r"devices\[1\].row is missing; it must be text"),
    "a word that is no pass": (_device(lambda d: d.update(row="1F0,9Z9")), "row 2, column 2 .*: '9Z9' is not a pass"),
    "another placement": (
        lambda v: v.update(placement=[0, 7]),
        r"placement is \[0, 7\]; it must be the device of each stage",
    ),
    "text for a number": (lambda v: v.update(microbatches="1"), 'microbatches is "1"; it must be an integer'),
    "a pass of no row": (
        _device(lambda d: d["passes"][0].__setitem__(0, "0F0")),
        r'passes\[0\] is "0F0"; it must be a pass of the row',
    ),
    "an unknown transfer": (
        _device(lambda d: d["waits"][0].__setitem__(0, "X9")),
        r'waits\[0\] is "X9"; it must be a transfer of the row',
    ),
    "passes out of order": (
        _device(lambda d: d["passes"].reverse()),
        r"devices\[1\].passes are not the passes of devices\[1\].row in the same order",
    ),
    "a pass left out": (_device(lambda d: d["passes"].pop()), "passes are not the passes of"),
    "a time that is text": (
        _device(lambda d: d["passes"][0].__setitem__(1, "soon")),
        r'devices\[1\].passes\[0\]\[1\] is "soon"; it must be a number of seconds',
    ),
    "an end before its start": (_device(lambda d: d["passes"][0].__setitem__(2, 1.0)), "before its start at 3.0 s"),
    "three of four": (
        _device(lambda d: d["waits"][0].pop()),
        "it must be a list of text, text, number of seconds, number of seconds",
    ),
    "no clock": (_device(_without("clock")), r"devices\[1\].clock is missing; it must be a table"),
    "a count left out": (_counts(retries=None), r"devices\[1\].allocations.retries is missing"),
    "fewer calls than none": (_counts(requests=-1), "allocations.requests is -1; it must be an integer of at least 0"),
    "costs that are none": (lambda v: v.update(costs={"F": -1}), "costs.F is -1; it must be a number of at least 0"),
}


def test_damage_is_one_sentence_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    for name, (change, message) in DAMAGE.items():
        values = copy.deepcopy(trace_to_dict(two_devices()))
        change(values)
        path.write_text(json.dumps(values), encoding="utf-8")
        with pytest.raises(InputError, match=message) as error:
            read_trace(path)
        assert str(error.value).startswith(str(path)) and "\n" not in str(error.value), name


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(two_devices(), tmp_path / "no" / "step.json")
