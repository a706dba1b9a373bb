"""What is wrong with an order."""

from __future__ import annotations

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import Order, Placement, check_order, forward_only, generate, plan_order

LINEAR = Placement.linear(2)
VOCABULARY = ("E0,0F0,S0,C0,T0,0B0,G0", "E0,1F0,S0,C0,1B0,T0,G0")

# rows, what is given besides, faults as (device, position, start of the sentence)
TABLE = [
    (("0F0,0B0", "1F0,1B0"), {}, []),
    (("0F0,,0B0", ",1F0,1B0"), {}, []),
    (VOCABULARY, {}, []),
    (("0UNSHARD,0F0,0B0,0RESHARD,0UNSHARD,0REDUCE_GRAD", "1F0,1B0,1REDUCE_GRAD"), {}, []),
    (("0F0,0R0,0B0", "1F0,1O0,1D0,1L0,1B0"), {}, []),
    (("0F0,0O0,0D0,0L0,0R0,0B0", "1F0,1O0,1D0,1L0,1R0,1I0,1W0"), {}, []),
    (("0F0,0I0,0W0", "1F0,1I0,1W0"), {}, []),
    (("0F0,0B0", "1F0"), {}, [(1, None, "1B0 is missing, so its activations are never released")]),
    (("0B0", "1F0,1B0"), {}, [(0, None, "0F0 is missing")]),
    (("0F0,0I0", "1F0,1I0,1W0"), {}, [(0, None, "0W0 is missing, so its activations are never released")]),
    (("0F0,0W0", "1F0,1B0"), {}, [(0, None, "0I0 is missing")]),
    (("0F0,0B0,0W0", "1F0,1B0"), {}, [(0, 2, "0B0 has run whole")]),
    (
        ("0F0,0O0,0B0", "1F0,1B0"),
        {},
        [
            (0, None, "0D0 is missing, so the copied memory is never freed"),
            (0, None, "0L0 is missing, so its activations are never copied back"),
        ],
    ),
    (
        ("0F0,0L0,0B0", "1F0,1B0"),
        {},
        [(0, None, "0O0 is missing, so its activations are not on the host"), (0, None, "0D0 is missing")],
    ),
    (
        ("0F0,0O0,0L0,0D0,0B0", "1F0,1B0"),
        {},
        [(0, 2, "0L0 comes before 0D0 at position 3"), (0, 2, "the order cannot complete")],
    ),
    (
        ("0F0,0D0,0O0,0L0,0B0", "1F0,1B0"),
        {},
        [(0, 1, "0D0 comes before 0O0 at position 2"), (0, 1, "the order cannot complete")],
    ),
    (
        ("0F0,0O0,0D0,0B0,0L0", "1F0,1B0"),
        {},
        [
            (0, 3, "0B0 comes before 0L0 at position 4"),
            (0, 3, "the order cannot complete: device 0 stops at position 3, 0B0, awaiting 0L0 of device 0"),
        ],
    ),
    (("0F0,0F0,0B0", "1F0,1B0"), {}, [(0, 1, "0F0 is already at position 0")]),
    (("0F0,0B0", "1F0,0B0,1B0"), {"placement": LINEAR}, [(1, 1, "0B0 belongs to device 0")]),
    (
        ("0F0,0B0", "1F0,1B0,2B0"),
        {"placement": LINEAR},
        [(1, 2, "2B0 names a stage that does not exist; stages are 0 to 1")],
    ),
    (("0F0,0B0", "1F0,1B0,1F7"), {"microbatches": 1}, [(1, 2, "1F7 names a microbatch that does not exist")]),
    (("0F0,0B0", "1F0,1F0.1,1B0"), {"slices": 1}, [(1, 1, "1F0.1 is for a slice of a sequence")]),
    (("0F0,S0,0B0", "1F0,1B0"), {"barriers": 0}, [(0, 1, "S0 is not allowed in an order with 0 barriers")]),
    (
        ("E0,0F0,S0,C0,T0,0B0,G0", "E0,1F0,S0,T0,1B0,G0"),
        {"barriers": 2},
        [(0, 3, "C0 is not allowed in an order with 2 barriers")],
    ),
    (("0F0,0B0", "1F0"), {"forward_only": True}, [(0, 1, "0B0 is not allowed in an order that only evaluates")]),
    (("0B0,0F0", "1F0,1B0"), {}, [(0, 0, "0B0 comes before 0F0 at position 1"), (0, 0, "the order cannot complete")]),
    (("0F0,0B0", "1B0,1F0"), {}, [(1, 0, "1B0 comes before 1F0"), (0, 1, "the order cannot complete")]),
    (
        ("0F0,0R0,0B0", "1F0,1B0,1R0"),
        {},
        [(1, 1, "1B0 comes before 1R0 at position 2"), (0, 2, "the order cannot complete")],
    ),
    (
        ("0F0,0O0,0D0,0R0,0L0,0B0", "1F0,1B0"),
        {},
        [
            (0, 3, "0R0 comes before 0L0 at position 4, which it needs"),
            (0, 3, "the order cannot complete: device 0 stops at position 3, 0R0, awaiting 0L0 of device 0"),
        ],
    ),
    (("0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"), {}, [(0, 1, "the order cannot complete: device 0 stops at position 1")]),
    (
        ("E0,0F0,S0,T0,C0,0B0,G0", VOCABULARY[1]),
        {},
        [(0, 3, "T0 comes before C0 at position 4"), (0, 3, "the order cannot complete")],
    ),
    (("(0F0;0B0)OVERLAP_F_B",), {}, []),
    (("0F0,(0F1;0F1)OVERLAP_F_B,0B0,0B1",), {}, [(0, 1, "0F1 is already at position 1")]),
    (
        ("0F0,(0W0;0I0)OVERLAP_F_B",),
        {},
        [(0, 1, "0W0 comes before the part of (0W0;0I0)OVERLAP_F_B that it needs"), (0, 1, "the order cannot")],
    ),
    (("0F0,0B0,0F1", "1F0,1F0,1B1"), {}, [
        (0, None, "0B1 is missing"),
        (1, 1, "1F0 is already at position 0"),
        (1, None, "1B0 is missing"),
        (1, None, "1F1 is missing"),
    ]),
    (("0F0,0B0,0F1,0B1", "1F0,1F1,1B0"), {}, [  # What is missing hides no standstill that it is not the cause of.
        (1, None, "1B1 is missing"),
        (0, 1, "the order cannot complete: device 0 stops at position 1, 0B0, awaiting 1B0 of device 1; "),
    ]),
    (("0F0,0B0,0F1,0B1", "1F0,1B0,1B1"), {}, [(1, None, "1F1 is missing")]),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "given", "faults"), TABLE)
