"""Extreme tokens in fp32, poisoned memory, ignored rows: where cross-entropy layers usually lose digits or leak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import vocabulary_reference
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from vocabulary_reference import (
    BACKWARDS,
    KEEP,
    Answer,
    Problem,
    assert_close,
    assert_same_bits,
    frobenius,
    problem,
    reference,
    sharded,
)

from evenpipe.vocabulary import Buffers, LossOptions, backward_shard, combine, forward_shard, split


def answers(
    inputs: Problem, parts: int, ways: Iterable[tuple[str, str]], buffers: Buffers | None = None, **options: Any
) -> Iterator[Answer]:
    """Of every (keep, backward)."""
    for keep, backward in ways:
        yield sharded(inputs, LossOptions(keep=keep, **options), parts, backward=backward, buffers=buffers)


def with_log_odds(log_odds: float, *, tokens: int = 40, hidden_size: int = 24, vocabulary: int = 301) -> Problem:
    """fp32 inputs whose labels all have about these log-odds against them: p = 1 / (1 + exp(log_odds)).

    The last hidden dimension only reaches the logit of token 17, the label of all, and sets it.
    """
    inputs = problem(tokens, hidden_size, vocabulary, spread=1.5)
    inputs.labels.fill_(17)
    inputs.weight[:, -1] = 0.0
    inputs.weight[17, -1] = 1.0
    inputs.hidden[:, -1] = 0.0
    logits = inputs.hidden @ inputs.weight.t()
    others = logits.clone()
    others[:, 17] = -torch.inf
    inputs.hidden[:, -1] = others.logsumexp(1) - logits[:, 17] - log_odds
    return inputs.to(torch.float32)


def on_a_grid(inputs: Problem) -> Problem:
    """Rounded so that logits are multiples of 1/256: fp32 holds them exactly, even with an offset of 10 000."""
    return replace(
        inputs,
        hidden=(inputs.hidden * 4).round() / 4,
        weight=(inputs.weight * 64).round() / 64,
        bias=None if inputs.bias is None else (inputs.bias * 256).round() / 256,
    )


def plain_fp32(inputs: Problem) -> Tensor:
    """The weight gradient as torch's own fp32 cross-entropy has it."""
    weight = inputs.weight.clone().requires_grad_()
    losses = cross_entropy(linear(inputs.hidden, weight), inputs.labels, reduction="none")
    (losses * inputs.token_weights).sum().backward()
    assert weight.grad is not None
    return weight.grad


def assert_log_odds_close(actual: Answer, expected: Answer, half_unit: float = 0.0) -> None:
    """half_unit: of the largest logit's last place, where products round otherwise than on a CPU."""
    assert_close(actual, expected, 2e-5, row_tolerance=max(1e-4, 60 * half_unit))
    relative = (actual.losses.double() - expected.losses).abs() / expected.losses
    assert _largest(relative, expected.losses < 1e-3) <= 1e-4
    assert _largest(relative, expected.losses >= 1e-3) <= max(1e-6, 6 * half_unit)


def _largest(values: Tensor, where: Tensor) -> float:
    return float(values[where].max()) if bool(where.any()) else 0.0


def half_unit_of(inputs: Problem) -> float:
    """0 on a CPU. On an H100 log-odds of -5 and -69 miss the bounds by 2.4 and 1.7 times, by 4 such half units, with
    torch's own operations as with Triton's."""
    if vocabulary_reference.TORCH_DEVICE == "cpu":
        return 0.0
    return 2**-24 * float((inputs.hidden.double() @ inputs.weight.double().t()).abs().max())


@pytest.mark.parametrize("confidence", [1e-2, 1e-6, 1e-12, 1e-30])
def test_confident_tokens(confidence: float, combinations) -> None:
    """1 - p of the label down to 1e-30, where 1 - p itself is zero in fp32 and in fp64."""
    inputs = with_log_odds(float(torch.tensor(confidence, dtype=torch.float64).log()))
    expected = reference(inputs, LossOptions(), log_odds=True)
    assert 0.1 * confidence < float(expected.losses.mean()) < 10 * confidence
    for actual in answers(inputs, 4, combinations(KEEP, BACKWARDS), rows_per_block=16):
        assert_log_odds_close(actual, expected, half_unit_of(inputs))
    if confidence <= 1e-6:
        assert frobenius(plain_fp32(inputs), expected.weight) > 1e-2, "this case no longer tells methods apart"


