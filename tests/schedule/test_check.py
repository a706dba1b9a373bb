"""What is wrong with an order, a program or a file, what exceeds the memory of a device, and what is no schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import edited
from text_tables import cases, order_of

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    SCHEDULES,
    Costs,
    Kind,
    Limits,
    Order,
    Pass,
    Placement,
    Program,
    Report,
    Transfer,
    TransferKind,
    add_communication,
    add_vocabulary,
    check_order,
    check_program,
    forward_only,
    generate,
    interlace,
    plan_order,
    plan_program,
    time_order,
)
from evenpipe.schedule.check_file import SHOWN, check_file
from evenpipe.schedule.files import read_order, write_schedule


def told(report: Report, starts: list[str]) -> bool:
    """Whether the faults of a report are those whose sentences start like that, in this order."""
    faults = [str(fault) for fault in report.faults]
    same = len(faults) == len(starts) and all(map(str.startswith, faults, starts))
    assert same, (faults, starts)
    return report.ok == (not starts)


# --- orders -----------------------------------------------------------------------------------------------------------

LINEAR = Placement.linear(2)
ORDERS = """
0F0,0B0|1F0,1B0
0F0,,0B0|,1F0,1B0
E0,0F0,S0,C0,T0,0B0,G0|E0,1F0,S0,C0,1B0,T0,G0
0UNSHARD,0F0,0B0,0RESHARD,0UNSHARD,0REDUCE_GRAD|1F0,1B0,1REDUCE_GRAD
0F0,0R0,0B0|1F0,1O0,1D0,1L0,1B0
0F0,0O0,0D0,0L0,0R0,0B0|1F0,1O0,1D0,1L0,1R0,1I0,1W0
0F0,0I0,0W0|1F0,1I0,1W0
0F0,0B0|1F0
    device 1: 1B0 is missing, so its activations are never released
0B0|1F0,1B0
    device 0: 0F0 is missing
0F0,0I0|1F0,1I0,1W0
    device 0: 0W0 is missing, so its activations are never released
0F0,0W0|1F0,1B0
    device 0: 0I0 is missing
0F0,0B0,0W0|1F0,1B0
    device 0, position 2: 0B0 has run whole
0F0,0O0,0B0|1F0,1B0
    device 0: 0D0 is missing, so the copied memory is never freed
    device 0: 0L0 is missing, so its activations are never copied back
0F0,0L0,0B0|1F0,1B0
    device 0: 0O0 is missing, so its activations are not on the host
    device 0: 0D0 is missing
0F0,0O0,0L0,0D0,0B0|1F0,1B0
    device 0, position 2: 0L0 comes before 0D0 at position 3
    device 0, position 2: deadlock
0F0,0D0,0O0,0L0,0B0|1F0,1B0
    device 0, position 1: 0D0 comes before 0O0 at position 2
    device 0, position 1: deadlock
0F0,0O0,0D0,0B0,0L0|1F0,1B0
    device 0, position 3: 0B0 comes before 0L0 at position 4
    device 0, position 3: deadlock: device 0 stops at position 3 (0B0), waiting for 0L0 of device 0
0F0,0F0,0B0|1F0,1B0
    device 0, position 1: 0F0 is already at position 0
0F0,0B0|1F0,0B0,1B0 ; {"placement": 2}
    device 1, position 1: 0B0 belongs to device 0
0F0,0B0|1F0,1B0,2B0 ; {"placement": 2}
    device 1, position 2: 2B0 names a stage that does not exist; stages are 0 to 1
0F0,0B0|1F0,1B0,1F7 ; {"microbatches": 1}
    device 1, position 2: 1F7 names a microbatch that does not exist
0F0,0B0|1F0,1F0.1,1B0 ; {"slices": 1}
    device 1, position 1: 1F0.1 is for a slice of a sequence
0F0,S0,0B0|1F0,1B0 ; {"vocabulary": "first-last"}
    device 0, position 1: S0 is not allowed in vocabulary mode first-last
E0,0F0,S0,C0,T0,0B0,G0|E0,1F0,S0,T0,1B0,G0 ; {"vocabulary": "vocab-1"}
    device 0, position 3: C0 is not allowed in vocabulary mode vocab-1
0F0,0B0|1F0 ; {"forward_only": true}
    device 0, position 1: 0B0 is not allowed in an order that only evaluates
0B0,0F0|1F0,1B0
    device 0, position 0: 0B0 comes before 0F0 at position 1
    device 0, position 0: deadlock
