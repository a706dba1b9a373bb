"""Layers that are shared as in Megatron-LM, for tensors without memory (`fakes`).

Tensor parallelism (arXiv 1909.08053) cuts the parameters of every block. With sequence parallelism (arXiv 2205.05198)
each rank keeps its rows of the hidden states between blocks: a product by columns gathers them, saves only the local
rows, and gathers again in the backward; a product by rows reduce-scatters its result. With context parallelism,
attention holds the keys and values of all other ranks while it runs, and in the backward their gradients too (for a
ring and an all-gather alike).

A block gets a placeholder of all rows, a view of a single row; its products read the rank's local rows instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenpipe.errors import InputError
from evenpipe.layers.weight_gradients import Entry, WeightGradients
from evenpipe.memory.exchange import FirstRank
from evenpipe.model import Description, EdgeTensor, ModuleStage, Stage
from evenpipe.model.linear import is_one_product, is_transposed
from evenpipe.tensor.cuts import BlockCut, count_of
from evenpipe.tensor.layers import Block, ModelCut
from evenpipe.tensor.local import divide, make_local
from evenpipe.tensor.operations import sum_product
from evenpipe.work import Done


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """How GPUs share layers."""

    tp: int = 1
    sequence_parallel: bool = True
    fuses_gradients: bool = True
    """Products for weight gradients add to the existing gradients, without allocating tensors."""
    casts: bool = False
    """Products read operands in 8 bits, and keep their input in 8 bits."""
    cp: int = 1
    exchanges_heads: bool = False
    """Context ranks exchange heads for tokens."""
    copies_attention: bool = False
    """The result of attention is kept in the layouts of the kernel and of the next product, if these differ: with
    several sequences, or if heads are exchanged."""
    holds_input: bool = False
    """A stage's input stays until the end of its backward."""

    @property
    def rows(self) -> int:
        """Number of ranks over which the rows of the hidden states are split."""
        return self.tp if self.sequence_parallel else 1


