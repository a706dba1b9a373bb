"""A fork server for random pipelines alone."""

import multiprocessing.forkserver
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def own_fork_server() -> Iterator[None]:
    """One that was started before has not imported what these cases need."""
    multiprocessing.forkserver._forkserver._stop()
    yield
    multiprocessing.forkserver._forkserver._stop()
