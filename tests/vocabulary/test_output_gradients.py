"""S, C and T on any number of shards against autograd in fp64 on the whole problem."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabulary_reference import Problem, assert_close, frobenius, problem, reference, sharded

from evenpipe.vocabulary import LossOptions, backward_shard, combine, forward_shard, split

BARRIERS = pytest.mark.parametrize("one_barrier", [True, False], ids=["one barrier", "two barriers"])
KEEP = pytest.mark.parametrize("keep", ["probabilities", "nothing"])

EACH_OPTION = {
    "plain": LossOptions(),
    "label smoothing": LossOptions(label_smoothing=0.1),
    "all smoothing": LossOptions(label_smoothing=1.0),
    "z-loss": LossOptions(z_loss=1e-2),
    "soft-cap": LossOptions(soft_cap=3.0),
    "logit scale": LossOptions(logit_scale=0.3),
    "negative logit scale": LossOptions(logit_scale=-1.7),
    "soft-cap and scale": LossOptions(soft_cap=2.0, logit_scale=1.9),
    "soft-cap and smoothing": LossOptions(soft_cap=3.0, label_smoothing=0.2),
    "entropy": LossOptions(entropy=True),
    "everything": LossOptions(label_smoothing=0.1, z_loss=1e-2, soft_cap=3.0, logit_scale=0.7, entropy=True),
}


@BARRIERS
@KEEP
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("vocabulary", [1003, 1024, 9])
def test_every_layout(vocabulary: int, parts: int, keep: str, one_barrier: bool) -> None:
    """9 rows on 4 shards are 3, 3, 3, 0; on 8 they are 2, 2, 2, 2, 1, 0, 0, 0."""
    inputs = problem(37, 16, vocabulary, ignored=(0, 5, 36))
    options = LossOptions(keep=keep, rows_per_block=10)
    assert_close(sharded(inputs, options, parts, one_barrier=one_barrier), reference(inputs, options), 1e-10)


@BARRIERS
@KEEP
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", EACH_OPTION)
def test_each_option(name: str, bias: bool, keep: str, one_barrier: bool) -> None:
    inputs = problem(29, 12, 103, bias=bias, ignored=(3, 4, 20), spread=2.0)
    options = replace(EACH_OPTION[name], keep=keep, rows_per_block=8)
    expected = reference(inputs, options)
    assert_close(sharded(inputs, options, 3, one_barrier=one_barrier), expected, 1e-10, row_tolerance=1e-9)


@BARRIERS
@pytest.mark.parametrize("name", EACH_OPTION)
def test_recomputation_in_several_slices(name: str, one_barrier: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 256 rows: four for the shard of 1003, and most targets are in another slice than the one at hand."""
    monkeypatch.setattr("evenpipe.vocabulary.output.BLOCK_LOGITS", 1)
    inputs = problem(29, 12, 1003, bias=True, ignored=(3,))
    options = replace(EACH_OPTION[name], keep="nothing")
    expected = reference(inputs, options)
    assert_close(sharded(inputs, options, 1, one_barrier=one_barrier), expected, 1e-10, row_tolerance=1e-9)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, LossOptions, int, bool, int | None]:
    vocabulary = draw(st.integers(1, 40))
    tokens = draw(st.integers(1, 20))
    ignored = draw(st.sets(st.integers(0, tokens - 1)))
    inputs = problem(
        tokens,
        draw(st.integers(1, 9)),
        vocabulary,
        seed=draw(st.integers(0, 10**6)),
        bias=draw(st.booleans()),
        ignored=ignored,
        spread=draw(st.sampled_from([0.1, 1.0, 5.0])),
    )
    options = LossOptions(
        label_smoothing=draw(st.sampled_from([0.0, 0.1, 0.9])),
        z_loss=draw(st.sampled_from([0.0, 1e-3, 0.3])),
        soft_cap=draw(st.sampled_from([None, 2.0, 30.0])),
        logit_scale=draw(st.sampled_from([1.0, 0.25, -0.4])),
        keep=draw(st.sampled_from(["probabilities", "nothing"])),
        entropy=draw(st.booleans()),
        rows_per_block=draw(st.sampled_from([None, 1, 3, 7, 64])),
    )
    padded_rows = draw(st.sampled_from([None, 0, 1, 7, 30]))
    return (
        inputs,
        options,
        draw(st.integers(1, 9)),
        draw(st.booleans()),
        None if padded_rows is None else vocabulary + padded_rows,
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_any_combination(case: tuple[Problem, LossOptions, int, bool, int | None]) -> None:
    inputs, options, parts, one_barrier, padded_rows = case
    actual = sharded(inputs, options, parts, one_barrier=one_barrier, padded_rows=padded_rows)
    expected = reference(inputs, options)
    # Where the expected gradient is zero but for rounding (one token in the vocabulary, all smoothing), relative errors
    # say nothing: measure against the size of the terms, which is that of the weights.
    for name in ("losses", "log_probabilities", "hidden", "weight", "bias", "entropies"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        if theirs is not None:
            scale = max(float(theirs.norm()), 1e-3)
            assert float((ours - theirs).norm()) <= 1e-10 * scale, name


@BARRIERS
@pytest.mark.parametrize("name", EACH_OPTION)
def test_fp32(name: str, one_barrier: bool) -> None:
    inputs = problem(61, 48, 509, bias=True, ignored=(7,)).to(torch.float32)
    options = replace(EACH_OPTION[name], rows_per_block=16)
    expected = reference(inputs, options)
    assert_close(sharded(inputs, options, 3, one_barrier=one_barrier), expected, 2e-5, row_tolerance=1e-4)


@KEEP
def test_fp32_does_not_depend_on_the_layout(keep: str) -> None:
    inputs = problem(61, 48, 509, ignored=(7,)).to(torch.float32)
    first = sharded(inputs, LossOptions(), 1, one_barrier=False)
    for parts in (2, 3, 4, 8):
        for rows_per_block in (None, 5, 32):
            for one_barrier in (True, False):
                options = LossOptions(keep=keep, rows_per_block=rows_per_block)
                assert_close(sharded(inputs, options, parts, one_barrier=one_barrier), first, 2e-6)


@BARRIERS
@KEEP
def test_runs_agree_bit_for_bit(keep: str, one_barrier: bool) -> None:
    inputs = problem(61, 48, 509, bias=True, ignored=(7,)).to(torch.float32)
    options = LossOptions(keep=keep, label_smoothing=0.1, z_loss=1e-3, soft_cap=5.0, rows_per_block=16)
    first = sharded(inputs, options, 3, one_barrier=one_barrier)
    again = sharded(inputs, options, 3, one_barrier=one_barrier)
    for name in ("losses", "log_probabilities", "hidden", "weight", "bias"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name


@BARRIERS
def test_gradients_accumulate(one_barrier: bool) -> None:
    """Two microbatches into a gradient that is not empty."""
    first, second = problem(20, 16, 103, seed=1), problem(13, 16, 103, seed=2, ignored=(0,))
    second = replace(second, weight=first.weight)
    options = LossOptions(label_smoothing=0.1)
    before = torch.randn(103, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    total = before.clone()
    for inputs in (first, second):
        sharded(inputs, options, 4, one_barrier=one_barrier, weight_gradient=total)
    expected = before + reference(first, options).weight + reference(second, options).weight
    assert frobenius(total, expected) <= 1e-10


def test_frozen_weight() -> None:
    """No weight gradient is wanted: the part of the hidden gradient is the same."""
    inputs = problem(20, 16, 103, bias=True)
    options, (shard,) = LossOptions(), split(103, 1)
    statistics, state = forward_shard(inputs.hidden, inputs.weight, inputs.bias, inputs.labels, shard, options, False)
    combined = combine(statistics[None], inputs.token_weights, inputs.labels, options, 103)
    part = backward_shard(state, combined, inputs.weight, None, None)
    assert part is not None
    assert frobenius(part, reference(inputs, options).hidden) <= 1e-10


@pytest.mark.parametrize("name", EACH_OPTION)
def test_evaluation_needs_only_the_statistics(name: str) -> None:
    inputs = problem(29, 12, 103, bias=True, ignored=(3,))
    options = replace(EACH_OPTION[name], rows_per_block=8)
    assert inputs.bias is not None
    table = []
    for shard in split(103, 4):
        rows = slice(shard.start, shard.stop)
        statistics, state = forward_shard(
            inputs.hidden, inputs.weight[rows], inputs.bias[rows], inputs.labels, shard, options, True, gradients=False
        )
        assert state.hidden is None and state.exponentials is None and state.products is None
        table.append(statistics)
    combined = combine(torch.stack(table), inputs.token_weights, inputs.labels, options, 103)
    expected = reference(inputs, options)
    assert frobenius(combined.losses, expected.losses) <= 1e-10
    assert frobenius(combined.log_probabilities, expected.log_probabilities) <= 1e-10
