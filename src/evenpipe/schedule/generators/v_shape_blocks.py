"""V-Half and V-Min: V-schedules with a half and a third of the activations of ZB-V (arXiv 2405.15362, section 3).

A building block says in which slot one microbatch takes each of its steps; a slot is one pass long, and the block is
repeated every six slots, which is the work of one microbatch on one device. The slots of a device differ modulo six, so
repetitions never collide, and each W takes the next slot that is free. How long a block lives on a device is what the
device has to store, so blocks with short lives need little memory.

Repeated blocks idle at both ends. There, passes are moved:

1. warm-up (until the first microbatch is back on device 0): each pass goes to the earliest slot where it is ready and
   that does not make the device store more than the limit;
2. cool-down (from the last forward of stage 0): each device runs the first pass of the block that is ready and fits
   into memory; W's fill what remains.
"""

from __future__ import annotations

from collections import deque

from evenpipe.schedule.order import Order

from .v_shape import Move, chain_steps, stores, v_order

PERIOD = 6
Block = tuple[int, ...]
"""The slot of each of the 4 * devices steps that others wait for."""
Slots = list[dict[int, Move]]
"""Per device, the move in each slot that is taken."""


def v_half(devices: int, microbatches: int, *, squeeze: bool = True) -> Order:
    """V-Half: half the activations of ZB-V, on every device alike (arXiv 2405.15362, section 3.2).

    Any devices >= 1 and microbatches >= 1. Every device stores at most 2 * floor((devices + 2) / 2) stage activations.
    With equal passes F = I = W = 1 the bubble is 6 * ceil(devices / 2) - 7 passes from 2 * devices microbatches on,
    which is the least possible for a V-schedule with that memory. It keeps this bubble, whatever the number of
    microbatches, while W + 2 I >= 2 F and W + 2 F >= 2 I.

    `squeeze=False` repeats the block and leaves both ends as they are: the bubble is 3.25 * devices for even devices,
    and passes stay apart by the distances of the block.
    """
    return build(half_block(devices), microbatches, half_peak(devices), squeeze)


def v_min(devices: int, microbatches: int, *, squeeze: bool = True) -> Order:
    """V-Min: a third of the activations of ZB-V, the least for any V-schedule without idle slots (arXiv 2405.15362).

    Any devices >= 1 and microbatches >= 1. No device stores more than 2 * floor((devices + 4) / 3) stage activations.
    With equal passes F = I = W = 1 the bubble is 4 * devices - 7 passes where 3 divides devices, else
    4 * devices - 5, from 2 * devices microbatches on. With unequal passes the bubble grows with every microbatch.

    `squeeze=False` repeats the block and leaves both ends as they are.
    """
    return build(min_block(devices), microbatches, min_peak(devices), squeeze)


