"""What the devices hold at once in an order without vocabulary passes: by stage, and for a split of the layers.

Each order is walked once (`HeldByStage`). A search tries many splits of the same order, each of which then takes one
product of small matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import ge
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenpipe.schedule import Order
from evenpipe.schedule.held import peak_activations
from evenpipe.schedule.passes import Kind, Pass, parts_in
from evenpipe.schedule.rules import Kept, changes
from evenpipe.schedule.vocabulary_mode import VocabularyMode

WITH_GRADIENTS = {Kind.B, Kind.W}
"""Passes in which weights get their gradients."""
WAITING, QUEUED = changes({Kept.ACTIVATIONS}), changes({Kept.WEIGHT_INPUTS})
"""How passes change the number of forwarded stages that wait for B or I, and of stages that wait for W."""

TOGETHER = 64
"""Number of moments that are compared with all others at once."""


class Moment(NamedTuple):
    """Numbers of layers of a device between two passes; each layer counts once per microbatch."""

    waiting: int
    """Layers that wait for B or I."""
    queued: int
    """Layers that wait for W."""
    begun: int
    """Layers that have had B or W, so that their gradients exist; each counts once."""
    open: int
    """Layers between the first and the last pass of their stage, for which their parameters are gathered; each counts
    once."""
    ahead: int
    """Layers whose F is still to come; at most as many as two barriers can add to the waiting ones."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Activations in flight in an order without vocabulary passes, counted per microbatch or, if sequences are cut, per
    slice. Tuples have one entry per device."""

    stages: tuple[int, ...]
    """The most stage activations at once."""
    moments: tuple[tuple[Moment, ...], ...]
    """The moments that no other moment exceeds in all numbers."""


class HeldByStage:
    """The activations in flight by stage."""

    def __init__(self, order: Order) -> None:
        rows = [list(order.passes(device)) for device in range(order.devices)]
        self._stages = tuple(int(peak_activations(row)) for row in rows)
        self._moments = [_by_stage(row) for row in rows]

    def of(self, layers_per_stage: Sequence[int]) -> InFlight:
        """Return what is in flight if the stages have these numbers of layers."""
        return InFlight(
            self._stages, tuple(_of_layers(*stages_and_counts, layers_per_stage) for stages_and_counts in self._moments)
        )


def _by_stage(row: Iterable[Pass]) -> tuple[list[int], NDArray[np.int64]]:
    """Return the stages of a row, and the moments that no other moment exceeds, as counts by stage."""
    passes = list(parts_in(row))
    last = {item.stage: position for position, item in enumerate(passes)}
    stages = [stage for stage in last if stage is not None]
    index_of = {stage: index for index, stage in enumerate(stages)}
    waiting, queued, begun, opened, ahead = current = [[0] * len(stages) for _ in Moment._fields]
    for item in passes:
        if item.kind is Kind.F and item.stage is not None:
            ahead[index_of[item.stage]] += 1
    seen: dict[tuple[int, ...], list[int]] = {}
    for position, item in enumerate(passes):
        assert item.stage is not None
        index, kind = index_of[item.stage], item.kind
        if kind is Kind.F:
            ahead[index] -= 1
        elif kind in WITH_GRADIENTS:
            begun[index] = 1
        waiting[index] += WAITING.get(kind, 0)
        queued[index] += QUEUED.get(kind, 0)
        opened[index] = int(position < last[item.stage])
        # The first of equal moments has the most layers ahead.
        seen.setdefault((*waiting, *queued, *begun, *opened), [*ahead])
    counts = np.array([(*held, *left) for held, left in seen.items()], dtype=np.int64)
    maxima = [_not_exceeded(counts, counts[first : first + TOGETHER]) for first in range(0, len(counts), TOGETHER)]
    return stages, np.concatenate(maxima).reshape(-1, len(current), len(stages))


def _not_exceeded(counts: NDArray[np.int64], candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the candidates, all rows of `counts`, that no other row exceeds."""
    dominating = (counts >= candidates[:, None]).all(axis=2).sum(axis=1)  # at least itself
    maxima: NDArray[np.int64] = candidates[dominating == 1]
    return maxima


def _of_layers(stages: list[int], counts: NDArray[np.int64], layers_per_stage: Sequence[int]) -> tuple[Moment, ...]:
    layers = [layers_per_stage[stage] for stage in stages]
    most_ahead = max(mode.barriers for mode in VocabularyMode) * sum(layers)
    moments = (Moment(*sums) for sums in (counts @ np.array(layers, dtype=np.int64)).tolist())
    seen = {moment._replace(ahead=min(moment.ahead, most_ahead)) for moment in moments}
    maxima: list[Moment] = []
    # By decreasing number of waiting layers: only earlier moments can exceed a moment.
    for moment in sorted(seen, reverse=True):
        if not any(all(map(ge, earlier, moment)) for earlier in maxima):
            maxima.append(moment)
    return tuple(maxima)
