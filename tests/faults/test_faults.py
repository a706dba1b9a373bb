"""Seven of the random runs of `make fault-test`, always the same, a cut cable, attacks, and how cases are drawn."""

from __future__ import annotations

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
def marked_processes(own_fork_server):
    """A fork server that was started before carries no mark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.delenv("RANK", raising=False)
        mark()
        yield
        os.environ.pop("EVENPIPE_FAULT_MARK")


@pytest.mark.parametrize(("started_by", "seed"), [(by, seed) for by, seeds in SEEDS.items() for seed in seeds])
@pytest.mark.slow
def test_all_others_end_and_say_why(started_by: str, seed: int) -> None:
    case = draw(seed, started_by)
    verdict = run(case)
    assert not verdict.complaints, f"{case}; at {verdict.place}: {verdict.complaints}; {verdict.message}"


CUT = next(scenario for scenario in network_case.SCENARIOS if scenario.name == "the link fails")
USERS = [attack for attack in attack_case.ATTACKS if attack.early and attack.machine == 0]


@pytest.mark.skipif(network_case.why_not() is not None, reason=str(network_case.why_not()))
@pytest.mark.parametrize("scenario", [CUT, *USERS], ids=lambda scenario: scenario.name)
@pytest.mark.slow
def test_on_networks_of_their_own(scenario: network_case.Scenario | attack_case.Attack) -> None:
    """All name a machine that is cut off; another user cannot get in."""
    if isinstance(scenario, attack_case.Attack):
        assert attack_case.play(scenario, run_network.loss_in_one_process()).complaints == []
    else:
        assert network_case.play(scenario).complaints == []


SIZES = {
    # from the first seed on: processes, ranks of a sequence, of tensors, and members that share experts
    FIRST_WITH_TENSOR_RANKS: {(2, 1, 2, 1), (4, 1, 2, 1)},
    FIRST_WITH_CONTEXT_RANKS: {(2, 2, 1, 1), (4, 2, 1, 1)},
    FIRST_WITH_EXPERTS: {(2, 1, 1, 2), (4, 1, 1, 2)},
}


def test_a_case_is_drawn_from_its_seed_alone() -> None:
    whole = [draw(seed) for seed in range(100)]
    assert whole[:20] == [draw(seed) for seed in range(20)]
    assert all(Case.load(case.dump()) == case for case in whole)
    assert any(case.also_stopped is not None for case in whole)
    assert {(case.tp, case.cp, case.ep) for case in whole} == {(1, 1, 1)}
    drawn = {first: [draw(seed) for seed in range(first, first + 100)] for first in SIZES}
    for first, cases in {0: whole, **drawn}.items():
        assert {case.where for case in cases} == set(PLACES)
        assert {case.how for case in cases} == set(FAULTS)
        if first:
            sizes = [(one.processes, one.cp, one.tp, one.ep) for one in cases]
            assert set(sizes) == SIZES[first]
            assert {case.victim for case in cases} == set(range(4))
    in_pieces = {(case.context_exchange, case.slices) for case in drawn[FIRST_WITH_CONTEXT_RANKS]}
    assert in_pieces == {("keys", 1), ("keys", 2), ("heads", 1), ("heads", 2)}
    for first, words in ((FIRST_WITH_CONTEXT_RANKS, "device, context rank"), (FIRST_WITH_EXPERTS, "replica, device")):
        outer, inner = words.split(", ")
        places = {f"{outer} {a}, {inner} {b}" for a in range(2) for b in range(2)}
        assert {case.place for case in drawn[first]} == places


def test_what_is_expected_of_a_message() -> None:
    """Patterns that match anything would let every run pass."""
    for how, patterns in FAULTS.items():
        for pattern in patterns:
            assert not re.search(pattern, "process 1 lost a connection"), how
            assert not re.search(re.sub(r"\bV\b", "1", pattern), "process 2 has died; process 1 was awaiting"), how
