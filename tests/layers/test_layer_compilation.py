"""Compiled layers in split backwards: the gradients of plain autograd, nothing more in the queue, no break in a graph.

Most of it with the back-end "aot_eager", which traces as inductor does but calls torch's own kernels: bit for bit. One
case goes through inductor itself, where there is a compiler.
"""

from __future__ import annotations

import copy
import logging
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from split_module import Fused, Layers, Split, data, difference, trunk
from torch import Tensor, nn
from torch._dynamo.utils import counters

from evenpipe.layers import compilation
from evenpipe.layers.checkpointing import CHOICES, Switch
from evenpipe.layers.compilation import compile_layer

CPU = torch.device("cpu")
PASSES = "F0 F1 I0 F2 B1 I2 W2 W0"
"""Split and fused, of changing lengths, W in another order than I."""


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    compilation._told.clear()
    yield
    torch._dynamo.reset()


class Compiled(Split):
    choice: Any = "none"
    """Of all layers, or of each."""
    backend = "aot_eager"
    observed = True
    """Whether a split backward has come by already: layers run the first one without compilation."""

    def __init__(self, module: nn.Module, batches: list[Any]) -> None:
        super().__init__(module, batches)
        self.switch = Switch()
        layers = module.h if hasattr(module, "h") else module.layers
        choices = [self.choice] * len(layers) if isinstance(self.choice, str) else self.choice
        for layer, choice in zip(layers, choices, strict=True):
            compile_layer(layer, self.queue, choice, self.switch, CPU, backend=self.backend)
        if self.observed:
            self.run("F0 I0 W0")
            module.zero_grad()


def assert_close(runner: Split, plain: Split) -> None:
    expected = dict(plain.module.named_parameters())
    for name, parameter in runner.module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_split_and_fused_backwards_of_compiled_layers() -> None:
    batches = data(3, 2, dtype=torch.float32)
    assert difference(lambda: trunk("llama", torch.float32), batches, PASSES, Compiled) == []
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 3  # for both layers: split, for one length and for any; fused


def test_what_runs_inside_of_a_layer_runs_once_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of a split backward too: a hook may collect what a router gave."""
    monkeypatch.setattr(Compiled, "observed", False)
    runner = Compiled(one_layer(nn.Linear(8, 8)), data(3, width=8, dtype=torch.float32))
    seen: list[Tensor] = []
    runner.module.layers[0].inside[0].register_forward_hook(lambda module, args, output: seen.append(output))
    for index in range(3):
        runner.run(f"F{index} I{index} W{index}")
        assert len(seen) == index + 1 and seen[-1].requires_grad


@pytest.mark.slow
def test_a_layer_that_torch_compiles_too_often_leaves_the_checkpointed_ones_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch runs a function without compilation once it has compiled its code so often. That is no failure."""
    monkeypatch.setattr(Compiled, "choice", ("none", "full"))
    torch.manual_seed(0)
    module = one_layer(nn.Linear(8, 8))
    module.layers.append(Layer(nn.Linear(8, 8)))
    with torch._dynamo.config.patch(recompile_limit=2):
        for passes in ("F0 B0 F1 B1 F2 B2", "F0 I0 W0 F1 I1 W1 F2 I2 W2"):
            batches = data(3, width=8, dtype=torch.float32)
            assert difference(lambda: copy.deepcopy(module), batches, passes, Compiled) == []


@pytest.mark.slow
def test_checkpointing_draws_the_same_dropout_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiled, "choice", "full")
    batches = data(1, 2, dtype=torch.float32)
    assert difference(lambda: trunk("gpt2", torch.float32), batches, "F0 I0 W0", Compiled) == []
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1


class Layer(nn.Module):
    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)

    def forward(self, hidden: Tensor) -> Tensor:
        for module in self.inside:
            hidden = module(hidden)
        return hidden


def one_layer(*inside: nn.Module) -> nn.Module:
    return Layers(Layer(*inside))


class OfTheFirstToken(nn.Linear):
    """No: a subclass. Its child is used on one token only."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.gate = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self.gate(hidden[:, :1])


class Broken(nn.Module):
    """No single graph."""

    def forward(self, hidden: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return hidden.sin()


def test_layers_used_twice_or_on_some_tokens_have_their_gradient_in_I() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        twice = nn.Linear(8, 8)
        return one_layer(
            twice, nn.GELU(), OfTheFirstToken(), twice, nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        )

    batches = data(2, width=8, dtype=torch.float32)
    plain, runner = Fused(make(), batches), Compiled(make(), batches)
    plain.run("F0 F1 B0 B1")
    runner.run("F0 F1 I0 I1")
    assert [len(entries) for entries in runner.queue._entries.values()] == [1, 1]
    runner.run("W0 W1")
    assert_close(runner, plain)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("choice", ["none", "full"])
def test_parameters_that_are_frozen_or_thawed_between_steps(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiled, "choice", choice)
    torch.manual_seed(0)
    module = one_layer(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))
    batches = data(1, width=8, dtype=torch.float32)
    plain, runner = Fused(copy.deepcopy(module), batches), Compiled(module, batches)
    for frozen in ((2, 3), (0,), (0, 2, 3)):
        for one in (plain, runner):
            one.module.zero_grad()
            for index, part in enumerate(one.module.layers[0].inside):
                part.requires_grad_(index not in frozen)
            one.run("F0 I0 W0" if one is runner else "F0 B0")
        assert_close(runner, plain)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.sampled(2)
def test_no_single_graph(choice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Compiled in pieces, also where it is checkpointed, and the user is told."""
    monkeypatch.setattr(Compiled, "choice", choice)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return one_layer(nn.Linear(8, 8), Broken(), nn.Linear(8, 8), nn.GELU(), Broken(), nn.Linear(8, 8))

    with caplog.at_level(logging.INFO, logger="evenpipe"):
        assert difference(make, data(2, width=8, dtype=torch.float32), "F0 F1 I0 I1 W0 W1", Compiled) == []
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert re.fullmatch(r"layers compiled in pieces: Layer, with [23] breaks in its graph", told[0])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler (g++) on the CPU")
def test_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffers are used again within a backward: what is queued must not be among them."""
    monkeypatch.setattr(Compiled, "backend", "inductor")
    torch.manual_seed(0)
    module = one_layer(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 8))
    batches = [(torch.randn(2, 6, 8), torch.randn(2, 6, 8)) for _ in range(2)]
    plain, runner = Fused(copy.deepcopy(module), batches), Compiled(module, batches)
    plain.run("F0 F1 B0 B1")
    runner.run("F0 F1 I0 I1 W0 W1")
    expected = dict(plain.module.named_parameters())
    for name, parameter in module.named_parameters():
        wanted = expected[name].grad
        assert torch.linalg.vector_norm(parameter.grad - wanted) <= 1e-5 * torch.linalg.vector_norm(wanted), name