0F0,0B0|1B0,1F0
    device 1, position 0: 1B0 comes before 1F0
    device 0, position 1: deadlock
0F0,0R0,0B0|1F0,1B0,1R0
    device 1, position 1: 1B0 comes before 1R0 at position 2
    device 0, position 2: deadlock
0R0,0F0,0B0|1F0,1B0
    device 0, position 0: 0R0 comes before 0F0 at position 1
    device 0, position 0: deadlock
0F0,0O0,0D0,0R0,0L0,0B0|1F0,1B0
    device 0, position 3: 0R0 comes before 0L0 at position 4, which it needs
    device 0, position 3: deadlock: device 0 stops at position 3 (0R0), waiting for 0L0 of device 0
0F0,0B0,0F1,0B1|1F0,1F1,1B0,1B1
    device 0, position 1: deadlock: device 0 stops at position 1
E0,0F0,S0,T0,C0,0B0,G0|E0,1F0,S0,C0,1B0,T0,G0
    device 0, position 3: T0 comes before C0 at position 4
    device 0, position 3: deadlock
(0F0;0B0)OVERLAP_F_B
0F0,(0F1;0F1)OVERLAP_F_B,0B0,0B1
    device 0, position 1: 0F1 is already at position 1
0F0,(0W0;0I0)OVERLAP_F_B
    device 0, position 1: 0W0 comes before the part of (0W0;0I0)OVERLAP_F_B that it needs
    device 0, position 1: deadlock
0F0,0B0,0F1|1F0,1F0,1B1
    device 0: 0B1 is missing
    device 1, position 1: 1F0 is already at position 0
    device 1: 1B0 is missing
    device 1: 1F1 is missing
0F0,0B0,0F1,0B1|1F0,1F1,1B0
    device 1: 1B1 is missing
    device 0, position 1: deadlock: device 0 stops at position 1 (0B0), waiting for 1B0 of device 1;
0F0,0B0,0F1,0B1|1F0,1B0,1B1
    device 1: 1F1 is missing
"""
"""Rows, what is given besides, and below them the faults, or how they begin."""


def test_faults_of_orders() -> None:
    for rows, options, faults in cases(ORDERS):
        if "placement" in options:
            options["placement"] = Placement.linear(options["placement"])
        assert told(check_order(order_of(rows, **options)), faults)


def test_a_fault_shows_the_rows_around_it() -> None:
    order = generate("1f1b", 4, 8)
    rows = [list(row) for row in order.rows]
    rows[1][4], rows[1][7] = rows[1][7], rows[1][4]  # 1F3 and 1B2
    (fault,) = check_order(Order(order.placement, 8, tuple(map(tuple, rows)))).faults
    assert str(fault).splitlines() == [
        "device 0, position 6: deadlock: "
        "device 0 stops at position 6 (0B1), waiting for 1B1 of device 1; "
        "device 1 stops at position 4 (1B2), waiting for 2B2 of device 2; "
        "device 2 stops at position 5 (2F3), waiting for 1F3 of device 1; "
        "device 3 stops at position 6 (3F3), waiting for 2F3 of device 2",
        "  device 0: ... 0F2 0F3 0B0 0F4 [0B1] 0F5 0B2 0F6 0B3 ...",
        "  device 1: 1F0 1F1 1F2 1B0 [1B2] 1B1 1F4 1F3 1F5 ...",
        "  device 2: ... 2F1 2B0 2F2 2B1 [2F3] 2B2 2F4 2B3 2F5 ...",
        "  device 3: ... 3F1 3B1 3F2 3B2 [3F3] 3B3 3F4 3B4 3F5 ...",
    ]


def test_an_error_shows_so_many_faults_and_a_report_all() -> None:
    check_order(plan_order("1f1b", 3, 3)).raise_if_faulty()
    with pytest.raises(InputError) as error:
        check_order(Order.from_csv("0F0,0F1,0B0\n1F0,1F1,1B0")).raise_if_faulty()
    assert str(error.value).splitlines() == [
        "the schedule has 2 faults",
        "device 0: 0B1 is missing, so its activations are never released",
        "device 1: 1B1 is missing, so its activations are never released",
    ]
    order = generate("1f1b", 2, 40)
    report = check_order(Order(order.placement, 40, (order.rows[0], order.rows[1][:1])))
    assert len(report.faults) == 79
    with pytest.raises(InputError, match="79 faults") as error:
        report.raise_if_faulty()
    assert str(error.value).endswith("and 59 more")


# --- programs ---------------------------------------------------------------------------------------------------------

# What every example starts from: 1F1B on two devices, two microbatches.
FIRST = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1"
SECOND = "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1"
WHOLE = f"{FIRST}\n{SECOND}\n"

PROGRAMS = """
0F0, -> 0F0,,
0F0, -> 0UNSHARD,0F0,
0SEND_F1, ->
    device 0: 0SEND_F1 is missing
