"""Whatever a file says: it is read or refused, and what is read is checked and timed or refused, without a crash."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    Order,
    Placement,
    Program,
    add_communication,
    add_vocabulary,
    check_order,
    check_program,
    forward_only,
    interlace,
    time_order,
)

PASSES = [
    *(
        "",
        "0F0",
        "1F0",
        "0B0",
        "1B0",
        "0F1",
        "1F1",
        "0B1",
        "1B1",
        "0I0",
        "0W0",
        "1I1",
        "2F0",
        "0R0",
        "1O0",
        "1D0",
        "1L0",
    ),
    *("E0", "S0", "C0", "T0", "G0", "S1", "0F0.1", "0UNSHARD", "(0F1;0B0)OVERLAP_F_B", "(1F1;1I0)OVERLAP_F_B"),
]
TRANSFERS = ["0SEND_F0", "1RECV_F0", "1SEND_B0", "0RECV_B0", "1SEND_F0", "X0", "STATISTICS0", "DX0", "ROWS1"]


def rows(words: list[str]) -> st.SearchStrategy[str]:
    row = st.lists(st.sampled_from(words), min_size=1, max_size=12).map(",".join)
    return st.lists(row, min_size=1, max_size=3).map("\n".join)


@settings(max_examples=300, deadline=None)
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


@settings(max_examples=300, deadline=None)
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
