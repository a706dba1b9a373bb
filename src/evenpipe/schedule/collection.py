"""Python's garbage collector, put aside while something large is built that is all kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Nothing that is built here is garbage. To look through all of it, again and again as it grows, would take as long
    as some of the work. Also a decorator: `@collecting_nothing()`."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
