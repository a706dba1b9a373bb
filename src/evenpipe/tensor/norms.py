"""Norms over all heads of queries or keys (OLMo 2), whose mean of squares is a sum over tensor ranks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from evenpipe.model.linear import is_linear
from evenpipe.tensor.exchange import Exchange, Sum
from evenpipe.tensor.units import Call, until_the_end

NormStyle = Literal["narrow", "wide", "plus one"]
"""How transformers' module computes a norm in fp32: rounded before the weight ("narrow"), after it ("wide"), or with
1 + weight."""


def norms_inside(block: nn.Module, call: Call) -> dict[str, str | None]:
    """Return the names of the norms inside a block, and for each the linear layer whose entire output it normalizes;
    None: its input is something else, such as the result of all heads."""
    outputs: dict[int, tuple[str, Tensor]] = {}
    norms: dict[str, str | None] = {}

    def linear(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[output.data_ptr()] = name, output  # holding the tensor keeps its address from being reused

    def norm(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden = args[0] if args else None
        if not isinstance(hidden, Tensor) or not isinstance(output, Tensor):
            return
        if _epsilon(module, hidden, output) is not None:
            source = outputs.get(hidden.data_ptr())
            norms[name] = source[0] if source is not None and source[1].shape == hidden.shape else None

    hooks = []
    for name, module in block.named_modules():
        if is_linear(module):
            hooks.append(module.register_forward_hook(partial(linear, name)))
        elif name and not list(module.children()) and [*module._parameters] == ["weight"]:
            hooks.append(module.register_forward_hook(partial(norm, name)))
    with until_the_end(hooks), torch.no_grad():
        call.of(block)
    return norms


def _epsilon(norm: nn.Module, hidden: Tensor, output: Tensor) -> float | None:
    """Return the epsilon of a root-mean-square norm; None: the module is something else."""
    weight = norm.weight
    if not isinstance(weight, Tensor) or weight.shape != hidden.shape[-1:]:
        return None
    squares = hidden.double().square().mean(-1, keepdim=True)
    for value in vars(norm).values():
        if isinstance(value, float) and value > 0:
            normed = hidden.double() * (squares + value).rsqrt()
            for factor in (weight.double(), 1 + weight.double()):
                if torch.allclose(normed * factor, output.double(), rtol=1e-4, atol=1e-6):
                    return value
    return None


@torch.no_grad()
def norm_style(norm: nn.Module) -> NormStyle:
    """Determine how a norm is computed, from its results on simple inputs.

    norm: a root-mean-square norm with one weight, on any device; a copy of it runs.
    """
    real = copy.copy(norm)
    real._parameters = {name: nn.Parameter(torch.empty(parameter.shape)) for name, parameter in norm.named_parameters()}
    weight = next(real.parameters())
    hidden = torch.arange(1.0, weight.shape[-1] + 1)
    weight.zero_()
    if real(hidden).any():
        return "plus one"
    weight.fill_(1.0)
    # If the weight is applied after the rounding, the result has the weight's dtype.
    return "narrow" if real(hidden.bfloat16()).dtype == torch.float32 else "wide"


def sum_over_ranks(norm: nn.Module, exchange: Exchange) -> None:
    """Make a norm over a rank's heads use the mean square over the heads of all ranks."""
    (epsilon,) = [value for value in vars(norm).values() if isinstance(value, float) and value > 0]
    style = norm_style(norm)
    norm.forward = partial(_normed, norm, exchange, epsilon, style)  # type: ignore[method-assign]


def _normed(norm: nn.Module, exchange: Exchange, epsilon: float, style: NormStyle, hidden: Tensor) -> Tensor:
    weight = norm.weight
    assert isinstance(weight, Tensor)
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    total = Sum.apply(wide.square().sum(-1, keepdim=True), exchange) / (exchange.size * hidden.shape[-1])
    normed = wide * torch.rsqrt(total + epsilon)
    if style == "narrow":
        return weight * normed.to(hidden.dtype)
    return (normed * (1 + weight if style == "plus one" else weight)).to(hidden.dtype)
