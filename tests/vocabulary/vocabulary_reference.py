"""The output layer and its loss on one piece of memory, with torch's autograd: what the shards must agree with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from evenpipe.vocabulary import Buffers, LossOptions, backward_shard, combine, forward_shard, hidden_gradient, split

TORCH_DEVICE = "cpu"
"""Where `sharded` computes; with Triton's kernels the GPU, where there is one (conftest.py)."""


KEEP = ("probabilities", "nothing")
BACKWARDS = ("one barrier", "two barriers", "split")
"""S prepares the hidden gradient and T makes that of the weight; T makes both; T makes the hidden gradient, and the
weight's later."""
NAMES = ("losses", "log_probabilities", "hidden", "weight", "bias", "entropies")
"""Of what an answer consists of."""


@dataclass(frozen=True)
class Problem:
    """Inputs of the output layer: hidden [n, h], weight [V, h], bias [V] or None, labels [n], token_weights [n]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    token_weights: Tensor

    def to(self, dtype: torch.dtype) -> Problem:
        """Rounded to `dtype` (labels stay; weights of tokens stay fp32, or fp64 for fp64)."""
        return replace(
            self,
            hidden=self.hidden.to(dtype),
            weight=self.weight.to(dtype),
            bias=None if self.bias is None else self.bias.to(dtype),
            token_weights=self.token_weights.to(torch.float64 if dtype == torch.float64 else torch.float32),
        )

    def on(self, torch_device: str) -> Problem:
        """Tensors on `torch_device`; labels and token weights stay on the host."""
        tensors = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return replace(
            self, **{name: None if tensor is None else tensor.to(torch_device) for name, tensor in tensors.items()}
        )


@dataclass(frozen=True)
class Answer:
    """What comes out: per token [n], and gradients of the weighted sum of the losses."""

    losses: Tensor
    log_probabilities: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    entropies: Tensor | None = None

    def on_host(self) -> Answer:
        return Answer(**{name: None if tensor is None else tensor.cpu() for name, tensor in vars(self).items()})


def problem(
    tokens: int,
    hidden_size: int,
    vocabulary: int,
    *,
    seed: int = 0,
    bias: bool = False,
    ignored: Iterable[int] = (),
    spread: float = 1.0,
) -> Problem:
    """Random inputs in fp64; logits have the standard deviation `spread`, token weights both signs and a zero."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    labels = torch.randint(vocabulary, (tokens,), generator=random)
    labels[list(ignored)] = -100
    token_weights = normal(tokens)
    token_weights[1:2] = 0.0
    return Problem(
        normal(tokens, hidden_size),
        normal(vocabulary, hidden_size) * spread / hidden_size**0.5,
        normal(vocabulary) if bias else None,
        labels,
        token_weights,
    )


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LossOptions) -> Tensor:
    """Products in the dtype of the operands; then at least fp32."""
    product = linear(hidden, weight, bias)
    logits = (product if product.dtype == torch.float64 else product.float()) * options.logit_scale
    if options.soft_cap is not None:
        logits = options.soft_cap * torch.tanh(logits / options.soft_cap)
    return logits


