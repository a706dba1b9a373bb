"""An output layer and its cross-entropy on one device, for any training loop.

The passes of a shard (output.py) with the whole vocabulary as the shard, without waiting between S and T.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, get_args

import torch
from torch import Tensor

from evenpipe.errors import InputError
from evenpipe.vocabulary.buffers import Buffers
from evenpipe.vocabulary.copies import to_device
from evenpipe.vocabulary.options import KernelsName, LossOptions
from evenpipe.vocabulary.output import backward_shard, combine, forward_shard
from evenpipe.vocabulary.products import accumulator_dtype, stored_dtype
from evenpipe.vocabulary.shards import Shard
from evenpipe.words import refused

Reduction = Literal["none", "mean", "sum"]
KEPT_BYTES = 1 << 30
"""Largest bytes of exponentials that are kept for all tokens at once."""
TOKENS_AT_LEAST = 1024
"""Least tokens per part: each part adds to the gradient of the weight, which is read and written as a whole."""


class FurtherOptions(TypedDict, total=False):
    """Those fields of `LossOptions` that torch's function does not have."""

    z_loss: float
    soft_cap: float | None
    logit_scale: float
    kernels: KernelsName


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    token_weights: Tensor | None = None,
    **further: Unpack[FurtherOptions],
) -> Tensor:
    """Return `cross_entropy(linear(input, linear_weight, linear_bias), target)` without fp32 logits of all tokens.

    It can replace `torch.nn.functional.linear_cross_entropy`: arguments with the same name have the same meaning. It
    supports fp64, fp32, bf16 and fp16, on a CPU and on a GPU (with Triton's kernels), and first derivatives for input,
    weight and bias; a second derivative is refused. It takes three matrix products, and keeps exponentials of all
    logits from forward to backward, in the dtype of `input`. If these would take more than 1 GiB, "mean" and "sum"
    process parts of the tokens (at least 1024) and compute the gradients with the loss; "none" recomputes the logits in
    the backward. Statistics and the loss are in fp32 (fp64 for fp64), in log-odds form: exact for confident tokens too
    (see combination.py). With Triton's kernels nothing waits for the host.

    Args:
        input: [..., hidden_size], hidden states. As with torch's functions autocast casts it and `linear_weight` first,
            but not fp64, and leaves the loss in fp32.
        linear_weight: [vocabulary, hidden_size], in the dtype of `input`.
        target: [...] int64, labels; tokens with `ignore_index` have no loss and no gradient, whatever their hidden
            states.
        linear_bias: [vocabulary].
        weight: [vocabulary], factor on the loss of tokens with this label. Not with label smoothing.
        reduction: "none": losses [...], in the dtype of `input`; "sum": sum of factor times loss; "mean": that divided
            by the sum of factors, NaN if no token counts, as in torch.
        token_weights: [...], factor on the loss of each token. A constant: no gradient flows to it.
        label_smoothing, z_loss, soft_cap, logit_scale, kernels: see `LossOptions`.

    Raises InputError for arguments that do not fit together, for an option out of range, and for invalid labels on the
    host; on a GPU such a label stops the device, as in torch. Raises TypeError for an unknown argument.
    """
    for name in further.keys() - FurtherOptions.__annotations__:
        raise TypeError(f"linear_cross_entropy() got an unexpected keyword argument {name!r}")
    options = LossOptions(label_smoothing=label_smoothing, ignore_index=ignore_index, **further)
    device_type = input.device.type
    autocast = torch.is_autocast_enabled(device_type)
    if autocast:
        dtype = torch.get_autocast_dtype(device_type)
        input, linear_weight = (
            tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in (input, linear_weight)
        )
    if reduction not in get_args(Reduction):
        raise InputError(f'reduction must be "none", "mean" or "sum", not {reduction!r}.')
    if weight is not None and label_smoothing:
        raise InputError("weight (factors of classes) does not go with label_smoothing; use token_weights.")
    _check(input, linear_weight, target, linear_bias, weight, token_weights)
    if linear_weight.stride(1) != 1:
        linear_weight = linear_weight.contiguous()
    hidden, labels = input.flatten(0, -2), target.flatten()
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    with torch.autocast(device_type, enabled=False):
        factors = _factors(hidden, labels, weight, token_weights, options)
        loss = _loss(hidden, linear_weight, linear_bias, labels, factors, options, reduction)
    return (loss if autocast else loss.to(input.dtype)).view(target.shape if reduction == "none" else ())


