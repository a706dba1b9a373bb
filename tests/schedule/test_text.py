"""Schedules as text and back: passes and transfers, orders and programs as CSV files, and which device holds what."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    MODES,
    Kind,
    Order,
    Pass,
    Placement,
    Program,
    Timeline,
    Transfer,
    TransferKind,
    evaluation_program,
    forward_only,
    generate,
    plan_program,
    time_order,
)
from evenpipe.schedule.passes import parse_item, parts_of
from evenpipe.schedule.picture import MOST_EVENTS

# --- words ------------------------------------------------------------------------------------------------------------

F1, B0 = Pass(Kind.F, 2, 1), Pass(Kind.B, 2, 0)
JOINT = Pass(Kind.OVERLAP_F_B, parts=(F1, B0))

WORDS = [
    ("2F0", Pass(Kind.F, 2, 0)),
    ("0B13", Pass(Kind.B, 0, 13)),
    ("12I3", Pass(Kind.I, 12, 3)),
    ("2W0", Pass(Kind.W, 2, 0)),
    ("2F0.1", Pass(Kind.F, 2, 0, 1)),
    ("2R0", Pass(Kind.R, 2, 0)),
    ("2O0", Pass(Kind.O, 2, 0)),
    ("2D0", Pass(Kind.D, 2, 0)),
    ("2L0", Pass(Kind.L, 2, 0)),
    ("E0", Pass(Kind.E, None, 0)),
    ("G5", Pass(Kind.G, None, 5)),
    ("S0", Pass(Kind.S, None, 0)),
    ("C0", Pass(Kind.C, None, 0)),
    ("T10", Pass(Kind.T, None, 10)),
    ("S0.3", Pass(Kind.S, None, 0, 3)),
    ("2UNSHARD", Pass(Kind.UNSHARD, 2)),
    ("2RESHARD", Pass(Kind.RESHARD, 2)),
    ("2REDUCE_GRAD", Pass(Kind.REDUCE_GRAD, 2)),
    ("(2F1;2B0)OVERLAP_F_B", JOINT),
    ("2SEND_F0", Transfer(TransferKind.SEND_F, 2, 0)),
    ("3RECV_F0", Transfer(TransferKind.RECV_F, 3, 0)),
    ("3SEND_B0", Transfer(TransferKind.SEND_B, 3, 0)),
    ("2RECV_B0.2", Transfer(TransferKind.RECV_B, 2, 0, 2)),
    ("X0", Transfer(TransferKind.X, None, 0)),
    ("STATISTICS4", Transfer(TransferKind.STATISTICS, None, 4)),
    ("DX0", Transfer(TransferKind.DX, None, 0)),
    ("ROWS0", Transfer(TransferKind.ROWS, None, 0)),
    ("ROW_GRADIENTS0", Transfer(TransferKind.ROW_GRADIENTS, None, 0)),
]


def test_text_and_back() -> None:
    for text, item in WORDS:
        assert (str(item), parse_item(text)) == (text, item)
    assert list(map(str, parts_of(JOINT))) == ["2F1", "2B0"] and parts_of(F1) == (F1,)


NOT_WORDS = [
    "0F" + "9" * 5000,
    *("", "F", "2F", "F0", "2f0", "2F0x", "2F0 ", " 2F0", "2F0\n", "02F0", "2F00", "2F0.0", "2F0.", "2F0.01", "-1F0"),
    *("2F-1", "2Q0", "2S0", "S", "0S", "2X0", "X", "STATISTICS", "SEND_F0", "2UNSHARD0", "UNSHARD", "2F٣", "2F0;2B0"),
    *("OVERLAP_F_B", "()OVERLAP_F_B", "(2F1)OVERLAP_F_B", "(2F1;2B0)", "(2F1;2B0)OVERLAP_F_B0", "(2F1;2X0)OVERLAP_F_B"),
    *("(2F1;S0)OVERLAP_F_B", "((2F1;2B0)OVERLAP_F_B;2F2)OVERLAP_F_B", "2F0,2F1", "2ROW_GRADIENTS0", "2.0F1"),
]


def test_what_is_not_exactly_a_word_is_refused() -> None:
    for text in NOT_WORDS:
        with pytest.raises(InputError) as error:
            parse_item(text)
        shown = text.replace("\n", "\\n") if len(text) < 60 else text[:57] + "..."
        assert str(error.value).startswith(f"'{shown}' is not a pass")
    for text, words in (
        ("2UNSHARD0", "UNSHARD has a stage and no microbatch, as in 2UNSHARD"),
        ("2S0", "S has no stage and a microbatch, as in S0"),
        ("3F", "F has a stage and a microbatch, as in 3F0"),
    ):
        with pytest.raises(InputError, match=f"'{text}' is not a pass or transfer; {words}"):
            parse_item(text)


@given(st.text("0123FBSEXROW_.;()UNDHAL ", max_size=12))
def test_any_text_is_a_word_or_refused(text: str) -> None:
    try:
        assert str(parse_item(text)) == text
    except InputError as error:
        assert "\n" not in str(error)


def test_parts_that_cannot_run_as_one_and_transfers_are_no_passes() -> None:
    for kind, stage, parts in (
        (Kind.OVERLAP_F_B, None, (F1,)),
        (Kind.OVERLAP_F_B, None, (F1, Pass(Kind.UNSHARD, 2))),
        (Kind.OVERLAP_F_B, None, (F1, JOINT)),
        (Kind.OVERLAP_F_B, 2, (F1, B0)),
        (Kind.F, None, (F1, B0)),
    ):
        with pytest.raises(InputError, match="OVERLAP_F_B"):
            Pass(kind, stage, parts=parts)
    with pytest.raises(InputError, match="'X0' is a transfer"):
        Pass.parse("X0")


# --- files ------------------------------------------------------------------------------------------------------------


def test_orders_and_programs_survive_their_files(sample: Callable[..., list[Any]]) -> None:
    for mode, (devices, microbatches) in sample(product(MODES, [(1, 1), (1, 3), (2, 1), (3, 5), (4, 8)]), 8):
        order, program = plan_program("1f1b", devices, microbatches, mode)
        for found in (order, forward_only(order)):
            assert Order.from_csv(found.to_csv()) == found
        for found in (program, evaluation_program(order)):
            assert Program.from_csv(found.to_csv()) == found


READ = [
    # text, and what is read from it: stages' devices, microbatches, vocabulary mode, whether it only evaluates
    ("0F0,0F1,,0B0,0B1\r\n,1F0,1B0,1F1,1B1\r\n", (0, 1), 2, "first-last", False),  # as torch writes it
    (" 0F0 ,\t0B0", (0,), 1, "first-last", False),
    (
        "0F0,3F0,(0F1;3I0)OVERLAP_F_B,3W0,0B0,3F1,3B1,0B1,0UNSHARD\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1,\n",
        *((0, 1, 1, 0), 2, "first-last", False),
    ),
    ("0F0,0F1,1B1,0B0,0B1\n1F0,1F1,1B0\n", (0, 1), 2, "first-last", False),  # a misplaced pass does not move its stage
    ("0F0", (0,), 1, "first-last", True),
    ("E0,0F0,S0,C0,T0,0B0,G0", (0,), 1, "vocab-2", False),
    ("E0,0F0,S0,T0,0B0,G0", (0,), 1, "vocab-1", False),
    ("E0,0F0,S0,C0", (0,), 1, "vocab-2", True),
]


def test_what_a_file_says() -> None:
    for text, stage_device, *expected in READ:
        order = Order.from_csv(text)
        assert order.placement.stage_device == stage_device
        assert [order.microbatches, order.vocabulary, order.forward_only] == expected
        plain = text.replace("\r", "").replace(" ", "").replace("\t", "")
        assert order.to_csv() == plain.rstrip("\n") + "\n"
    assert Order.from_csv(READ[0][0]).rows[1][0] is None
    fields = {"microbatches": 2, "vocabulary": "vocab-2", "forward_only": True, "placement": Placement(1, (0, 0))}
    told = Order.from_csv("0F0,0B0\n", **fields)
    assert (told.microbatches, told.vocabulary, told.forward_only, told.placement.stages) == (2, "vocab-2", True, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("\n", "the file is empty; a schedule has one line per device"),
        (" , ,\n\n", "the file is empty"),
        ("0F0,0B0\n\n1F0,1B0\n", "row 2 is blank"),
        ("0F0,0B0\n , ,\n", "row 2 is blank"),
        ("0F0,0B0x", "row 1, column 2 (device 0, position 1): '0B0x' is not a pass"),
        ("0F0,0B0\n1F0,1B0 1F1", "row 2, column 2 (device 1, position 1): '1B0 1F1' is not a pass"),
        ('0F0,0B0\n1F0,,"1B0"', "row 2, column 3"),
        ("0F0,0B0;", "row 1, column 2"),
        ("0F0,0SEND_F0", "row 1, column 2 (device 0, position 1): '0SEND_F0' is a transfer"),
        ("S0,T0", "no pass of a stage"),
        ("0UNSHARD", "no pass of a microbatch"),
        ("0F0,2F0", "stage 1 appears in no row, though stage 2 does"),
        ("0F0,0F999999999", "microbatch 999999999 appears, but 2 passes"),
        ("999999999F0", "stage 0 appears in no row"),
        ("0F0,1F0\nS0,S1", "device 1 holds no stage"),
        ("0F0,0B0\n0F0,0B0", "device 1 runs only stages of other devices, such as stage 0, which belongs to device 0"),
    ],
)
def test_errors_name_row_and_column(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        Order.from_csv(text)
    assert message in str(error.value)


def test_a_program_file_says_who_takes_part() -> None:
    program = Program.from_csv(plan_program("1f1b", 3, 2, "vocab-2")[1].to_csv())
    hops = {"F:0>1": (0, 1), "F:1>2": (1, 2), "B:1>0": (1, 0), "B:2>1": (2, 1)}
    assert program.communicators == {**dict.fromkeys(("ROWS", "X", "STATISTICS", "DX"), (0, 1, 2)), **hops}
    with pytest.raises(
        InputError, match=r"row 1, column 2 \(device 0, position 1\): 'SEND0' is not a pass or transfer"
    ):
        Program.from_csv("0F0,SEND0")


# --- placements -------------------------------------------------------------------------------------------------------


def test_stages_of_devices() -> None:
    for placement, stage_device in (
        (Placement.linear(4), (0, 1, 2, 3)),
        (Placement.looped(3, 2), (0, 1, 2, 0, 1, 2)),
        (Placement.v_shape(3), (0, 1, 2, 2, 1, 0)),
        (Placement.v_shape(1), (0, 0)),
    ):
        assert placement.stage_device == stage_device
        assert (placement.first_device, placement.last_device) == (stage_device[0], stage_device[-1])
        held = [(device, stage) for device in range(placement.devices) for stage in placement.stages_of(device)]
        assert sorted(held) == sorted((device, stage) for stage, device in enumerate(stage_device))
    assert [Placement.v_shape(2).predecessors(stage) for stage in range(4)] == [(), (0,), (1,), (2,)]
    assert [Placement.v_shape(2).successors(stage) for stage in range(4)] == [(1,), (2,), (3,), ()]


ROWS = generate("1f1b", 2, 2).rows
IMPOSSIBLE: list[tuple[Callable[[], object], str]] = [
    (lambda: Placement(0, ()), "devices is 0; it must be at least 1"),
    (lambda: Placement(2, (0, 2)), "stage 1 is placed on device 2"),
    (lambda: Placement(2, (0, -1)), "stage 1 is placed on device -1"),
    (lambda: Placement(3, (0, 2)), "device 1 holds no stage"),
    (lambda: Placement.looped(2, 0), "stages per device is 0; it must be at least 1"),
    (lambda: Order(Placement.linear(2), 2, ()), "the order has 0 rows for 2 devices"),
    (lambda: Program(Placement.linear(2), 0, ROWS), "microbatches is 0; it must be at least 1"),
    (lambda: Order(Placement.linear(2), 2, ROWS, "vocab-3"), 'vocabulary is "vocab-3"; it must be one of balanced'),
]


def test_what_cannot_be() -> None:
    for call, message in IMPOSSIBLE:
        with pytest.raises(InputError, match=message):
            call()


# --- in a notebook ----------------------------------------------------------------------------------------------------


def test_a_notebook_shows_a_line_and_a_picture() -> None:
    order, program = plan_program("1f1b", 2, 3, "first-last")
    for shown, words in (
        (order, "<Order: 2 devices, 2 stages, 3 microbatches, 12 passes>"),
        (program, "<Program: 2 devices, 2 stages, 3 microbatches, 12 passes, 12 transfers>"),
        (time_order(order, EQUAL_COSTS), "<Timeline: 2 devices, step 12, busy 75.0 %>"),
    ):
        line, picture = ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")
        assert repr(shown) == words and (line.text or "").startswith(words)
        assert picture.tag.endswith("svg") and "device 1" in "".join(picture.itertext())
    assert Timeline(((), ()))._repr_html_() == "<pre>&lt;Timeline: 2 devices, no events&gt;</pre>"
    stuck = Order.from_csv("0F0,0B0\n1B0,1F0")._repr_html_()
    assert stuck.startswith("<pre>&lt;Order: 2 devices, 2 stages, 1 microbatch, 4 passes&gt;\n")
    assert "deadlock" in stuck and "<svg" not in stuck
    assert "<svg" not in generate("gpipe", 1, MOST_EVENTS // 2 + 1)._repr_html_()
