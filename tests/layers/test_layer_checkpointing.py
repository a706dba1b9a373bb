"""What a checkpointed layer keeps, how often it runs, and that its gradients are those of plain autograd to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from split_module import Layers, Products, Split, Storages, data, difference, trunk, without_collector
from torch import Tensor, nn

from evenpipe.errors import InputError
from evenpipe.layers.checkpointing import Switch, check_choices, checkpoint_layer
from evenpipe.recipe.recipe import Recipe

CPU = torch.device("cpu")
PASSES = ("F0 F1 F2 I0 I1 I2 W0 W1 W2", "F0 F1 I0 F2 B1 I2 W0 W2", "F0 B0 F1 B1 F2 B2")


def layers_of(module: nn.Module) -> list[nn.Module]:
    return list(module.h if hasattr(module, "h") else module.layers)


def checkpointed(module: nn.Module, *choices: str, switch: Switch | None = None) -> nn.Module:
    layers = layers_of(module)
    for layer, choice in zip(layers, choices * len(layers), strict=False):
        checkpoint_layer(layer, choice, switch or Switch(), CPU)
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


class Blocks(nn.Module):
    """Layers whose forward is called with everything that a layer of transformers may get, and more."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        scale = hidden.mean()
        for layer in self.layers:
            hidden, scale = layer(hidden, None, scale=scale, factors=(2.0, torch.ones(32)))
        return hidden * scale


class Block(nn.Module):
    shared = nn.Linear(32, 32)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32, bias=False)
        self.everywhere = Block.shared

    def forward(self, hidden: Tensor, mask: None, *, scale: Tensor, factors: tuple[float, Tensor]) -> Any:
        hidden = self.everywhere(hidden) * factors[0] + factors[1]
        return hidden + self.down(self.dropout(self.up(hidden).relu()) * scale), scale + hidden.mean()


def test_other_differentiable_arguments_tuples_of_results_and_parameters_of_several_layers() -> None:
    assert difference(Blocks, data(3, 2, dtype=torch.float32), PASSES[1], split=Checkpointed) == []


# --- how often -------------------------------------------------------------------------------------------------------


def forwards_in(passes: str, choice: str, switch: Switch | None = None) -> dict[str, list[int]]:
    """For every module of the layers: its forwards in each of the passes."""
    runner = Split(checkpointed(trunk("llama", torch.float32), choice, switch=switch), data(1, dtype=torch.float32))
    counts: dict[str, list[int]] = {}
    for number, layer in enumerate(layers_of(runner.module)):
        for name, part in layer.named_modules():
            if name:  # hooks of the layer itself stay outside of what runs again
                own = counts.setdefault(f"{number}.{name}", [])
                part.register_forward_pre_hook(lambda *_, own=own: own.__setitem__(-1, own[-1] + 1))

    @contextmanager
    def next_pass() -> Iterator[SimpleNamespace]:
        for own in counts.values():
            own.append(0)
        yield SimpleNamespace(count=0)

    runner.run_counted(passes, next_pass)
    return counts


def test_each_forward_runs_exactly_twice_and_never_in_W() -> None:
    passes = {"F0 I0 W0": [1, 1, 0], "F0 B0": [1, 1]}
    for choice, (tokens, expected) in itertools.product(("full", "selective"), passes.items()):
        counts = forwards_in(tokens, choice)
        assert len(counts) > 20 and all(own == expected for own in counts.values()), counts
    switched_off = forwards_in("F0 I0 W0", "full", Switch(off=True))
    assert all(own == [1, 0, 0] for own in switched_off.values()), "a layer keeps everything"


def products_in(passes: str, choice: str) -> list[int]:
    runner = Split(checkpointed(trunk("llama", torch.float32), choice), data(1, dtype=torch.float32))
    return runner.run_counted(passes, Products)


