"""What a checkpointed layer computes again, and that its gradients are those of plain autograd to the bit.

`tests/multiprocess` counts its forwards and the bytes that it keeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_module import ChangesItsInput, Products, Split, data, difference, trunk
from torch import Tensor, nn

from evenpipe.layers.checkpointing import Switch, checkpoint_layer

CPU = torch.device("cpu")
PASSES = ("F0 F1 F2 I0 I1 I2 W0 W1 W2", "F0 F1 I0 F2 B1 I2 W0 W2", "F0 B0 F1 B1 F2 B2")


def layers_of(module: nn.Module) -> list[nn.Module]:
    return list(module.h if hasattr(module, "h") else module.layers)


def checkpointed(module: nn.Module, *choices: str) -> nn.Module:
    layers = layers_of(module)
    for layer, choice in zip(layers, choices * len(layers), strict=False):
        checkpoint_layer(layer, choice, Switch(), CPU)
    return module


class Checkpointed(Split):
    """Checkpointing comes after the copy for the fused run: the copy of a bound forward is the original's."""

    choices: tuple[str, ...] = ("full",)

    def __init__(self, module: nn.Module, batches: list[Any]) -> None:
        super().__init__(checkpointed(module, *self.choices), batches)


CHOICES = (("full",), ("selective",), ("full", "none"), ("selective", "full"))


def test_gradients_are_those_of_plain_layers_bit_for_bit(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 draws dropout: the second forward draws it again, and what is drawn afterwards stays the same."""
    families, dtypes = ("llama", "gemma2", "gpt2"), (torch.float32, torch.bfloat16)
    for case in sample(itertools.product(families, dtypes, CHOICES, PASSES), 10):
        family, dtype, choices, passes = case
        monkeypatch.setattr(Checkpointed, "choices", choices)
        batches = data(3, 2, dtype=dtype)
        assert difference(lambda: trunk(family, dtype), batches, passes, split=Checkpointed) == [], case


# --- what runs again, and what is the same -----------------------------------------------------------------------


def products_in(passes: str, choice: str) -> list[int]:
    runner = Split(checkpointed(trunk("llama", torch.float32), choice), data(1, dtype=torch.float32))
    return [products.count for products in runner.run(passes, Products)]


def test_products_that_run_again() -> None:
    """A Llama layer has 7 linear layers and an attention (whose backward is not counted). "full" runs them again, but
    for the last one, whose result nobody wants; "selective" none."""
    layers = 2
    for passes, backward in (("F0 I0 W0", [7, 7]), ("F0 B0", [14])):
        plain = [layers * count for count in (7 + 1, *backward)]
        assert products_in(passes, "none") == products_in(passes, "selective") == plain
        plain[1] += layers * (6 + 1)
        assert products_in(passes, "full") == plain


class Forgetful(nn.Module):
    """Computes something else the second time."""

    def __init__(self, first: Callable[[nn.Module, Tensor], Tensor], second: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        self.linear, self.forwards = nn.Linear(4, 4), [first, second]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.forwards.pop(0)(self.linear, hidden)


def test_what_is_not_the_same_the_second_time_is_an_error() -> None:
    module = ChangesItsInput(nn.Linear(4, 4), nn.Linear(4, 4))
    runner = Split(checkpointed(module, "full"), [(torch.randn(2, 4), torch.randn(2, 4))])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        runner.run("F0 B0")

    def changed_in_place(linear: nn.Module, hidden: Tensor) -> Tensor:
        return linear(hidden).mul_(2).exp()

    aside = Switch(hooks=(Tensor.detach, lambda tensor: tensor))
    cases: list[tuple[str, Switch, nn.Module, str]] = [
        (
            "full",
            Switch(),
            Forgetful(lambda linear, hidden: linear(hidden).exp(), lambda linear, hidden: linear(hidden)),
            "depends on more than its arguments",
        ),
        (
            "selective",
            Switch(hooks=(lambda tensor: (tensor.clone(),), lambda packed: packed[0])),
            Forgetful(
                lambda linear, hidden: linear(hidden).exp() @ torch.ones(4, 4),
                lambda linear, hidden: linear(hidden @ torch.ones(4, 4)).exp(),
            ),
            r"computed aten.addmm.default, but aten.mm.default in its recomputation",
        ),
        (
            "selective",
            aside,
            Forgetful(changed_in_place, changed_in_place),
            r"a product \[2, 4\] torch.float32 .* was changed in place",
        ),
    ]
    for choice, switch, layer, sentence in cases:
        checkpoint_layer(layer, choice, switch, CPU)
        with pytest.raises(RuntimeError, match=sentence):
            layer(torch.randn(2, 4, requires_grad=True)).sum().backward()


def test_the_mechanism_of_transformers_is_switched_off() -> None:
    module = trunk("llama", torch.float32)
    module.gradient_checkpointing_enable()
    assert layers_of(module)[0].gradient_checkpointing
    checkpointed(module, "full")
    assert not layers_of(module)[0].gradient_checkpointing