def leaf(values: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """An own copy that collects a gradient."""
    return values.detach().to(dtype, copy=True).requires_grad_()


def reference(
    inputs: Problem, options: LossOptions, *, log_odds: bool = False, dtype: torch.dtype = torch.float64
) -> Answer:
    """Autograd on the unsharded problem, ignored tokens cut out first.

    dtype: of the products.
    log_odds: write lse - z_t as log(1 + exp(lse of the others - z_t)), for tokens so confident that fp64 itself would
    lose digits in lse - z_t. Only for label_smoothing = 0.
    """
    valid = inputs.labels != options.ignore_index
    labels = inputs.labels[valid]
    hidden, weight = leaf(inputs.hidden[valid], dtype), leaf(inputs.weight, dtype)
    bias = None if inputs.bias is None else leaf(inputs.bias, dtype)
    logits = logits_of(hidden, weight, bias, options)
    if log_odds:
        assert not options.label_smoothing
        others = logits.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
        odds = others - logits.gather(1, labels[:, None]).squeeze(1)
        plain = losses = torch.logaddexp(odds, torch.zeros_like(odds))
    else:
        plain = cross_entropy(logits, labels, reduction="none")
        losses = cross_entropy(logits, labels, reduction="none", label_smoothing=options.label_smoothing)
    losses = losses + options.z_loss * logits.logsumexp(1).square()
    (losses * inputs.token_weights[valid].double()).sum().backward()

    def spread(values: Tensor | None) -> Tensor:
        assert values is not None
        return torch.zeros(len(valid), *values.shape[1:], dtype=torch.float64).index_copy(
            0, valid.nonzero().squeeze(1), values.detach().double()
        )

    assert weight.grad is not None
    return Answer(
        spread(losses),
        spread(-plain),
        spread(hidden.grad),
        weight.grad,
        None if bias is None else bias.grad,
        spread(torch.special.entr(logits.softmax(1)).sum(1)) if options.entropy else None,
    )


def sharded(
    inputs: Problem,
    options: LossOptions,
    parts: int,
    *,
    backward: str = BACKWARDS[0],
    padded_rows: int | None = None,
    buffers: Buffers | None = None,
) -> Answer:
    """The same through S, the barrier, C and T on `parts` shards; gathers and reductions are a stack and a sum.

    On `TORCH_DEVICE`, or where the inputs are; the answer is on the host.

    padded_rows: add rows to weight and bias that stand for no token, filled with NaN: they must never be read.
    """
    torch_device = TORCH_DEVICE if inputs.hidden.device.type == "cpu" else inputs.hidden.device.type
    inputs = inputs.on(torch_device)
    vocabulary, hidden_size = inputs.weight.shape
    dtype = torch.float64 if inputs.hidden.dtype == torch.float64 else torch.float32
    shards = split(vocabulary, parts, padded_rows=padded_rows)
    rows = [slice(shard.start, shard.stop) for shard in shards]
    padding = (padded_rows or vocabulary) - vocabulary
    weight = torch.cat([inputs.weight, inputs.weight.new_full((padding, hidden_size), torch.nan)])
    bias = None if inputs.bias is None else torch.cat([inputs.bias, inputs.bias.new_full((padding,), torch.nan)])
    of_weight = torch.zeros_like(weight, dtype=dtype)
    bias_gradient = None if bias is None else torch.zeros_like(bias, dtype=dtype)

    def part_of(tensor: Tensor | None, part: slice) -> Tensor | None:
        return None if tensor is None else tensor[part]

    passes = [
        forward_shard(
            inputs.hidden,
            weight[part],
            part_of(bias, part),
            inputs.labels,
            shard,
            options,
            backward == "one barrier",
            buffers=buffers,
        )
        for shard, part in zip(shards, rows, strict=True)
    ]
    table = torch.stack([statistics for statistics, _ in passes])
    combined = combine(table, inputs.token_weights, inputs.labels, options, vocabulary)
    hidden_parts = []
    if backward != "two barriers":
        hidden_parts = [
            hidden_gradient(state, combined, weight[part]) for part, (_, state) in zip(rows, passes, strict=True)
        ]
    sent = [part.clone() for part in hidden_parts]
    for part, (_, state) in zip(rows, passes, strict=True):
        late = backward_shard(state, combined, weight[part], of_weight[part], part_of(bias_gradient, part))
        assert (late is None) == (backward != "two barriers")
        if late is not None:
            hidden_parts.append(late)
    assert all(map(torch.equal, sent, hidden_parts)), "the hidden gradient is on its way while the weight's is made"
    assert not padding or not bool(of_weight[vocabulary:].any())
    assert all(part.dtype == dtype for part in hidden_parts)
    return Answer(
        combined.losses,
        combined.log_probabilities,
        torch.stack(hidden_parts).sum(0),
        of_weight[:vocabulary],
        None if bias_gradient is None else bias_gradient[:vocabulary],
        combined.entropies,
    ).on_host()


def frobenius(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; absolute where the expected tensor is zero."""
    scale = float(expected.double().norm())
    error = float((actual.double() - expected.double()).norm())
    return error / scale if scale else error


def worst_row(actual: Tensor, expected: Tensor) -> float:
    """Largest relative error of a row. Rows below a millionth of the largest are compared with that."""
    scales = expected.double().norm(dim=1)
    errors = (actual.double() - expected.double()).norm(dim=1)
    floor = max(float(scales.max()) * 1e-6, 1e-300) if len(scales) else 1.0
    return float((errors / scales.clamp(min=floor)).max()) if len(scales) else 0.0


def assert_close(actual: Answer, expected: Answer, tolerance: float, *, row_tolerance: float | None = None) -> None:
    """Every tensor to a relative Frobenius error of `tolerance`; rows of the two matrices to `row_tolerance`."""
    for name in NAMES:
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is None:
            continue
        assert ours.shape == theirs.shape, name
        assert bool(ours.isfinite().all()), f"{name} is not finite"
        error = frobenius(ours, theirs)
        assert error <= tolerance, f"{name}: relative Frobenius error {error:.2e}"
        if row_tolerance is not None and ours.dim() == 2:
            error = worst_row(ours, theirs)
            assert error <= row_tolerance, f"{name}: worst row {error:.2e}"


def assert_same_bits(actual: Answer, expected: Answer) -> None:
    for name in NAMES:
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert (ours is None and theirs is None) or torch.equal(ours, theirs), name