1RECV_F1, ->
    device 1: 1RECV_F1 is missing
0SEND_F1 -> 0SEND_F1,0SEND_F1
    device 0, position 4: 0SEND_F1 is already at position 3
1SEND_B1 -> 1SEND_B1,1SEND_F0
    device 1, position 8: no pass needs 1SEND_F0, or device 1 is not a member of it
1SEND_B1 -> 1SEND_B1,0SEND_F1
    device 1, position 8: no pass needs 0SEND_F1, or device 1 is not a member of it
0F0, -> X0,0F0,
    device 0, position 0: no pass needs X0, or device 0 is not a member of it
0F0, -> 0SEND_F5,0F0,
    device 0, position 0: 0SEND_F5 names a microbatch that does not exist; microbatches are 0 to 1
0F0, -> 0SEND_F0.1,0F0,
    device 0, position 0: 0SEND_F0.1 is for a slice of a sequence
0F0,0SEND_F0 -> 0SEND_F0,0F0
    device 0, position 0: 0SEND_F0 is issued before 0F0 at position 1, whose data it carries
1RECV_F0,1F0 -> 1F0,1RECV_F0
    device 1, position 1: 1RECV_F0 is issued after 1F0 at position 0, which waits for it
0F0,0SEND_F0,0F1,0SEND_F1 -> 0F0,0F1,0SEND_F1,0SEND_F0
    device 1, position 0: 1RECV_F0 comes before 1RECV_F1 on communicator F:0>1, but not on device 0
1B1, ->
    device 1: 1B1 is missing
1F0,1RECV_F1,1B0 -> 1B0,1RECV_F1,1F0
    device 1, position 1: 1B0 comes before 1F0 at position 3
"""
"""Replaced text and replacement, and below them the faults."""


def test_faults_of_programs() -> None:
    assert check_program(Program.from_csv(WHOLE)).ok
    for replaced, _, faults in cases(PROGRAMS):
        old, _, new = replaced.partition(" ->")
        assert old in WHOLE
        assert told(check_program(Program.from_csv(WHOLE.replace(old, new.strip(), 1), microbatches=2)), faults)


def test_a_transfer_says_who_takes_part() -> None:
    _, program = plan_program("1f1b", 3, 1, "vocab-2")
    for change, message in (
        ({"members": (0, 1)}, "X0 has members (0, 1), not (0, 1, 2)"),
        ({"root": 0}, "X0 has root 0, not 2"),
        ({"communicator": "DX"}, "X0 has communicator 'DX', not 'X'"),
    ):
        row = [replace(item, **change) if str(item) == "X0" else item for item in program.rows[1]]
        (fault,) = check_program(edited(program, 1, row)).faults
        assert (fault.device, fault.message) == (1, message)


def test_standstills_of_programs() -> None:
    """With one queue per device they stand still where communicators are in order, but not beside each other."""
    queued = "waiting for 0RECV_B0 (queued after 1RECV_F1 on device 1)"
    never = (
        "waiting for 0RECV_B0 (not issued by device 1); device 1 stops at position 3 (1F1), waiting for 1RECV_F1 "
        "(not issued by device 0)"
    )
    missing = ["1B1 is missing, so its activation", "0RECV_B1 is missing"]
    for first, second, starts, words in (
        (
            "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1",
            "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
            ["deadlock with one queue per device: device 0 stops at position 5 (0B0), "],
            queued,
        ),
        (
            "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0B1",
            "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1SEND_B1",
            [*missing, "deadlock with one queue per device"],
            queued,
        ),
        (  # device 0 offers 1F1's input only behind the backward that 1F1 comes before on device 1
            "0F0,0SEND_F0,0F1,0RECV_B0,0B0,0SEND_F1,0RECV_B1,0B1",
            "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
            [
                f"deadlock with one queue per {model}: device 0 stops at position 4 (0B0)"
                for model in ("communicator", "device")
            ],
            never,
        ),
    ):
        faults = check_program(Program.from_csv(f"{first}\n{second}")).faults
        assert len(faults) == len(starts)
        assert all(fault.message.startswith(start) for fault, start in zip(faults, starts, strict=True))
        for fault in faults:
            assert "missing" in fault.message or (words in fault.message and "[0B0]" in fault.rows)


# --- limits -----------------------------------------------------------------------------------------------------------

GPIPE = "0F0,0F1,0F2,0B0,0B1,0B2|1F0,1F1,1F2,1B0,1B1,1B2"
LIMITS = """
GPIPE ; {"activations": 3}
GPIPE ; {"activations": [3, 2]}
    device 1, position 2: 1F2 makes it 3 stage activations, more than the limit of 2