class _Rank(FirstRank):
    """The first tensor rank. Sums are scattered without a copy."""

    def start_scatter(self, partial: Tensor) -> Done:
        return Done(partial.new_empty(partial.shape[0] // self.size, *partial.shape[1:]), [partial])


@dataclass(slots=True, eq=False)
class FusedSum(Entry):
    """The inputs of W for a layer whose weight gradient is added to the existing one, without a separate tensor."""

    weight: nn.Parameter = field(kw_only=True)


@dataclass(slots=True, eq=False)
class _Casts:
    """The operands in 8 bits of a stage's products; products of the same input share a copy."""

    _last: tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None = None

    def saved(self, rows: Tensor) -> Tensor:
        """Return what layers keep of an input: the layout that their weight gradients need."""
        known = None if self._last is None or self._last[0]() is not rows else self._last[1]()
        if known is None:
            known = self.operand(rows)
            self._last = weakref.ref(rows), weakref.ref(known)
        return known

    @staticmethod
    def operand(like: Tensor) -> Tensor:
        """Return one layout of an operand."""
        return like.new_empty(like.shape, dtype=torch.uint8)


@dataclass(slots=True, eq=False)
class _Layer:
    """A linear layer, called instead of its own forward."""

    module: Any
    """`nn.Linear` or `Conv1D`."""
    queue: WeightGradients
    rank: _Rank
    rows: Callable[[], Tensor] | None = None
    """Returns the local rows of its input, if it gathers the others."""
    scatters: bool = False
    casts: _Casts | None = None
    """Casts of products in fp8; None for other products."""

    def __call__(self, hidden: Tensor) -> Tensor:
        result: Tensor = _Product.apply(hidden if self.rows is None else self.rows(), self)
        return result

    def output(self, hidden: Tensor) -> Tensor:
        """Return [batch, tokens, out] for an input [batch, tokens, in]; either may have only local rows."""
        weight = self.module.weight if is_transposed(self.module) else self.module.weight.t()
        if self.scatters:
            batch, length, width = hidden.shape
            rows = sum_product(hidden.reshape(-1, width), weight, self.module.bias, self.rank)
            return rows.view(batch, length // self.rank.size, -1)
        all_rows = hidden if self.rows is None else self._gathered(hidden)
        return functional.linear(all_rows, weight.t(), self.module.bias)

    def input_gradient(self, saved: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of the saved input, and queue or add that of the weight."""
        layouts = () if self.casts is None else (self.casts.operand(gradient), self.casts.operand(gradient))
        gathered_gradient = self._gathered(gradient) if self.scatters else None
        entry = FusedSum((), partial(self._add, saved, gradient), weight=self.module.weight)
        if self.queue.under_way is not None:
            self.queue.add(entry)
            gathered_input = None
        else:
            gathered_input = self._gathered(saved) if self.rows is not None else None
        if self.rows is not None:
            result = self._gathered(saved, gradient)
        result = gradient.new_empty(saved.shape)  # if all rows were gathered: reduce-scattered
        del gathered_gradient, gathered_input, layouts
        return result

    def _add(self, saved: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        gathered = [self._gathered(saved)] if self.rows is not None else []
        gathered += [self._gathered(gradient)] if self.scatters else []
        return ()

    def _gathered(self, rows: Tensor, like: Tensor | None = None) -> Tensor:
        """Return memory for the rows of all ranks. like: tensor of the same dtype; None: `rows`."""
        batch, length, width = rows.shape
        return (rows if like is None else like).new_empty(batch, length * self.rank.size, width)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: _Layer) -> Tensor:
        ctx.layer = layer
        if layer.casts is None:
            ctx.save_for_backward(rows)
            return layer.output(rows)
        ctx.save_for_backward(layer.casts.saved(rows))
        layout = layer.casts.operand(rows)
        result = layer.output(rows)
        del layout
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        input_gradient: Tensor = ctx.layer.input_gradient(saved.detach(), gradient)
        return input_gradient, None


@dataclass(slots=True)
class _Input:
    """The local rows that a block gets, while it runs."""

    block: Block
    ranks: int
    _rows: Callable[[], Tensor | None] = lambda: None

    def replace(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The hook before the block: replace the local rows by the placeholder of all rows."""
        hidden = self.block.hidden
        self._rows = weakref.ref(next(args[key] if isinstance(key, int) else kwargs[key] for key in hidden))
        return (
            tuple(self._placeholder(value) if index in hidden else value for index, value in enumerate(args)),
            {key: self._placeholder(value) if key in hidden else value for key, value in kwargs.items()},
        )

    def _placeholder(self, rows: Tensor) -> Tensor:
        batch, length, width = rows.shape
        return rows.detach()[:, :1].expand(batch, length * self.ranks, width)

    def rows(self) -> Tensor:
        """The local rows."""
        rows = self._rows()
        assert rows is not None
        return rows


def share(
    description: Description,
    stage: Stage | ModuleStage,
    names: Iterable[str],
    layout: MegatronLayout,
    queue: WeightGradients,
    *,
    cut: ModelCut | None,
) -> None:
    """Make a stage, which has one rank's parameters, compute as this rank does.

    Args:
        names: names of its layers.
        queue: queue of weight gradients between I and W.
        cut: how layers are cut over tensor ranks; None for a single rank.
    Raises:
        InputError: a part of a layer cannot be cut.
    """
    products: dict[nn.Module, _Layer] = {}
    rank, casts = _Rank(layout.rows), _Casts() if layout.casts else None
    for of_layer in names:
        layer, index = stage.get_submodule(of_layer), int(of_layer.rpartition(".")[2])
        for name, block in {} if cut is None else cut.blocks_of(index).items():
            module = layer.get_submodule(name)
            if block.cut is None:
                raise InputError(
                    f"tp: {layout.tp}, but in Megatron-LM layers cannot be shared that have {name}, which cannot be"
                    f" cut: {block.reason or 'it mixes tokens'}; expected tp = 1, or kernels 'transformers' or 'fused'"
                )
            count = count_of(module, block.cut.groups[0])
            if layout.rows > 1 and not _is_of_matrices(module, block.cut):
                make_local(module, block.cut, rank, block.hidden, groups=count)
                continue
            divide(module, block.cut, layout.tp, count)
            if layout.rows > 1:
                products |= _of_block(module, block, rank, queue)
        for linear in filter(is_one_product, layer.modules() if layout.fuses_gradients else ()):
            products.setdefault(linear, _Layer(linear, queue, rank))
    for linear, product in products.items():
        product.casts = casts
        linear.forward = product  # type: ignore[assignment]
    if isinstance(stage, Stage):
        _leave_out_ends(stage, description.structure.last_parameters)


def _is_of_matrices(module: nn.Module, cut: BlockCut) -> bool:
    """Return whether a block consists only of matrices cut by columns and one cut by rows. Otherwise, as with experts,
    it gathers its input once, and reduce-scatters its result."""
    linear = {key for key, child in module.named_modules() if is_one_product(child)}
    split = {key.removesuffix(".weight") for group in cut.groups for key in group.splits}
    return cut.sums_at is not None and linear <= split


def _of_block(module: nn.Module, block: Block, rank: _Rank, queue: WeightGradients) -> dict[nn.Module, _Layer]:
    """Return the products of a block, and make the block get the placeholder from now on."""
    cut, block_input = block.cut, _Input(block, rank.size)
    assert cut is not None
    module.register_forward_pre_hook(block_input.replace, with_kwargs=True)
    linear = {key: child for key, child in module.named_modules() if is_one_product(child)}
    return {
        child: _Layer(child, queue, rank, scatters=True)
        if key == cut.sums_at
        else _Layer(child, queue, rank, block_input.rows)
        for key, child in linear.items()
    }


def _leave_out_ends(stage: Stage, last_parameters: Iterable[str]) -> None:
    """Make a stage compute nothing that belongs to other stages: Megatron-LM's stages have only their own modules."""

    def stand_in(received: Tensor, form: EdgeTensor) -> Tensor:
        batch, length, width = received.shape
        return received.detach()[:, :1].expand(batch, length * (1 if stage.is_first else stage.tensor_ranks), width)

    stage.make_stand_in = stand_in  # type: ignore[method-assign]
    for name in () if stage.is_last else last_parameters:
        stage.whole.get_submodule(name.rpartition(".")[0]).forward = _identity  # type: ignore[assignment]


def _identity(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden
