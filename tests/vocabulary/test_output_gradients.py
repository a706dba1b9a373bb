"""S, C and T on any number of shards against autograd in fp64 on the whole problem."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabulary_reference import (
    BACKWARDS,
    KEEP,
    NAMES,
    Problem,
    assert_close,
    assert_same_bits,
    problem,
    reference,
    sharded,
)

from evenpipe.vocabulary import LossOptions

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


def test_every_layout(combinations) -> None:
    """9 rows on 4 shards are 3, 3, 3, 0; on 8 they are 2, 2, 2, 2, 1, 0, 0, 0."""
    for vocabulary, parts, keep, backward in combinations((1003, 1024, 9), (1, 2, 3, 4, 8), KEEP, BACKWARDS):
        inputs = problem(37, 16, vocabulary, ignored=(0, 5, 36))
        options = LossOptions(keep=keep, rows_per_block=10)
        assert_close(sharded(inputs, options, parts, backward=backward), reference(inputs, options), 1e-10)


def test_each_option(combinations) -> None:
    for name, bias, keep, backward in combinations(EACH_OPTION, (False, True), KEEP, BACKWARDS):
        inputs = problem(29, 12, 103, bias=bias, ignored=(3, 4, 20), spread=2.0)
        options = replace(EACH_OPTION[name], keep=keep, rows_per_block=8)
        expected = reference(inputs, options)
        assert_close(sharded(inputs, options, 3, backward=backward), expected, 1e-10, row_tolerance=1e-9)


def test_recomputation_in_several_slices(combinations, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 256 rows: four for the shard of 1003, and most targets are in another slice than the one at hand."""
    monkeypatch.setattr("evenpipe.vocabulary.output.BLOCK_LOGITS", 1)
    inputs = problem(29, 12, 1003, bias=True, ignored=(3,))
    for name, backward in combinations(EACH_OPTION, BACKWARDS):
        options = replace(EACH_OPTION[name], keep="nothing")
        expected = reference(inputs, options)
        assert_close(sharded(inputs, options, 1, backward=backward), expected, 1e-10, row_tolerance=1e-9)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, LossOptions, int, str, int | None]:
    vocabulary = draw(st.integers(1, 40))
    tokens = draw(st.integers(1, 20))
    inputs = problem(
        tokens,
        draw(st.integers(1, 9)),
        vocabulary,
        seed=draw(st.integers(0, 10**6)),
        bias=draw(st.booleans()),
        ignored=draw(st.sets(st.integers(0, tokens - 1))),
        spread=draw(st.sampled_from([0.1, 1.0, 5.0])),
    )
    options = LossOptions(
        label_smoothing=draw(st.sampled_from([0.0, 0.1, 0.9])),
        z_loss=draw(st.sampled_from([0.0, 1e-3, 0.3])),
        soft_cap=draw(st.sampled_from([None, 2.0, 30.0])),
        logit_scale=draw(st.sampled_from([1.0, 0.25, -0.4])),
        keep=draw(st.sampled_from(KEEP)),
        entropy=draw(st.booleans()),
        rows_per_block=draw(st.sampled_from([None, 1, 3, 7, 64])),
    )
    padding = draw(st.sampled_from([None, 0, 1, 7, 30]))
    padded_rows = None if padding is None else vocabulary + padding
    return inputs, options, draw(st.integers(1, 9)), draw(st.sampled_from(BACKWARDS)), padded_rows


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_any_combination(case: tuple[Problem, LossOptions, int, str, int | None]) -> None:
    """Measured against the size of the terms: gradients that are zero but for rounding have no relative error."""
    inputs, options, parts, backward, padded_rows = case
    actual = sharded(inputs, options, parts, backward=backward, padded_rows=padded_rows)
    expected = reference(inputs, options)
    for name in NAMES:
        ours, theirs = getattr(actual, name), getattr(expected, name)
        if theirs is not None:
            assert float((ours - theirs).norm()) <= 1e-10 * max(float(theirs.norm()), 1e-3), name


def test_runs_agree_bit_for_bit(combinations) -> None:
    """Twice the same; and both halves of a split backward with the whole one."""
    inputs = problem(61, 48, 509, bias=True, ignored=(7,)).to(torch.float32)
    for keep, backward in combinations(KEEP, BACKWARDS):
        options = LossOptions(keep=keep, label_smoothing=0.1, z_loss=1e-3, soft_cap=5.0, rows_per_block=16)
        first = sharded(inputs, options, 3, backward=backward)
        again = "two barriers" if backward == "split" else backward
        assert_same_bits(sharded(inputs, options, 3, backward=again), first)


# --- on a GPU, with labels and token weights on the host; the CPU runs the first test too ----------------------------


DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]
# Products of bf16 are written in fp32 on a GPU; on a CPU they may be rounded to bf16.
TOLERANCES = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (4e-3, 2e-3),
    torch.float16: (2e-5, 2e-5),
}


OPTIONS = {
    "plain": LossOptions(),
    "everything": LossOptions(label_smoothing=0.1, z_loss=1e-3, soft_cap=8.0, logit_scale=0.7),
}


@pytest.mark.parametrize("torch_device", DEVICES)
def test_gradients_on_every_device(torch_device: str, combinations) -> None:
    for name, dtype, keep, backward in combinations(OPTIONS, TOLERANCES, KEEP, BACKWARDS):
        inputs = problem(96, 64, 512, bias=True, ignored=(0, 50)).to(dtype)
        options = replace(OPTIONS[name], keep=keep, rows_per_block=32)
        actual = sharded(inputs.on(torch_device), options, 3, backward=backward)
        assert_close(actual, reference(inputs, options), TOLERANCES[dtype][torch_device != "cpu"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_logits_than_32_bits_count() -> None:
    """The last tokens of 2.2 billion logits, which are beyond any 32-bit offset, beside the same tokens alone."""
    tokens, vocabulary, last = 66_000, 33_000, 64
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, 64, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(vocabulary, 64, generator=generator, device="cuda").bfloat16() / 8
    labels = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))
    whole = Problem(hidden, weight, None, labels, torch.ones(tokens))
    alone = Problem(hidden[-last:], weight, None, labels[-last:], torch.ones(last))
    actual = sharded(whole, LossOptions(), 1)
    expected = sharded(alone, LossOptions(), 1)
    torch.testing.assert_close(actual.losses[-last:], expected.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.hidden[-last:], expected.hidden, rtol=1e-2, atol=1e-3)
