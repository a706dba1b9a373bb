"""Runs S, C and T of a device under the tracker, on tensors without memory.

They are the functions that the runtime calls (`runtime/vocabulary_layers.py`), in its order. Products, kernels and
lists of targets are replaced by functions that allocate the same memory as those of a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from evenpipe.vocabulary import (
    Buffers,
    LossOptions,
    OutputState,
    Shard,
    backward_shard,
    combination,
    combine,
    forward_shard,
    hidden_gradient,
    merge,
    output,
    products,
    state,
)
from evenpipe.vocabulary.buffers import aligned
from evenpipe.vocabulary.kernels import plain, triton_kernels
from evenpipe.vocabulary.state import Rooms
from evenpipe.vocabulary.targets import Owned, Targets, starts_of_parts

from .bytes import OutputPeaks, VocabularyBytes
from .emulation import replaced
from .exchange import FirstRank
from .fakes import without_memory
from .tracker import Span, Tracker

Machine = Literal["gpu", "cpu", "cpu without bf16"]
""""gpu": products write into their accumulators, Triton kernels process them, and the allocator reuses memory; "cpu":
bf16 products have bf16 results; "cpu without bf16": bf16 products are computed in fp32, in pieces."""


Passes = Literal["S C T", "S T", "F B", "F I W"]
""""S C T": one barrier; "S T": two barriers; otherwise the layer is part of the last stage's passes."""


def this_cpu() -> Machine:
    """Return the kind of machine that this process runs on."""
    return "cpu" if products.cpu_has_bf16() else "cpu without bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayer:
    """One shard of the output layer, and one microbatch."""

    passes: Passes
    shard: Shard
    shards: int
    """Number of shards whose statistics are gathered."""
    ranks: int
    """Number of tensor ranks that each hold a part of the hidden states, and of their gradient."""
    tokens: int
    labelled: int
    """Tokens that have a label."""
    owned: int
    """Tokens whose label is in the shard."""
    hidden_size: int
    dtype: torch.dtype
    """Of hidden states and products."""
    bias: bool
    options: LossOptions
    machine: Machine


@cache
def output_bytes(layer: OutputLayer) -> VocabularyBytes:
    """Return the bytes of the output layer, without those of its parameters."""
    with without_memory() as tracker, _machine(layer):
        return _Bench(layer, tracker).trace()


