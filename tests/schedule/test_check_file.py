"""What is said of a file, whatever stands in it: in a time linear in its size, readably, and without a crash."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    Costs,
    Order,
    Placement,
    Program,
    add_communication,
    add_vocabulary,
    check_order,
    check_program,
    forward_only,
    generate,
    interlace,
    plan_program,
    time_order,
)
from evenpipe.schedule.check_file import SHOWN, check_file
from evenpipe.schedule.files import read_order, write_schedule

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


def rows(words: list[str]) -> st.SearchStrategy[str]:
    row = st.lists(st.sampled_from(words), min_size=1, max_size=12).map(",".join)
    return st.lists(row, min_size=1, max_size=3).map("\n".join)


@settings(max_examples=300)
@given(rows(PASSES), st.sampled_from([None, Placement.linear(2), Placement.looped(2, 2)]))
def test_orders(text: str, placement: Placement | None) -> None:
    try:
        order = Order.from_csv(text, placement=placement)
    except InputError:
        return
    assert Order.from_csv(order.to_csv(), placement=placement) == order
    sound = check_order(order).ok
    for use in (
        lambda: time_order(order, EQUAL_COSTS),
        lambda: add_communication(order),
        lambda: add_vocabulary(order, 1),
        lambda: interlace(order),
        lambda: forward_only(order),
    ):
        try:
            use()
        except InputError:
            assert not sound or order.barriers or order.forward_only or "UNSHARD" in text


@settings(max_examples=300)
@given(rows([*PASSES, *TRANSFERS]))
def test_programs(text: str) -> None:
    try:
        program = Program.from_csv(text)
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
    assert report.faults[0].what == f"0B0 comes before the part of {beginning} that it needs"
    assert len(report.faults) == PARTS // 2 + 1
    assert max(len(str(fault)) for fault in report.faults) < 500


def test_thousands_of_faults_are_counted(tmp_path: Path) -> None:
    (tmp_path / "faults.csv").write_text("".join(f"{i}F0\n" for i in range(DEVICES)) + f"{DEVICES}F0,{DEVICES}B0\n")
    report = check_file(tmp_path / "faults.csv")
    lines = report.text().splitlines()
    assert (lines[0], lines[-1]) == (f"{DEVICES} faults", f"and {DEVICES - SHOWN} more; --json lists all")
    assert len(lines) == SHOWN + 2 and len(report.to_dict()["faults"]) == DEVICES
