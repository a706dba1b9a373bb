"""How the times of passes differ between the slices of a sequence, from traces of steps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from evenpipe.schedule import Kind
from evenpipe.schedule.costs import LAYERS
from evenpipe.schedule.trace import Trace

_BY_TOKENS = (Kind.S, Kind.T, Kind.W)
"""Passes whose time depends on the number of tokens only: the first of these kinds that was measured gives the factors
of all other kinds. W is not exact, because it also adds to gradients once per slice."""


def slice_factors(traces: Sequence[Trace], tokens: Sequence[int] = ()) -> dict[str, Any]:
    """Return `Costs.slices`: factors on the mean time of each kind of pass, by slice; empty for whole sequences.

    tokens: of each slice, if known; otherwise estimated from the vocabulary passes, or from W.
    """
    slices = traces[0].program.slices
    if slices == 1:
        return {}
    times: dict[Kind, list[list[float]]] = defaultdict(lambda: [[] for _ in range(slices)])
    for trace in traces:
        for row in trace.devices:
            for entry in row.passes:
                if not entry.item.parts and entry.item.microbatch is not None:
                    times[entry.item.kind][entry.item.slice].append(entry.end - entry.start)
    factors = {
        kind: _relative(list(map(statistics.fmean, by_slice))) for kind, by_slice in times.items() if all(by_slice)
    }
    result = {name: factors[Kind(name)] for name in LAYERS if Kind(name) in factors}
    known = next((factors[kind] for kind in _BY_TOKENS if kind in factors), None)
    if tokens:
        known = _relative([float(count) for count in tokens])
    return result if known is None else {**result, "tokens": known}


def _relative(values: Sequence[float]) -> tuple[float, ...]:
    mean = statistics.fmean(values)
    return tuple(value / mean if mean else 1.0 for value in values)