def _loss(  # noqa: PLR0917 - the arguments of the function
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    factors: Tensor,
    options: LossOptions,
    reduction: Reduction,
) -> Tensor:
    """Return the loss of [tokens, hidden_size], in the accumulator dtype."""
    if reduction == "mean":
        factors = factors / factors.sum()
    size = KEPT_BYTES // (weight.shape[0] * stored_dtype(hidden.dtype).itemsize) // TOKENS_AT_LEAST * TOKENS_AT_LEAST
    size = max(TOKENS_AT_LEAST, size)
    keeps_all = size >= hidden.shape[0]
    differentiable = (hidden, weight, bias)
    losses: Tensor
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in differentiable):
        origin = (_Origin.apply(*differentiable),)  # type: ignore[no-untyped-call]
        if not keeps_all and reduction != "none":
            losses = _AtOnce.apply(*differentiable, labels, factors, options, origin, size)  # type: ignore[no-untyped-call]
            return losses
        split_options = options if keeps_all else replace(options, keep="nothing")
        losses = _InParts.apply(*differentiable, labels, split_options, origin)  # type: ignore[no-untyped-call]
    else:
        statistics, _ = _first_half(*differentiable, labels, options, gradients=False)
        losses = combine(statistics[None], torch.ones_like(factors), labels, options, weight.shape[0]).losses
    if reduction == "none":
        return losses * factors
    if reduction == "mean" and not labels.numel():
        return losses.sum() / 0.0
    return torch.dot(losses, factors)


