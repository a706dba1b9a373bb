"""What is wrong with a program."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_oracle import completes, edited

from evenpipe.errors import InputError
from evenpipe.schedule import Program, check_program, plan_program

# What every example starts from: 1F1B on two devices, two microbatches.
FIRST = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1"
SECOND = "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1"

# replaced text, replacement, faults as (device, position, start of the sentence)
TABLE = [
    ("", "", []),
    ("0F0,", "0F0,,", []),
    ("0F0,", "0UNSHARD,0F0,", []),
    ("0SEND_F1,", "", [(0, None, "0SEND_F1 is missing")]),
    ("1RECV_F1,", "", [(1, None, "1RECV_F1 is missing")]),
    ("0SEND_F1", "0SEND_F1,0SEND_F1", [(0, 4, "0SEND_F1 is already at position 3")]),
    ("1SEND_B1", "1SEND_B1,1SEND_F0", [(1, 8, "no pass needs 1SEND_F0, or device 1 is not a member of it")]),
    ("1SEND_B1", "1SEND_B1,0SEND_F1", [(1, 8, "no pass needs 0SEND_F1, or device 1 is not a member of it")]),
    ("0F0,", "X0,0F0,", [(0, 0, "no pass needs X0, or device 0 is not a member of it")]),
    ("0F0,", "0SEND_F5,0F0,", [(0, 0, "0SEND_F5 names a microbatch that does not exist; microbatches are 0 to 1")]),
    ("0F0,", "0SEND_F0.1,0F0,", [(0, 0, "0SEND_F0.1 is for a slice of a sequence")]),
    ("0F0,0SEND_F0", "0SEND_F0,0F0", [(0, 0, "0SEND_F0 is issued before 0F0 at position 1, whose data it carries")]),
    ("1RECV_F0,1F0", "1F0,1RECV_F0", [(1, 1, "1RECV_F0 is issued after 1F0 at position 0, which waits for it")]),
    (
        "0F0,0SEND_F0,0F1,0SEND_F1",
        "0F0,0F1,0SEND_F1,0SEND_F0",
        [(1, 0, "1RECV_F0 comes before 1RECV_F1 on communicator F:0>1, but not on device 0")],
    ),
    ("1B1,", "", [(1, None, "1B1 is missing")]),
    (
        "1F0,1RECV_F1,1B0",
        "1B0,1RECV_F1,1F0",
        [
            (1, 1, "1B0 comes before 1F0 at position 3"),
            (0, 5, "the order cannot complete: device 0 stops at position 5, 0B0, awaiting 1B0 of device 1"),
        ],
    ),
]


@pytest.mark.parametrize(("old", "new", "faults"), TABLE)
def test_faults(old: str, new: str, faults: list[tuple[int, int | None, str]]) -> None:
    text = f"{FIRST}\n{SECOND}\n"
    assert old in text
    program = Program.from_csv(text.replace(old, new, 1), microbatches=2)
    found = [(fault.device, fault.position, fault.what) for fault in check_program(program).faults]
    assert len(found) == len(faults), found
    for (device, position, what), expected in zip(found, faults, strict=True):
        assert (device, position) == expected[:2]
        assert what.startswith(expected[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"members": (0, 1)}, "X0 has members (0, 1), not (0, 1, 2)"),
        ({"root": 0}, "X0 has root 0, not 2"),
        ({"communicator": "DX"}, "X0 has communicator 'DX', not 'X'"),
    ],
)
def test_a_transfer_says_who_takes_part(change: dict[str, object], message: str) -> None:
    _, program = plan_program("1f1b", 3, 1, "vocab-2")
    row = [replace(item, **change) if str(item) == "X0" else item for item in program.rows[1]]
    (fault,) = check_program(edited(program, 1, row)).faults
    assert (fault.device, fault.what) == (1, message)


def test_a_program_that_only_separate_queues_complete() -> None:
    """Each communicator is in order on both devices, but between communicators the devices disagree."""
    _, program = plan_program("1f1b", 2, 2, "first-last")
    rows = [
        "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1",
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
    ]
    damaged = Program.from_csv("\n".join(rows))
    assert check_program(program).ok
    (fault,) = check_program(damaged).faults
    assert fault.what.startswith("with one queue per device the program cannot complete: device 0 stops at position 5")
    assert "0B0, awaiting 0RECV_B0 (queued after 1RECV_F1 on device 1)" in fault.what
    assert completes(damaged, lambda transfer: transfer.communicator)
    assert not completes(damaged, lambda transfer: "")


def test_what_is_missing_hides_no_standstill() -> None:
    rows = [
        "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0B1",
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1SEND_B1",
    ]
    faults = check_program(Program.from_csv("\n".join(rows))).faults
    assert [fault.what[:33] for fault in faults] == [
        "1B1 is missing, so its activation",
        "0RECV_B1 is missing",
        "with one queue per device the pro",
    ]


def test_a_program_that_no_queues_complete() -> None:
    """Device 0 offers 1F1's input only behind the backward that 1F1 comes before on device 1."""
    rows = [
        "0F0,0SEND_F0,0F1,0RECV_B0,0B0,0SEND_F1,0RECV_B1,0B1",
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
    ]
    faults = check_program(Program.from_csv("\n".join(rows))).faults
    for fault, model in zip(faults, ("one queue per communicator", "one queue per device"), strict=True):
        assert fault.what.startswith(f"with {model} the program cannot complete: device 0 stops at position 4, 0B0")
        assert "awaiting 0RECV_B0 (not issued by device 1)" in fault.what
        assert "device 1 stops at position 3, 1F1, awaiting 1RECV_F1 (not issued by device 0)" in fault.what