GPIPE ; {"activations": 2.5}
    device 0, position 2: 0F2 makes it 3 stage activations, more than the limit of 2.5
    device 1, position 2: 1F2 makes it 3 stage activations, more than the limit of 2.5
0F0,,0I0,0F1,0W0,0I1,0W1 ; {"activations": 1}
    device 0, position 3: 0F1 makes it 2 stage activations
0F0,(0F1;0B0)OVERLAP_F_B,0B1 ; {"activations": 1}
    device 0, position 1: (0F1;0B0)OVERLAP_F_B makes it 2
GPIPE ; {"bytes": 30, "costs": [10, 5]}
GPIPE ; {"bytes": 29, "costs": [10, 5]}
    device 0, position 2: 0F2 makes it 30 bytes
GPIPE ; {"bytes": [30, 14], "costs": [10, 5]}
    device 1, position 2: 1F2 makes it 15 bytes
0F0,0O0,0D0,0F1,0B1,0L0,0B0 ; {"bytes": 10, "costs": 10}
0F0,0O0,0F1,0B1,0D0,0L0,0B0 ; {"bytes": 10, "costs": 10}
    device 0, position 2: 0F1 makes it 20 bytes
0F0,0O0,0D0,0F1,0L0,0B1,0B0 ; {"bytes": 10, "costs": 10}
    device 0, position 4: 0L0 makes it 20 bytes
GPIPE ; {"activations": 1, "bytes": 1, "costs": 1}
    device 0, position 1: 0F1 makes it 2 stage activations
    device 1, position 1: 1F1 makes it 2 stage activations
    device 0, position 1: 0F1 makes it 2 bytes
    device 1, position 1: 1F1 makes it 2 bytes
0F0,0F1,0B0|1F0,1F1,1B1,1B0 ; {"activations": 1}
    device 0: 0B1 is missing
    device 0, position 1: 0F1 makes it 2 stage activations
    device 1, position 1: 1F1 makes it 2 stage activations
