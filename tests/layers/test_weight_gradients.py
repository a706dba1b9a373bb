"""A backward in two passes gives the gradients of autograd's own bit for bit, and keeps two tensors per linear layer.

The table of passes runs on transformers' modules; everything else that a parameter can be (frozen, shared, hooked,
used twice) on small modules. The judge is always the same module under plain autograd.
"""

from __future__ import annotations

import itertools
from types import MethodType

import pytest
import torch
from split_module import FAMILIES, Fused, Split, Storages, data, difference, trunk, unequal, without_collector
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

from evenpipe.layers import weight_gradients
from evenpipe.layers.weight_gradients import WeightGradients, split_layers

PASSES = {
    "one after the other": "F0 I0 W0 F1 I1 W1 F2 I2 W2",
    "all in flight": "F0 F1 F2 I0 I1 I2 W0 W1 W2",
    "last W first": "F0 F1 F2 I0 I1 I2 W2 W0 W1",
    "fused and split": "F0 F1 I0 F2 B1 I2 W0 W2",
    "W between F and I": "F0 F1 I0 F2 W0 I1 W1 I2 W2",
}


DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def test_split_equals_fused_bit_for_bit(sample) -> None:
    for case in sample(itertools.product(FAMILIES, DTYPES, (1, 2), PASSES), 8):
        family, dtype, batch, passes = case
        assert difference(lambda: trunk(family, dtype), data(3, batch, dtype=dtype), PASSES[passes]) == [], case


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float32), ("qwen3", torch.bfloat16), ("gemma2", torch.bfloat16)]
)
@pytest.mark.sampled(1)
def test_between_I_and_W_stay_input_and_output_gradient_of_each_linear_layer(family: str, dtype: torch.dtype) -> None:
    """12 + 4r + 6q bytes per layer in bf16, times tokens x hidden size; r = key-value heads / heads, q = intermediate /
    hidden size. Inputs 6+2q (q, k and v share one, gate and up as well), output gradients 6+4r+4q."""
    tokens, hidden, r, q = 16, 32, 2 / 4, 48 / 32
    batch = [tuple(torch.randn(2, tokens // 2, hidden).to(dtype) for _ in range(2))]
    split = Split(trunk(family, dtype), batch)
    with without_collector():
        with Storages() as storages:
            split.run("F0 I0")
            split.outputs.clear()
            split.input_gradients.clear()
            split.module.zero_grad()  # norms have theirs
        layers = 2
        assert storages.alive == layers * (12 + 4 * r + 6 * q) / 2 * tokens * hidden * dtype.itemsize
        split.run("W0")
        split.module.zero_grad()
        assert storages.alive == 0


def test_a_frozen_weight_keeps_nothing() -> None:
    for frozen, tensors in (("weight bias", 0), ("weight", 0), ("bias", 2), ("", 2)):
        layer = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for name in frozen.split():
            getattr(layer[1], name).requires_grad_(False)
        layer[0].requires_grad_(False)
        split = Split(layer, [(torch.randn(4, 8), torch.randn(4, 8).clone())])
        with Storages() as storages:
            split.batches = [tuple(tensor.clone() for tensor in split.batches[0])]
            split.run("F0 I0")
            layer.zero_grad()
            split.batches, split.outputs, split.input_gradients = [], {}, {}
        assert storages.alive == tensors * 4 * 8 * 4, frozen


# --- parameters of every kind ------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A layer used three times, a norm, two layers with one weight, an adapter beside a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 48, bias=False), nn.Linear(48, 32)
        self.twin = nn.Linear(32, 48)
        self.twin.weight = self.up.weight
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(32, 4, bias=False), nn.Dropout(0.3), nn.Linear(4, 32, bias=False))
        self.bias_only = nn.Linear(32, 32)
        self.bias_only.weight.requires_grad_(False)
        self.weight_only = nn.Linear(32, 32)
        self.weight_only.bias.requires_grad_(False)
        self.unused = nn.Linear(32, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.again(functional.gelu(self.again(hidden)))
        hidden = self.norm(self.again(hidden))
        hidden = self.down(functional.silu(self.up(hidden)) * self.twin(hidden))
        hidden = self.frozen(hidden) + self.adapter(hidden)
        return self.weight_only(self.bias_only(hidden.transpose(0, 1)).transpose(0, 1).contiguous())


def mixed(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Mixed().to(dtype)


def test_frozen_shared_and_repeated_parameters(sample) -> None:
    for dtype, passes in sample(itertools.product(DTYPES, PASSES), 5):
        assert difference(lambda: mixed(dtype), data(3, 2, dtype=dtype), PASSES[passes]) == [], (dtype, passes)


class Tied(nn.Module):
    """A matrix that an embedding looks up and a linear layer multiplies: the second is not split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.embedding, self.last = nn.Linear(32, 32), nn.Embedding(16, 32), nn.Linear(32, 16, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        rows = self.embedding(torch.arange(hidden.shape[1]))
        return functional.pad(self.last(self.first(hidden) + rows), (0, 16))


class Inside(nn.Linear):
    """A subclass: who knows what it does."""


class Foreign(nn.Module):
    """Matrices in modules of other kinds, and linear layers whose weight is not a parameter of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.router = Inside(32, 32), nn.Parameter(torch.randn(32, 32) / 8)
        self.normed = weight_norm(nn.Linear(32, 32))
        self.plain = nn.Linear(32, 32)
        self.replaced = nn.Linear(32, 32)
        self.replaced.forward = MethodType(lambda layer, hidden: functional.linear(hidden, layer.weight), self.replaced)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.replaced(self.plain(self.normed(self.inside(hidden) @ self.router)))


NORMED = [f"normed.parametrizations.weight.original{index}" for index in (0, 1)]


@pytest.mark.parametrize(
    ("make", "unsplit"),
    [
        (Tied, ["embedding.weight"]),
        (Foreign, ["router", "inside.weight", *NORMED, "replaced.weight"]),
        (lambda: trunk("llama", torch.float32), ["embed_tokens.weight"]),
    ],
)
def test_what_is_not_a_linear_layer_is_left_alone_and_reported(make, unsplit: list[str]) -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return make()

    assert difference(seeded, data(2, dtype=torch.float32), "F0 F1 I1 I0 W0 W1") == []
    module, plain = seeded(), seeded()
    assert split_layers(module, WeightGradients()) == unsplit
    assert module.state_dict().keys() == plain.state_dict().keys()


def test_one_line_names_what_is_not_split(caplog: pytest.LogCaptureFixture) -> None:
    weight_gradients.report_unsplit([])
    assert not caplog.records
    weight_gradients.report_unsplit(["layers.0.mlp.gate.weight", "layers.11.mlp.gate.weight", "positions.weight"])
    (record,) = caplog.records
    assert "layers.*.mlp.gate.weight (2 times), positions.weight" in record.getMessage()


# --- gradients, hooks, inputs ------------------------------------------------------------------------------------


def test_hooks_of_parameters_run_once_per_microbatch_and_see_the_whole_gradient() -> None:
    """A hook that replaces the gradient (clipping), and one after the addition: bf16 copies with fp32 masters."""

    def run(kind: type[Split]) -> tuple[dict[str, Tensor], dict[str, int], Split]:
        module = mixed(torch.bfloat16)
        masters: dict[str, Tensor] = {}
        calls: dict[str, int] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue

            def add(copy: Tensor, name: str = name) -> None:
                masters[name] = masters.get(name, 0) + copy.grad.float()
                calls[name] = calls.get(name, 0) + 1
                copy.grad = None

            parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
            parameter.register_post_accumulate_grad_hook(add)
        runner = kind(module, data(3, 2, dtype=torch.bfloat16))
        runner.run("F0 F1 F2 B0 B1 B2" if kind is Fused else "F0 F1 F2 I0 I1 B2 W0 W1".replace("B2 W0 W1", "W0 W1 B2"))
        return masters, calls, runner

    expected, expected_calls, plain = run(Fused)
    masters, calls, split = run(Split)
    assert unequal(split, plain) == []
    assert calls == expected_calls and set(calls.values()) == {3}
    assert all(torch.equal(masters[name], expected[name]) for name in expected)


def test_no_hook_of_a_linear_layer_runs_in_I() -> None:
    module = nn.Linear(32, 32)
    seen: list[str] = []
    module.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("weight"))
    split = Split(module, data(1, dtype=torch.float32))
    split.run("F0 I0")
    assert seen == [] and module.weight.grad is None
    split.run("W0")
    assert seen == ["weight"]


LAYOUTS = {
    "one vector": lambda: torch.randn(8),
    "a matrix": lambda: torch.randn(53, 8),
    "three dimensions": lambda: torch.randn(7, 53, 8),
    "four dimensions": lambda: torch.randn(3, 2, 53, 8),
    "sequences first": lambda: torch.randn(53, 7, 8).transpose(0, 1),
    "some of the tokens": lambda: torch.randn(7, 60, 8)[:, :53],
    "some of the columns": lambda: torch.randn(7, 53, 16)[:, :, 8:],
    "columns first": lambda: torch.randn(8, 53, 7).permute(2, 1, 0),
    "heads": lambda: torch.randn(7, 2, 53, 8).transpose(1, 2),
}


def test_layouts_of_the_input() -> None:
    """torch adds the bias to rows of a matrix or to all dimensions, and sums its gradient so: the last bit tells."""
    torch.manual_seed(0)
    for layout, dtype in itertools.product(LAYOUTS, DTYPES[1:]):
        hidden = LAYOUTS[layout]().to(dtype)
        gradient = torch.randn(*hidden.shape[:-1], 6).to(dtype)
        expanded = torch.randn(6).to(dtype).expand(gradient.shape)
        for batches, passes in itertools.product(([(hidden, gradient)], [(hidden, expanded)]), ("F0 I0 W0", "F0 B0")):
            assert difference(lambda: nn.Linear(8, 6, dtype=dtype), batches, passes) == [], (layout, dtype)


def test_an_output_may_be_changed_in_place() -> None:
    class Clamping(nn.Module):
        def __init__(self, layer: type[nn.Module]) -> None:
            super().__init__()
            self.inner = layer(32, 32)

        def forward(self, hidden: Tensor) -> Tensor:
            output = self.inner(hidden).clamp_(-0.5, 0.5)
            output[..., 0] += hidden[..., 0]
            return output

    for layer, batch, passes in itertools.product((nn.Linear, Conv1D), (1, 3), ("F0 F1 I0 I1 W0 W1", "F0 B0 F1 B1")):
        assert difference(lambda: Clamping(layer), data(2, batch, dtype=torch.float32), passes) == []


def test_without_gradients_for_the_input_or_for_anything_nothing_is_queued() -> None:
    """A layer whose input needs no gradient has its weight gradient in I; without grad mode there is no graph."""

    class OfConstants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.second(hidden) + self.first(torch.ones(32, dtype=hidden.dtype))

    assert difference(OfConstants, data(2, dtype=torch.float32), "F0 F1 I0 I1 W0 W1") == []
    module = nn.Linear(4, 4)
    queue = WeightGradients()
    split_layers(module, queue)
    queue.under_way = (0, 0)
    with torch.no_grad():
        assert not module(torch.ones(4, requires_grad=True)).requires_grad


@pytest.mark.parametrize("change", ["F0 change I0", "F0 change B0"])
def test_a_saved_input_changed_in_place_is_an_error(change: str) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = self.first(hidden)
            output = self.second(hidden)
            hidden.add_(1)
            return output

    split = Split(Changing(), [(torch.randn(2, 4), torch.randn(2, 4))])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        split.run(change.replace("change ", ""))
