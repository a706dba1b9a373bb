"""Gives a stage under the tracker a piece of its sequences: the mask, and the exchanges of its attention.

The exchanges are the runtime's, between one process and others that do not exist: they allocate memory, but results
have no meaning. The carry that earlier and later slices would leave is filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from evenpipe.attention.blocks import Block
from evenpipe.attention.carry import Carry
from evenpipe.attention.flash import Index, Round, Rounds
from evenpipe.attention.row_context import Alone, Exchange, Keys, Mask, Predicate, RowContext, activated
from evenpipe.memory.pieces import Piece
from evenpipe.parallel.context_ranks import ContextRanks, HeadRanks
from evenpipe.parallel.running import Running
from evenpipe.work import Done


class _FirstOf:
    """The communicator of the first of several processes, without the others."""

    position = 0

    def __init__(self, size: int, measure: Callable[[int], int]) -> None:
        self.members, self._measure = tuple(range(size)), measure
        self.gathered: list[int] = []
        """Bytes of each all-gather's output."""

    def all_gather(self, tensor: Tensor, label: str) -> Done:
        output = tensor.new_empty((len(self.members), *tensor.shape))
        self.gathered.append(self._measure(output.nbytes))
        return Done(output, [output, tensor])

    def reduce_scatter(self, output: Tensor, tensor: Tensor, label: str) -> Done:
        return Done(output, [output, tensor])

    def all_to_all(self, output: Tensor, tensor: Tensor, label: str) -> Done:
        return Done(held=[output, tensor])


@dataclass(eq=False, kw_only=True)
class _ContextOfPiece(RowContext):
    """A row context whose positions have no values, since its tensors have no memory."""

    piece: Piece

    def mask(self, predicate: Predicate, batch: int, *, separate: bool) -> Mask:
        return _MaskOfPiece(self, predicate, batch, separate=separate)


class _MaskOfPiece(Mask):
    """Blocks are computed from the real positions of the piece; evaluating the predicate on them allocates as usual."""

    def _real(self) -> Mask:
        """Return the mask of a row."""
        assert isinstance(self.row_context, _ContextOfPiece)
        row_context = RowContext(*self.row_context.piece.places, self.row_context.exchange, self.row_context.length)
        return Mask(row_context, self._predicate, 1, separate=False)

    @cached_property
    def blocks(self) -> list[Block]:
        with _disable_current_modes():
            blocks = self._real().blocks
        if not self.is_causal:
            for block in blocks:
                self.tensor(block.queries)
        return blocks

    @cached_property
    def rounds(self) -> Rounds | None:
        with _disable_current_modes():
            real = self._real().rounds
            return None if real is None else real._replace(rounds=[self._of_all_rows(round_) for round_ in real.rounds])

    def _of_all_rows(self, round_: Round) -> Round:
        """Return the round for the whole batch, without memory: `Piece.known_positions` counts it."""

        def index(row_index: Index | None) -> Index | None:
            if row_index is None:
                return None
            return Index(*(numbers.new_empty(self._batch * len(numbers), device="meta") for numbers in row_index))

        return round_._replace(queries=index(round_.queries), keys=index(round_.keys))

    @property
    def block_mask(self) -> Any:
        """Nothing: the emulated kernel reads no mask."""
        return None


class PieceBench:
    """Runs a stage on a piece. Must be created inside the mode of the stage's tensors."""

    def __init__(self, piece: Piece, sequences: int, measure: Callable[[int], int]) -> None:
        """measure: maps a number of bytes to the tracker's count."""
        self.piece, self._measure = piece, measure
        self._communicator = _FirstOf(piece.ranks, measure)
        communicator: Any = self._communicator
        self._exchange: Exchange = ContextRanks(communicator, Running()) if piece.gathers else Alone()
        heads = HeadRanks(communicator, Running()) if piece.trades_heads else None
        with _disable_current_modes():
            queries, keys = piece.places
        self._row_context = _ContextOfPiece(
            queries=torch.empty(len(queries), dtype=torch.int64),
            keys=torch.empty(len(keys), dtype=torch.int64),
            exchange=self._exchange,
            length=piece.length,
            heads=heads,
            kernels_of=piece.kernels_of,
            piece=piece,
        )
        self._positions = torch.empty(piece.tokens, dtype=torch.int64).expand(sequences, -1)
        self._carry: Carry | None = None
        self._shapes: dict[int, Keys] = {}
        """Keys and values of each layer's carry, without memory; known after the first forward."""

    def run(self, stage: nn.Module, hidden: Tensor) -> Tensor:
        """Run a forward of the stage."""
        row_context = self._row_context
        if self._carry is not None:
            row_context = replace(row_context, exchange=self._carry.slice(self.piece.index, self._exchange))
        with activated(row_context):
            output: Tensor = stage(hidden, position_ids=self._positions)
        return output

    # --- the carry ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a microbatch: hold the carry of earlier slices."""
        if self.piece.carried:
            self._carry = Carry(self.piece.ends)
            if not self.piece.is_first:
                self._carry._keys = {layer: _like(keys) for layer, keys in self._shapes.items()}

    def turn(self) -> None:
        """Begin a backward: hold the gradients that later slices left in the carry."""
        if self._carry is None:
            return
        if not self._shapes:
            self._shapes = {layer: _on_meta(keys) for layer, keys in self._carry._keys.items()}
        if not self.piece.is_last:
            self._carry._gradients = {layer: _like(keys, wide=True) for layer, keys in self._shapes.items()}

    @property
    def held(self) -> int:
        """Bytes that the carry holds now."""
        if self._carry is None:
            return 0
        tables = (*self._carry._keys.values(), *self._carry._gradients.values())
        return sum(self._measure(tensor.untyped_storage().nbytes()) for table in tables for tensor in table)

    def carried(self, layers: Sequence[nn.Module]) -> tuple[CarriedBytes, ...]:
        """Return the bytes of each layer's carry."""
        sizes = []
        for layer in layers:
            indices = {index for module in layer.modules() if isinstance(index := vars(module).get("layer_idx"), int)}
            tables = [tensor for index in indices if index in self._shapes for tensor in self._shapes[index]]
            wide = sum(self._measure(tensor.numel() * _wide(tensor).itemsize) for tensor in tables)
            sizes.append(CarriedBytes(sum(self._measure(tensor.nbytes) for tensor in tables), wide))
        return tuple(sizes)

    @property
    def gathered(self) -> tuple[int, ...]:
        """Distinct sizes in bytes of the keys and values that a layer gathers."""
        sizes = self._communicator.gathered
        return tuple({sum(pair) for pair in zip(sizes[::2], sizes[1::2], strict=True)})


class CarriedBytes(NamedTuple):
    """Bytes of a layer's carry."""

    keys: int
    gradients: int


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _like(keys: Keys, *, wide: bool = False) -> Keys:
    key, value = (torch.empty(tensor.shape, dtype=_wide(tensor) if wide else tensor.dtype) for tensor in keys)
    return key, value


def _on_meta(keys: Keys) -> Keys:
    with _disable_current_modes():
        key, value = (torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in keys)
    return key, value
