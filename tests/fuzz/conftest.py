"""Lets the tests of this folder import its programs, the tiny models and the random orders, in any import mode."""

import multiprocessing.forkserver
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for folder in ("fuzz", "model", "multiprocess", "train"):
    if (path := str(Path(__file__).parent.parent / folder)) not in sys.path:
        sys.path.insert(0, path)


@pytest.fixture(scope="module")
def own_fork_server() -> Iterator[None]:
    """One that was started before has not imported what these cases need."""
    multiprocessing.forkserver._forkserver._stop()
    yield
    multiprocessing.forkserver._forkserver._stop()
