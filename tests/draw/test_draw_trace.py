"""The trace for Perfetto: the structure of the Trace Event format, and what stands in it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from drawn_timelines import EMPTY, tensor_ranks, timeline, two_devices, with_slack

from evenpipe.draw import trace
from evenpipe.schedule import EQUAL_COSTS, Event, Pass, Placement, Timeline, plan_order, time_order

# phase -> the fields that an event of it must have
FIELDS = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}


def events(timelines: Any, **options: Any) -> list[dict[str, Any]]:
    return json.loads(trace(timelines, **options))["traceEvents"]


def of_phase(found: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in found if event["ph"] == phase]


VOCABULARY = time_order(plan_order("1f1b", 3, 4, "vocab-2"), EQUAL_COSTS)


@pytest.mark.parametrize("timelines", [two_devices(), {"a": two_devices(), "b": VOCABULARY}, *EMPTY.values()])
def test_every_event_has_the_fields_of_its_phase(timelines: Any) -> None:
    found = events(timelines)
    for event in found:
        assert set(event) >= FIELDS[event["ph"]], event
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    times = [event["ts"] for event in found if event["ph"] != "M"]
    assert times == sorted(times)
    # Perfetto takes process 0 for the kernel's, and reads an id that is text as a hexadecimal number or not at all.
    numbers = [event[name] for event in found for name in ("pid", "tid", "id") if name in event]
    assert all(isinstance(number, int) and number > 0 for number in numbers)
    arrows = of_phase(found, "s")
    assert len({event["id"] for event in arrows}) == len(arrows) == len(of_phase(found, "f"))
    named = {(event["pid"], event["tid"]) for event in found if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in of_phase(found, "X")} <= named


def test_slices_of_a_thread_do_not_overlap() -> None:
    """Perfetto drops slices that begin before the one before them has ended and do not lie within it."""
    moving = [Event(0, Pass.parse(f"0O{k}"), 1.0 * k, 1.0 * k + 2.5) for k in range(5)]
    found = of_phase(events(Timeline(timeline("0F0 0 1").events, concurrent=(tuple(moving),))), "X")
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in found:
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(rows) == 4  # compute, and three threads of copies
    for row in rows.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(row))


def test_a_device_is_a_process_with_its_threads() -> None:
    found = events({"run": two_devices(), "next": two_devices()})
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert names == {1: "run: device 0", 2: "run: device 1", 3: "next: device 0", 4: "next: device 1"}
    threads = [event["args"]["name"] for event in found if event["name"] == "thread_name"]
    assert threads == ["compute", "waits", "communication"] * 4


def test_times_are_microseconds_from_the_first_event_and_do_not_overlap_in_whole_nanoseconds() -> None:
    """Thirds of a microsecond: start and duration, each rounded down to nanoseconds as Perfetto does, still fit."""
    for unit, microseconds in ((None, 1e3), (1.0, 1e6), (1e-6, 1.0)):
        (slice_,) = of_phase(events(timeline("0F0 5 7"), unit_seconds=unit), "X")
        assert (slice_["ts"], slice_["dur"]) == (0.0, 2 * microseconds)
    row = ", ".join(f"0F{k} {k / 3} {(k + 1) / 3}" for k in range(50))
    found = of_phase(events(timeline(row), unit_seconds=1e-6), "X")
    in_nanoseconds = [(round(1e3 * event["ts"], 6), round(1e3 * event["dur"], 6)) for event in found]
    assert all(number == int(number) for pair in in_nanoseconds for number in pair)
    assert all(a[0] + a[1] == b[0] for a, b in pairwise(in_nanoseconds))


def test_arguments_say_what_was_waited_for_and_what_tensor_ranks_exchange() -> None:
    arguments = {event["name"]: event["args"] for event in of_phase(events(two_devices()), "X")}
    assert arguments["1F0"] == {"stage": 1, "microbatch": 0, "waited for": "transfer: 1RECV_F0 on device 1"}
    assert arguments["0F0"]["waited for"] == "start"
    arguments = {event["name"]: event["args"] for event in of_phase(events(tensor_ranks()), "X")}
    assert arguments["1I1"]["of which tensor collectives"] == "50.0 %"
    assert "of which tensor collectives" not in arguments["1W1"]


def test_arguments_say_how_much_later_a_pass_could_end_and_who_waits() -> None:
    slices = of_phase(events(with_slack(two_devices()), unit_seconds=1e-6), "X")
    arguments = {event["name"]: event["args"] for event in slices if event["tid"] == 1}
    shown = {
        name: [args.get(key) for key in ("could end later by (µs)", "first to wait")]
        for name, args in arguments.items()
    }
    assert shown["0F0"] == [1.0, "1F0 on device 1"] and shown["0B0"] == [0.0, "the end of the step"]
    assert shown["1B0"] == [None, None]


def test_arrows_lead_to_the_pass_that_takes_the_result() -> None:
    rows = "0F0 0 2, 0B0 9 12", "1F0 3 5, 1B0 5 8"
    found = events(timeline(*rows, placement=Placement.linear(2)), unit_seconds=1e-6)
    ends = {event["id"]: event for event in of_phase(found, "f")}
    arrows = [(begin, ends[begin["id"]]) for begin in of_phase(found, "s")]
    places = [(begin["pid"], begin["ts"], end["pid"], end["ts"]) for begin, end in arrows]
    assert places == [(1, 1.0, 2, 3.0), (2, 6.5, 1, 9.0)]  # from the middle of a slice to the start of another
    assert not of_phase(events(timeline(*rows)), "s")  # which stages are next to each other is not known


def test_memory_is_a_counter() -> None:
    counters = [event for event in of_phase(events(two_devices(), unit_seconds=1e-6), "C") if event["pid"] == 2]
    assert [(event["ts"], event["args"]["bytes"]) for event in counters] == [(3.0, 2048.0), (8.0, 0.0)]
    (first, *_) = of_phase(events(timeline("0F0 0 1, 0B0 1 2")), "C")
    assert first["args"] == {"stage activations": 1.0}
