"""Times of single passes, measured in one process: what the event model predicts a step from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from evenpipe.model import build_stage, describe, fill_parameters, fill_rows, head_flops, layer_flops
from evenpipe.runtime.batch import Batch, Inputs, cut
from evenpipe.runtime.layout import Layout, ModelCosts, build_layout
from evenpipe.runtime.parameters import Matrix
from evenpipe.runtime.vocabulary_layers import EmbeddingShard, OutputShard
from evenpipe.schedule import Costs
from evenpipe.vocabulary import LossOptions, Shard


def measure_costs(
    config: PreTrainedConfig, mode: str, *, devices: int, input_ids: Tensor, microbatches: int, repetitions: int
) -> Costs:
    """Median seconds of each pass of every device in a vocabulary mode, in this process alone.

    Device after device is built as the runtime builds it; what would come from other devices is made up.
    """
    description = describe(config)
    layout = build_layout(
        devices=devices,
        microbatches=microbatches,
        schedule="1f1b",
        vocabulary=mode,
        model=ModelCosts(layers=tuple(layer_flops(description, input_ids.shape[1])), head=head_flops(description)),
        rows=description.vocabulary_size,
    )
    batch = cut(Inputs(input_ids, input_ids.clone()), microbatches=microbatches, dtype=torch.float32)
    per_device = [_Alone(description, layout, device, batch).measure(repetitions) for device in range(devices)]
    return Costs(**{kind: tuple(times[kind] for times in per_device) for kind in per_device[0]})


class _Alone:
    """The passes of one device without the others."""

    def __init__(self, description, layout: Layout, device: int, batch: Batch) -> None:
        self._batch, self._sharded = batch, layout.sharded
        self._one_barrier = layout.program.barriers == 1
        self._devices, self._width = layout.program.devices, description.hidden_size
        self._is_first, self._is_last = device == 0, device == self._devices - 1
        first, last = layout.layers[device]
        self._stage = build_stage(
            description,
            first,
            last,
            is_first=self._is_first,
            is_last=self._is_last,
            dtype=torch.float32,
            torch_device="cpu",
        )
        fill_parameters(self._stage, description)

        def matrix(name: str, shard: Shard) -> Matrix | None:
            if not shard.rows:
                return None
            rows = fill_rows(description, name, shard.start, shard.stop)
            return Matrix(nn.Parameter(rows), torch.float32)

        embedding = matrix(description.embedding_name, layout.embedding_shards[device])
        shards = layout.embedding_shards if layout.sharded else layout.embedding_shards[:1]
        self._embedding = (
            None if embedding is None else EmbeddingShard(embedding, shards, device if layout.sharded else 0, None)
        )
        head = matrix(description.head_name, layout.head_shards[device])
        self._output = (
            None
            if head is None
            else OutputShard(head, None, layout.head_shards[device], LossOptions(), one_barrier=self._one_barrier)
        )

    def measure(self, repetitions: int) -> dict[str, float]:
        """Median seconds by kind; the first microbatch of each repetition warms up."""
        seconds: dict[str, list[float]] = {}
        for _ in range(repetitions):
            if self._embedding is not None:
                self._embedding.begin(self._batch)
            if self._output is not None:
                self._output.clear()
            for index in range(min(3, len(self._batch.microbatches))):
                for kind, run in self._passes(index).items():
                    started = time.perf_counter()
                    run()
                    if index:
                        seconds.setdefault(kind, []).append(time.perf_counter() - started)
        return {kind: statistics.median(times) for kind, times in seconds.items()}

    def _passes(self, index: int) -> dict[str, Callable[[], None]]:
        passes = {"F": lambda: self._forward(index), "B": lambda: self._backward(index)}
        if not self._sharded:
            return passes
        passes = {"E": lambda: self._embed(index), **passes, "S": lambda: self._softmax(index)}
        if self._one_barrier:
            passes["C"] = lambda: self._combine(index)
        passes["T"] = lambda: self._output_backward(index)
        passes["G"] = lambda: self._embedding_gradient(index)
        return passes

    def _random(self) -> Tensor:
        return torch.randn(*self._batch.microbatches[0].token_ids.shape, self._width)

    def _forward(self, index: int) -> None:
        if self._is_first and not self._sharded:
            rows = self._embedding.place(self._embedding.rows(index), index)
            self._input = rows.view(1, -1, self._width)
        else:
            self._input = self._random()
        self._input.requires_grad_()
        self._hidden = self._stage(self._input)
        if self._is_last and not self._sharded:
            self._softmax(index)
            self._combine(index, with_gradient=False)

    def _backward(self, index: int) -> None:
        if self._is_last and not self._sharded:
            gradient = self._output.backward(index).view_as(self._hidden)
        else:
            gradient = self._random()
        torch.autograd.backward((self._hidden,), (gradient,))
        if self._is_first and not self._sharded:
            rows = self._embedding.pick(self._input.grad.view(-1, self._width), index)
            self._embedding.add_gradient(rows, index)

    def _embed(self, index: int) -> None:
        self._rows = self._embedding.rows(index)

    def _embedding_gradient(self, index: int) -> None:
        self._embedding.add_gradient(self._rows, index)

    def _softmax(self, index: int) -> None:
        hidden = self._hidden.detach().view(-1, self._width)
        microbatch = self._batch.microbatches[index]
        self._statistics = self._output.forward(hidden, microbatch, index, gradients=True)

    def _combine(self, index: int, *, with_gradient: bool = True) -> None:
        shards = self._devices if self._sharded else 1
        table = self._statistics.unsqueeze(0).expand(shards, -1, -1)
        self._output.combine(table, self._batch.microbatches[index], index, gradients=True)
        if with_gradient:
            self._output.hidden_gradient(index)

    def _output_backward(self, index: int) -> None:
        if not self._one_barrier:
            self._combine(index, with_gradient=False)
        self._output.backward(index)