class _Bench:
    def __init__(self, layer: OutputLayer, tracker: Tracker) -> None:
        self._layer, self._tracker = layer, tracker
        self._exchange = None if layer.ranks == 1 else FirstRank(layer.ranks)
        self._buffers = BuffersOfGpu() if layer.machine == "gpu" else Buffers()
        self._labels, self._token_weights = torch.empty(layer.tokens, dtype=torch.int64), torch.empty(layer.tokens)
        rows, wide = layer.shard.rows, products.accumulator_dtype(layer.dtype)
        self._weight, self._gradient = (
            torch.empty(rows, layer.hidden_size, dtype=dtype) for dtype in (layer.dtype, wide)
        )
        self._bias = torch.empty(rows, dtype=layer.dtype) if layer.bias else None
        self._bias_gradient = torch.empty(rows, dtype=wide) if layer.bias else None

    def trace(self) -> VocabularyBytes:
        """Return the bytes of a microbatch that reuses the buffers of an earlier one."""
        first = self._microbatch()
        return self._microbatch() if self._buffers.free else first

    def _microbatch(self) -> VocabularyBytes:
        layer, tracker, initial = self._layer, self._tracker, self._tracker.live
        hidden = torch.empty(layer.tokens // layer.ranks, layer.hidden_size, dtype=layer.dtype)
        hidden_bytes = hidden.nbytes
        with tracker.span() as output_span:
            statistics, saved = self._output(hidden)
            del hidden
        statistics_bytes = statistics.nbytes
        stored = tracker.live - initial - statistics_bytes
        exponentials = _bytes_of(tensor for tensor in (saved.exponentials, saved.derivative) if tensor is not None)
        table = statistics[None] if layer.shards == 1 else statistics.new_empty(layer.shards, *statistics.shape)
        with tracker.span() as combine_span:
            combined = combine(table, self._token_weights, self._labels, layer.options, layer.shard.vocabulary)
        del statistics, table
        gradient_span, dx = Span(0), None
        if layer.passes in ("S C T", "F I W"):
            with tracker.span() as gradient_span:
                dx = self._scattered(hidden_gradient(saved, combined, self._weight))
        with tracker.span() as backward_span:
            full_dx = backward_shard(saved, combined, self._weight, self._gradient, self._bias_gradient)
            dx = self._scattered(full_dx) if full_dx is not None else dx
        assert dx is not None
        gradient = dx.nbytes
        free = _bytes_of(self._buffers.free)
        handed_on = exponentials if free else 0
        return VocabularyBytes(
            hidden=hidden_bytes if layer.passes in ("S C T", "S T") else 0,
            stored=stored,
            product=gradient - gradient_span.retained if layer.passes == "S C T" else 0,
            handed_on=handed_on,
            room=free - handed_on,
            own_statistics=statistics_bytes,
            statistics=statistics_bytes * layer.shards if layer.passes in ("S C T", "S T") else 0,
            combined=combine_span.retained,
            gradient=gradient,
            peaks=OutputPeaks(
                output=output_span.above,
                combine=combine_span.above,
                gradient=gradient_span.above,
                backward=0 if layer.passes == "F I W" else backward_span.above,
                weight=backward_span.above if layer.passes == "F I W" else 0,
            ),
        )

    def _output(self, hidden: Tensor) -> tuple[Tensor, OutputState]:
        layer = self._layer
        gathered = hidden if self._exchange is None else self._exchange.gather(hidden)  # live until the end
        statistics, saved = forward_shard(
            gathered,
            self._weight,
            self._bias,
            self._labels,
            layer.shard,
            layer.options,
            layer.passes == "S C T",
            buffers=self._buffers,
        )
        return statistics if self._exchange is None else merge(self._exchange.table(statistics), layer.options), saved

    def _scattered(self, gradient: Tensor) -> Tensor:
        return gradient if self._exchange is None else self._exchange.scatter(gradient)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


# --- what a machine allocates ----------------------------------------------------------------------------------------


class BuffersOfGpu(Buffers):
    """Buffers of a GPU, where the allocator keeps free memory, and rows are aligned to vectors."""

    def give(self, *tensors: Tensor | None) -> None:
        pass

    @staticmethod
    def _distance(columns: int, like: Tensor) -> int:
        return aligned(columns)


@contextmanager
def _machine(layer: OutputLayer) -> Iterator[None]:
    """Inside the context, the functions of the output layer allocate as they do on the layer's machine."""
    in_blocks = output.rows_per_block
    changes: list[tuple[Any, str, Any]] = [
        (output, "find_targets", partial(_targets, layer)),
        (plain, "_parts_of_logits", partial(_first_of, plain._parts_of_logits)),
        *((module, "to_device", lambda values, _: values) for module in (combination, triton_kernels)),
    ]
    if layer.machine == "gpu":
        changes += [
            (output, "rows_per_block", lambda *sizes, **kwargs: in_blocks(*sizes, **{**kwargs, "on_gpu": True})),
            (output, "choose", _kernels),
            (triton_kernels, "launch", _nothing),
            (plain, "cached_rows", lambda rows, _: rows),
            (products, "_multiplies_natively", lambda _: False),
        ]
        if layer.dtype == torch.bfloat16:
            changes += [
                (products, "_widens", lambda _: False),
                (output, "logits_product", _nothing),
                (output, "weight_product", _nothing),
                (state, "hidden_product", _nothing),
            ]
    else:
        changes += [(products, "cpu_has_bf16", lambda: layer.machine == "cpu")]
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(replaced(*change))
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for functions that write into existing tensors."""


def _first_of(
    parts: Callable[..., Any], rooms: Rooms, output_state: OutputState, *arguments: Any, **kwargs: Any
) -> Any:
    """Process only the first part of a block of logits: all parts are alike."""
    tokens, columns = rooms.logits.shape
    rows = slice(output_state.kernels.tokens_at_once(tokens, columns, rooms.logits))
    derivative = None if rooms.derivative is None else rooms.derivative[rows]
    first = Rooms(rooms.logits[rows], rooms.exponentials[rows], derivative, rooms.bias)
    return parts(first, output_state, *arguments, **kwargs)


def _kernels(options: LossOptions, like: Tensor) -> plain.Kernels:
    return plain.Kernels() if options.kernels == "torch" else triton_kernels.TritonKernels()


def _targets(layer: OutputLayer, *_: Any, block: int, part: int, by_column: bool) -> Targets:
    """Return the result of `find_targets` for labels that are spread evenly over the tokens; on a GPU all lists are
    copied at once."""
    tokens, count = layer.labelled, layer.owned
    sizes = [tokens] * (tokens < layer.tokens) + [tokens] * by_column + [count, count]
    if layer.machine == "gpu":
        rooms = list(map(aligned, sizes))
        made = torch.empty(sum(rooms), dtype=torch.int64).split(rooms)
    else:
        made = tuple(torch.empty(size, dtype=torch.int64) for size in sizes)
    lists = iter([room[:size] for room, size in zip(made, sizes, strict=True)])
    starts = [] if by_column else starts_of_parts(tokens, max(1, block), max(1, part))
    return Targets(
        tokens=layer.tokens,
        valid_tokens=tokens,
        valid=next(lists) if tokens < layer.tokens else None,
        column=next(lists) if by_column else None,
        owned=Owned(next(lists), next(lists)),
        ends=tuple(count * start // max(1, tokens) for start in starts),
        starts=starts,
    )
