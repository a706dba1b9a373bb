"""Transfers that share communicators: fewer of them, the same transfers, sound under both queue models."""

from __future__ import annotations

import random

import pytest
from schedule_oracle import completes, program_is_sound, random_costs, random_order

from evenpipe.schedule import (
    EQUAL_COSTS,
    MODES,
    SCHEDULES,
    SHARING,
    Costs,
    Placement,
    Program,
    Transfer,
    TransferKind,
    add_communication,
    add_vocabulary,
    check_program,
    evaluation_program,
    plan_order,
    plan_program,
    time_order,
)
from evenpipe.schedule.queues import QUEUE_MODELS

HOW_MANY = [
    # devices, schedule, mode, (per-pair, per-kind, one)
    (1, "1f1b", "vocab-2", (0, 0, 0)),
    (2, "1f1b", "first-last", (2, 2, 1)),
    (4, "1f1b", "first-last", (6, 2, 1)),
    (4, "1f1b", "vocab-2", (10, 6, 1)),
    (4, "interleaved", "vocab-1", (12, 6, 1)),  # round the ring
    (4, "zbv", "first-last", (12, 2, 1)),  # there and back, each for F and B
    (8, "zbv", "vocab-2", (32, 6, 1)),
]


@pytest.mark.parametrize(("devices", "schedule", "mode", "counts"), HOW_MANY)
def test_how_many_there_are(devices: int, schedule: str, mode: str, counts: tuple[int, ...]) -> None:
    for sharing, count in zip(SHARING, counts, strict=True):
        _, program = plan_program(schedule, devices, 3, mode, sharing=sharing)
        assert len(program.communicators) == count
        if sharing == "one" and count:
            assert program.communicators == {"ALL": tuple(range(devices))}


def carried(program: Program) -> list[list[tuple[TransferKind, int | None, int]]]:
    return [
        sorted((item.kind, item.stage or 0, item.microbatch) for item in row if isinstance(item, Transfer))
        for row in program.rows
    ]


@pytest.mark.sampled(30)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_sound_with_fewer(name: str, mode: str) -> None:
    for devices, microbatches in ((2, 3), (3, 5), (4, 4)):
        order = plan_order(name, devices, microbatches, mode)
        usual = add_communication(order)
        for sharing in SHARING[1:]:
            program = add_communication(order, sharing=sharing)
            assert check_program(program).ok
            assert program.order == usual.order
            assert carried(program) == carried(usual)
            assert check_program(evaluation_program(order, sharing=sharing)).ok
            # The same transfers at the places that they have with communicators of their own are sound as well.
            assert check_program(usual.shared(sharing)).ok
            assert usual.shared(sharing).shared("per-pair") == usual


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("seed", range(25))
def test_any_order_at_any_costs_by_a_second_opinion(seed: int, sharing: str) -> None:
    rng = random.Random(seed)
    devices = rng.randint(2, 4)
    table = [*range(devices), *(rng.randrange(devices) for _ in range(rng.randint(0, 4)))]
    rng.shuffle(table)
    order = random_order(seed, Placement(devices, tuple(table)), rng.randint(1, 4), split=rng.random() < 0.5)
    costs = random_costs(seed, order.placement)
    barriers = rng.choice((0, 1, 2))
    order = add_vocabulary(order, barriers, costs) if barriers else order
    program = add_communication(order, costs, sharing)
    assert check_program(program).ok
    assert program_is_sound(program, add_communication(order, costs).shared(sharing))
    for queue in (lambda item: item.communicator, lambda item: ""):
        assert completes(program, queue, blocking=True)


@pytest.mark.parametrize("sharing", SHARING[1:])
def test_dx_stands_a_quarter_interval_before_the_backward_of_the_last_stage(sharing: str) -> None:
    """F = 2 and B = 4, so an interval is 6, and dX stands 1.5 before B where C was done earlier."""
    costs = Costs(F=2, B=4, S=1, C=0, T=0.5, E=0, G=0)
    order = plan_order("1f1b", 4, 8, "vocab-2", costs)
    at = {(event.device, str(event.item)): event for row in time_order(order, costs).events for event in row}
    usual, program = add_communication(order, costs), add_communication(order, costs, sharing)
    for microbatch in range(8):
        ready = max(at[device, f"C{microbatch}"].end for device in range(4))
        due = max(ready, at[3, f"3B{microbatch}"].start - 1.5)
        for device in range(4):
            row = list(map(str, program.rows[device]))
            here = row.index(f"DX{microbatch}")
            assert all(at[device, text].end <= due + 1e-9 for text in row[:here] if (device, text) in at)
            assert all(at[device, text].end >= due - 1e-9 for text in row[here:] if (device, text) in at)
    assert program.rows != usual.shared(sharing).rows


def test_hops_of_one_pair_in_another_order_than_its_partner_are_found() -> None:
    """Devices 1 and 2 of three, neither of which is the communicator's first member."""
    _, program = plan_program("gpipe", 3, 2, "first-last", EQUAL_COSTS, sharing="per-kind")
    row = list(program.rows[2])
    first, second = (row.index(item) for item in row if isinstance(item, Transfer) and item.kind == "RECV_F")
    assert (row[first].microbatch, row[second].microbatch) == (0, 1)
    row[first], row[second] = row[second], row[first]
    damaged = Program(program.placement, 2, (*program.rows[:2], tuple(row)), sharing="per-kind")
    report = check_program(damaged)
    assert not report.ok
    assert any("on communicator F" in fault.what for fault in report.faults)


def test_a_communicator_of_another_name_is_a_fault() -> None:
    _, program = plan_program("1f1b", 2, 1, "first-last")
    renamed = program.shared("per-kind")
    wrong = Program(program.placement, 1, renamed.rows)
    assert any("communicator" in fault.what for fault in check_program(wrong).faults)
    assert set(QUEUE_MODELS) == {"one queue per communicator", "one queue per device"}
