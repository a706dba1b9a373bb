"""The checker finds a fault if and only if the real walkers fail, and if and only if the rules say so.

`agreement` and `rules_agreement` say how, and do as many more cases as one likes from the command line.
"""

from __future__ import annotations

import agreement
import pytest
import rules_agreement
from exchange import StandstillError
from walked import walk

from evenpipe.schedule import Program, check_program

VOCABULARY = """
E0,ROWS0,0F0,0SEND_F0,X0,S0,STATISTICS0,C0,DX0,T0,0RECV_B0,0B0,ROW_GRADIENTS0,G0
E0,ROWS0,1RECV_F0,1F0,X0,S0,STATISTICS0,C0,DX0,1B0,1SEND_B0,T0,ROW_GRADIENTS0,G0
"""
MOVED = "0F0,0O0,0D0,0L0,0R0,0B0"
TWO_STAGES = "0F0,1F0,1B0,0B0"

# program, what is damaged, how, and words of its first fault, "" if it is still sound
TABLE = [
    ("each device sends before it uses up", VOCABULARY, "", "", ""),
    ("S on the last device before its X", VOCABULARY, "1F0,X0,S0", "1F0,S0,X0", "S0 at position 4, which consumes"),
    ("S on the first device before its X", VOCABULARY, "F0,X0,S0", "F0,S0,X0", "S0 at position 4, which waits"),
    ("G on the first device early", VOCABULARY, "ROW_GRADIENTS0,G0\nE0", "G0,ROW_GRADIENTS0\nE0", "after G0"),
    ("a share of dX given late", VOCABULARY, "DX0,T0,0RECV_B0", "T0,DX0,0RECV_B0", ""),
    ("loaded, then run again", MOVED, "", "", ""),
    ("run again before it is loaded", MOVED, "0L0,0R0", "0R0,0L0", "0R0 comes before 0L0 at position 4"),
    ("loaded where nothing was given back", MOVED, "0D0,", "", "0D0 is missing"),
    ("given back twice", MOVED, "0D0", "0D0,0D0", "0D0 is already at"),
    ("the forward of the first stage twice", TWO_STAGES, "0F0", "0F0,0F0", "0F0 is already at"),
    ("the same behind the second", TWO_STAGES, "1F0", "1F0,0F0", "0F0 is already at"),
    ("a part of a sequence", TWO_STAGES, "0B0", "0B0.1", "0B0.1 is for a slice of a sequence"),
    ("gathered where it is", TWO_STAGES, "0F0", "0UNSHARD,0F0", ""),
    ("gathered where it is not", TWO_STAGES, "0F0", "2UNSHARD,0F0", "2UNSHARD names a stage that does not exist"),
    ("run as one", TWO_STAGES, "0F0,1F0", "(0F0;1F0)OVERLAP_F_B", ""),
    ("run as one, the wrong way round", TWO_STAGES, "0F0,1F0", "(1F0;0F0)OVERLAP_F_B", "1F0 comes before the part of"),
]  # fmt: skip


def test_by_hand() -> None:
    for name, text, old, new, fault in TABLE:
        whole = Program.from_csv(text.strip())
        assert check_program(whole).ok and old in text, name
        damaged = Program.from_csv(text.strip().replace(old, new), placement=whole.placement, microbatches=1, slices=1)
        if not fault:
            assert check_program(damaged).ok, name
            walk(damaged, seed=0)
            continue
        assert fault in check_program(damaged).faults[0].what, name
        with pytest.raises((AssertionError, KeyError, RuntimeError)):
            walk(damaged, seed=0)


def test_a_standstill_is_one_at_once_and_an_evaluation_has_no_pass_of_training() -> None:
    with pytest.raises(AssertionError):
        walk(Program.from_csv("0F0,0REDUCE_GRAD", forward_only=True), seed=0)
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
