"""Choose the shortest of several V-schedules, unchanged and rescheduled for given pass times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .v_shape import Rows, StepTimes, device_of_step, spans_and_makespan
from .v_shape_list import Rescheduling

LAID_OUT_ANEW = 16
"""Number of candidates, the shortest unchanged ones, that are also rescheduled."""
EFFORT = 600_000
"""Most moves that are rescheduled: with long candidates, fewer of them."""
FINALISTS = 4
"""Candidates that are compared with all microbatches, if there are many."""


Base = Callable[[int], Rows]
"""A V-schedule of any number of microbatches."""


_Found = tuple[tuple[float, float], Base, Rescheduling | None, Rows]
"""A candidate, with its span and its makespan."""

LAYOUTS = (
    Rescheduling(0.0, True),
    Rescheduling(0.0, False),
    Rescheduling(0.5, True),
    Rescheduling(0.5, False),
    Rescheduling(1.0, False),
    *(Rescheduling(share=share) for share in (0.5, 0.75, 1.0, 1.5)),
    Rescheduling(share=1.0, rounds=2),
)
"""Each is the best for some times, which cannot be predicted."""


def shortest(
    bases: Sequence[Base], microbatches: int, limits: Sequence[int], times: StepTimes, enough: float | None = None
) -> Rows:
    """Return the rows with the shortest span, then the shortest makespan, of all bases as they are and rescheduled,
    within `limits`.

    With `enough`, bases are not rescheduled, and the first one with no more bubble than that ends the search. A first
    comparison uses few microbatches; its winners and the first base are then compared with all microbatches.
    """
    few = min(microbatches, 3 * len(limits))
    seen: set[tuple[tuple[tuple[int, int], ...], ...]] = set()
    found: list[_Found] = []
    for base in bases:
        rows = base(few)
        key = tuple(map(tuple, rows))
        if key in seen:
            continue
        seen.add(key)
        found.append((_length(rows, times), base, None, rows))
        if enough is not None and found[-1][0][0] <= few * _work(times, len(limits)) + enough:
            return base(microbatches)
    found.sort(key=lambda entry: entry[0])
    if enough is None:
        affordable = EFFORT // (6 * few * len(limits) * len(LAYOUTS))
        for _, base, _, rows in found[: min(LAID_OUT_ANEW, max(FINALISTS, affordable))]:
            for rescheduling in LAYOUTS:
                found.sort(key=lambda entry: entry[0])
                anew = rescheduling.rows(rows, limits, times, _longest_of_finalists(found))
                if anew is not None:
                    found.append((_length(anew, times), base, rescheduling, anew))
        found.sort(key=lambda entry: entry[0])
    if few == microbatches:
        return found[0][3]
    finalists: list[tuple[Base, Rescheduling | None]] = [(base, how) for _, base, how, _ in found[:FINALISTS]]
    finals = []
    for base, how in [*finalists, (bases[0], None)]:
        rows = base(microbatches)
        final = rows if how is None else how.rows(rows, limits, times)
        assert final is not None, "any span will do"
        finals.append(final)
    return min(finals, key=lambda rows: _length(rows, times))


def _longest_of_finalists(found: Sequence[_Found]) -> float:
    """Return the longest span of the finalists so far, of the candidates in the order of their lengths."""
    return (1 + 1e-9) * found[FINALISTS - 1][0][0] if len(found) >= FINALISTS else math.inf


def _length(rows: Rows, times: StepTimes) -> tuple[float, float]:
    spans, makespan = spans_and_makespan(rows, times)
    return max(spans), makespan


def _work(times: StepTimes, devices: int) -> float:
    """Return the work of the busiest device per microbatch."""
    per_device = [0.0] * devices
    for step, time in enumerate(times.steps):
        per_device[device_of_step(devices, step)] += time
    return max(per_device)
