"""DualPipeV: each device has both ends, and overlaps forwards and backwards of different microbatches.

Half of DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1): github.com/deepseek-ai/DualPipe, with the eight steps
of its `dualpipev.py`. Device r of d holds stage r on the way out and stage 2d - 1 - r on the way back.
"""

from __future__ import annotations

from collections import deque

from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import ROLE, Kind, Pass, parts_of
from evenpipe.schedule.placement import Placement

OUT, BACK = 0, 1
"""The two stages of a device, by their index in `Placement.stages_of`."""


def dualpipe_v(devices: int, microbatches: int, *, overlap: bool = True) -> Order:
    """In the steady state a forward of one stage and a full backward of the other run as one OVERLAP_F_B.

    Any devices >= 1 and microbatches >= 1; with fewer microbatches than stages, they run as the last ones of a larger
    step. Otherwise every device holds 2 * devices + 1 activations at its peak, and the bubble with equal stages and F =
    I is (devices - 1) (F + 2 B - 3 W), if an overlapped pair takes as long as its two passes, as in our runtime and by
    default in torch's. `overlap=False` runs them one after the other, the forward first, which shortens the bubble to
    (devices - 1) (F + B - 2 W).
    """
    padded = max(microbatches, 2 * devices)
    rows = [_row(device, devices, padded, overlap) for device in range(devices)]
    # The last microbatches have split backwards, which helps when there are few.
    remaining = tuple(
        _without_first(row, padded - microbatches) if padded > microbatches else tuple(row) for row in rows
    )
    return Order(Placement.v_shape(devices), microbatches, remaining)


class _Row:
    """The passes of a device; each kind runs the microbatches of its stage in order."""

    def __init__(self, stages: tuple[int, ...], overlap: bool) -> None:
        self.stages = stages
        self.overlap = overlap
        self.passes: list[Pass] = []
        self.turns = {Kind.F: [0, 0], Kind.B: [0, 0]}
        self.weights: deque[Pass] = deque()

    def forward(self, end: int) -> None:
        self.passes.append(self._next(Kind.F, end))

    def backward(self, end: int) -> None:
        self.passes.append(self._next(Kind.B, end))

    def inputs(self, end: int) -> None:
        """Add the gradient of the input; the weight gradient waits for `weight`."""
        item = self._next(Kind.I, end)
        self.passes.append(item)
        self.weights.append(Pass(Kind.W, item.stage, item.microbatch))

    def weight(self) -> None:
        """Add the oldest pending weight gradient, if any."""
        if self.weights:
            self.passes.append(self.weights.popleft())

    def both(self, forward: int, backward: int) -> None:
        """Add a forward of one end and a full backward of the other as one pass."""
        parts = (self._next(Kind.F, forward), self._next(Kind.B, backward))
        self.passes += [Pass(Kind.OVERLAP_F_B, parts=parts)] if self.overlap else parts

    def _next(self, kind: Kind, end: int) -> Pass:
        turns = self.turns[ROLE[kind]]
        turns[end] += 1
        return Pass(kind, self.stages[end], turns[end] - 1)


def _row(device: int, devices: int, microbatches: int, overlap: bool) -> list[Pass]:
    """The passes of a device in a step of at least `2 * devices` microbatches.

    0 and 1 are the stages on the way out and back.
    """
    row = _Row((device, 2 * devices - 1 - device), overlap)
    upstream, downstream = device, devices - 1 - device

    # 1: F0
    for _ in range(2 * downstream):
        row.forward(OUT)

    # 2: F0 F1
    for _ in range(upstream + 1):
        row.forward(OUT)
        row.forward(BACK)

    # 3: I1 W1 F1
    for _ in range(downstream):
        row.inputs(BACK)
        row.weight()
        row.forward(BACK)

    # 4: F0+B1 F1+B0, the steady state. On the last device the first F0 must run before any backward.
    for turn in range(microbatches - 2 * devices + upstream + 1):
        if turn == 0 and downstream == 0:
            row.forward(OUT)
            row.backward(BACK)
        else:
            row.both(OUT, BACK)
        row.both(BACK, OUT)

    # 5: B1 F1+B0
    for _ in range(downstream):
        row.backward(BACK)
        row.both(BACK, OUT)

    # 6: B1 B0, from the middle on I1 I0
    ends = [BACK, OUT] * (upstream + 1)
    split_from = upstream + 1
    for turn, end in enumerate(ends):
        row.inputs(end) if turn >= split_from else row.backward(end)

    # 7: W I0
    for _ in range(downstream):
        row.weight()
        row.inputs(OUT)

    # 8: W
    while row.weights:
        row.weight()
    return row.passes


def _without_first(row: list[Pass], count: int) -> tuple[Pass, ...]:
    """`row` without the first microbatches, the others renumbered from 0."""
    remaining: list[Pass] = []
    for item in row:
        parts = tuple(
            Pass(component.kind, component.stage, component.microbatch - count)
            for component in parts_of(item)
            if component.microbatch is not None and component.microbatch >= count
        )
        remaining += [Pass(item.kind, parts=parts)] if len(parts) > 1 else parts
    return tuple(remaining)
