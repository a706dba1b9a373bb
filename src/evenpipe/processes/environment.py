"""Variables of the environment for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def default_variable(name: str, value: str) -> Iterator[None]:
    """Within, a variable of the environment has this value, unless it has another."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
