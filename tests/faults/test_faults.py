"""Seven of the random runs of `make fault-test`, always the same, a cut cable, an attack, and how cases are drawn."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import re

import attack_case
import network_case
import pytest
import run_network
from fault_case import FAULTS, FIRST_WITH_CONTEXT_RANKS, FIRST_WITH_EXPERTS, FIRST_WITH_TENSOR_RANKS, PLACES, Case, draw
from fault_run import mark, run

SEEDS = {"launch": (4, 11, 126, 133, 10_001), "torchrun": (47, 402)}
"""A process killed while communicators are made; one stopped while it saves; one that leaves beside a stopped one; one
that hangs in the optimizer; a tensor rank that is terminated in a sum; and of torchrun's one beside a stopped one, and
one that ends at once before a wait."""


@pytest.fixture(scope="module", autouse=True)
def marked_processes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.delenv("RANK", raising=False)
        mark()
        multiprocessing.forkserver._forkserver._stop()  # one that was started before carries no mark
        yield
        multiprocessing.forkserver._forkserver._stop()
        os.environ.pop("EVENPIPE_FAULT_MARK")


@pytest.mark.parametrize(("started_by", "seed"), [(by, seed) for by, seeds in SEEDS.items() for seed in seeds])
@pytest.mark.sampled(2)
def test_all_others_end_and_say_why(started_by: str, seed: int) -> None:
    case = draw(seed, started_by)
    verdict = run(case)
    assert not verdict.complaints, f"{case}; at {verdict.place}: {verdict.complaints}; {verdict.message}"


@pytest.mark.skipif(network_case.why_not() is not None, reason=str(network_case.why_not()))
def test_a_machine_that_is_cut_off_is_named_by_all() -> None:
    scenario = next(scenario for scenario in network_case.SCENARIOS if scenario.name == "the link fails")
    assert network_case.play(scenario).complaints == []


@pytest.mark.skipif(network_case.why_not() is not None, reason=str(network_case.why_not()))
@pytest.mark.parametrize("answers", [1, 2])
def test_another_user_of_the_machine_cannot_get_in(answers: int) -> None:
    attack = next(
        attack for attack in attack_case.ATTACKS if attack.early and (attack.machine, attack.answers) == (0, answers)
    )
    assert attack_case.play(attack, run_network.loss_in_one_process()).complaints == []


def test_a_case_is_drawn_from_its_seed_alone() -> None:
    cases = [draw(seed) for seed in range(100)]
    assert cases[:20] == [draw(seed) for seed in range(20)]
    assert all(Case.load(case.dump()) == case for case in cases)
    assert {case.where for case in cases} == set(PLACES)
    assert {case.how for case in cases} == set(FAULTS)
    assert any(case.also_stopped is not None for case in cases)
    assert {case.tensor_parallel for case in cases} == {1}


def test_cases_with_tensor_ranks() -> None:
    cases = [draw(seed) for seed in range(FIRST_WITH_TENSOR_RANKS, FIRST_WITH_TENSOR_RANKS + 100)]
    assert {(case.processes, case.tensor_parallel) for case in cases} == {(2, 2), (4, 2)}
    assert {case.where for case in cases} == set(PLACES)
    assert {case.how for case in cases} == set(FAULTS)
    assert {case.victim for case in cases} == set(range(4))


def test_cases_with_context_ranks() -> None:
    cases = [draw(seed) for seed in range(FIRST_WITH_CONTEXT_RANKS, FIRST_WITH_CONTEXT_RANKS + 100)]
    assert {(case.processes, case.tensor_parallel, case.context_parallel) for case in cases} == {(2, 1, 2), (4, 1, 2)}
    assert {(case.context_exchange, case.slices) for case in cases} == {
        (a, b) for a in ("keys", "heads") for b in (1, 2)
    }
    assert {case.where for case in cases} == set(PLACES)
    assert {case.how for case in cases} == set(FAULTS)
    assert {case.place for case in cases} == {f"device {a}, context rank {b}" for a in range(2) for b in range(2)}


def test_cases_with_shared_experts() -> None:
    cases = [draw(seed) for seed in range(FIRST_WITH_EXPERTS, FIRST_WITH_EXPERTS + 100)]
    assert {(case.processes, case.expert_parallel, case.tensor_parallel) for case in cases} == {(2, 2, 1), (4, 2, 1)}
    assert {case.where for case in cases} == set(PLACES)
    assert {case.how for case in cases} == set(FAULTS)
    assert {case.place for case in cases} == {f"replica {a}, device {b}" for a in range(2) for b in range(2)}


def test_what_is_expected_of_a_message() -> None:
    """Patterns that match anything would let every run pass."""
    for how, patterns in FAULTS.items():
        for pattern in patterns:
            assert not re.search(pattern, "process 1 lost a connection"), how
            assert not re.search(re.sub(r"\bV\b", "1", pattern), "process 2 has died; process 1 was awaiting"), how
