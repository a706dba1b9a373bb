"""Random schedules, and a second opinion on schedules: naive, and written from the rules, not from the code."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from evenpipe.schedule import Costs, Item, Kind, Order, Pass, Placement, Program, Transfer, TransferKind, parts_of

Placed = tuple[int, Pass]  # device, pass
Unit = tuple[int | None, int]  # microbatch and slice
Carried = tuple[str, tuple[int, int], int, int]  # direction or kind, edge, microbatch, slice
NO_EDGE = (-1, -1)

DIAMOND = ((0, 1), (0, 2), (1, 3), (2, 3))
UNEVEN = ((0, 1), (0, 3), (1, 2), (2, 4), (3, 4))  # branches of two stages, and of one
GRAPHS = [
    Placement(4, (0, 1, 2, 3), DIAMOND),
    Placement(2, (0, 1, 1, 0), DIAMOND),
    Placement(2, (0, 0, 1, 1), DIAMOND),
    Placement(1, (0, 0, 0, 0), DIAMOND),
    Placement(3, (0, 1, 2, 1, 0), UNEVEN),
    Placement(5, (0, 1, 2, 3, 4), UNEVEN),
]


def words(order: Order, device: int) -> str:
    """The row of a device as text."""
    return " ".join(map(str, order.passes(device)))


def leading_to(placement: Placement, stage: int) -> list[int]:
    return [source for source, target in placement.edges if target == stage]


def following(placement: Placement, stage: int) -> list[int]:
    return [target for source, target in placement.edges if source == stage]


def needs(order: Order) -> dict[Placed, list[Placed]]:
    """For each pass of a sound order, the passes (of any device) that must have ended before it starts.

    Passes that run as one are taken apart.
    """
    place, last, sharded = order.placement, order.placement.stages - 1, order.vocabulary != "first-last"
    everything = {
        (device, part) for device in range(order.devices) for item in order.passes(device) for part in parts_of(item)
    }

    def at(kind: Kind, stage: int, unit: Unit) -> Placed:
        return place.device_of(stage), Pass(kind, stage, *unit)

    def backward(stage: int, unit: Unit) -> Placed:
        return at(Kind.B, stage, unit) if at(Kind.B, stage, unit) in everything else at(Kind.I, stage, unit)

    def everywhere(kind: Kind, unit: Unit) -> list[Placed]:
        return [(device, Pass(kind, None, *unit)) for device in range(order.devices)]

    combining = Kind.T if order.vocabulary == "vocab-1" else Kind.C
    result: dict[Placed, list[Placed]] = {}
    for device, item in everything:
        stage, i = item.stage, (item.microbatch, item.slice)
        found: list[Placed] = []
        if item.kind is Kind.F:
            found += [at(Kind.F, before, i) for before in leading_to(place, stage)]
            found += everywhere(Kind.E, i) if sharded and not stage else []
            found += [at(Kind.F, stage, (i[0], i[1] - 1))] if i[1] else []
        elif item.kind in {Kind.B, Kind.I}:
            found.append(at(Kind.F, stage, i))
            found += [at(Kind.L, stage, i)] if at(Kind.L, stage, i) in everything else []
            found += [backward(behind, i) for behind in following(place, stage)]
            found += everywhere(combining, i) if sharded and stage == last else []
            found += [backward(stage, (i[0], i[1] + 1))] if i[1] + 1 < order.slices else []
        elif item.kind is Kind.W:
            found.append(at(Kind.I, stage, i))
        elif item.kind in {Kind.O, Kind.D, Kind.L}:
            found.append(at({Kind.O: Kind.F, Kind.D: Kind.O, Kind.L: Kind.D}[item.kind], stage, i))
        elif item.kind is Kind.S:
            found.append(at(Kind.F, last, i))
        elif item.kind is combining:
            found += everywhere(Kind.S, i)
        elif item.kind is Kind.T:
            found.append((device, Pass(Kind.C, None, *i)))
        elif item.kind is Kind.G:
            found.append(backward(0, i))
        result[device, item] = found
    return result


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


def same_transfer(item: Transfer, placement: Placement) -> Carried:
    """What is the same on both ends of a hop, and on all members of a collective."""
    unit = item.microbatch, item.slice
    if item.stage is None:
        return item.kind.value, NO_EDGE, *unit
    forward = item.kind in {TransferKind.SEND_F, TransferKind.RECV_F}
    sends = item.kind in {TransferKind.SEND_F, TransferKind.SEND_B}
    beside = following(placement, item.stage) if forward == sends else leading_to(placement, item.stage)
    other = item.peer if item.peer is not None else (*beside, -1)[0]
    return item.kind.value[-1], (item.stage, other) if sends else (other, item.stage), *unit


def order_is_sound(order: Order) -> bool:
    """Whether every pass is there once, on its device, and all devices reach the ends of their rows.

    Of R, which is not in every order, it knows nothing.
    """
    place, last = order.placement, order.placement.stages - 1
    combining = [] if order.vocabulary == "vocab-1" else [Kind.C]
    shard = [Kind.E, Kind.S, *combining, *([] if order.forward_only else [Kind.T, Kind.G])]
    if order.vocabulary == "first-last":
        shard = []
    placed = Counter(
        (device, part) for device in range(order.devices) for item in order.passes(device) for part in parts_of(item)
    )
    units = [(microbatch, part) for microbatch in range(order.microbatches) for part in range(order.slices)]
    for device in range(order.devices):
        for unit in units:
            for kind in shard:
                placed[device, Pass(kind, None, *unit)] -= 1
    for stage in range(last + 1):
        for unit in units:
            device = place.device_of(stage)
            split = placed[device, Pass(Kind.B, stage, *unit)] == 0
            backward = [] if order.forward_only else [Kind.I, Kind.W] if split else [Kind.B]
            moved = {placed[device, Pass(kind, stage, *unit)] for kind in (Kind.O, Kind.D, Kind.L)} != {0}
            for kind in (Kind.F, *backward, *((Kind.O, Kind.D, Kind.L) if moved and backward else ())):
                placed[device, Pass(kind, stage, *unit)] -= 1
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
    """Whether `program` is right, given one that is, for an order of the same size and vocabulary mode."""

    def issued(of: Program) -> Counter[tuple[int, Transfer]]:
        return Counter(
            (device, item) for device, row in enumerate(of.rows) for item in row if isinstance(item, Transfer)
        )

    def sequence(device: int, communicator: str, other: int) -> list[Carried]:
        """What both devices issue on a communicator, in the order of the first."""
        row = [item for item in program.rows[device] if isinstance(item, Transfer) and other in item.members]
        return [same_transfer(item, program.placement) for item in row if item.communicator == communicator]

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
    here, i = places[str(item)], str(Pass(Kind.S, None, item.microbatch, item.slice))[1:]
    last = program.placement.stages - 1
    combining = "T" if program.vocabulary == "vocab-1" else "C"
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


def waits(program: Program, device: int, item: Pass) -> set[Carried]:
    """The transfers of `program` that `item` of `device` waits for, by `same_transfer`."""
    if item.parts:
        return set().union(*(waits(program, device, part) for part in item.parts))
    stage, unit = item.stage, (item.microbatch, item.slice)
    last, place = program.placement.stages - 1, program.placement
    found: set[Carried] = set()
    if program.devices == 1:
        return found
    if item.kind is Kind.F:
        elsewhere = [before for before in leading_to(place, stage) if place.device_of(before) != device]
        found |= {("F", (before, stage), *unit) for before in elsewhere}
    if item.kind is Kind.F and stage == 0 and program.vocabulary != "first-last":
        found.add(("ROWS", NO_EDGE, *unit))
    if item.kind in {Kind.B, Kind.I}:
        elsewhere = [behind for behind in following(place, stage) if place.device_of(behind) != device]
        found |= {("B", (behind, stage), *unit) for behind in elsewhere}
    if item.kind in {Kind.B, Kind.I} and stage == last and program.vocabulary != "first-last":
        found.add(("DX", NO_EDGE, *unit))
    if item.kind is Kind.S and place.last_device != device:
        found.add(("X", NO_EDGE, *unit))
    if item.kind is Kind.C or (item.kind is Kind.T and program.vocabulary == "vocab-1"):
        found.add(("STATISTICS", NO_EDGE, *unit))
    if item.kind is Kind.G and place.first_device != device:
        found.add(("ROW_GRADIENTS", NO_EDGE, *unit))
    return found


def completes(
    program: Program,
    queue: Callable[[Transfer], str],
    *,
    blocking: bool = False,
    members: int = 1,
    exchanges: str | None = None,
) -> bool:
    """Whether the processes of all replicas reach the ends of their rows, by going round them until nothing changes.

    Replica and device make a process; those of one device may exchange within F, B, I and R, and wait for it.

    Args:
        queue: names the queue of a process that a transfer is in.
        blocking: a process moreover waits for each transfer before it goes on.
        members: number of replicas.
        exchanges: the queue that exchanges are in. None: there are none.
    """
    rows = [[item for item in row if item is not None] for row in program.rows]
    processes = [(member, device) for member in range(members) for device in range(program.devices)]
    position = dict.fromkeys(processes, 0)
    queues: dict[tuple[int, int], dict[str, list[object]]] = {process: {} for process in processes}
    taking_part: dict[object, tuple[list[tuple[int, int]], str]] = {}
    complete: set[object] = set()
    issued: set[object] = set()

    def issue(process: tuple[int, int], what: object, line: str, others: list[tuple[int, int]]) -> None:
        if (process, what) not in issued:
            issued.add((process, what))
            taking_part[what] = others, line
            queues[process].setdefault(line, []).append(what)

    def passes_by(process: tuple[int, int]) -> bool:
        member, device = process
        item = rows[device][position[process]]
        if isinstance(item, Transfer):
            transfer = member, same_transfer(item, program.placement)
            issue(process, transfer, queue(item), [(member, other) for other in item.members])
            return not blocking or transfer in complete
        if not {(member, awaited) for awaited in waits(program, device, item)} <= complete:
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
        for what, (others, line) in taking_part.items():
            if what not in complete:
                lines = [queues[other].get(line, []) for other in others if other in queues]
                if len(lines) == len(others) and all(ahead[:1] == [what] for ahead in lines):
                    for ahead in lines:
                        ahead.pop(0)
                    complete.add(what)
                    moving = True
    at_ends = all(position[process] == len(rows[process[1]]) for process in processes)
    return at_ends and complete == taking_part.keys()


def random_order(
    seed: int, placement: Placement, microbatches: int, *, split: bool = False, eager: float = 0.5, slices: int = 1
) -> Order:
    """A sound order without vocabulary passes: again and again one of the passes that are ready, chosen at random.

    With `split` every backward is an I and a W. `eager` is the chance that a backward is taken when there is one.
    """
    rng = random.Random(seed)
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    stages = range(placement.stages)
    units = [(microbatch, part) for microbatch in range(microbatches) for part in range(slices)]
    left = {Pass(kind, stage, *unit) for kind in kinds for stage in stages for unit in units}
    rows: list[list[Pass]] = [[] for _ in range(placement.devices)]

    def ready(item: Pass) -> bool:
        stage, microbatch, part = item.stage, item.microbatch, item.slice
        if item.kind is Kind.W:
            return Pass(Kind.I, stage, microbatch, part) not in left
        if item.kind is Kind.F:
            needed = [Pass(Kind.F, before, microbatch, part) for before in leading_to(placement, stage)]
            return not left & {*needed, Pass(Kind.F, stage, microbatch, part - 1)}
        needed = [Pass(item.kind, behind, microbatch, part) for behind in following(placement, stage)]
        own = Pass(Kind.F, stage, microbatch, part), Pass(item.kind, stage, microbatch, part + 1)
        return not left & {*needed, *own}

    while left:
        choices = sorted(filter(ready, left), key=str)
        backward = [item for item in choices if item.kind is not Kind.F]
        item = rng.choice(backward) if backward and rng.random() < eager else rng.choice(choices)
        left.remove(item)
        rows[placement.device_of(item.stage)].append(item)
    return Order(placement, microbatches, tuple(map(tuple, rows)), slices=slices)


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
    return replace(program, rows=rows)