def test_very_unlikely_tokens_and_dominated_shards(combinations) -> None:
    """The logits of the second shard stand 150 above all others: nothing of theirs survives, and nothing overflows."""
    unlikely = with_log_odds(200.0)
    dominated = on_a_grid(problem(40, 16, 400, bias=True)).to(torch.float32)
    assert dominated.bias is not None
    dominated.bias[100:200] += 150.0
    dominated.labels[:30] = torch.arange(100, 400, 10)  # labels in and outside the dominating shard
    assert float(reference(unlikely, LossOptions(), log_odds=True).losses.min()) > 190
    for inputs in (unlikely, dominated):
        expected = reference(inputs, LossOptions(), log_odds=True)
        for actual in answers(inputs, 4, combinations(KEEP, BACKWARDS)):
            assert_log_odds_close(actual, expected)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_common_offset(label_smoothing: float, combinations) -> None:
    """Each device subtracts first and combines then, so an offset of all logits changes nothing."""
    inputs = on_a_grid(problem(40, 16, 301, bias=True)).to(torch.float32)
    assert inputs.bias is not None
    at_zero = replace(inputs, bias=torch.zeros_like(inputs.bias))
    expected = reference(at_zero, LossOptions(label_smoothing=label_smoothing))
    for offset, *way in combinations((0.0, 1e4, -1e4), KEEP, BACKWARDS):
        shifted = replace(inputs, bias=torch.full_like(inputs.bias, offset))
        (actual,) = answers(shifted, 3, [way], label_smoothing=label_smoothing)
        assert_close(actual, expected, 2e-5, row_tolerance=1e-4)


def test_tokens_masked_out_by_the_bias(combinations) -> None:
    """A bias of minus infinity takes tokens out of the vocabulary, here with one whole shard."""
    inputs = problem(30, 16, 40, bias=True)
    assert inputs.bias is not None
    inputs.bias[10:20] = -torch.inf
    inputs.bias[25] = -torch.inf
    inputs.labels[:] = torch.arange(30) % 10
    kept = inputs.bias.isfinite()
    small = replace(inputs, weight=inputs.weight[kept], bias=inputs.bias[kept])
    expected = reference(small, LossOptions(z_loss=1e-3))
    for actual in answers(inputs, 4, combinations(KEEP, BACKWARDS), z_loss=1e-3):
        assert actual.bias is not None
        assert float(actual.weight[~kept].norm()) == float(actual.bias[~kept].norm()) == 0.0
        assert_close(replace(actual, weight=actual.weight[kept], bias=actual.bias[kept]), expected, 1e-10)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_all_tokens_ignored(label_smoothing: float, combinations) -> None:
    inputs = problem(12, 8, 30, bias=True, ignored=range(12))
    inputs.hidden.fill_(torch.nan)
    inputs.token_weights.fill_(torch.nan)  # what 0 / 0 tokens makes of the weights
    for actual in answers(inputs, 4, combinations(KEEP, BACKWARDS), label_smoothing=label_smoothing):
        for name in ("losses", "log_probabilities", "hidden", "weight", "bias"):
            assert not bool(getattr(actual, name).any()), name


def test_ignored_rows_reach_nothing(combinations) -> None:
    ignored = [0, 7, 8, 19]
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "soft_cap": 5.0, "rows_per_block": 8}
    for poison, *way in combinations((torch.nan, torch.inf, -torch.inf), KEEP, BACKWARDS):
        inputs = problem(20, 16, 103, bias=True, ignored=ignored)
        (clean,) = answers(inputs, 3, [way], **options)
        inputs.hidden[ignored] = poison
        inputs.token_weights[ignored] = poison
        (poisoned,) = answers(inputs, 3, [way], **options)
        assert_same_bits(poisoned, clean)
        assert not bool(poisoned.hidden[ignored].any())


