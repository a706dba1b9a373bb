"""Run Python's garbage collector less often while building something large."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLD = 1_000_000
"""New objects before the collector runs, instead of 700 (0: it never runs): some steps of 32 devices."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Collect garbage rarely: few of the objects built here are garbage, and scanning them repeatedly would take a
    considerable share of the time. Also a decorator: `@collecting_rarely()`."""
    thresholds = gc.get_threshold()
    if 0 < thresholds[0] < _THRESHOLD:
        gc.set_threshold(_THRESHOLD, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
