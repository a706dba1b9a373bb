"""What the devices of an order hold at once, before it has vocabulary passes: by stage, and for a split of the layers.

An order is gone through once (`HeldByStage`). A search asks for many splits of the same order, each of which then
takes one product of small matrices.
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
"""Forwarded stages that wait for B or I, and stages that wait for W."""

TOGETHER = 64
"""Moments that are compared with all others at once."""


class Moment(NamedTuple):
    """Layers of a device between two passes, each as often as for it there are microbatches."""

    waiting: int
    """That wait for B or I."""
    queued: int
    """That wait for W."""
    begun: int
    """That have had B or W, so that their gradients exist; each once."""
    open: int
    """Between the first and the last pass of their stage, for which their parameters are gathered; each once."""
    ahead: int
    """Whose F is still to come; no more of them than two barriers let wait besides."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Activations in flight of an order without vocabulary passes, each of a microbatch or, if sequences are cut, of a
    slice. Lists are per device."""

    stages: tuple[int, ...]
    """Most stage activations."""
    moments: tuple[tuple[Moment, ...], ...]
    """Those that no other one exceeds in all of its numbers."""


class HeldByStage:
    """The same by stage."""

    def __init__(self, order: Order) -> None:
        rows = [list(order.passes(device)) for device in range(order.devices)]
        self._stages = tuple(int(peak_activations(row)) for row in rows)
        self._moments = [_by_stage(row) for row in rows]

    def of(self, layers_per_stage: Sequence[int]) -> InFlight:
        """Return what is in flight if the stages have so many layers."""
        return InFlight(self._stages, tuple(_of_layers(*one, layers_per_stage) for one in self._moments))


def _by_stage(row: Iterable[Pass]) -> tuple[list[int], NDArray[np.int64]]:
    """Return the stages of a row, and the moments that no other one exceeds, as numbers of each stage."""
    parts = list(parts_in(row))
    last = {part.stage: place for place, part in enumerate(parts)}
    stages = [stage for stage in last if stage is not None]
    place_of = {stage: place for place, stage in enumerate(stages)}
    waiting, queued, begun, opened, ahead = now = [[0] * len(stages) for _ in Moment._fields]
    for part in parts:
        if part.kind is Kind.F and part.stage is not None:
            ahead[place_of[part.stage]] += 1
    seen: dict[tuple[int, ...], list[int]] = {}
    for place, part in enumerate(parts):
        assert part.stage is not None
        here, kind = place_of[part.stage], part.kind
        if kind is Kind.F:
            ahead[here] -= 1
        elif kind in WITH_GRADIENTS:
            begun[here] = 1
        waiting[here] += WAITING.get(kind, 0)
        queued[here] += QUEUED.get(kind, 0)
        opened[here] = int(place < last[part.stage])
        # The first of equal moments has the most ahead.
        seen.setdefault((*waiting, *queued, *begun, *opened), [*ahead])
    counts = np.array([(*held, *left) for held, left in seen.items()], dtype=np.int64)
    kept = [_not_exceeded(counts, counts[first : first + TOGETHER]) for first in range(0, len(counts), TOGETHER)]
    return stages, np.concatenate(kept).reshape(-1, len(now), len(stages))


def _not_exceeded(counts: NDArray[np.int64], some: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of some rows of a matrix that no other row exceeds."""
    reaching = (counts >= some[:, None]).all(axis=2).sum(axis=1)  # itself, at least
    alone: NDArray[np.int64] = some[reaching == 1]
    return alone


def _of_layers(stages: list[int], counts: NDArray[np.int64], layers_per_stage: Sequence[int]) -> tuple[Moment, ...]:
    layers = [layers_per_stage[stage] for stage in stages]
    most = max(mode.barriers for mode in VocabularyMode) * sum(layers)
    found = (Moment(*sums) for sums in (counts @ np.array(layers, dtype=np.int64)).tolist())
    seen = {one._replace(ahead=min(one.ahead, most)) for one in found}
    kept: list[Moment] = []
    for one in sorted(seen, reverse=True):  # by falling number of waiting layers: only earlier ones can exceed it
        if not any(all(map(ge, other, one)) for other in kept):
            kept.append(one)
    return tuple(kept)
