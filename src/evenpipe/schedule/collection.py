"""Pause Python's garbage collector while building something large."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Pause garbage collection: nothing built here is garbage, and scanning it repeatedly would take as long as some of
    the work. Also a decorator: `@collecting_nothing()`."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
