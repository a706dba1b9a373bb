"""A measured step as a timeline: causes, waits that add up to idle time, transfers beside compute."""

from __future__ import annotations

from traced_steps import two_devices

from evenpipe.schedule import Cause, Pass


def test_passes_say_what_they_waited_for() -> None:
    trace = two_devices()
    found = [[(str(e.item), e.start, e.end, e.cause) for e in row] for row in trace.timeline().events]
    send, receive = trace.devices[0].transfers[1].item, trace.devices[1].transfers[0].item
    first, second = Pass.parse("0F0"), Pass.parse("1F0")
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
    assert first == trace.devices[0].passes[0].item


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
