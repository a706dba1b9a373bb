"""The words of a schedule, as text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.errors import InputError
from evenpipe.schedule import Kind, Pass, Transfer, TransferKind
from evenpipe.schedule.passes import parse_item, parts_of

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


@pytest.mark.parametrize(("text", "item"), WORDS, ids=[text for text, _ in WORDS])
def test_text_and_back(text: str, item: Pass | Transfer) -> None:
    assert str(item) == text
    assert parse_item(text) == item


NOT_WORDS = [
    "0F" + "9" * 5000,
    *("", "F", "2F", "F0", "2f0", "2F0x", "2F0 ", " 2F0", "2F0\n", "02F0", "2F00", "2F0.0", "2F0.", "2F0.01", "-1F0"),
    *("2F-1", "2Q0", "2S0", "S", "0S", "2X0", "X", "STATISTICS", "SEND_F0", "2UNSHARD0", "UNSHARD", "2F٣", "2F0;2B0"),
    *("OVERLAP_F_B", "()OVERLAP_F_B", "(2F1)OVERLAP_F_B", "(2F1;2B0)", "(2F1;2B0)OVERLAP_F_B0", "(2F1;2X0)OVERLAP_F_B"),
    *("(2F1;S0)OVERLAP_F_B", "((2F1;2B0)OVERLAP_F_B;2F2)OVERLAP_F_B", "2F0,2F1", "2ROW_GRADIENTS0", "2.0F1"),
]


@pytest.mark.parametrize("text", NOT_WORDS, ids=lambda text: repr(text[:30]))
def test_what_is_not_exactly_a_word_is_refused(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_item(text)
    shown = text.replace("\n", "\\n") if len(text) < 60 else text[:57] + "..."
    assert str(error.value).startswith(f"'{shown}' is not a pass")


@given(st.text("0123FBSEXROW_.;()UNDHAL ", max_size=12))
def test_any_text_is_a_word_or_refused(text: str) -> None:
    try:
        assert str(parse_item(text)) == text
    except InputError as error:
        assert "\n" not in str(error)


def test_the_message_shows_how_the_kind_is_written() -> None:
    for text, words in {
        "2UNSHARD0": "UNSHARD has a stage and no microbatch, as in 2UNSHARD",
        "2S0": "S has no stage and a microbatch, as in S0",
        "0X1": "X has no stage and a microbatch, as in X1",
        "F3": "F has a stage and a microbatch, as in 0F3",
        "3F": "F has a stage and a microbatch, as in 3F0",
    }.items():
        with pytest.raises(InputError, match=f"'{text}' is not a pass or transfer; {words}"):
            parse_item(text)


def test_a_pass_is_not_a_transfer() -> None:
    assert Pass.parse("2F0") == Pass(Kind.F, 2, 0)
    with pytest.raises(InputError, match="'X0' is a transfer"):
        Pass.parse("X0")


def test_parts() -> None:
    both = Pass.parse("(2F1;2B0)OVERLAP_F_B")
    assert list(map(str, parts_of(both))) == ["2F1", "2B0"]
    assert parts_of(both.parts[0]) == (both.parts[0],)


@pytest.mark.parametrize(
    ("kind", "stage", "parts"),
    [
        (Kind.OVERLAP_F_B, None, (F1,)),
        (Kind.OVERLAP_F_B, None, (F1, Pass(Kind.UNSHARD, 2))),
        (Kind.OVERLAP_F_B, None, (F1, JOINT)),
        (Kind.OVERLAP_F_B, 2, (F1, B0)),
        (Kind.F, None, (F1, B0)),
    ],
)
def test_parts_that_cannot_run_as_one(kind: Kind, stage: int | None, parts: tuple[Pass, ...]) -> None:
    with pytest.raises(InputError, match="OVERLAP_F_B"):
        Pass(kind, stage, parts=parts)


def test_members_and_root_are_part_of_a_transfers_identity() -> None:
    one = Transfer(TransferKind.X, None, 0, members=(0, 1), root=1)
    assert one == Transfer(TransferKind.X, None, 0, members=(0, 1), root=1)
    assert one != Transfer(TransferKind.X, None, 0, members=(0, 1), root=0)
    assert one != Transfer(TransferKind.X, None, 0, members=(0, 2), root=1)


def test_a_collective_with_a_peer_can_be_told() -> None:
    """No program has one, but a damaged one may, and the fault names it."""
    assert str(Transfer(TransferKind.DX, 1, 0, members=(0, 1), peer=2)) == "1DX0-2"
