"""Blocks of queries and what they look at are the causal mask: each pair that sees each other stands in one look."""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from evenpipe.attention import function
from evenpipe.attention import sight as sight_of_pieces
from evenpipe.attention.blocks import Block, causal_blocks
from evenpipe.attention.places import places_of_ranks
from evenpipe.attention.sight import Alone, Mask, Sight, documents_of


def pairs(found: list[Block], batch: int, queries: int, keys: int) -> Tensor:
    """Return how many looks each pair stands in, [batch, queries, keys]."""
    counts = torch.zeros(batch, queries, keys, dtype=torch.int64)
    for block in found:
        for look in block.looks:
            part = counts[block.sequences, block.queries, look.keys]
            part += torch.ones(part.shape[1:], dtype=torch.int64).tril() if look.how == "diagonal" else 1
            assert look.how != "diagonal" or part.shape[1] == part.shape[2]
    return counts


def drawn(dice: random.Random) -> Sight:
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
    return Sight(own, keys, Alone(), length, positions, documents, valid, apart=documents is not None)


def test_looks_are_the_mask() -> None:
    for seed in range(200):
        sight = drawn(random.Random(seed))
        mask = Mask(sight, causal_mask_function, 2, apart=sight.apart)
        expected = mask.tensor()[:, 0].expand(2, -1, -1).long()
        assert torch.equal(pairs(mask.blocks, 2, *expected.shape[1:]), expected), seed
        asked = torch.zeros(2, len(sight.queries), dtype=torch.int64)
        for block in mask.blocks:
            asked[block.sequences, block.queries] += 1
        assert asked.eq(1).all(), seed


def test_a_slice_looks_at_all_before_it_and_at_its_own_diagonal() -> None:
    (block,) = causal_blocks(torch.arange(40, 60), torch.arange(60), None, None)
    assert [(look.keys, look.how) for look in block.looks] == [(slice(0, 40), "all"), (slice(40, 60), "diagonal")]


def test_kernel_computes_what_a_mask_would(sample, monkeypatch) -> None:
    """With shared heads of keys, values smaller than queries, and queries that see nothing."""
    for window, seed in sample(itertools.product((None, 7), range(20)), 10):
        dice = random.Random(seed)
        monkeypatch.setattr(sight_of_pieces, "ROWS", dice.choice([4, 16, 1024]))
        torch.manual_seed(seed)
        sight = drawn(dice)
        heads, shared, size, smaller = 2, dice.choice([1, 3]), 16, dice.choice([16, 8])
        shapes = (
            (heads * shared, len(sight.queries), size),
            (heads, len(sight.keys), size),
            (heads, len(sight.keys), smaller),
        )
        tensors = [torch.randn(2, *shape, dtype=torch.float64) for shape in shapes]
        sees = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
        mask = Mask(sight, sees, 2, apart=sight.apart)
        seen = mask.tensor().expand(2, 1, -1, -1)
        results = []
        for attend in (ours, plain):
            inputs = [tensor.clone().requires_grad_() for tensor in tensors]
            result = attend(inputs, mask, seen)
            result.square().sum().backward()
            results.append([result, *(leaf.grad for leaf in inputs)])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def ours(inputs: list[Tensor], mask: Mask, seen: Tensor) -> Tensor:
    class Inner:
        scale = 0.3

    call = function.Call(mask, Alone(), 0, Inner())
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        return function._Kernel.apply(*inputs, call)
    finally:
        torch.use_deterministic_algorithms(False)


def plain(inputs: list[Tensor], mask: Mask, seen: Tensor) -> Tensor:
    query, key, value = inputs
    shared = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(shared, 1) for one in (key, value))
    scores = (query @ key.mT * 0.3).masked_fill(~seen, float("-inf"))
    weights = functional.softmax(scores, -1)
    return torch.where(seen.any(-1, keepdim=True), weights, torch.zeros(())) @ value
