"""The whole output layer in a split backward: dX by itself, the gradient of the weight later, with S of two barriers.

`hidden_gradient` after an S for two barriers is the first half of T; `backward_shard` then gives the rest, and no dX.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import vocabulary_reference
from hypothesis import given, settings
from test_output_gradients import EACH_OPTION, cases
from torch import Tensor
from vocabulary_reference import Answer, Problem, assert_close, problem, reference, sharded

from evenpipe.vocabulary import Buffers, LossOptions, backward_shard, combine, forward_shard, hidden_gradient, split

KEEP = pytest.mark.parametrize("keep", ["probabilities", "nothing"])


def split_backward(inputs: Problem, options: LossOptions, *, parts: int = 1, trained: bool = True) -> Answer:
    """S, the barrier, dX of all shards, and only then what W does. Frozen: no gradient of weight and bias is wanted."""
    inputs = inputs.on(vocabulary_reference.TORCH_DEVICE)
    vocabulary = inputs.weight.shape[0]
    dtype = torch.float64 if inputs.hidden.dtype == torch.float64 else torch.float32
    buffers = Buffers()
    weight_gradient = torch.zeros_like(inputs.weight, dtype=dtype)
    bias_gradient = None if inputs.bias is None else torch.zeros_like(inputs.bias, dtype=dtype)

    def own(tensor: Tensor | None, rows: slice) -> Tensor | None:
        return None if tensor is None else tensor[rows]

    shards = [(shard, slice(shard.start, shard.stop)) for shard in split(vocabulary, parts)]
    passes = []
    for shard, rows in shards:
        bias = own(inputs.bias, rows)
        passes.append(
            forward_shard(
                inputs.hidden, inputs.weight[rows], bias, inputs.labels, shard, options, False, buffers=buffers
            )
        )
    table = torch.stack([statistics for statistics, _ in passes])
    combined = combine(table, inputs.token_weights, inputs.labels, options, vocabulary)
    hidden = [
        hidden_gradient(state, combined, inputs.weight[rows])
        for (_, rows), (_, state) in zip(shards, passes, strict=True)
    ]
    kept = [part.clone() for part in hidden]
    for (_, rows), (_, state) in zip(shards, passes, strict=True):
        gradients = (weight_gradient[rows], own(bias_gradient, rows)) if trained else (None, None)
        assert backward_shard(state, combined, inputs.weight[rows], *gradients) is None
    assert all(map(torch.equal, kept, hidden)), "dX is on its way while W runs"
    return Answer(
        combined.losses,
        combined.log_probabilities,
        torch.stack(hidden).sum(0),
        weight_gradient,
        bias_gradient,
        combined.entropies,
    ).on_host()


@KEEP
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", EACH_OPTION)
def test_each_option(name: str, bias: bool, keep: str) -> None:
    inputs = problem(29, 12, 103, bias=bias, ignored=(3, 4, 20), spread=2.0)
    options = replace(EACH_OPTION[name], keep=keep, rows_per_block=8)
    assert_close(split_backward(inputs, options), reference(inputs, options), 1e-10, row_tolerance=1e-9)


@pytest.mark.parametrize("name", EACH_OPTION)
def test_recomputation_in_several_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept, and both halves compute the exponentials again, 256 rows at a time."""
    monkeypatch.setattr("evenpipe.vocabulary.output.BLOCK_LOGITS", 1)
    inputs = problem(29, 12, 1003, bias=True, ignored=(3,))
    options = replace(EACH_OPTION[name], keep="nothing")
    assert_close(split_backward(inputs, options), reference(inputs, options), 1e-10, row_tolerance=1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_any_combination(case: tuple[Problem, LossOptions, int, bool, int | None]) -> None:
    """Relative to the size of the terms, since gradients may be zero but for rounding."""
    inputs, options, parts, *_ = case
    actual, expected = split_backward(inputs, options, parts=parts), reference(inputs, options)
    for name in ("losses", "log_probabilities", "hidden", "weight", "bias"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        if theirs is not None:
            assert float((ours - theirs).norm()) <= 1e-10 * max(float(theirs.norm()), 1e-3), name


@KEEP
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_bits_are_those_of_the_whole_backward(name: str, keep: str) -> None:
    inputs = problem(61, 48, 509, bias=True, ignored=(7,)).to(torch.float32)
    options = replace(EACH_OPTION[name], keep=keep, rows_per_block=16)
    halves, whole = split_backward(inputs, options), sharded(inputs, options, 1, one_barrier=False)
    for part in ("losses", "hidden", "weight", "bias"):
        assert torch.equal(getattr(halves, part), getattr(whole, part)), part


@KEEP
def test_frozen_weight(keep: str) -> None:
    inputs = problem(29, 12, 103, bias=True, ignored=(3,))
    options = LossOptions(keep=keep, label_smoothing=0.1)
    found, expected = split_backward(inputs, options, trained=False), reference(inputs, options)
    assert not found.weight.any()
    assert_close(replace(found, weight=expected.weight, bias=expected.bias), expected, 1e-10)


@KEEP
def test_no_label_counts(keep: str) -> None:
    inputs = problem(5, 4, 11, ignored=range(5))
    found = split_backward(inputs, LossOptions(keep=keep))
    assert found.hidden.shape == (5, 4)
    assert not found.hidden.any() and not found.weight.any() and not found.losses.any()


def test_what_stays_between_the_halves() -> None:
    """After dX the product that it was made of is gone: only X, E and numbers per token wait for W."""
    inputs = problem(16, 8, 31)
    (shard,) = split(31, 1)
    statistics, state = forward_shard(
        inputs.hidden, inputs.weight, None, inputs.labels, shard, LossOptions(keep="probabilities"), False
    )
    combined = combine(statistics[None], inputs.token_weights, inputs.labels, LossOptions(), 31)
    hidden_gradient(state, combined, inputs.weight)
    assert state.products is None
    assert state.hidden is not None and state.exponentials is not None
    backward_shard(state, combined, inputs.weight, torch.zeros_like(inputs.weight))
    assert state.hidden is None and state.exponentials is None
