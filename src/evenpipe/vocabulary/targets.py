"""Which tokens of a microbatch count, and which of their targets a shard owns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenpipe.errors import InputError
from evenpipe.vocabulary.copies import to_device_together
from evenpipe.vocabulary.shards import Shard, outside

ELSEWHERE, IGNORED = -1, -2
"""Replace a column: the target belongs to another shard; the token has no label."""


@dataclass(frozen=True, slots=True)
class Owned:
    """Tokens whose target a shard owns: their rows, and the targets' columns in the shard."""

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True, slots=True)
class Targets:
    """The labels of a microbatch for one shard. "Valid" tokens are those that are not ignored.

    Operations of torch need lists of owned targets in the order of tokens; Triton's kernels need a column for every
    token, and the lists in the order of columns, so that one program adds up all tokens of a row.
    """

    tokens: int
    """All tokens of the microbatch."""
    valid_tokens: int
    valid: Tensor | None
    """Positions of the valid tokens, ascending; None if all count as valid."""
    owned: Owned
    """`rows` count only valid tokens."""
    column: Tensor | None
    """[valid tokens] of each token's target in the shard, ELSEWHERE or IGNORED; None for operations of torch."""
    ends: tuple[int, ...] = ()
    """`owned` up to `ends[k]` belongs to the first `starts[k]` valid tokens. Empty for Triton's kernels."""
    starts: Sequence[int] = ()

    def owned_between(self, start: int, stop: int) -> Owned:
        """Return the owned targets of the valid tokens from `start` to `stop`, both in `starts`; rows count from
        `start`."""
        first, last = (self.ends[bisect_left(self.starts, token)] for token in (start, stop))
        return Owned(self.owned.rows[first:last] - start, self.owned.columns[first:last])

    def select(self, values: Tensor) -> Tensor:
        """Convert [tokens, ...] to [valid tokens, ...]."""
        return values if self.valid is None else values.index_select(0, self.valid)

    def spread(self, values: Tensor) -> Tensor:
        """Convert [valid tokens, ...] to [tokens, ...], zero at ignored tokens."""
        if self.valid is None:
            return values
        return values.new_zeros(self.tokens, *values.shape[1:]).index_copy_(0, self.valid, values)


def starts_of_parts(tokens: int, block: int, part: int) -> list[int]:
    """Return the starts of the parts of `part` tokens, into which the blocks of `block` tokens are cut; and the end."""
    return [start for first in range(0, tokens, block) for start in range(first, min(tokens, first + block), part)] + [
        tokens
    ]


def find_targets(
    labels: Tensor,
    shard: Shard,
    ignore_index: int,
    torch_device: torch.device,
    *,
    block: int = 0,
    part: int = 0,
    by_column: bool = False,
) -> Targets:
    """Return the targets of a microbatch; indices are on `torch_device`.

    Sizes are read on the device of the labels, so labels on the host cost no synchronisation with a GPU.
    block, part: tokens of the pieces for `owned_between` (see `starts_of_parts`).
    by_column: in the form for Triton's kernels.
    Raises InputError for a label that is neither a token of the vocabulary nor `ignore_index`.
    """
    tokens = labels.shape[0]
    is_valid = labels != ignore_index
    valid: Tensor | None = None
    if not bool(is_valid.all()):
        valid = is_valid.nonzero().squeeze(1)
        labels = labels[valid]
    wrong = outside(labels, shard.vocabulary)
    if wrong is not None:
        raise InputError(
            f"Label {wrong} is neither a token (0 to {shard.vocabulary - 1}) nor ignore_index ({ignore_index})."
        )
    is_owned = (labels >= shard.start) & (labels < shard.stop)
    rows = is_owned.nonzero().squeeze(1)
    columns = labels[rows] - shard.start
    column: Tensor | None = None
    ends: tuple[int, ...] = ()
    starts: list[int] = []
    if by_column:
        column = torch.where(is_owned, labels - shard.start, ELSEWHERE)
        columns, order = torch.sort(columns, stable=True)
        rows = rows[order]
    else:
        starts = starts_of_parts(labels.shape[0], max(1, block), max(1, part))
        ends = tuple(torch.searchsorted(rows, torch.tensor(starts, device=rows.device)).tolist())
    made = [indices for indices in (valid, column, rows, columns) if indices is not None]
    copied = iter(to_device_together(made, torch_device))
    return Targets(
        tokens=tokens,
        valid_tokens=labels.shape[0],
        valid=None if valid is None else next(copied),
        column=None if column is None else next(copied),
        owned=Owned(next(copied), next(copied)),
        ends=ends,
        starts=starts,
    )


def targets_on_device(labels: Tensor, shard: Shard, ignore_index: int) -> Targets:
    """Return the targets in Triton's form for labels that are on the GPU already, without synchronisation.

    Ignored tokens are not removed, since their number is not known on the host: they are marked, and the kernels write
    zeros for them. An invalid label stops the GPU ("device-side assert"), as in torch's cross-entropy.
    """
    ignored = labels == ignore_index
    is_token = (labels >= 0) & (labels < shard.vocabulary)
    torch._assert_async((is_token | ignored).all(), "a label is neither a token of the vocabulary nor ignore_index")
    is_owned = (labels >= shard.start) & (labels < shard.stop) & ~ignored
    column = torch.where(is_owned, labels - shard.start, ELSEWHERE).masked_fill_(ignored, IGNORED)
    columns, rows = torch.sort(column, stable=True)
    return Targets(
        tokens=labels.shape[0], valid_tokens=labels.shape[0], valid=None, owned=Owned(rows, columns), column=column
    )
