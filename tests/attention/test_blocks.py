"""Blocks of queries and what they look at are the causal mask: each pair that sees each other stands in one look."""

from __future__ import annotations

import contextlib
import itertools
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import kernel_stand_ins
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from evenpipe.attention import function
from evenpipe.attention import row_context as sight_of_pieces
from evenpipe.attention.blocks import Block, causal_blocks
from evenpipe.attention.places import places_of_ranks
from evenpipe.attention.row_context import Alone, Mask, RowContext, documents_of
from evenpipe.errors import InputError


def pairs(found: list[Block], batch: int, queries: int, keys: int) -> Tensor:
    """Return how many looks each pair stands in, [batch, queries, keys]."""
    counts = torch.zeros(batch, queries, keys, dtype=torch.int64)
    for block in found:
        for look in block.key_ranges:
            part = counts[block.sequences, block.queries, look.keys]
            part += torch.ones(part.shape[1:], dtype=torch.int64).tril() if look.how == "diagonal" else 1
            assert look.how != "diagonal" or part.shape[1] == part.shape[2]
    return counts


def drawn(dice: random.Random) -> RowContext:
    """Return what a pass sees of two rows: some slices of them, on one of some ranks, in their order or any other."""
    ranks, batch = dice.choice([1, 1, 2, 3]), 2
    unit = 1 if ranks == 1 else 2 * ranks
    length = unit * dice.randint(2, 60 // unit)
    documents = valid = None
    positions = torch.arange(length).expand(batch, -1).clone()
    if dice.random() < 0.6:
        for row in range(batch):
            for start in dice.sample(range(1, length), min(length - 1, dice.randint(0, 4))):
                positions[row, start:] -= positions[row, start].item()
        documents = documents_of(positions)
    elif dice.random() < 0.5:
        valid = torch.arange(length) < torch.tensor([[length], [dice.randint(1, length)]])
        valid = valid.flip(1) if dice.random() < 0.5 else valid
    ends = [unit * end for end in sorted(dice.sample(range(1, length // unit + 1), min(length // unit, 3)))]
    known = [places_of_ranks(start, end, ranks, positions) for start, end in zip((0, *ends), ends, strict=False)]
    own = known[-1][dice.randrange(ranks)]
    keys = torch.cat([places for slice_ in known for places in slice_])
    if dice.random() < 0.2:
        keys = keys[torch.tensor(dice.sample(range(len(keys)), len(keys)))]
    return RowContext(own, keys, Alone(), length, positions, documents, valid, separate=documents is not None)


def test_looks_are_the_mask() -> None:
    for seed in range(200):
        row_context = drawn(random.Random(seed))
        mask = Mask(row_context, causal_mask_function, 2, separate=row_context.separate)
        expected = mask.tensor()[:, 0].expand(2, -1, -1).long()
        assert torch.equal(pairs(mask.blocks, 2, *expected.shape[1:]), expected), seed
        asked = torch.zeros(2, len(row_context.queries), dtype=torch.int64)
        for block in mask.blocks:
            asked[block.sequences, block.queries] += 1
        assert asked.eq(1).all(), seed


def test_a_slice_looks_at_all_before_it_and_at_its_own_diagonal() -> None:
    (block,) = causal_blocks(torch.arange(40, 60), torch.arange(60), None, None)
    assert [(look.keys, look.how) for look in block.key_ranges] == [(slice(0, 40), "all"), (slice(40, 60), "diagonal")]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", ["_Kernel", "_Flash", "FlexAttention"])
def test_kernels_compute_what_a_mask_would(kernel: str, sample, monkeypatch) -> None:
    """With shared heads of keys, values smaller than queries, and queries that see nothing."""
    for window, seed in sample(itertools.product((None, 7), range(20)), 10):
        dice = random.Random(seed)
        monkeypatch.setattr(sight_of_pieces, "ROWS", dice.choice([4, 16, 1024]))
        torch.manual_seed(seed)
        row_context = drawn(dice)
        heads, shared, size, smaller = 2, dice.choice([1, 3]), 16, dice.choice([16, 8])
        shapes = (
            (heads * shared, len(row_context.queries), size),
            (heads, len(row_context.keys), size),
            (heads, len(row_context.keys), smaller),
        )
        tensors = [torch.randn(2, *shape, dtype=torch.float64) for shape in shapes]
        sees = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
        mask = Mask(row_context, sees, 2, separate=row_context.separate)
        seen = mask.tensor().expand(2, 1, -1, -1)
        if kernel == "_Flash" and mask.rounds is None:
            assert window is not None and row_context.valid is not None
            continue
        results = []
        for attend in (partial(ours, kernel), plain):
            inputs = [tensor.clone().requires_grad_() for tensor in tensors]
            with contextlib.nullcontext() if kernel == "_Kernel" else kernel_stand_ins.on_cpu():
                result = attend(inputs, mask, seen)
                result.square().sum().backward()
            results.append([result, *(leaf.grad for leaf in inputs)])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def ours(kernel: str, inputs: list[Tensor], mask: Mask, seen: Tensor) -> Tensor:
    inner = function._Inner(of_a_layer(), {"scaling": 0.3})
    call = function.Call(mask, Alone(), 0, inner)
    if kernel == "FlexAttention":
        inner.choose_mask(on_gpu=True, dtype=torch.float32)
        return function._Again.apply(*inputs, call).transpose(1, 2)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        return getattr(function, kernel).apply(*inputs, call)
    finally:
        torch.use_deterministic_algorithms(False)


def of_a_layer(name: str = "sdpa") -> Any:
    return SimpleNamespace(config=SimpleNamespace(**{function._INNER: name}), training=True)


def test_flash_attention_takes_documents_in_one_call_and_chunks_apart() -> None:
    """A document, or a slice, shares no keys with another; chunks of one document do."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
    every = torch.arange(8)
    packed = RowContext(every, every, Alone(), 8, positions, documents_of(positions))
    (call,) = Mask(packed, causal_mask_function, 2, separate=True).rounds.rounds
    assert call.queries is None and call.keys is None and call.causal
    assert call.query_ends.tolist() == call.key_ends.tolist() == [0, 3, 7, 8, 16]
    assert (call.most_queries, call.most_keys) == (8, 8)
    slice_ = RowContext(every[5:], every, Alone(), 8)
    (call,) = Mask(slice_, causal_mask_function, 2, separate=False).rounds.rounds
    assert call.queries is None and call.keys is None
    assert (call.query_ends.tolist(), call.key_ends.tolist()) == ([0, 3, 6], [0, 8, 16])
    ranks = places_of_ranks(0, 8, 2, None)
    chunks = RowContext(ranks[0], torch.cat(ranks), Alone(), 8)
    calls = Mask(chunks, causal_mask_function, 1, separate=False).rounds.rounds
    assert [call.key_ends.tolist() for call in calls] == [[0, 8], [0, 2]]
    assert calls[0].keys.tokens.tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
    together = RowContext(torch.cat(ranks), torch.cat(ranks), Alone(), 8)  # heads are exchanged for tokens
    (call,) = Mask(together, causal_mask_function, 1, separate=False).rounds.rounds
    assert call.query_ends.tolist() == call.key_ends.tolist() == [0, 8]


def test_blocks_of_flex_attention_are_those_of_the_mask(monkeypatch) -> None:
    monkeypatch.setattr(sight_of_pieces, "BLOCK", 4)
    monkeypatch.setattr(sight_of_pieces, "ROWS", 8)
    for seed in range(40):
        row_context = drawn(random.Random(seed))
        mask = Mask(row_context, sliding_window_causal_mask_function(5), 2, separate=row_context.separate)
        seen, found = mask.tensor(), mask.block_mask
        padded = functional.pad(seen, (0, -seen.shape[3] % 4, 0, -seen.shape[2] % 4))
        seen_of_block = padded.unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).sum((3, 5))
        assert torch.equal(found.to_dense().bool(), seen_of_block > 0), seed
        assert torch.equal(found.full_kv_num_blocks, (seen_of_block == 16).sum(-1)), seed


def test_windows_are_recognised() -> None:
    row_context = RowContext(torch.arange(8), torch.arange(8), Alone(), 8)
    for predicate, window in (
        (sliding_window_causal_mask_function(3), 3),
        (causal_mask_function, None),
        (and_masks(causal_mask_function, sliding_window_overlay(3)), None),  # true as well, and not transformers' own
        (sliding_window_bidirectional_mask_function(3), None),
        (partial(causal_mask_function), None),
    ):
        assert Mask(row_context, predicate, 1, separate=False).window == window


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn3", "flex_attention"])
def test_an_implementation_that_cannot_be_honoured_is_refused(name: str) -> None:
    inner = function._Inner(of_a_layer(name), {"s_aux": torch.zeros(2)})
    assert not inner.is_fused and function._Inner(of_a_layer(name), {"scaling": 0.5, "s_aux": None}).is_fused
    with pytest.raises(InputError, match=f"attn_implementation: '{name}' of .* on a CPU in torch.float32 .* expected"):
        inner.choose_mask(on_gpu=False, dtype=torch.float32)
    takes_blocks = name == "flex_attention"
    with contextlib.nullcontext() if takes_blocks else pytest.raises(InputError, match="on a GPU in"):
        inner.choose_mask(on_gpu=True, dtype=torch.bfloat16)


def plain(inputs: list[Tensor], mask: Mask, seen: Tensor) -> Tensor:
    query, key, value = inputs
    shared = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(shared, 1) for one in (key, value))
    scores = (query @ key.mT * 0.3).masked_fill(~seen, float("-inf"))
    weights = functional.softmax(scores, -1)
    return torch.where(seen.any(-1, keepdim=True), weights, torch.zeros(())) @ value
