"""The checker finds a fault if and only if the real walkers fail, and if and only if the rules say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import agreement
import pytest
import rules_agreement
from walked import walk

from evenpipe.errors import InputError
from evenpipe.recipe.parallelism import Parallelism, for_replicas
from evenpipe.schedule import MODES, SCHEDULES, SHARING, Program, check_program, evaluation_program, plan_program

VOCABULARY = """
E0,ROWS0,0F0,0SEND_F0,X0,S0,STATISTICS0,C0,DX0,T0,0RECV_B0,0B0,ROW_GRADIENTS0,G0
E0,ROWS0,1RECV_F0,1F0,X0,S0,STATISTICS0,C0,DX0,1B0,1SEND_B0,T0,ROW_GRADIENTS0,G0
"""

# what is damaged, how, and words of its first fault, "" if it is still sound
TABLE = [
    ("as it is", "", "", ""),
    ("S on the last device before its X", "1F0,X0,S0", "1F0,S0,X0", "S0 at position 4, which consumes"),
    ("S on the first device before its X", "F0,X0,S0", "F0,S0,X0", "S0 at position 4, which waits"),
    ("G on the first device early", "ROW_GRADIENTS0,G0\nE0", "G0,ROW_GRADIENTS0\nE0", "after G0"),
    ("a share of dX given late", "DX0,T0,0RECV_B0", "T0,DX0,0RECV_B0", ""),
]  # fmt: skip


def test_what_a_device_sends_is_sent_before_the_device_uses_it_up() -> None:
    for name, old, new, fault in TABLE:
        assert old in VOCABULARY, name
        damaged = Program.from_csv(VOCABULARY.strip().replace(old, new))
        if not fault:
            assert check_program(damaged).ok, name
            walk(damaged, seed=0)
            continue
        assert fault in check_program(damaged).faults[0].message, name
        with pytest.raises((AssertionError, KeyError, RuntimeError)):
            walk(damaged, seed=0)


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


# --- several processes on a device ------------------------------------------------------------------------------------

Sample = Callable[..., list[Any]]
WITH_EXPERTS = "one queue per device and exchanges of experts"
SIZES = [
    *[(2, 2), (2, 3), (2, 6), (2, 24), (3, 3), (3, 5), (3, 9), (4, 4), (4, 8), (4, 24), (5, 10)],
    *[(6, 6), (6, 12), (7, 14), (8, 8), (8, 16), (8, 24)],
]
"""Devices and microbatches."""


def test_every_program_completes_with_experts(sample: Sample) -> None:
    for name, mode, sharing, (devices, microbatches) in sample(product(SCHEDULES, MODES, SHARING, SIZES), 60):
        order, program = plan_program(name, devices, microbatches, mode, sharing=sharing)
        for made in (program, evaluation_program(order, sharing=sharing)):
            assert check_program(made, experts=True).ok, (name, mode, sharing, devices, microbatches)


def test_the_fault_says_what_a_device_stops_for() -> None:
    """Device 0 asks for the gradient of its microbatch before it sends the activation that this needs."""
    _, program = plan_program("1f1b", 2, 2, "first-last")
    early = sorted(program.rows[0], key=lambda item: str(item) != "0RECV_B0")
    other = replace(program, rows=(tuple(early), program.rows[1]))
    report = check_program(other, experts=True)
    (fault,) = [fault for fault in report.faults if WITH_EXPERTS in fault.message]
    assert (fault.device, fault.position) == (0, 1)
    assert "device 0 stops at position 1 (0F0), waiting for 0RECV_B0 (not issued by device 1" in fault.message
    assert WITH_EXPERTS not in "".join(fault.message for fault in check_program(other).faults)
    with pytest.raises(InputError, match=WITH_EXPERTS):
        for_replicas(other, Parallelism(dp=4, pp=2, ep=2), tied=False)
    with pytest.raises(InputError, match="one queue per device: device"):
        for_replicas(other, Parallelism(dp=4, pp=2), tied=False)
