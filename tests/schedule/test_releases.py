"""What has been sent is given back as soon as it must have arrived, and never before."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import unit_needs
from schedule_oracle import random_order

from evenpipe.schedule import (
    SCHEDULES,
    Dependencies,
    Kind,
    Pass,
    Placement,
    Program,
    Transfer,
    add_communication,
    add_vocabulary,
    parts_of,
    plan_program,
)
from evenpipe.schedule.releases import releases

TABLE = [
    # schedule, devices, microbatches, device: after which pass what has arrived
    ("1f1b", 2, 2, 0, {"0B0": "0SEND_F0", "0B1": "0SEND_F1"}),
    ("1f1b", 2, 3, 1, {"1F2": "1SEND_B0"}),
    ("gpipe", 2, 3, 1, {}),  # device 0 sends nothing any more once it has gradients
    ("gpipe", 2, 3, 0, {"0B0": "0SEND_F0 0SEND_F1 0SEND_F2"}),
]


def text(program: Program, device: int) -> dict[str, str]:
    row = program.rows[device]
    return {str(row[place]): " ".join(map(str, sent)) for place, sent in releases(program, device).items()}


@pytest.mark.parametrize(("schedule", "devices", "microbatches", "device", "expected"), TABLE)
def test_where(schedule: str, devices: int, microbatches: int, device: int, expected: dict[str, str]) -> None:
    _, program = plan_program(schedule, devices, microbatches, "first-last")
    assert text(program, device) == expected


def earlier(program: Program) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """(device, position) -> all places that have been passed once a pass there has its inputs, in any run."""
    dependencies = Dependencies.of(program, program.sharing)
    place = {
        (device, str(item)): (device, position)
        for device, row in enumerate(program.rows)
        for position, item in enumerate(row)
    }
    known: dict[tuple[int, int], set[tuple[int, int]]] = {}

    def of(at: tuple[int, int]) -> set[tuple[int, int]]:
        if at not in known:
            device, position = at
            result = {at} | (of((device, position - 1)) if position else set())
            item = program.rows[device][position]
            if isinstance(item, Pass):
                for transfer in unit_needs.waits_for(dependencies, item, device):
                    for producer, _ in unit_needs.producers(dependencies, transfer, device):
                        route = dependencies.route_of(transfer, device)
                        theirs = route.transfer(producer, transfer.microbatch, transfer.slice)
                        result |= of(place[producer, str(theirs)])
            known[at] = result
        return known[at]

    for device, row in enumerate(program.rows):
        for position in range(len(row)):
            of((device, position))
    return known


def position_of(program: Program, device: int, wanted: Pass) -> int:
    """Where a pass stands, by itself or in a joint one; I where B is not there."""
    kinds = {wanted.kind, Kind.I} if wanted.kind is Kind.B else {wanted.kind}
    return next(
        position
        for position, item in enumerate(program.rows[device])
        if isinstance(item, Pass)
        for part in parts_of(item)
        if part.kind in kinds
        and (part.stage, part.microbatch, part.slice) == (wanted.stage, wanted.microbatch, wanted.slice)
    )


def check(program: Program) -> None:
    before = earlier(program)
    dependencies = Dependencies.of(program, program.sharing)
    for device, row in enumerate(program.rows):
        given_back = Counter(sent for here in releases(program, device).values() for sent in here)
        assert set(given_back.values()) <= {1}
        for position, sent in releases(program, device).items():
            for transfer in sent:
                assert isinstance(transfer, Transfer) and transfer in row[:position]
                for other, consumer in unit_needs.consumers(dependencies, transfer, device):
                    place = position_of(program, other, consumer)
                    assert other == device or (other, place) in before[device, position]


@pytest.mark.parametrize("mode", ["first-last", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_never_before_it_must_have_arrived(name: str, mode: str) -> None:
    for devices, microbatches in ((2, 5), (3, 4)):
        check(plan_program(name, devices, microbatches, mode)[1])


@pytest.mark.parametrize("seed", range(20))
def test_any_order(seed: int) -> None:
    rng = random.Random(seed)
    devices = rng.randint(2, 4)
    table = [*range(devices), *(rng.randrange(devices) for _ in range(rng.randint(0, 3)))]
    rng.shuffle(table)
    order = random_order(seed, Placement(devices, tuple(table)), rng.randint(1, 4), split=seed % 2 == 0)
    barriers = rng.choice((0, 1, 2))
    check(add_communication(add_vocabulary(order, barriers) if barriers else order))


def test_a_long_step_holds_no_more_than_a_short_one() -> None:
    """1F1B: forwards are known to have arrived by their gradients, gradients by later forwards."""
    most = []
    for microbatches in (8, 40):
        _, program = plan_program("1f1b", 4, microbatches, "first-last")
        held = []
        for device, row in enumerate(program.rows):
            back, open_, peak = releases(program, device), 0, 0
            for position, item in enumerate(row):
                open_ += isinstance(item, Transfer) and item.kind.value.startswith("SEND")
                peak = max(peak, open_)
                open_ -= len(back.get(position, ()))
            held.append((peak, open_))
        most.append(held)
    assert most[0] == most[1]
    assert all(left <= peak <= 4 for peak, left in most[0])
