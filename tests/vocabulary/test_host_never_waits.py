"""Nothing of E, G, S, C and T waits for a GPU: run on torch's "meta" device, which has no values to wait for."""

from __future__ import annotations

import itertools

import pytest
import torch
from blocking_copies import BlockingCopies

from evenpipe.parallel.parameters import Matrix
from evenpipe.runtime.batch import Batch, cut
from evenpipe.runtime.inputs import Inputs
from evenpipe.runtime.vocabulary_layers import EmbeddingShard, OutputShard
from evenpipe.vocabulary import LossOptions, split

VOCABULARY, HIDDEN, PARTS, PADDING = 60, 8, 3, 2


def batch_of(sequences: int, tokens: int, *, torch_device: str) -> Batch:
    ids = torch.randint(VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(0))
    ids[:, -3:] = PADDING
    labels = ids.masked_fill(ids == PADDING, -100)
    return cut(Inputs(ids, labels), microbatches=2, dtype=torch.float32, torch_device=torch_device)


def output_shard(options: LossOptions, torch_device: str, *, one_barrier: bool) -> OutputShard:
    shard = split(VOCABULARY, PARTS)[0]
    rows = torch.nn.Parameter(torch.ones(shard.rows, HIDDEN, device=torch_device))
    return OutputShard(Matrix(rows, torch.float32), None, shard, options, one_barrier=one_barrier)


def step(layer: OutputShard, batch: Batch, torch_device: str, *, one_barrier: bool, gradients: bool = True) -> None:
    layer.clear()
    for index, microbatch in enumerate(batch.microbatches):
        hidden = torch.ones(microbatch.tokens, HIDDEN, device=torch_device)
        statistics = layer.forward(hidden, microbatch, index, gradients=gradients)
        layer.combine(statistics.expand(PARTS, -1, -1), microbatch, index, gradients=gradients)
        if gradients and one_barrier:
            layer.hidden_gradient(index)
        if gradients:
            layer.backward(index)


def test_the_output_layer() -> None:
    each = LossOptions(), LossOptions(keep="nothing", label_smoothing=0.1, soft_cap=5.0)
    for options, one_barrier, gradients in itertools.product(each, (True, False), (True, False)):
        layer, batch = output_shard(options, "meta", one_barrier=one_barrier), batch_of(4, 9, torch_device="meta")
        with BlockingCopies() as copies:
            step(layer, batch, "meta", one_barrier=one_barrier, gradients=gradients)
        assert copies.copies and not copies.blocking, (options, one_barrier, gradients)


def test_the_barrier_copies_nothing() -> None:
    """S has moved the labels."""
    layer, batch = output_shard(LossOptions(), "meta", one_barrier=True), batch_of(4, 9, torch_device="meta")
    layer.clear()
    microbatch = batch.microbatches[0]
    statistics = layer.forward(torch.ones(microbatch.tokens, HIDDEN, device="meta"), microbatch, 0, gradients=True)
    with BlockingCopies() as copies:
        layer.combine(statistics[None], microbatch, 0, gradients=True)
    assert not copies.copies


@pytest.mark.parametrize("parts", [1, PARTS])
def test_the_embedding(parts: int) -> None:
    shards, batch = split(VOCABULARY, parts), batch_of(4, 9, torch_device="meta")
    for part, shard in enumerate(shards):
        rows = torch.nn.Parameter(torch.ones(shard.rows, HIDDEN, device="meta"))
        layer = EmbeddingShard(Matrix(rows, torch.float32), shards, part, PADDING)
        with BlockingCopies() as copies:
            layer.begin(batch)
        assert not copies.copies
        with BlockingCopies() as copies:  # each microbatch, when it is reached
            assert all(layer.counts(index) for index in range(len(batch.microbatches)))
        assert copies.copies and not copies.blocking
        with BlockingCopies() as copies:
            for index, microbatch in enumerate(batch.microbatches):
                placed = layer.place(torch.ones(microbatch.tokens, HIDDEN, device="meta"), index)
                assert layer.pick(placed, index).shape == placed.shape
                layer.add_gradient(layer.rows(index), index)
        assert not copies.copies


def test_free_memory_does_not_outlive_its_use() -> None:
    """What S and T of a large batch hand on is let go when a smaller batch or an evaluation begins."""
    layer = output_shard(LossOptions(), "cpu", one_barrier=True)

    def free_elements(sequences: int, *, gradients: bool = True) -> int:
        batch = batch_of(sequences, 9, torch_device="cpu")
        step(layer, batch, "cpu", one_barrier=True, gradients=gradients)
        return sum(room.numel() for room in layer._buffers._free)

    rows = split(VOCABULARY, PARTS)[0].rows
    large = free_elements(8)
    assert large >= 4 * 9 * rows
    memory = [room.data_ptr() for room in layer._buffers._free]
    assert free_elements(8) == large and [room.data_ptr() for room in layer._buffers._free] == memory, "used again"
    assert free_elements(2) <= 9 * rows
    assert free_elements(2, gradients=False) <= 9 * rows
    assert free_elements(8) == large
