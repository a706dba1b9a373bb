"""For all tests.

Where there is no GPU, Triton interprets its kernels (it looks when a kernel is defined). An example of hypothesis may
take its time, since a busy machine is no fault of the code. No test asks the hub.
"""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

pytest_plugins = ["sampling"]

settings.register_profile("evenpipe", deadline=None)
settings.load_profile("evenpipe")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


GIB_PER_WORKER = 3
"""With the processes that its tests start."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One for each core, as far as there is memory."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(gib / GIB_PER_WORKER)))


def pytest_collection_finish() -> None:
    """Thousands of tests and all modules stay to the end: no garbage collection has to look through them again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton calls all of it leaked when Python ends


@pytest.fixture(scope="module")
def own_fork_server() -> Iterator[None]:
    """A fork server for a module alone: one that was started before has not imported what its processes need."""
    multiprocessing.forkserver._forkserver._stop()
    yield
    multiprocessing.forkserver._forkserver._stop()
