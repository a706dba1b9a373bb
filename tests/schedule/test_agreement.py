"""The checker finds a fault if and only if the real walkers fail, and if and only if the rules say so.

`agreement` and `rules_agreement` say how, and do as many more cases as one likes from the command line.
"""

from __future__ import annotations

import agreement
import pytest
import rules_agreement
from exchange import StandstillError
from walked import walk

from evenpipe.schedule import Pass, Program, Transfer, check_program

VOCABULARY = """
E0,ROWS0,0F0,0SEND_F0,X0,S0,STATISTICS0,C0,DX0,T0,0RECV_B0,0B0,ROW_GRADIENTS0,G0
E0,ROWS0,1RECV_F0,1F0,X0,S0,STATISTICS0,C0,DX0,1B0,1SEND_B0,T0,ROW_GRADIENTS0,G0
"""
MOVED = "0F0,0O0,0D0,0L0,0R0,0B0"
TWO_STAGES = "0F0,1F0,1B0,0B0"

# program, what is damaged, how, and whether it is still sound
TABLE = [
    ("each device sends before it uses up", VOCABULARY, "", "", True),
    ("S on the last device before its X", VOCABULARY, "1F0,X0,S0", "1F0,S0,X0", False),
    ("G on the first device before ROW_GRADIENTS", VOCABULARY, "ROW_GRADIENTS0,G0\nE0", "G0,ROW_GRADIENTS0\nE0", False),
    ("a share of dX given late", VOCABULARY, "DX0,T0,0RECV_B0", "T0,DX0,0RECV_B0", True),
    ("loaded, then run again", MOVED, "", "", True),
    ("run again before it is loaded", MOVED, "0L0,0R0", "0R0,0L0", False),
    ("loaded where nothing was given back", MOVED, "0D0,", "", False),
    ("given back twice", MOVED, "0D0", "0D0,0D0", False),
    ("the forward of the first stage twice", TWO_STAGES, "0F0", "0F0,0F0", False),
    ("the same behind the second", TWO_STAGES, "1F0", "1F0,0F0", False),
    ("a part of a sequence", TWO_STAGES, "0B0", "0B0.1", False),
    ("gathered where it is", TWO_STAGES, "0F0", "0UNSHARD,0F0", True),
    ("gathered where it is not", TWO_STAGES, "0F0", "2UNSHARD,0F0", False),
    ("run as one", TWO_STAGES, "0F0,1F0", "(0F0;1F0)OVERLAP_F_B", True),
    ("run as one, the wrong way round", TWO_STAGES, "0F0,1F0", "(1F0;0F0)OVERLAP_F_B", False),
]  # fmt: skip


def test_by_hand() -> None:
    for name, text, old, new, sound in TABLE:
        whole = Program.from_csv(text.strip())
        assert check_program(whole).ok and old in text, name
        damaged = Program.from_csv(text.strip().replace(old, new), placement=whole.placement, microbatches=1, slices=1)
        assert check_program(damaged).ok == sound, name
        if sound:
            walk(damaged, seed=0)
        else:
            with pytest.raises((AssertionError, KeyError, RuntimeError)):
                walk(damaged, seed=0)


def test_a_pass_of_training_in_an_evaluation() -> None:
    evaluation = Program.from_csv("0F0", forward_only=True)
    walk(evaluation, seed=0)
    damaged = Program.from_csv("0F0,0REDUCE_GRAD", forward_only=True)
    assert not check_program(damaged).ok
    with pytest.raises(AssertionError):
        walk(damaged, seed=0)


def test_a_standstill_is_one_at_once() -> None:
    rows = [
        "0F0,0SEND_F0,0F1,0RECV_B0,0B0,0SEND_F1,0RECV_B1,0B1",
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
    ]
    with pytest.raises(StandstillError, match="0: '0RECV_B0', 1: '1RECV_F1'"):
        walk(Program.from_csv("\n".join(rows)), seed=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", range(0, 600, 100))
def test_walkers_fail_if_and_only_if_a_fault_is_found(first: int) -> None:
    verdicts = {seed: agreement.judged(seed) for seed in range(first, first + 100)}
    assert not {seed: verdict for seed, verdict in verdicts.items() if verdict[2]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", range(0, 2000, 50))
def test_the_rules_are_broken_if_and_only_if_a_fault_is_found(first: int) -> None:
    verdicts = {seed: rules_agreement.judged(seed) for seed in range(first, first + 50)}
    assert not {seed: verdict for seed, verdict in verdicts.items() if verdict[2]}
    assert {outcome for _, outcome, _ in verdicts.values()} == {"sound", "faulty"}


def test_every_field_of_passes_and_transfers_is_damaged() -> None:
    """So that a field that is added is not forgotten in `damage`."""
    fields = set(Transfer.__dataclass_fields__)
    assert fields == {"kind", "stage", "microbatch", "slice", "members", "root", "communicator", "peer"}
    assert set(Pass.__dataclass_fields__) == {"kind", "stage", "microbatch", "slice", "parts"}
