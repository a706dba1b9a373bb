"""Tells transformers that no row contains several sequences if that is known without reading values.

Without position ids a model's forward uses 0, 1, 2, ... Without a mask, transformers then reads these values to find
sequences that share a row, and the host waits for the GPU: once or twice in every forward of a stage. No argument of a
forward prevents this and still leaves the mask to the attention's own kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor
from transformers import masking_utils

_known: ContextVar[bool] = ContextVar("nothing is packed", default=False)


@contextmanager
def nothing_packed() -> Iterator[None]:
    """Make transformers assume, inside this context, that no row contains several sequences."""
    before = _known.set(True)
    try:
        yield
    finally:
        _known.reset(before)


def _install() -> None:
    find = masking_utils.find_packed_sequence_indices

    @functools.wraps(find)
    def find_unless_known(position_ids: Tensor) -> Tensor | None:
        return None if _known.get() else find(position_ids)

    masking_utils.find_packed_sequence_indices = find_unless_known


_install()
