"""Random schedules, and a second opinion on schedules: naive, and written from the rules, not from the code."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from evenpipe.schedule import Costs, Item, Kind, Order, Pass, Placement, Program, Transfer, TransferKind, parts_of

Placed = tuple[int, Pass]  # device, pass


def words(order: Order, device: int) -> str:
    """The row of a device as text."""
    return " ".join(map(str, order.passes(device)))


def needs(order: Order) -> dict[Placed, list[Placed]]:
    """For each pass of a sound order, the passes (of any device) that must have ended before it starts.

    Passes that run as one are taken apart.
    """
    place, last, barriers = order.placement, order.placement.stages - 1, order.barriers
    everything = {
        (device, part) for device in range(order.devices) for item in order.passes(device) for part in parts_of(item)
    }

    def at(kind: Kind, stage: int, i: int | None) -> Placed:
        return place.device_of(stage), Pass(kind, stage, i)

    def backward(stage: int, i: int | None) -> Placed:
        return at(Kind.B, stage, i) if at(Kind.B, stage, i) in everything else at(Kind.I, stage, i)

    def everywhere(kind: Kind, i: int | None) -> list[Placed]:
        return [(device, Pass(kind, None, i)) for device in range(order.devices)]

    combining = Kind.T if barriers == 2 and not order.forward_only else Kind.C
    result: dict[Placed, list[Placed]] = {}
    for device, item in everything:
        stage, i = item.stage, item.microbatch
        found: list[Placed] = []
        if item.kind is Kind.F:
            found += [at(Kind.F, stage - 1, i)] if stage else everywhere(Kind.E, i) if barriers else []
        elif item.kind in {Kind.B, Kind.I}:
            found.append(at(Kind.F, stage, i))
            found += [at(Kind.L, stage, i)] if at(Kind.L, stage, i) in everything else []
            found += [backward(stage + 1, i)] if stage < last else everywhere(combining, i) if barriers else []
        elif item.kind is Kind.W:
            found.append(at(Kind.I, stage, i))
        elif item.kind in {Kind.O, Kind.D, Kind.L}:
            found.append(at({Kind.O: Kind.F, Kind.D: Kind.O, Kind.L: Kind.D}[item.kind], stage, i))
        elif item.kind is Kind.S:
            found.append(at(Kind.F, last, i))
        elif item.kind is combining:
            found += everywhere(Kind.S, i)
        elif item.kind is Kind.T:
            found.append((device, Pass(Kind.C, None, i)))
        elif item.kind is Kind.G:
            found.append(backward(0, i))
        result[device, item] = found
    return result


def ancestors(order: Order) -> dict[Placed, set[Placed]]:
    """For each pass everything that it needs, and what that needs, and so on."""
    direct = needs(order)
    done: dict[Placed, set[Placed]] = {}

    def of(placed: Placed) -> set[Placed]:
        if placed not in done:
            done[placed] = set(direct[placed]).union(*map(of, direct[placed]))
        return done[placed]

    for placed in direct:
        of(placed)
    return done


def end_times(order: Order, duration: Callable[[Pass, int], float]) -> dict[Placed, float]:
    """When each pass ends if transfers take no time, by going round all devices until nothing changes."""
    direct, ends = needs(order), {}
    positions, free = [0] * order.devices, [0.0] * order.devices
    rows = [list(order.passes(device)) for device in range(order.devices)]
    moving = True
    while moving:
        moving = False
        for device, row in enumerate(rows):
            if positions[device] == len(row):
                continue
            placed = (device, row[positions[device]])
            if all(need in ends for need in direct[placed]):
                start = max([free[device], *(ends[need] for need in direct[placed])])
                free[device] = ends[placed] = start + duration(placed[1], device)
                positions[device] += 1
                moving = True
    assert positions == [len(row) for row in rows], "the order does not complete"
    return ends


def same_transfer(item: Transfer) -> tuple[str, int, int, int]:
    """What is the same on both ends of a hop, and on all members of a collective."""
    sending = {TransferKind.SEND_F: 1, TransferKind.SEND_B: -1}
    receiving = {TransferKind.RECV_F: 0, TransferKind.RECV_B: 0}
    kind = item.kind.value[-1] if item.kind in sending or item.kind in receiving else item.kind.value
    stage = -1 if item.stage is None else item.stage + sending.get(item.kind, 0)
    return kind, stage, item.microbatch, item.slice


def order_is_sound(order: Order) -> bool:
    """Whether every pass is there once, on its device, and all devices reach the ends of their rows.

    Of R, which is not in every order, it knows nothing.
    """
    place, last = order.placement, order.placement.stages - 1
    combining = [] if order.barriers == 2 and not order.forward_only else [Kind.C]
    shard = [Kind.E, Kind.S, *combining, *([] if order.forward_only else [Kind.T, Kind.G])] if order.barriers else []
    placed = Counter(
        (device, part) for device in range(order.devices) for item in order.passes(device) for part in parts_of(item)
    )
    for device in range(order.devices):
        for i in range(order.microbatches):
            for kind in shard:
                placed[device, Pass(kind, None, i)] -= 1
    for stage in range(last + 1):
        for i in range(order.microbatches):
            device = place.device_of(stage)
            split = placed[device, Pass(Kind.B, stage, i)] == 0
            backward = [] if order.forward_only else [Kind.I, Kind.W] if split else [Kind.B]
            moved = {placed[device, Pass(kind, stage, i)] for kind in (Kind.O, Kind.D, Kind.L)} != {0}
            for kind in (Kind.F, *backward, *((Kind.O, Kind.D, Kind.L) if moved and backward else ())):
                placed[device, Pass(kind, stage, i)] -= 1
    if any(placed.values()):
        return False
    direct, done = needs(order), set()
    rows = [list(order.passes(device)) for device in range(order.devices)]
    moving = True
    while moving:
        moving = False
        for device, row in enumerate(rows):
            while row:
                own: set[Placed] = set()
                for part in parts_of(row[0]):
                    if all(need in done or need in own for need in direct[device, part]):
                        own.add((device, part))
                if len(own) < len(parts_of(row[0])):
                    break
                done |= own
                row.pop(0)
                moving = True
    return not any(rows)


def program_is_sound(program: Program, sound: Program) -> bool:
    """Whether `program` is right, given one that is, for an order of the same placement, microbatches and barriers."""

    def issued(of: Program) -> Counter[tuple[int, Transfer]]:
        return Counter(
            (device, item) for device, row in enumerate(of.rows) for item in row if isinstance(item, Transfer)
        )

    def sequence(device: int, communicator: str, other: int) -> list[tuple[str, int, int, int]]:
        """What both devices issue on a communicator, in the order of the first."""
        row = [item for item in program.rows[device] if isinstance(item, Transfer) and other in item.members]
        return [same_transfer(item) for item in row if item.communicator == communicator]

    return (
        order_is_sound(program.order)
        and issued(program) == issued(sound)
        and all(
            in_time(program, device, item)
            for device, row in enumerate(program.rows)
            for item in row
            if isinstance(item, Transfer)
        )
        and all(
            sequence(device, name, other) == sequence(other, name, device)
            for name, members in program.communicators.items()
            for device in members
            for other in members
        )
        and completes(program, lambda transfer: transfer.communicator)
        and completes(program, lambda transfer: "")
    )


def in_time(program: Program, device: int, item: Transfer) -> bool:
    """Whether `item` stands behind the passes of its device that make its data, before those that use it."""
    places = {
        str(part): position
        for position, other in enumerate(program.rows[device])
        for part in (() if other is None else (other,) if isinstance(other, Transfer) else parts_of(other))
    }
    here, i = places[str(item)], item.microbatch
    last = program.placement.stages - 1
    combining = "T" if program.barriers == 2 and not program.forward_only else "C"
    before, behind = {
        "SEND_F": ([f"{item.stage}F{i}"], []),
        "RECV_F": ([], [f"{item.stage}F{i}"]),
        "SEND_B": ([f"{item.stage}{letter}{i}" for letter in "BI"], []),
        "RECV_B": ([], [f"{item.stage}{letter}{i}" for letter in "BI"]),
        "ROWS": ([f"E{i}"], [f"0F{i}"]),
        "X": ([f"{last}F{i}"], [f"S{i}"]),
        "STATISTICS": ([f"S{i}"], [f"{combining}{i}"]),
        "DX": ([f"{combining}{i}"], [f"{last}{letter}{i}" for letter in "BI"]),
        "ROW_GRADIENTS": ([f"0{letter}{i}" for letter in "BI"], [f"G{i}"]),
    }[item.kind.value]
    return all(places[name] < here for name in before if name in places) and all(
        places[name] > here for name in behind if name in places
    )


def waits(program: Program, device: int, item: Pass) -> set[tuple[str, int, int, int]]:
    """The transfers of `program` that `item` of `device` waits for, by `same_transfer`."""
    if item.parts:
        return set().union(*(waits(program, device, part) for part in item.parts))
    stage, i = item.stage, item.microbatch
    last, place = program.placement.stages - 1, program.placement
    found = set()
    if program.devices == 1:
        return found
    if item.kind is Kind.F and stage and place.device_of(stage - 1) != device:
        found.add(("F", stage, i, 0))
    if item.kind is Kind.F and stage == 0 and program.barriers:
        found.add(("ROWS", -1, i, 0))
    if item.kind in {Kind.B, Kind.I} and stage < last and place.device_of(stage + 1) != device:
        found.add(("B", stage, i, 0))
    if item.kind in {Kind.B, Kind.I} and stage == last and program.barriers:
        found.add(("DX", -1, i, 0))
    if item.kind is Kind.S and place.last_device != device:
        found.add(("X", -1, i, 0))
    if item.kind is Kind.C or (item.kind is Kind.T and program.barriers == 2):
        found.add(("STATISTICS", -1, i, 0))
    if item.kind is Kind.G and place.first_device != device:
        found.add(("ROW_GRADIENTS", -1, i, 0))
    return found


def completes(program: Program, queue: Callable[[Transfer], str], *, blocking: bool = False) -> bool:
    """Whether all devices reach the end of their rows, by going round them until nothing changes.

    `queue` names the queue of a device that a transfer is in. With `blocking` a device moreover waits for each
    transfer before it goes on.
    """
    rows = [[item for item in row if item is not None] for row in program.rows]
    position = [0] * program.devices
    queues: list[dict[str, list[tuple[str, int, int, int]]]] = [{} for _ in rows]
    members = {
        same_transfer(item): item.members
        for device, row in enumerate(rows)
        for item in row
        if isinstance(item, Transfer)
    }
    names = {
        same_transfer(item): queue(item)
        for device, row in enumerate(rows)
        for item in row
        if isinstance(item, Transfer)
    }
    complete: set[tuple[str, int, int, int]] = set()
    issued: set[tuple[int, int]] = set()
    moving = True
    while moving:
        moving = False
        for device, row in enumerate(rows):
            while position[device] < len(row):
                item = row[position[device]]
                if isinstance(item, Pass):
                    if not waits(program, device, item) <= complete:
                        break
                elif (device, position[device]) not in issued:
                    issued.add((device, position[device]))
                    queues[device].setdefault(queue(item), []).append(same_transfer(item))
                if blocking and isinstance(item, Transfer) and same_transfer(item) not in complete:
                    break
                position[device] += 1
                moving = True
        for transfer, devices in members.items():
            lines = [queues[device].get(names[transfer], []) for device in devices]
            if transfer not in complete and all(line[:1] == [transfer] for line in lines):
                for line in lines:
                    line.pop(0)
                complete.add(transfer)
                moving = True
    return position == [len(row) for row in rows] and complete == set(members)


def random_order(
    seed: int, placement: Placement, microbatches: int, *, split: bool = False, eager: float = 0.5
) -> Order:
    """A sound order without vocabulary passes: again and again one of the passes that are ready, chosen at random.

    With `split` every backward is an I and a W. `eager` is the chance that a backward is taken when there is one.
    """
    rng = random.Random(seed)
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    stages = range(placement.stages)
    left = {Pass(kind, stage, i) for kind in kinds for stage in stages for i in range(microbatches)}
    rows: list[list[Pass]] = [[] for _ in range(placement.devices)]

    def ready(item: Pass) -> bool:
        stage, i = item.stage, item.microbatch
        if item.kind is Kind.F:
            return stage == 0 or Pass(Kind.F, stage - 1, i) not in left
        if item.kind is Kind.W:
            return Pass(Kind.I, stage, i) not in left
        return Pass(Kind.F, stage, i) not in left and Pass(item.kind, stage + 1, i) not in left

    while left:
        choices = sorted(filter(ready, left), key=str)
        backward = [item for item in choices if item.kind is not Kind.F]
        item = rng.choice(backward) if backward and rng.random() < eager else rng.choice(choices)
        left.remove(item)
        rows[placement.device_of(item.stage)].append(item)
    return Order(placement, microbatches, tuple(map(tuple, rows)))


def random_costs(seed: int, placement: Placement) -> Costs:
    """Costs per stage and device over a range of 1 to 10, now and then a stage that takes no time."""
    rng = random.Random(seed)

    def some(count: int) -> list[float]:
        return [rng.choice([0.0, *(rng.uniform(0.3, 3.0) for _ in range(6))]) for _ in range(count)]

    stages = {name: some(placement.stages) for name in "FIW"}
    stages["F"][0] = max(stages["F"][0], 0.1)
    devices = {name: some(placement.devices) for name in "SCTEG"}
    collectives = {name: rng.choice([0.0, 0.2]) for name in ("broadcast", "statistics", "reduce", "embedding")}
    return Costs.from_dict({**stages, **devices, "p2p": rng.choice([0.0, 0.1]), "collectives": collectives})


def edited(program: Program, device: int, row: Sequence[Item | None]) -> Program:
    """`program` with another row for one device."""
    rows = tuple(tuple(row) if here == device else old for here, old in enumerate(program.rows))
    return Program(program.placement, program.microbatches, rows, program.barriers, program.forward_only)