def test_faults(rows: tuple[str, ...], given: dict[str, object], faults: list[tuple[int, int | None, str]]) -> None:
    report = check_order(Order.from_csv("\n".join(rows), **given))
    found = [(fault.device, fault.position, fault.what) for fault in report.faults]
    assert len(found) == len(faults), found
    for (device, position, what), expected in zip(found, faults, strict=True):
        assert (device, position) == expected[:2]
        assert what.startswith(expected[2])
    assert report.ok == (not faults)


def test_a_fault_shows_the_rows_around_it() -> None:
    order = generate("1f1b", 4, 8)
    rows = [list(row) for row in order.rows]
    rows[1][4], rows[1][7] = rows[1][7], rows[1][4]  # 1F3 and 1B2
    (fault,) = check_order(Order(order.placement, 8, tuple(map(tuple, rows)))).faults
    assert str(fault).splitlines() == [
        "device 0, position 6: the order cannot complete: "
        "device 0 stops at position 6, 0B1, awaiting 1B1 of device 1; "
        "device 1 stops at position 4, 1B2, awaiting 2B2 of device 2; "
        "device 2 stops at position 5, 2F3, awaiting 1F3 of device 1; "
        "device 3 stops at position 6, 3F3, awaiting 2F3 of device 2",
        "  device 0: ... 0F2 0F3 0B0 0F4 [0B1] 0F5 0B2 0F6 0B3 ...",
        "  device 1: 1F0 1F1 1F2 1B0 [1B2] 1B1 1F4 1F3 1F5 ...",
        "  device 2: ... 2F1 2B0 2F2 2B1 [2F3] 2B2 2F4 2B3 2F5 ...",
        "  device 3: ... 3F1 3B1 3F2 3B2 [3F3] 3B3 3F4 3B4 3F5 ...",
    ]


@pytest.mark.parametrize(("name", "in_flight"), [("gpipe", (5, 5, 5)), ("1f1b", (3, 2, 1))])
def test_in_flight(name: str, in_flight: tuple[int, ...]) -> None:
    assert check_order(generate(name, 3, 5)).in_flight == in_flight


def test_evaluation_stores_nothing() -> None:
    assert check_order(forward_only(plan_order("1f1b", 3, 5))).in_flight == (0, 0, 0)


def test_in_flight_counts_every_stage_of_a_device() -> None:
    order = Order.from_csv("0F0,3F0,0F1,3B0,0B0,3F1,3B1,0B1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1")
    assert check_order(order).in_flight == (3, 2)
    assert check_order(order).ok


def test_raise_if_faulty() -> None:
    check_order(plan_order("1f1b", 3, 3)).raise_if_faulty()
    broken = Order.from_csv("0F0,0F1,0B0\n1F0,1F1,1B0")
    with pytest.raises(InputError) as error:
        check_order(broken).raise_if_faulty()
    assert str(error.value).splitlines() == [
        "the schedule has 2 faults",
        "device 0: 0B1 is missing, so its activations are never released",
        "device 1: 1B1 is missing, so its activations are never released",
    ]


def test_an_error_shows_so_many_faults_and_a_report_all() -> None:
    order = generate("1f1b", 2, 40)
    report = check_order(Order(order.placement, 40, (order.rows[0], order.rows[1][:1])))
    assert len(report.faults) == 79
    with pytest.raises(InputError, match="79 faults") as error:
        report.raise_if_faulty()
    assert str(error.value).endswith("and 59 more")