@pytest.mark.parametrize(
    ("device", "transfer", "user"), [(2, "X0", "S0"), (0, "ROW_GRADIENTS0", "G0"), (1, "X0", "S0"), (1, "DX0", "")]
)
@pytest.mark.parametrize("mode", ["vocab-1", "vocab-2", "interlaced"])
def test_what_a_device_sends_is_sent_before_the_device_uses_it_up(
    mode: str, device: int, transfer: str, user: str
) -> None:
    """Its own share too, for which it waits for nobody. Who only gives may do it later."""
    _, program = plan_program("1f1b", 3, 1, mode)
    row = list(program.rows[device])
    (late,) = (item for item in row if str(item) == transfer)
    here = row.index(late)
    row.append(row.pop(here))
    faults = check_program(edited(program, device, row)).faults
    if not user:
        assert not any("is issued after" in fault.what for fault in faults)
        return
    place = [str(item) for item in row].index(user)
    own = next(fault for fault in faults if fault.device == device and "is issued after" in fault.what)
    why = "which waits for it" if device == 1 else "which consumes its data"
    assert own.what == f"{transfer} is issued after {user} at position {place}, {why}"
    assert f"[{transfer}]" in own.rows


def test_the_message_of_a_standstill_shows_rows_with_transfers() -> None:
    damaged = Program.from_csv(f"{FIRST}\n1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1")
    assert check_program(damaged).ok
    damaged = Program.from_csv(f"{FIRST.replace('0SEND_F1,0RECV_B0', '0RECV_B0,0SEND_F1')}\n{SECOND}")
    (fault,) = check_program(damaged).faults
    assert fault.rows.splitlines()[0] == "  device 0: ... 0SEND_F0 0F1 0RECV_B0 0SEND_F1 [0B0] 0RECV_B1 0B1"


def test_a_program_that_is_not_sound_is_refused_with_all_its_faults() -> None:
    program = Program.from_csv(f"{FIRST.replace('0SEND_F0,', '')}\n{SECOND.replace(',1SEND_B1', '')}")
    with pytest.raises(InputError) as error:
        check_program(program).raise_if_faulty()
    assert str(error.value) == (
        "the schedule has 2 faults\ndevice 0: 0SEND_F0 is missing\ndevice 1: 1SEND_B1 is missing"
    )
