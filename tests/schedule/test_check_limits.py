"""Does every device stay within its memory, and is what cannot be a schedule refused?"""

from __future__ import annotations

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import (
    SCHEDULES,
    Costs,
    Kind,
    Limits,
    Order,
    Pass,
    Placement,
    Program,
    Transfer,
    TransferKind,
    check_order,
    check_program,
    forward_only,
    generate,
    plan_program,
)

TEN = Costs(F=1, B=2, bytes=10)
GPIPE = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2"

# rows, limits, faults as (device, position, sentence)
TABLE = [
    (GPIPE, {"activations": 3}, []),
    (GPIPE, {"activations": [3, 2]}, [(1, 2, "1F2 makes it 3 stage activations, more than the limit of 2")]),
    (GPIPE, {"activations": 2.5}, [
        (0, 2, "0F2 makes it 3 stage activations, more than the limit of 2.5"),
        (1, 2, "1F2 makes it 3 stage activations, more than the limit of 2.5"),
    ]),
    ("0F0,,0I0,0F1,0W0,0I1,0W1", {"activations": 1}, [(0, 3, "0F1 makes it 2 stage activations")]),
    ("0F0,(0F1;0B0)OVERLAP_F_B,0B1", {"activations": 1}, [(0, 1, "(0F1;0B0)OVERLAP_F_B makes it 2")]),
    (GPIPE, {"bytes": 30, "costs": Costs(F=1, B=2, bytes=[10, 5])}, []),
    (GPIPE, {"bytes": 29, "costs": Costs(F=1, B=2, bytes=[10, 5])}, [(0, 2, "0F2 makes it 30 bytes")]),
    (GPIPE, {"bytes": [30, 14], "costs": Costs(F=1, B=2, bytes=[10, 5])}, [(1, 2, "1F2 makes it 15 bytes")]),
    ("0F0,0O0,0D0,0F1,0B1,0L0,0B0", {"bytes": 10, "costs": TEN}, []),
    ("0F0,0O0,0F1,0B1,0D0,0L0,0B0", {"bytes": 10, "costs": TEN}, [(0, 2, "0F1 makes it 20 bytes")]),
    ("0F0,0O0,0D0,0F1,0L0,0B1,0B0", {"bytes": 10, "costs": TEN}, [(0, 4, "0L0 makes it 20 bytes")]),
    (GPIPE, {"activations": 1, "bytes": 1, "costs": Costs(F=1, B=2, bytes=1)}, [
        *((device, 1, f"{device}F1 makes it 2 stage activations") for device in (0, 1)),
        *((device, 1, f"{device}F1 makes it 2 bytes") for device in (0, 1)),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "limits", "faults"), TABLE)
def test_limits(rows: str, limits: dict[str, object], faults: list[tuple[int, int, str]]) -> None:
    report = check_order(Order.from_csv(rows), Limits(**limits))
    assert len(report.faults) == len(faults), report.faults
    for fault, (device, position, what) in zip(report.faults, faults, strict=True):
        assert (fault.device, fault.position) == (device, position)
        assert fault.what.startswith(what)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_peak_is_the_least_limit(name: str) -> None:
    order = generate(name, 3, 5)
    peaks = check_order(order).in_flight
    assert check_order(order, Limits(activations=peaks)).ok
    for device, peak in enumerate(peaks):
        if peak > 1:
            less = [limit - (there == device) for there, limit in enumerate(peaks)]
            (fault,) = check_order(order, Limits(activations=less)).faults
            assert fault.device == device
            assert f"makes it {peak} stage activations, more than the limit of {peak - 1}" in fault.what


def test_positions_in_a_program_count_transfers() -> None:
    _, program = plan_program("gpipe", 2, 2, "first-last")
    (fault,) = check_program(program, Limits(activations=[2, 1])).faults
    assert str(program.rows[1][fault.position]) == "1F1"
    assert f"[{program.rows[1][fault.position]}]" in fault.rows


def test_limits_stand_beside_other_faults() -> None:
    faults = check_order(Order.from_csv("0F0,0F1,0B0\n1F0,1F1,1B1,1B0"), Limits(activations=1)).faults
    assert [fault.what.split(",")[0] for fault in faults] == [
        "0B1 is missing",
        "0F1 makes it 2 stage activations",
        "1F1 makes it 2 stage activations",
    ]


def test_evaluation_stores_nothing() -> None:
    assert check_order(forward_only(generate("gpipe", 2, 4)), Limits(activations=1)).ok


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"activations": 0}, "must be a finite number above 0, in stage activations, not 0"),
        ({"activations": [1, 2, 3]}, "has 3 numbers for 2 devices"),
        ({"bytes": -1, "costs": Costs(F=1, B=2, bytes=1)}, "must be a finite number above 0, in bytes, not -1"),
        ({"bytes": 5}, "a limit in bytes needs costs with the field bytes or memory"),
        ({"bytes": 5, "costs": Costs(F=1, B=2)}, "a limit in bytes needs costs"),
        ({"bytes": 5, "costs": Costs(F=1, B=2, bytes=[1, 2, 3])}, "bytes has 3 numbers for 2 stages"),
    ],
)
def test_limits_that_are_none(limits: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_order(Order.from_csv(GPIPE), Limits(**limits))


ONE = Placement.linear(1)
HUGE = 10**9


@pytest.mark.parametrize(
    ("rows", "microbatches", "faults"),
    [
        ([Pass(Kind.F, 0, 0), Pass(Kind.B, 0, 0)], HUGE, ["0F1 to 0F999999999 are missing", "0B1 to 0B999999999 are"]),
        ([Pass(Kind.F, 0, 0), Pass(Kind.B, 0, 0), Pass(Kind.F, HUGE, 0)], 1, [f"{HUGE}F0 names a stage that"]),
        (
            [Pass(Kind.F, 0, 0), Pass(Kind.B, 0, 0), Pass(Kind.F, 0, HUGE)],
            1,
            [f"0F{HUGE} names a microbatch that does not exist"],
        ),
        (
            [Pass(Kind.F, 0, 0), Pass(Kind.B, 0, 0), Pass(Kind.F, 0, -1)],
            1,
            ["0F-1 names a microbatch that does not exist"],
        ),
        ([Pass(Kind.F, 0, 0), Pass(Kind.B, 0, 0), Pass(Kind.F, 0)], 1, ["0F is not a pass: F has a stage and a micro"]),
        ([Pass(Kind.F, 0, 0), Pass(Kind.B, 0, 0), Pass(Kind.S, 0, 0)], 1, ["0S0 is not allowed in an order with 0"]),
        (
            [Pass(Kind.F, 0, 0), Pass(Kind.B, 0, 0), Pass(Kind.UNSHARD)],
            1,
            ["UNSHARD is not a pass: UNSHARD has a stage"],
        ),
        ([], 1, ["0F0 is missing", "0B0 is missing"]),
    ],
)
def test_what_is_far_off_is_named_and_takes_no_room(rows: list[Pass], microbatches: int, faults: list[str]) -> None:
    found = check_order(Order(ONE, microbatches, (tuple(rows),))).faults
    assert len(found) == len(faults)
    assert all(fault.what.startswith(words) for fault, words in zip(found, faults, strict=True))


def test_transfers_that_are_far_off() -> None:
    order = Order.from_csv("0F0,0B0\n1F0,1B0", microbatches=HUGE)
    found = [fault.what for fault in check_program(Program(order.placement, HUGE, order.rows)).faults]
    assert "0SEND_F0 to 0SEND_F999999999 are missing" in found


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda: Order(ONE, 1.5, ((),)), "microbatches must be a whole number, not 1.5"),
        (lambda: Order(Placement.linear(2), 1, ((),)), "the order has 1 row for 2 devices"),
        (lambda: Order(ONE, 1, (("0F0",),)), "device 0, position 0: expected a pass, not '0F0'"),
        (lambda: Order(ONE, 1, ((Pass(Kind.F, 0, 0), 7),)), "device 0, position 1: expected a pass, not 7"),
        (lambda: Order(ONE, 1, ((Transfer(TransferKind.X, None, 0),),)), "position 0: expected a pass, not Transfer"),
        (lambda: Program(ONE, 1, (("X0",),)), "device 0, position 0: expected a pass or transfer, not 'X0'"),
    ],
)
def test_what_is_no_schedule(schedule: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        built = schedule()
        check_program(built) if isinstance(built, Program) else check_order(built)
