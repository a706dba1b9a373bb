"""V-schedules from building blocks (arXiv 2405.15362, section 3).

A building block gives the slot in which one microbatch takes each of its steps. A slot is one pass long, and the block
is repeated every six slots, which is the work of a microbatch on one device. The slots of a device differ modulo six,
so repetitions never collide, and each W takes the next free slot. A device stores activations for the lifetime of the
block on it, so blocks with short lifetimes need little memory.

Repeated blocks are idle at both ends, so passes are moved there:

1. warm-up (until the first microbatch is back on device 0): each pass goes to the earliest slot where it is ready and
   that does not make the device store more than its limit;
2. cool-down: each device runs the first pass of the block that is ready and fits into memory; W's fill the remaining
   slots. It begins on all devices after the last forward of stage 0, or on each device after its last forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .v_shape import Move, Rows, chain_steps, stores

PERIOD = 6
Block = tuple[int, ...]
"""The slot of each of the 4 * devices steps that others wait for."""
Slots = list[dict[int, Move]]
"""Per device, slot -> move."""


def block_of_gaps(gaps: Sequence[int]) -> Block:
    """The block with the given gaps between consecutive steps: 4 * devices - 1 gaps, each at least 1."""
    slots = [0]
    for gap in gaps:
        slots.append(slots[-1] + gap)
    return tuple(slots)


def collides(block: Block) -> bool:
    """Whether a device takes two steps in one slot when the block is repeated."""
    devices = len(block) // 4
    slots_of_devices = ({block[step] % PERIOD for step in chain_steps(devices, device)} for device in range(devices))
    return any(len(slots) < 4 for slots in slots_of_devices)


def peaks(block: Block) -> tuple[int, ...]:
    """The most stage activations on each device while `block` is repeated forever."""
    devices = len(block) // 4
    return tuple(_peak(*(block[step] for step in chain_steps(devices, device))) for device in range(devices))


def _peak(down: int, up: int, up_i: int, down_i: int) -> int:
    """The most overlapping lifetimes from F to W; `down` is the F of the first stage, `up` that of the second."""
    occupied = {slot % PERIOD for slot in (down, up, up_i, down_i)}

    def following(slot: int, *used: int) -> int:
        return next(w for w in range(slot + 1, slot + PERIOD + 1) if w % PERIOD not in occupied and w not in used)

    up_w, down_w = following(up_i), following(down_i)
    if (up_w - down_w) % PERIOD == 0:  # the W of the older I goes first, the other takes the second free slot
        if up_w - up_i >= down_w - down_i:
            down_w = following(down_w)
        else:
            up_w = following(up_w)
    return max(
        sum((now - start) // PERIOD - (now - end - 1) // PERIOD for start, end in ((down, down_w), (up, up_w)))
        for now in (down, up)
    )


def repeat(block: Block, microbatches: int) -> Slots:
    """Repeat the block every `PERIOD` slots, with every W in the first free slot after its I."""
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


def squeezed(block: Block, microbatches: int, limits: Sequence[int], late: bool = False) -> Rows:
    """The rows of repeated `block`, with the passes at both ends moved, within `limits` stage activations per
    device.

    With `late`, the cool-down of a device begins after its last forward, otherwise after the last forward of stage 0.
    """
    slots = repeat(block, microbatches)
    warm_up(slots, block[-1], limits)
    last = microbatches - 1
    if late:
        ends = [_slot_of(row, (2 * len(slots) - 1 - device, last)) + 1 for device, row in enumerate(slots)]
    else:
        ends = [_slot_of(slots[0], (0, last)) + 1] * len(slots)
    cool_down(slots, ends, limits)
    return in_order(slots)


def in_order(slots: Slots) -> Rows:
    """The moves of each device by slot."""
    return [[row[slot] for slot in sorted(row)] for row in slots]


def _slot_of(row: dict[int, Move], target: Move) -> int:
    return next(slot for slot, move in row.items() if move == target)


def warm_up(rows: Slots, end: int, limits: Sequence[int]) -> None:
    """Move the moves before slot `end` to earlier slots, in the order of the slots."""
    devices = len(rows)
    slot_of = {move: slot for row in rows for slot, move in row.items() if slot <= end}
    held = [0] * devices  # by the moves before the current slot
    for slot, device in sorted((slot, device) for device, row in enumerate(rows) for slot in row if slot < end):
        row, move = rows[device], rows[device][slot]
        step, i = move
        needs = step - 2 * devices if step >= 4 * devices else step - 1
        ready = slot_of[needs, i] + 1 if step else 0
        if step < 2 * devices:
            free = _first_with_room(row, ready, slot, limits[device] - held[device], devices)
        else:
            free = next((earlier for earlier in range(ready, slot) if earlier not in row), slot)
        if free < slot:
            del row[slot]
            row[free] = move
            slot_of[move] = free
        held[device] += stores(devices, step)


def _first_with_room(row: dict[int, Move], ready: int, slot: int, room: int, devices: int) -> int:
    """The earliest free slot for the forward in `slot` such that the device stays within its limit. Before `slot`
    it has room for `room` more activations."""
    best = slot
    for earlier in range(slot - 1, ready - 1, -1):
        if room <= 0:
            break
        if earlier in row:
            room += stores(devices, row[earlier][0])
        else:
            best = earlier
    return best


def cool_down(rows: Slots, ends: Sequence[int], limits: Sequence[int]) -> None:
    """Replan, slot by slot, the moves of each device from slot `ends[device]` on."""
    devices = len(rows)
    next_slot: dict[Move, int] = {}  # the slot after each move
    waiting: list[list[Move]] = []
    weights: list[deque[Move]] = []
    held = []
    for row, end in zip(rows, ends, strict=True):
        next_slot.update((move, slot + 1) for slot, move in row.items() if slot < end)
        later = sorted(slot for slot in row if slot >= end)
        waiting.append([row[slot] for slot in later if row[slot][0] < 4 * devices])
        postponed = (row[slot] for slot in later if row[slot][0] >= 4 * devices)
        weights.append(deque(move for move in postponed if (move[0] - 2 * devices, move[1]) in next_slot))
        for slot in later:
            del row[slot]
        held.append(sum(stores(devices, step) for step, _ in row.values()))
    now = min(ends)
    while any(waiting) or any(weights):
        chosen = []
        for device, row in enumerate(rows):
            if now < ends[device]:
                continue
            for move in waiting[device]:
                step, i = move
                if next_slot.get((step - 1, i), now + 1) <= now and (
                    step >= 2 * devices or held[device] < limits[device]
                ):
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
            next_slot[move] = now + 1
        now += 1
