"""Which tokens of a microbatch count, and which of their targets one shard owns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evenpipe.errors import InputError
from evenpipe.vocabulary.shards import Shard


@dataclass(frozen=True, slots=True)
class Owned:
    """Tokens whose target a shard owns: rows (ascending) among the tokens at hand, and columns in the shard."""

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True, slots=True)
class Targets:
    """The labels of a microbatch as one shard sees them. "Valid" tokens are those that are not ignored."""

    tokens: int
    """All tokens of the microbatch."""
    valid_tokens: int
    valid: Tensor | None
    """Positions of the valid tokens, ascending; None when all are valid."""
    owned: Owned
    """`rows` count valid tokens only."""
    blocks: tuple[int, ...]
    """`owned` up to `blocks[k]` belongs to the first k blocks of valid tokens."""
    block: int
    """Valid tokens per block."""

    def owned_in_block(self, number: int) -> Owned:
        """The owned targets of one block of valid tokens, rows counted from the block's first."""
        part = slice(self.blocks[number], self.blocks[number + 1])
        return Owned(self.owned.rows[part] - number * self.block, self.owned.columns[part])

    def select(self, values: Tensor) -> Tensor:
        """[tokens, ...] -> [valid tokens, ...]."""
        return values if self.valid is None else values.index_select(0, self.valid)

    def spread(self, values: Tensor) -> Tensor:
        """[valid tokens, ...] -> [tokens, ...], zero at ignored tokens."""
        if self.valid is None:
            return values
        return values.new_zeros(self.tokens, *values.shape[1:]).index_copy_(0, self.valid, values)


def find_targets(labels: Tensor, shard: Shard, ignore_index: int, block: int, torch_device: torch.device) -> Targets:
    """Sort the tokens of a microbatch; indices end up on `torch_device`.

    Sizes are read where the labels are, so labels on the host cost no synchronisation with a GPU.
    Raises InputError for a label that is neither a token of the vocabulary nor `ignore_index`.
    """
    tokens = labels.shape[0]
    is_valid = labels != ignore_index
    valid: Tensor | None = None
    if not bool(is_valid.all()):
        valid = is_valid.nonzero().squeeze(1)
        labels = labels[valid]
    if labels.numel():
        low, high = (int(value) for value in torch.aminmax(labels))
        if low < 0 or high >= shard.vocabulary:
            raise InputError(
                f"Label {low if low < 0 else high} is neither a token (0 to {shard.vocabulary - 1})"
                f" nor ignore_index ({ignore_index})."
            )
    rows = ((labels >= shard.start) & (labels < shard.stop)).nonzero().squeeze(1)
    valid_tokens = labels.shape[0]
    block = max(1, min(block, valid_tokens))
    ends = torch.arange(0, valid_tokens + block, block, device=labels.device)
    return Targets(
        tokens=tokens,
        valid_tokens=valid_tokens,
        valid=None if valid is None else valid.to(torch_device, non_blocking=True),
        owned=Owned(
            rows.to(torch_device, non_blocking=True), (labels[rows] - shard.start).to(torch_device, non_blocking=True)
        ),
        blocks=tuple(int(end) for end in torch.searchsorted(rows, ends).tolist()),
        block=block,
    )
