"""Random orders and programs, sound and damaged, against the rules as `schedule_oracle` has them.

    python tests/schedule/rules_agreement.py --cases 10000 --seed 0

The checker finds a fault if and only if the second opinion does, with experts in several replicas, too. A program that
is not damaged completes even if every device waits for each transfer before it goes on, and `releases` gives back what
was sent exactly where an independent walk has proof of its arrival.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import unit_needs
from damage import TO_BOTH, TO_PROGRAMS, Damage, Rows, count_cases
from schedule_oracle import GRAPHS, completes, order_is_sound, program_is_sound, random_costs, random_order

from evenpipe.errors import InputError
from evenpipe.schedule import (
    MODES,
    SCHEDULES,
    SHARING,
    Item,
    Kind,
    Order,
    Pass,
    Placement,
    Program,
    Rules,
    Transfer,
    add_communication,
    check_order,
    check_program,
    evaluation_program,
    parts_of,
    plan_order,
)
from evenpipe.schedule.passes import ROLE
from evenpipe.schedule.releases import releases

DAMAGED_ALIKE = 4
"""Cases that begin with the same order."""


def swap_in_sequence(rng: random.Random, rows: Rows) -> None:
    """Two F, or two B or I, of one stage and sequence change places."""
    places: dict[tuple[int, Kind, int | None, int | None], list[int]] = {}
    for device, row in enumerate(rows):
        for position, item in enumerate(row):
            if isinstance(item, Pass) and ROLE[item.kind] in (Kind.F, Kind.B):
                places.setdefault((device, item.kind, item.stage, item.microbatch), []).append(position)
    pairs = [(device, found) for (device, *_), found in sorted(places.items(), key=str) if len(found) > 1]
    for device, found in pairs and [rng.choice(pairs)]:
        one, other = rng.sample(found, 2)
        rows[device][one], rows[device][other] = rows[device][other], rows[device][one]


def drop_slice(rng: random.Random, rows: Rows) -> None:
    """Everything about one slice of a sequence, on all devices or on one."""
    units = [(item.microbatch, item.slice) for row in rows for item in row if item.microbatch is not None]
    devices = range(len(rows)) if rng.random() < 0.5 else [rng.randrange(len(rows))]
    for unit in units and [rng.choice(units)]:
        for device in devices:
            rows[device] = [item for item in rows[device] if (item.microbatch, item.slice) != unit]


def turn_sequence(rng: random.Random, rows: Rows) -> None:
    """The backwards of one sequence on one device run from the first slice to the last."""
    device = rng.randrange(len(rows))
    row = rows[device]
    places = [at for at, item in enumerate(row) if isinstance(item, Pass) and ROLE[item.kind] is Kind.B]
    for at in places and [rng.choice(places)]:
        chosen = [other for other in places if _of(row[other]) == _of(row[at])]
        for place, item in zip(chosen, [row[other] for other in reversed(chosen)], strict=True):
            row[place] = item


def _of(item: Item) -> tuple[object, ...]:
    return item.kind, item.stage, item.microbatch


OF_SEQUENCES = (swap_in_sequence, swap_in_sequence, drop_slice, turn_sequence)


@dataclass(frozen=True, slots=True)
class Case:
    """A sound program, transfers that any sound one has, and what becomes of the program or its order."""

    sound: Program
    usual: Program
    schedule: Order | Program
    damage: Damage | None

    @property
    def name(self) -> str:
        what = "program" if isinstance(self.schedule, Program) else "order"
        return f"{what}, {'as it is' if self.damage is None else self.damage.__name__}"


def sound_program(rng: random.Random) -> tuple[Program, Program]:
    """Of up to five devices and four slices: by name, or anything that the rules allow.

    And the same with a communicator for each pair of devices, which then share those of the first.
    """
    while True:
        devices, microbatches, slices = rng.randint(1, 4), rng.randint(1, 4), rng.choice([1, 1, 1, 2, 3, 4])
        mode, split, sharing = rng.choice(MODES), rng.random() < 0.5, rng.choice(SHARING)
        if rng.random() < 0.5:
            schedule: str | Order = rng.choice(list(SCHEDULES))
        else:
            table = [*range(devices), *(rng.randrange(devices) for _ in range(rng.choice([0, 0, 1, 2])))]
            rng.shuffle(table)
            placement = rng.choice([Placement(devices, tuple(table)), rng.choice(GRAPHS)])
            schedule = random_order(rng.randrange(10**6), placement, microbatches, split=split, slices=slices)
            devices = placement.devices
        costs = random_costs(rng.randrange(10**6), schedule.placement) if isinstance(schedule, Order) else None
        try:
            order = plan_order(schedule, devices, microbatches, mode, costs, slices=slices)
        except InputError:  # not made for this size, or passes that run as one
            continue
        if rng.random() < 0.15:
            return evaluation_program(order, sharing=sharing), evaluation_program(order).shared(sharing)
        return add_communication(order, costs, sharing), add_communication(order, costs).shared(sharing)


def case_of(seed: int) -> Case:
    """The case of that number."""
    program, usual = sound_program(random.Random(seed // DAMAGED_ALIKE))
    rng = random.Random(-1 - seed)
    schedule: Order | Program = program if rng.random() < 0.5 else program.order
    if seed % DAMAGED_ALIKE == 0:
        return Case(program, usual, schedule, None)
    others = TO_PROGRAMS if isinstance(schedule, Program) else TO_BOTH
    damage = rng.choice(OF_SEQUENCES if program.slices > 1 and rng.random() < 0.5 else others)
    rows: Rows = [[item for item in row if item is not None] for row in schedule.rows]
    damage(rng, rows)
    return Case(program, usual, replace(schedule, rows=tuple(map(tuple, rows))), damage)


# --- what has been sent -----------------------------------------------------------------------------------------------


def earlier(program: Program) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """(device, position) -> all places that have been passed once a pass there has its inputs, in any run."""
    rules = Rules.of(program)
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
                for transfer in unit_needs.waits_for(rules, item, device):
                    for producer, _ in unit_needs.producers(rules, transfer, device):
                        route = rules.route(device, transfer)
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


def check_releases(program: Program) -> None:
    """What has been sent is given back once, and not before it must have arrived."""
    before = earlier(program)
    rules = Rules.of(program)
    for device, row in enumerate(program.rows):
        given_back = Counter(sent for here in releases(program, device).values() for sent in here)
        assert set(given_back.values()) <= {1}
        for position, sent in releases(program, device).items():
            for transfer in sent:
                assert isinstance(transfer, Transfer) and transfer in row[:position]
                for other, consumer in unit_needs.consumers(rules, transfer, device):
                    place = position_of(program, other, consumer)
                    assert other == device or (other, place) in before[device, position]


# --- both opinions ----------------------------------------------------------------------------------------------------


def complaints(case: Case) -> Iterator[str]:
    """What the code and the second opinion do not agree on."""
    schedule = case.schedule
    if isinstance(schedule, Program):
        told, sound = check_program(schedule).ok, program_is_sound(schedule, case.usual)
    else:
        told, sound = check_order(schedule).ok, order_is_sound(schedule)
    if told != sound:
        yield f"the checker says {told}, the rules say {sound}"
    if isinstance(schedule, Program):
        told = check_program(schedule, experts=True).ok
        if told != (sound and completes(schedule, lambda transfer: "", members=2, exchanges="")):
            yield f"with experts in two replicas the checker says {told}"
    if case.damage is not None:
        return
    if not sound or not program_is_sound(case.sound, case.usual):
        yield "it is not sound to begin with"
    for queue in (lambda transfer: transfer.communicator, lambda transfer: ""):
        if not completes(case.sound, queue, blocking=True):
            yield "it does not complete if devices wait for each transfer"
    try:
        check_releases(case.sound)
    except AssertionError as error:
        yield f"releases: {error}"


def judged(seed: int) -> tuple[str, str, str]:
    """A case by its number: name, outcome, and what is wrong with the code, or ""."""
    case = case_of(seed)
    checked = check_program if isinstance(case.schedule, Program) else check_order
    outcome = "sound" if checked(case.schedule).ok else "faulty"  # type: ignore[operator]
    return case.name, outcome, ", ".join(complaints(case))


if __name__ == "__main__":
    count_cases(__doc__, judged)
