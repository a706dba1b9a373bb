"""Tells transformers whether rows contain several sequences, where this is known without reading values.

Without position ids a model's forward uses 0, 1, 2, ... Without a mask, transformers then reads these values to find
sequences that share a row, and the host waits for the GPU: once or twice in every forward of a stage. No argument of a
forward prevents this and still leaves the mask to the attention's own kernel. And for a part of a row the result would
be wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from torch import Tensor
from transformers import masking_utils

_answer: ContextVar[Callable[[Tensor], Tensor | None] | None] = ContextVar("which rows are packed", default=None)


@contextmanager
def packed_as(answer: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Tell transformers, inside this context, which tokens of a row belong to the same sequence. None: all of them."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


def nothing_packed() -> AbstractContextManager[None]:
    """Make transformers assume, inside this context, that no row contains several sequences."""
    return packed_as(lambda position_ids: None)


def _install() -> None:
    find = masking_utils.find_packed_sequence_indices

    @functools.wraps(find)
    def find_unless_known(position_ids: Tensor) -> Tensor | None:
        answer = _answer.get()
        return find(position_ids) if answer is None else answer(position_ids)

    masking_utils.find_packed_sequence_indices = find_unless_known


_install()