"""
"""Rows and limits, with the bytes of each stage, and below them the faults."""


def test_limits() -> None:
    for rows, limits, faults in cases(LIMITS):
        costs = Costs(F=1, B=2, bytes=limits.pop("costs")) if "costs" in limits else None
        assert told(check_order(order_of(rows.replace("GPIPE", GPIPE)), Limits(**limits, costs=costs)), faults)


def test_the_peak_is_the_least_limit() -> None:
    for name in SCHEDULES:
        order = generate(name, 3, 5)
        peaks = check_order(order).in_flight
        assert check_order(order, Limits(activations=peaks)).ok
        for device, peak in enumerate(peaks):
            if peak > 1:
                less = [limit - (there == device) for there, limit in enumerate(peaks)]
                (fault,) = check_order(order, Limits(activations=less)).faults
                assert fault.device == device
                assert f"makes it {peak} stage activations, more than the limit of {peak - 1}" in fault.message


def test_positions_in_a_program_count_transfers_and_evaluation_stores_nothing() -> None:
    _, program = plan_program("gpipe", 2, 2, "first-last")
    (fault,) = check_program(program, Limits(activations=[2, 1])).faults
    assert str(program.rows[1][fault.position]) == "1F1" and "[1F1]" in fault.rows
    assert check_order(forward_only(generate("gpipe", 2, 4)), Limits(activations=1)).ok


# --- what is no schedule ----------------------------------------------------------------------------------------------

ONE = Placement.linear(1)
HUGE = 10**9
SOUND = Pass(Kind.F, 0, 0), Pass(Kind.B, 0, 0)
FAR_OFF = [
    # passes of one device, microbatches, faults
    (SOUND, HUGE, ["0F1 to 0F999999999 are missing", "0B1 to 0B999999999 are"]),
    ((*SOUND, Pass(Kind.F, HUGE, 0)), 1, [f"{HUGE}F0 names a stage that"]),
    ((*SOUND, Pass(Kind.F, 0, HUGE)), 1, [f"0F{HUGE} names a microbatch that does not exist"]),
    ((*SOUND, Pass(Kind.F, 0, -1)), 1, ["0F-1 names a microbatch that does not exist"]),
    ((*SOUND, Pass(Kind.F, 0)), 1, ["0F is not a pass: F has a stage and a micro"]),
    ((*SOUND, Pass(Kind.S, 0, 0)), 1, ["0S0 is not allowed in vocabulary mode first-last"]),
    ((*SOUND, Pass(Kind.UNSHARD)), 1, ["UNSHARD is not a pass: UNSHARD has a stage"]),
    ((), 1, ["0F0 is missing", "0B0 is missing"]),
]


def test_what_is_far_off_is_named_and_takes_no_room() -> None:
    for row, microbatches, expected in FAR_OFF:
        found = [fault.message for fault in check_order(Order(ONE, microbatches, (row,))).faults]
        assert len(found) == len(expected), found
        assert all(what.startswith(start) for what, start in zip(found, expected, strict=True)), found


def test_transfers_that_are_far_off() -> None:
    order = Order.from_csv("0F0,0B0\n1F0,1B0", microbatches=HUGE)
    found = [fault.message for fault in check_program(Program(order.placement, HUGE, order.rows)).faults]
    assert "0SEND_F0 to 0SEND_F999999999 are missing" in found


BYTES = Costs(F=1, B=2, bytes=1)
NONE: list[tuple[Callable[[], object], str]] = [
    (lambda: Limits(activations=0), "is 0; it must be a finite number above 0, in stage activations"),
    (lambda: Limits(activations=[1, 2, 3]), "has 3 numbers for 2 devices"),
    (lambda: Limits(bytes=-1, costs=BYTES), "is -1; it must be a finite number above 0, in bytes"),
    (lambda: Limits(bytes=5), "a limit in bytes needs costs with the field bytes or memory"),
    (lambda: Limits(bytes=5, costs=Costs(F=1, B=2)), "a limit in bytes needs costs"),
    (lambda: Limits(bytes=5, costs=Costs(F=1, B=2, bytes=[1, 2, 3])), "bytes has 3 numbers for 2 stages"),
    (lambda: Order(ONE, 1.5, ((),)), "microbatches is 1.5; it must be a whole number"),
    (lambda: Order(LINEAR, 1, ((),)), "the order has 1 row for 2 devices"),
    (lambda: Order(ONE, 1, (("0F0",),)), "device 0, position 0: expected a pass, not '0F0'"),
    (lambda: Order(ONE, 1, ((Pass(Kind.F, 0, 0), 7),)), "device 0, position 1: expected a pass, not 7"),
    (lambda: Order(ONE, 1, ((Transfer(TransferKind.X, None, 0),),)), "position 0: expected a pass, not Transfer"),
    (lambda: Program(ONE, 1, (("X0",),)), "device 0, position 0: expected a pass or transfer, not 'X0'"),
]


@pytest.mark.parametrize(("build", "message"), NONE)
def test_what_is_no_schedule_and_no_limit(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        match build():
            case Limits() as limits:
                check_order(order_of(GPIPE), limits)
            case Program() as program:
                check_program(program)
            case Order() as order:
                check_order(order)


# --- any file ---------------------------------------------------------------------------------------------------------

SAID = [
    ("0F0,0B0", "sound: an order of 1 device and 1 microbatch\ndevice of stage 0: 0\n"),
    ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", "sound: an order of 2 devices and 2 microbatches\ndevices of stages 0 to 1: "),
    ("0F0,0F1\n1F0,1F1", "sound: an order, for evaluation, of 2 devices and 2 microbatches\n"),
    ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "sound: a program with transfers of 2 devices and 1 "),
    ("0F0\n1F0,1B0", "1 fault\ndevice 0: 0B0 is missing"),
    ("0F0,0B0,0B0\n1F0", "2 faults\ndevice 0, position 2: 0B0 is already at position 1"),
]  # fmt: skip


def test_what_is_said(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    for text, said in SAID:
        path.write_text(text)
        report = check_file(path)
        assert report.text().startswith(said)
        assert report.sound == said.startswith("sound") == report.to_dict()["sound"]


def test_a_file_and_back_and_bytes_by_costs(tmp_path: Path) -> None:
    order, program = plan_program("zb-h1", 3, 4, "vocab-2")
    write_schedule(program, tmp_path / "program.csv")
    assert check_file(tmp_path / "program.csv").schedule == program
    assert read_order(tmp_path / "program.csv") == order
    write_schedule(generate("1f1b", 2, 3), tmp_path / "order.csv")
    report = check_file(tmp_path / "order.csv", Costs(F=1, B=2, bytes=[3, 5]))
    assert report.peak_bytes == (6, 5) and "most bytes of activations, per device: 6 5" in report.text()


# --- any file ---------------------------------------------------------------------------------------------------------

PASSES = [
    *("", "0F0", "1F0", "0B0", "1B0", "0F1", "1F1", "0B1", "1B1", "0I0", "0W0", "1I1", "2F0", "0R0", "1O0", "1D0"),
    *("1L0", "E0", "S0", "C0", "T0", "G0", "S1", "0F0.1", "0UNSHARD"),
    *("(0F1;0B0)OVERLAP_F_B", "(1F1;1I0)OVERLAP_F_B"),
]
TRANSFERS = ["0SEND_F0", "1RECV_F0", "1SEND_B0", "0RECV_B0", "1SEND_F0", "X0", "STATISTICS0", "DX0", "ROWS1"]


ROW = st.lists(st.sampled_from([*PASSES, *TRANSFERS]), min_size=1, max_size=12).map(",".join)
ORDER_ROW = st.lists(st.sampled_from(PASSES), min_size=1, max_size=12).map(",".join)


@settings(max_examples=300)
@given(st.lists(ORDER_ROW, min_size=1, max_size=3), st.sampled_from([None, LINEAR, Placement.looped(2, 2)]))
def test_orders(rows: list[str], placement: Placement | None) -> None:
    try:
        order = Order.from_csv("\n".join(rows), placement=placement)
    except InputError:
        return
    assert Order.from_csv(order.to_csv(), placement=placement) == order
    sound = check_order(order).ok
    for use in (
        lambda: time_order(order, EQUAL_COSTS),
        lambda: add_communication(order),
        lambda: add_vocabulary(order),
        lambda: interlace(order),
        lambda: forward_only(order),
    ):
        try:
            use()
        except InputError:
            assert not sound or order.vocabulary.sharded or order.forward_only or "UNSHARD" in order.to_csv()


@settings(max_examples=300)
@given(st.lists(ROW, min_size=1, max_size=3))
def test_programs(rows: list[str]) -> None:
    try:
        program = Program.from_csv("\n".join(rows))
    except InputError:
        return
    assert Program.from_csv(program.to_csv()) == program
    report = check_program(program)
    assert len(report.in_flight) == program.devices
    assert all(0 <= fault.device < program.devices for fault in report.faults)


# --- large files ------------------------------------------------------------------------------------------------------

PARTS, DEVICES = 4_000, 5_000


def joint(first: str, second: str) -> str:
    """One device that runs `PARTS` passes as one."""
    parts = ";".join(f"0{first}{i};0{second}{i}" for i in range(PARTS // 2))
    return f"({parts})OVERLAP_F_B\n"


def test_a_long_joint_pass_is_checked_and_its_faults_show_its_beginning() -> None:
    order = Order.from_csv(joint("F", "B"))
    assert check_order(order).ok and time_order(order, EQUAL_COSTS).span == 3 * PARTS / 2
    report = check_order(Order.from_csv(joint("B", "F")))
    beginning = "(0B0;0F0;0B1;0F1;...3996 more)OVERLAP_F_B"
    assert report.faults[0].message == f"0B0 comes before the part of {beginning} that it needs"
    assert len(report.faults) == PARTS // 2 + 1
    assert max(len(str(fault)) for fault in report.faults) < 500


def test_thousands_of_faults_are_counted(tmp_path: Path) -> None:
    (tmp_path / "faults.csv").write_text("".join(f"{i}F0\n" for i in range(DEVICES)) + f"{DEVICES}F0,{DEVICES}B0\n")
    report = check_file(tmp_path / "faults.csv")
    lines = report.text().splitlines()
    assert (lines[0], lines[-1]) == (f"{DEVICES} faults", f"and {DEVICES - SHOWN} more; --json lists all")
    assert len(lines) == SHOWN + 2 and len(report.to_dict()["faults"]) == DEVICES
