"""Programs complete where several processes share a device: replicas with experts, and tensor ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from rules_agreement import sound_program
from schedule_oracle import completes

from evenpipe.errors import InputError
from evenpipe.recipe.parallelism import Parallelism, for_replicas
from evenpipe.schedule import (
    MODES,
    SCHEDULES,
    SHARING,
    Dependencies,
    Pass,
    Program,
    Transfer,
    add_communication,
    add_recompute,
    check_program,
    evaluation_program,
    plan_program,
)
from evenpipe.schedule.graph import Graph
from evenpipe.schedule.queues import QUEUE_MODELS, WITH_EXPERTS, check_completion
from evenpipe.schedule.tensor_ranks import check_tensor_ranks

Sample = Callable[..., list[Any]]
SIZES = [
    *[(2, 2), (2, 3), (2, 6), (2, 24), (3, 3), (3, 5), (3, 9), (4, 4), (4, 8), (4, 24), (5, 10)],
    *[(6, 6), (6, 12), (7, 14), (8, 8), (8, 16), (8, 24)],
]
"""Devices and microbatches."""


def incomplete(program: Program) -> set[str]:
    """Return the models under which a program does not complete, without the quick proof."""
    dependencies = Dependencies.of(program, program.sharing)
    graph = Graph.of(program.order, dependencies, absent_is_done=True)
    names = {*QUEUE_MODELS, WITH_EXPERTS}
    faults = list(check_completion(program, graph, dependencies, experts=True))
    found = {name for name in names if any(f"with {name} the program" in fault.what for fault in faults)}
    assert len(found) == len(faults)
    return found


def test_every_program_completes_with_experts(sample: Sample) -> None:
    wrong = []
    for name, mode, sharing, (devices, microbatches) in sample(product(SCHEDULES, MODES, SHARING, SIZES), 60):
        order, program = plan_program(name, devices, microbatches, mode, sharing=sharing)
        for found in (program, evaluation_program(order, sharing=sharing)):
            if not check_program(found, experts=True).ok or incomplete(found):
                wrong.append((name, mode, sharing, devices, microbatches, found.forward_only))
    assert not wrong


def by_device(item: Transfer) -> str:
    """One queue for everything."""
    return ""


def damaged(rng: random.Random, program: Program) -> Program:
    """Move a few transfers of a row, or exchange them."""
    rows = [list(row) for row in program.rows]
    for _ in range(rng.randint(1, 3)):
        row = rng.choice(rows)
        places = [place for place, item in enumerate(row) if isinstance(item, Transfer)]
        if not places:
            continue
        one, other = rng.choice(places), rng.choice(places)
        if rng.random() < 0.5:
            row[one], row[other] = row[other], row[one]
        else:
            row.insert(max(0, one + rng.randint(-4, 4)), row.pop(one))
    return replace(program, rows=tuple(map(tuple, rows)))


def test_damage_is_found_if_and_only_if_processes_stand_still(sample: Sample) -> None:
    per_communicator, per_device = QUEUE_MODELS
    damage = 0
    for seed in sample(range(40), 12):
        rng = random.Random(seed)
        program, _ = sound_program(rng)
        if not program.forward_only and rng.random() < 0.3:
            program = add_communication(add_recompute(program.order), sharing=program.sharing)
        assert not incomplete(program) and completes(program, by_device, members=2, exchanges="")
        for _ in range(10):
            other = damaged(rng, program)
            found, members = incomplete(other), rng.choice((2, 3))
            assert (WITH_EXPERTS in found) != completes(other, by_device, members=members, exchanges="")
            assert (per_device in found) != completes(other, by_device)
            each = completes(other, lambda item: item.communicator, members=members, exchanges="experts")
            assert (per_communicator in found) != each
            assert (WITH_EXPERTS in found) == (per_device in found), "stopping holds up nobody else"
            damage += WITH_EXPERTS in found
    assert damage > 10


def test_the_fault_says_what_a_device_stops_for() -> None:
    """Device 0 asks for the gradient of its microbatch before it sends the activation that this needs."""
    _, program = plan_program("1f1b", 2, 2, "first-last")
    early = sorted(program.rows[0], key=lambda item: str(item) != "0RECV_B0")
    other = replace(program, rows=(tuple(early), program.rows[1]))
    report = check_program(other, experts=True)
    (fault,) = [fault for fault in report.faults if WITH_EXPERTS in fault.what]
    assert (fault.device, fault.position) == (0, 1)
    assert "device 0 stops at position 1, 0F0, awaiting 0RECV_B0 (not issued by device 1" in fault.what
    assert WITH_EXPERTS not in "".join(fault.what for fault in check_program(other).faults)
    with pytest.raises(InputError, match=WITH_EXPERTS):
        for_replicas(other, Parallelism(dp=4, pp=2, ep=2), tied=False)
    with pytest.raises(InputError, match="one queue per device the program"):
        for_replicas(other, Parallelism(dp=4, pp=2), tied=False)


def test_every_program_completes_on_several_tensor_ranks(sample: Sample) -> None:
    modes = ["first-last", "interlaced", "vocab-1", "vocab-2"]
    wrong = []
    for name, devices, more, mode, ranks in sample(product(SCHEDULES, (2, 3, 4), (0, 2), modes, (2, 4)), 40):
        _, program = plan_program(name, devices, 2 * devices + more, mode)
        if check_tensor_ranks(program, ranks):
            wrong.append((name, devices, more, mode, ranks))
    assert not wrong


def test_a_tensor_rank_that_exchanges_two_passes_is_found() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        ranks, devices = rng.choice((2, 4)), rng.choice((2, 4))
        _, program = plan_program(rng.choice(["1f1b", "zb-h1", "zbv"]), devices, 2 * devices, rng.choice(MODES))
        rows = [list(row) for row in program.rows for _ in range(ranks)]
        row = rng.choice(rows)
        passes = [place for place, item in enumerate(row) if isinstance(item, Pass)]
        one, other = rng.choice([pair for pair in pairwise(passes) if row[pair[0]].kind != row[pair[1]].kind])
        row[one], row[other] = row[other], row[one]
        faults = check_tensor_ranks(program, ranks, rows)
        assert len(faults) == 2
        assert f"{ranks} tensor ranks the program cannot complete" in faults[0].what