def test_products_that_run_again() -> None:
    """A Llama layer has 7 linear layers and an attention (whose backward is not counted). "full" runs them again, but
    for the last one, whose result nobody wants; "selective" none."""
    layers = 2
    for passes, backward in (("F0 I0 W0", [7, 7]), ("F0 B0", [14])):
        plain = [layers * count for count in (7 + 1, *backward)]
        assert products_in(passes, "none") == products_in(passes, "selective") == plain
        plain[1] += layers * (6 + 1)
        assert products_in(passes, "full") == plain


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_fully_checkpointed_layer_keeps_its_input_until_I_and_what_W_needs_until_W() -> None:
    tokens, width = 10, 32
    layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(3)]
    runner = Split(checkpointed(Layers(*layers), "full"), [])
    unit = tokens * width * 4
    with without_collector(), Storages() as storages:
        runner.batches, runner._split = [(torch.randn(1, tokens, width), torch.randn(1, tokens, width))], {0}
        runner.forward(0)
        runner.outputs.clear()
        assert storages.alive == (1 + 3) * unit  # the gradient to come, and an input each
        runner.input_gradient(0)
        runner.batches.clear()
        runner.input_gradients.clear()
        assert storages.alive == 3 * (1 + 4 + 4 + 1) * unit  # input and output gradient of both linear layers
        runner.weight_gradient(0)
        runner.module.zero_grad()
        assert storages.alive == 0


class ChangesItsInput(Layers):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.layers[0](hidden)
        output = self.layers[1](hidden)
        hidden.add_(1)
        return output


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
            Elsewhere().switch,
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


# --- what "selective" keeps goes to somebody else ---------------------------------------------------------------------


class Elsewhere:
    """Takes copies of what it is given, and counts it."""

    def __init__(self) -> None:
        self.given = self.asked_for = 0

    def pack(self, tensor: Tensor) -> tuple[Tensor]:
        self.given += 1
        return (tensor.clone(),)

    def unpack(self, packed: tuple[Tensor]) -> Tensor:
        self.asked_for += 1
        return packed[0]

    @property
    def switch(self) -> Switch:
        return Switch(hooks=(self.pack, self.unpack))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_products_that_are_handed_over_come_back(family: str) -> None:
    """A Llama layer has 7 linear layers and an attention with two results, GPT-2's has 4. The last product of Llama's
    is the layer's result, which nobody wants to know again where the backward is whole."""
    places = []

    class HandingOver(Split):
        def __init__(self, module: nn.Module, batches: list[Any]) -> None:
            places.append(Elsewhere())
            super().__init__(checkpointed(module, "selective", switch=places[-1].switch), batches)

    for passes in PASSES:
        batches = data(3, 2, dtype=torch.float32)
        assert difference(lambda: trunk(family, torch.float32), batches, passes, split=HandingOver) == []
    calls = 2 * 3
    kept = calls * ((7 if family == "llama" else 4) + 2)
    wanted = kept - (calls if family == "llama" else 0)
    assert all(place.given == kept and wanted <= place.asked_for <= kept for place in places)
    assert places[-1].asked_for == wanted


# --- what stands around -----------------------------------------------------------------------------------------------


def test_hooks_on_saved_tensors_around_a_layer_see_its_input_alone() -> None:
    layer = Block()
    checkpoint_layer(layer, "full", Switch(), CPU)
    hidden, scale = torch.randn(2, 32, requires_grad=True), torch.ones((), requires_grad=True)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor.shape), lambda packed: packed):
        layer(hidden, None, scale=scale, factors=(1.0, torch.ones(32)))
    assert seen == [hidden.shape, scale.shape]


def test_the_mechanism_of_transformers_is_switched_off() -> None:
    module = trunk("llama", torch.float32)
    module.gradient_checkpointing_enable()
    assert layers_of(module)[0].gradient_checkpointing
    checkpointed(module, "full")
    assert not layers_of(module)[0].gradient_checkpointing


# --- values ----------------------------------------------------------------------------------------------------------


def test_one_choice_or_one_per_layer() -> None:
    for value, layers, expected in (
        ("none", 2, ("none", "none")),
        ("selective", 3, ("selective",) * 3),
        (["full", "none"], 2, ("full", "none")),
        (("selective",), 1, ("selective",)),
    ):
        assert Recipe.of(checkpointing=value).checkpointing_of(layers) == expected
    for value, sentence in (
        ("some", 'checkpointing: \'some\', expected one of "none", "full", "selective"'),
        (["full", True], "checkpointing: True"),
        (["full"], "checkpointing: 1 choice, expected one for each of the model's 2 layers"),
        (True, "checkpointing: True"),
    ):
        with pytest.raises(InputError, match=sentence):
            check_choices(Recipe.of(checkpointing=value).checkpointing_of(2))