def _check(  # noqa: PLR0917 - the arguments of the function
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weights: Tensor | None,
    token_weights: Tensor | None,
) -> None:
    if weight.dim() != 2 or hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1]:
        raise InputError(
            "input must be [..., hidden_size] and linear_weight [vocabulary, hidden_size],"
            f" not {list(hidden.shape)} and {list(weight.shape)}."
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise InputError(f"input and linear_weight must have one dtype, not {hidden.dtype} and {weight.dtype}.")
    tokens, vocabulary = hidden.shape[:-1], weight.shape[:1]
    for name, tensor, shape in (
        ("target", labels, tokens),
        ("linear_bias", bias, vocabulary),
        ("weight", class_weights, vocabulary),
        ("token_weights", token_weights, tokens),
    ):
        if tensor is not None and tensor.shape != shape:
            raise refused(name, list(tensor.shape), str(list(shape)))
    if labels.dtype != torch.int64:
        raise InputError(f"target must hold labels in torch.int64, not {labels.dtype}.")
    for name, tensor in (("weight", class_weights), ("token_weights", token_weights)):
        if tensor is not None and tensor.requires_grad:
            raise InputError(f"{name} is a constant here; detach it.")


def _factors(
    hidden: Tensor, labels: Tensor, class_weights: Tensor | None, token_weights: Tensor | None, options: LossOptions
) -> Tensor:
    """Return [tokens], the factor on each token's loss: 0 if it is ignored."""
    counts = labels != options.ignore_index
    dtype = accumulator_dtype(hidden.dtype)
    factors = to_device(counts, hidden.device).to(dtype)
    if class_weights is not None:
        # An invalid label is reported later: here it must not be looked up.
        indices = labels.where(counts, 0).clamp(0, class_weights.shape[0] - 1).to(class_weights.device)
        factors = factors * class_weights.to(dtype)[indices].to(hidden.device)
    if token_weights is not None:
        token_factors = to_device(token_weights.flatten(), hidden.device).to(dtype)
        factors = torch.where(factors != 0, factors * token_factors, 0.0)
    return factors


def _first_half(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    options: LossOptions,
    **options_of_shard: Any,
) -> Any:
    """S with the whole vocabulary as the shard."""
    shard = Shard(0, weight.shape[0], weight.shape[0])
    return forward_shard(hidden, weight, bias, labels, shard, options, one_barrier=False, **options_of_shard)


class _Origin(torch.autograd.Function):
    """An empty tensor that depends on the inputs of the loss and keeps nothing: it detects second derivatives."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> Tensor:
        (first, *_) = inputs
        assert first is not None
        return first.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "linear_cross_entropy has no second derivative: use cross_entropy(linear(...)) of torch.nn.functional if"
            " gradients are differentiated."
        )


def _without_graph(backward: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """Decorate a backward that computes gradients from constants. If the caller wants to differentiate them
    (`create_graph`), this raises an error instead of silently giving zero. torch's `once_differentiable` does less: it
    is silent if the gradient of the loss is a constant, and for `torch.autograd.grad`."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, upstream: Tensor) -> Any:
        with torch.no_grad():
            gradients = backward(ctx, upstream)
        if not torch.is_grad_enabled():
            return gradients
        nothing = ctx.origin[0].sum() + _Origin.apply(upstream).sum()  # type: ignore[no-untyped-call]
        return tuple(None if gradient is None else gradient + nothing for gradient in gradients)

    return wrapped


def _in_dtypes_of(inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    pairs = zip(inputs, gradients, strict=True)
    return [None if tensor is None or gradient is None else gradient.to(tensor.dtype) for tensor, gradient in pairs]


class _InParts(torch.autograd.Function):
    """Losses of all tokens; the gradients are computed in the backward, when the factors on them are known."""

    @staticmethod
    def forward(  # type: ignore[override]  # noqa: PLR0917
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        options: LossOptions,
        origin: tuple[Tensor],
    ) -> Tensor:
        ctx.options, ctx.origin = options, origin
        statistics, ctx.state = _first_half(hidden, weight, bias, labels, options)
        ctx.save_for_backward(hidden, weight, bias, labels, statistics)
        unit_factors = statistics.new_ones(hidden.shape[0])
        return combine(statistics[None], unit_factors, labels, options, weight.shape[0]).losses

    @staticmethod
    @_without_graph
    def backward(ctx: Any, of_losses: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, bias, labels, statistics = ctx.saved_tensors
        state, ctx.state = ctx.state, None
        if state is None:
            raise RuntimeError("linear_cross_entropy has only one backward, which frees its exponentials.")
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        combined = combine(statistics[None], of_losses, labels, ctx.options, weight.shape[0])
        state.one_barrier = not to_hidden  # then T makes no gradient of the hidden states
        dtype = stored_dtype(weight.dtype)
        of_weight = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format) if to_weight else None
        of_bias = torch.zeros_like(bias, dtype=statistics.dtype) if to_bias else None
        of_hidden = backward_shard(state, combined, weight, of_weight, of_bias, overwrite=True)
        return *_in_dtypes_of((hidden, weight, bias), (of_hidden, of_weight, of_bias)), None, None, None


class _AtOnce(torch.autograd.Function):
    """The weighted sum of the losses, computed together with the gradients, part by part of the tokens."""

    @staticmethod
    def forward(  # type: ignore[override]  # noqa: PLR0917
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        factors: Tensor,
        options: LossOptions,
        origin: tuple[Tensor],
        size: int,
    ) -> Tensor:
        ctx.origin = origin
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if to_hidden else None
        of_weight = torch.empty_like(weight, dtype=factors.dtype) if to_weight else None
        of_bias = torch.zeros_like(bias, dtype=factors.dtype) if to_bias and bias is not None else None
        loss, buffers = factors.new_zeros(()), Buffers()
        for start in range(0, hidden.shape[0], size):
            rows = slice(start, start + size)
            statistics, state = _first_half(hidden[rows], weight, bias, labels[rows], options, buffers=buffers)
            combined = combine(statistics[None], factors[rows], labels[rows], options, weight.shape[0])
            loss = loss + torch.dot(combined.losses, factors[rows])
            state.one_barrier = not to_hidden
            hidden_gradient = backward_shard(state, combined, weight, of_weight, of_bias, overwrite=start == 0)
            if of_hidden is not None and hidden_gradient is not None:
                of_hidden[rows] = hidden_gradient
        ctx.gradients = _in_dtypes_of((hidden, weight, bias), (of_hidden, of_weight, of_bias))
        return loss

    @staticmethod
    @_without_graph
    def backward(ctx: Any, of_loss: Tensor) -> Any:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("linear_cross_entropy has only one backward, which frees its gradients.")
        # On a CPU the factor is known here, and is usually one.
        if of_loss.is_cuda or of_loss.item() != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(of_loss)
        return (*gradients, None, None, None, None, None)
