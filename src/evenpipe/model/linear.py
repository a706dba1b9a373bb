"""Linear layers: torch's, and transformers' `Conv1D` (GPT-2), whose matrix is [in, out]; and terms added to them.

A linear layer is one product x W^T + b, on which other features build: its weight gradient can be deferred to W, and
its input may be gathered, or its outputs summed, over tensor ranks. A term is what an adapter adds:

    y = x W^T + b + term(x)                 `add_term(layer, "low_rank", term)`

The layer keeps its class, its name and its parameters' names; names of the term's parameters begin with those of the
layer and the term. `use_products` gives a layer products of another kind, such as fp8.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from evenpipe.errors import InputError
from evenpipe.model.products import Product, Products

LINEAR = (nn.Linear, Conv1D)


class LinearTerm(nn.Module):
    """A function of a linear layer's input [..., in] that is added to the layer's product. It must be linear if tensor
    ranks share the layer. Subclasses define `forward`, returning [..., out], and `reset_parameters`."""

    inputs: tuple[str, ...] = ()
    """Names of its linear layers that multiply the layer's input: a tensor rank that has some columns of that
    input has the same columns of their matrices."""
    outputs: tuple[str, ...] = ()
    """Names of its linear layers whose outputs are the term's outputs: a tensor rank that has some of the layer's
    outputs has the same of their outputs."""

    def reset_parameters(self) -> None:
        """Draw initial values for all its parameters."""
        raise NotImplementedError(f"{type(self).__name__}.reset_parameters")


class _WithTerms(nn.Module):
    """Mixin in front of the class of a linear layer that has terms."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(hidden)
        for term in terms_of(self).values():
            result = result + term(hidden)
        return result


class _WithProducts(nn.Module):
    """Mixin in front of the class of a linear layer that has its own products."""

    weight: Any
    bias: Any
    _products: Products

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        how = self._products, is_transposed(self)
        result: torch.Tensor = Product.apply(hidden, self.weight, self.bias, how)
        return result


def use_products(layer: nn.Module, products: Products) -> None:
    """Let a linear layer, or a module of experts, multiply in another way. For experts this needs a pipeline.

    Raises:
        InputError: the layer is a linear layer that does more than one product (`is_one_product`).
    """
    if is_linear(layer):
        if not is_one_product(layer):
            raise InputError(f"{type(layer).__name__} does more than one product; expected a layer that is x W^T + b")
        if not isinstance(layer, _WithProducts):
            layer.__class__ = specialised(type(layer), _WithProducts)  # type: ignore[assignment, arg-type]
    layer.__dict__["_products"] = products


def add_term(layer: nn.Module, name: str, term: LinearTerm) -> None:
    """Add a term to a linear layer, after its existing terms. The layer must not have an attribute `name`."""
    layer.add_module(name, term)
    if not isinstance(layer, _WithTerms):
        layer.__class__ = _with_terms(type(layer))  # type: ignore[assignment, arg-type]  # a class is hashable


@cache
def _with_terms(kind: Any) -> Any:
    return type(kind.__name__, (_WithTerms, kind), {"__module__": kind.__module__})


def terms_of(layer: nn.Module) -> dict[str, LinearTerm]:
    """Return the terms of a linear layer, by name."""
    return {name: module for name, module in layer._modules.items() if isinstance(module, LinearTerm)}


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer; subclasses count."""
    return isinstance(module, LINEAR)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear layer's matrix is [in, out] rather than [out, in]."""
    return isinstance(module, Conv1D)


def named_linear(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, layer) of the linear layers in a module, except those inside terms."""
    ends: tuple[str, ...] = ()
    for name, inner in module.named_modules():
        if is_linear(inner) and not name.startswith(ends or "\0"):
            yield name, inner
            ends += (f"{name}." if name else "",)


def is_one_product(module: nn.Module) -> bool:
    """Return whether a linear layer computes one product with a parameter, and adds a bias and terms: its forward is
    the one of torch or transformers, not replaced in a subclass or in the layer, and no hook computes its weight."""
    kinds = (kind for kind in type(module).__mro__ if kind not in (_WithTerms, _WithProducts))
    forward = next((vars(kind)["forward"] for kind in kinds if "forward" in vars(kind)), None)
    return (
        forward in {kind.forward for kind in LINEAR}
        and module._parameters.keys() == {"weight", "bias"}
        and isinstance(module._parameters["weight"], nn.Parameter)
        and "forward" not in vars(module)
    )


@cache
def specialised(kind: Any, mixin: Any) -> Any:
    """Return the class of linear layers of this kind whose product `mixin` computes, with terms as before."""
    bases = (_WithTerms, mixin, kind.__bases__[-1]) if issubclass(kind, _WithTerms) else (mixin, kind)
    return type(f"{mixin.__name__}{kind.__name__}", bases, {})