def test_memory_full_of_nan_is_never_read(combinations) -> None:
    """Buffers handed on from microbatches of other sizes, poisoned in between. On a GPU the allocator hands them on."""
    options = {"label_smoothing": 0.1, "soft_cap": 5.0, "rows_per_block": 8}
    for dtype, *way in combinations((torch.float64, torch.float32, torch.bfloat16), KEEP, BACKWARDS):
        buffers = Buffers()
        for seed, ignored in enumerate([(), (1, 2, 3), (), range(15), (0,)]):
            inputs = problem(20, 16, 103, seed=seed, ignored=ignored).to(dtype)
            (fresh,) = answers(inputs, 3, [way], **options)
            (used,) = answers(inputs, 3, [way], buffers, **options)
            assert_same_bits(used, fresh)
            if vocabulary_reference.TORCH_DEVICE == "cpu":
                assert buffers._free, "nothing was handed back"
            else:
                for _ in range(16):  # as large as tensors are that the allocator keeps together with smaller ones
                    torch.full((1 << 18,), torch.nan, device=vocabulary_reference.TORCH_DEVICE)
            for room in buffers._free:
                room.fill_(torch.nan)


def test_every_device_combines_to_the_same_bits() -> None:
    """The gathered table may lie anywhere in memory, and each device may hold the weights in its own storage."""
    inputs = problem(333, 16, 103, ignored=(1, 5)).to(torch.float32)
    options = LossOptions(label_smoothing=0.1, z_loss=1e-3, soft_cap=5.0)
    hidden, weight, labels = inputs.hidden, inputs.weight, inputs.labels
    rows = [(shard, weight[shard.start : shard.stop]) for shard in split(103, 4)]
    table = torch.stack([forward_shard(hidden, part, None, labels, shard, options, False)[0] for shard, part in rows])
    first = combine(table, inputs.token_weights, inputs.labels, options, 103)
    for shift in range(1, 5):
        elsewhere = torch.empty(table.numel() + shift)[shift:].view_as(table).copy_(table)
        weights = torch.empty(333 + shift)[shift:].copy_(inputs.token_weights)
        again = combine(elsewhere, weights, inputs.labels, options, 103)
        for name in ("losses", "log_probabilities", "log_sum_exp", "maximum", "others", "target", "uniform"):
            assert torch.equal(getattr(first, name), getattr(again, name)), name


def test_wrong_input_is_refused() -> None:
    inputs = problem(6, 8, 20, bias=True)
    options, (shard,) = LossOptions(), split(20, 1)
    tensors = {name: getattr(inputs, name) for name in ("hidden", "weight", "bias", "labels")}
    hidden, weight, _, labels = tensors.values()
    refused: list[tuple[dict[str, Tensor], str]] = [
        (
            {"labels": labels.index_fill(0, torch.tensor([2]), 20)},
            r"Label 20 is neither a token \(0 to 19\) nor ignore_index \(-100\)",
        ),
        ({"labels": labels.index_fill(0, torch.tensor([2]), -1)}, "Label -1 is neither a token"),
        ({"labels": labels[1:]}, r"labels must have the shape \[6\], not \[5\]"),
        ({"weight": weight.float()}, r"one dtype, not torch\.float64 and torch\.float32"),
        ({"weight": weight[1:]}, "the shard's 20 rows, not 19"),
        ({"hidden": hidden[:, 1:]}, r"not \[6, 7\] and \[20, 8\]"),
        ({"bias": torch.zeros(3)}, r"bias must have the shape \[20\]"),
    ]
    for changes, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            forward_shard(*(tensors | changes).values(), shard, options, True)
    statistics, state = forward_shard(*tensors.values(), shard, options, False)
    with pytest.raises(ValueError, match=r"statistics is \[1, 6, 3\]; it must be \[shards, 6, 5\]"):
        combine(statistics[None], inputs.token_weights, labels, LossOptions(label_smoothing=0.1), 20)
    combined = combine(statistics[None], inputs.token_weights, labels, options, 20)
    with pytest.raises(ValueError, match=r"weight_gradient is .*; it must be \[20, 8\] torch.float64"):
        backward_shard(state, combined, weight, torch.zeros(20, 8))
    with pytest.raises(ValueError, match=r"bias_gradient is .*; it must be \[20\] torch.float64"):
        backward_shard(state, combined, weight, torch.zeros(20, 8).double(), torch.zeros(19).double())