def half_peak(devices: int) -> int:
    """Stage activations that V-Half stores on a device."""
    return 2 * ((devices + 2) // 2)


def min_peak(devices: int) -> int:
    """Stage activations that V-Min stores on the fullest device."""
    return 2 * ((devices + 4) // 3)


def half_block(devices: int) -> Block:
    """Two slots per step away from device 0, one towards it; for even devices the backward waits three more."""
    shift = 3 if devices % 2 == 0 else 0
    return (
        *(2 * r for r in range(devices)),
        *(3 * devices - 2 - r for r in reversed(range(devices))),
        *(3 * devices - 1 + shift + 2 * r for r in range(devices)),
        *(6 * devices - 2 + shift - r for r in reversed(range(devices))),
    )


def min_block(devices: int) -> Block:
    """One slot per step; where 3 divides devices the backward waits two more, for passes would collide."""
    shift = 2 if devices % 3 == 0 else 0
    return (*range(2 * devices), *range(2 * devices + shift, 4 * devices + shift))


def build(block: Block, microbatches: int, limit: int, squeeze: bool) -> Order:
    """Repeat `block`, and with `squeeze` move the passes at both ends within `limit` stage activations per device."""
    devices = len(block) // 4
    rows = repeat(block, microbatches)
    if squeeze:
        warm_up(rows, block, limit)
        cool_down(rows, block, microbatches, limit)
    return v_order(devices, microbatches, [[row[slot] for slot in sorted(row)] for row in rows])


def repeat(block: Block, microbatches: int) -> Slots:
    """One block every `PERIOD` slots, and every W in the first free slot after its I."""
    devices = len(block) // 4
    rows: Slots = []
    for device in range(devices):
        row: dict[int, Move] = {}
        for step in chain_steps(devices, device):
            for i in range(microbatches):
                row[block[step] + PERIOD * i] = (step, i)
        assert len(row) == 4 * microbatches, "the block collides with its repetitions"
        free = 0
        for slot in sorted(row):
            step, i = row[slot]
            if step >= 2 * devices:
                free = max(free, slot + 1)
                while free in row:
                    free += 1
                row[free] = (step + 2 * devices, i)
        rows.append(row)
    return rows


def warm_up(rows: Slots, block: Block, limit: int) -> None:
    """Move what stands before the end of the first block, in the order of its slots."""
    devices = len(rows)
    end = block[-1]
    slot_of = {move: slot for row in rows for slot, move in row.items() if slot <= end}
    for slot, device in sorted((slot, device) for device, row in enumerate(rows) for slot in row if slot < end):
        row, move = rows[device], rows[device][slot]
        step, i = move
        needs = step - 2 * devices if step >= 4 * devices else step - 1
        ready = slot_of[needs, i] + 1 if step else 0
        free = _earliest(row, slot, ready, limit, devices) if step < 2 * devices else _first_free(row, ready, slot)
        if free < slot:
            del row[slot]
            row[free] = move
            slot_of[move] = free


def _first_free(row: dict[int, Move], ready: int, slot: int) -> int:
    return next((earlier for earlier in range(ready, slot) if earlier not in row), slot)


def _earliest(row: dict[int, Move], slot: int, ready: int, limit: int, devices: int) -> int:
    """The earliest free slot for the forward in `slot` from where on the device stores no more than `limit`."""
    held = sum(stores(devices, row[earlier][0]) for earlier in range(slot) if earlier in row)
    best = slot
    for earlier in range(slot - 1, ready - 1, -1):
        if held >= limit:
            break
        if earlier in row:
            held -= stores(devices, row[earlier][0])
        else:
            best = earlier
    return best


def cool_down(rows: Slots, block: Block, microbatches: int, limit: int) -> None:
    """Plan anew, slot by slot, what stands after the last forward of stage 0."""
    devices = len(rows)
    last = microbatches - 1
    start = next(slot for slot, move in rows[0].items() if move == (0, last)) + 1
    done: dict[Move, int] = {}  # the slot after each move
    waiting, weights, held = [], [], []
    for row in rows:
        for slot, move in row.items():
            if slot < start:
                done[move] = slot + 1
        later = sorted(slot for slot in row if slot >= start)
        waiting.append([row[slot] for slot in later if row[slot][0] < 4 * devices])
        postponed = (row[slot] for slot in later if row[slot][0] >= 4 * devices)
        weights.append(deque(move for move in postponed if (move[0] - 2 * devices, move[1]) in done))
        for slot in later:
            del row[slot]
        held.append(sum(stores(devices, step) for step, _ in row.values()))
    now = start
    while any(waiting) or any(weights):
        chosen = []
        for device, row in enumerate(rows):
            for move in waiting[device]:
                step, i = move
                if done.get((step - 1, i), now + 1) <= now and (step >= 2 * devices or held[device] < limit):
                    waiting[device].remove(move)
                    if step >= 2 * devices:
                        weights[device].append((step + 2 * devices, i))
                    break
            else:
                if not weights[device]:
                    continue
                move = weights[device].popleft()
            row[now] = move
            held[device] += stores(devices, move[0])
            chosen.append(move)
        for move in chosen:
            done[move] = now + 1
        now += 1
