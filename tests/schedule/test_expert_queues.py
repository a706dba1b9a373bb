"""Programs complete where devices of several replicas exchange within their passes, as a second opinion sees it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from schedule_oracle import Carried, random_order, same_transfer, waits

from evenpipe.errors import InputError
from evenpipe.recipe.parallelism import Parallelism, for_replicas
from evenpipe.schedule import (
    MODES,
    SCHEDULES,
    SHARING,
    Dependencies,
    Kind,
    Pass,
    Placement,
    Program,
    Transfer,
    add_communication,
    add_recompute,
    add_vocabulary,
    check_program,
    evaluation_program,
    parts_of,
    plan_program,
)
from evenpipe.schedule.graph import Graph
from evenpipe.schedule.queues import QUEUE_MODELS, WITH_EXPERTS, check_completion

FEW = [(2, 3), (3, 5), (4, 4)]
MANY = [
    *[(2, 2), (2, 6), (2, 24), (3, 3), (3, 9), (4, 4), (4, 8), (4, 24), (5, 10), (6, 6), (6, 12), (7, 14), (8, 8)],
    *[(8, 16), (8, 24)],
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


def check(name: str, mode: str, sharing: str, sizes: list[tuple[int, int]]) -> None:
    for devices, microbatches in sizes:
        try:
            order, program = plan_program(name, devices, microbatches, mode, sharing=sharing)
        except InputError:  # not made for this size
            continue
        for one in (program, evaluation_program(order, sharing=sharing)):
            assert check_program(one, experts=True).ok
            assert not incomplete(one)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_program_completes(name: str, mode: str, sharing: str) -> None:
    check(name, mode, sharing, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_program_of_many_sizes_completes(name: str, mode: str, sharing: str) -> None:
    check(name, mode, sharing, MANY)


def members_complete(program: Program, queue: Callable[[Transfer], str], exchanges: str | None, members: int) -> bool:
    """Return whether the processes of all replicas reach the ends of their rows, by going round them until nothing
    changes. Replica and device make a process; those of one device exchange within F, B, I and R, and wait for it.

    Args:
        queue: names the queue of a process that a transfer is in.
        exchanges: the queue that exchanges are in. None: there are none.
    """
    rows = [[item for item in row if item is not None] for row in program.rows]
    processes = [(member, device) for member in range(members) for device in range(program.devices)]
    position = dict.fromkeys(processes, 0)
    queues: dict[tuple[int, int], dict[str, list[object]]] = {one: {} for one in processes}
    members_of: dict[object, tuple[list[tuple[int, int]], str]] = {}
    complete: set[object] = set()
    issued: set[object] = set()

    def issue(process: tuple[int, int], what: object, line: str, others: list[tuple[int, int]]) -> None:
        if (process, what) not in issued:
            issued.add((process, what))
            members_of[what] = others, line
            queues[process].setdefault(line, []).append(what)

    def passes_by(process: tuple[int, int]) -> bool:
        member, device = process
        item = rows[device][position[process]]
        if isinstance(item, Transfer):
            what: tuple[int, Carried] = member, same_transfer(item, program.placement)
            issue(process, what, queue(item), [(member, other) for other in item.members])
            return True
        assert isinstance(item, Pass)
        if not {(member, one) for one in waits(program, device, item)} <= complete:
            return False
        if exchanges is None or not any(part.kind in (Kind.F, Kind.B, Kind.I, Kind.R) for part in parts_of(item)):
            return True
        exchange = device, str(item)
        issue(process, exchange, exchanges, [(other, device) for other in range(members)])
        return exchange in complete

    moving = True
    while moving:
        moving = False
        for process in processes:
            while position[process] < len(rows[process[1]]) and passes_by(process):
                position[process] += 1
                moving = True
        for what, (others, line) in members_of.items():
            lines = [queues[other].get(line, []) for other in others]
            if what not in complete and all(one[:1] == [what] for one in lines):
                for one in lines:
                    one.pop(0)
                complete.add(what)
                moving = True
    return all(position[process] == len(rows[process[1]]) for process in processes) and complete == members_of.keys()


def built(rng: random.Random) -> Program:
    """A sound program: of a named schedule, or random, some with R."""
    devices = rng.randint(2, 4)
    sharing = rng.choice(SHARING)
    if rng.random() < 0.5:
        name = rng.choice(["1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipe-v"])
        return plan_program(name, devices, 2 * devices, rng.choice(MODES), sharing=sharing)[1]
    table = [*range(devices), *(rng.randrange(devices) for _ in range(rng.randint(0, 3)))]
    rng.shuffle(table)
    placement = Placement(devices, tuple(table))
    order = random_order(rng.randrange(10**6), placement, rng.randint(1, 3), split=rng.random() < 0.5)
    if rng.random() < 0.3:
        order = add_recompute(order)
    barriers = rng.choice((0, 1, 2))
    return add_communication(add_vocabulary(order, barriers) if barriers else order, sharing=sharing)


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


@pytest.mark.parametrize("seed", range(40))
def test_damage_is_found_if_and_only_if_processes_stand_still(seed: int) -> None:
    rng = random.Random(seed)
    program = built(rng)
    one, two = QUEUE_MODELS
    verdicts = set()
    for _ in range(10):
        other = damaged(rng, program)
        found, members = incomplete(other), rng.choice((2, 3))
        assert (WITH_EXPERTS in found) != members_complete(other, lambda item: "", "", members)
        assert (two in found) != members_complete(other, lambda item: "", None, 1)
        assert (one in found) != members_complete(other, lambda item: item.communicator, "experts", members)
        assert (WITH_EXPERTS in found) == (two in found), "stopping holds up nobody else"
        verdicts.add(WITH_EXPERTS in found)
    assert not incomplete(program) and members_complete(program, lambda item: "", "", 2)
    assert True in verdicts, "some damage was done"


def test_the_fault_says_what_a_device_stops_for() -> None:
    """Device 0 asks for the gradient of its microbatch before it sends the activation that this needs."""
    _, program = plan_program("1f1b", 2, 2, "first-last")
    row = list(program.rows[0])
    row.remove(next(item for item in row if str(item).startswith("0RECV_B0")))
    row.insert(0, next(item for item in program.rows[0] if str(item).startswith("0RECV_B0")))
    other = replace(program, rows=(tuple(row), program.rows[1]))
    report = check_program(other, experts=True)
    (fault,) = [fault for fault in report.faults if WITH_EXPERTS in fault.what]
    assert (fault.device, fault.position) == (0, 1)
    assert "device 0 stops at position 1, 0F0, awaiting 0RECV_B0" in fault.what
    assert "not issued by device 1" in fault.what
    assert WITH_EXPERTS not in "".join(fault.what for fault in check_program(other).faults)
    with pytest.raises(InputError, match=WITH_EXPERTS):
        for_replicas(other, Parallelism(dp=4, pp=2, ep=2), tied=False)
    with pytest.raises(InputError, match="one queue per device the program"):
        for_replicas(other, Parallelism(dp=4, pp=2), tied=False)
