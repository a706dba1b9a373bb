"""A backward in two passes gives the gradients of autograd's own bit for bit.

The table of passes runs on transformers' modules; everything else that a parameter can be (frozen, shared, hooked,
used twice) on small modules. The judge is always the same module under plain autograd.
"""

from __future__ import annotations

import itertools
from types import MethodType

import pytest
import torch
from split_module import FAMILIES, ChangesItsInput, Split, data, difference, trunk
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from evenpipe.layers import weight_gradients
from evenpipe.layers.weight_gradients import SplitBackward, WeightGradients, unsplit_matrices
from evenpipe.memory.tracker import Tracker

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


def test_a_frozen_weight_keeps_nothing() -> None:
    for frozen, tensors in (("weight bias", 0), ("weight", 0), ("bias", 2), ("", 2)):
        layer = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
        for name in frozen.split():
            getattr(layer[1], name).requires_grad_(False)
        with Tracker() as tracker:
            tracker.add(*layer.parameters())
            before = tracker.live
            split = Split(layer, [(torch.randn(4, 8), torch.randn(4, 8))])
            split.run("F0 I0")
            layer.zero_grad()
            split.batches, split.outputs, split.input_gradients = [], {}, {}
            assert tracker.live - before == tensors * 4 * 8 * 4, frozen


# --- parameters of every kind ------------------------------------------------------------------------------------


class Inside(nn.Linear):
    """A subclass that computes what it likes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)


class Named(nn.Linear):
    """A subclass that computes what torch does."""


class Mixed(nn.Module):
    """A layer used three times, a norm, two layers with one weight, an adapter beside a frozen layer, a matrix that an
    embedding looks up and a linear layer multiplies, matrices in modules of other kinds, and linear layers whose weight
    is not a parameter of their own or whose forward is replaced."""

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
        self.weight_only = Named(32, 32)
        self.weight_only.bias.requires_grad_(False)
        self.unused = nn.Linear(32, 32)
        self.embedding, self.last = nn.Embedding(32, 32), nn.Linear(32, 32, bias=False)
        self.last.weight = self.embedding.weight
        self.inside, self.router = Inside(32, 32), nn.Parameter(torch.randn(32, 32) / 8)
        self.normed = weight_norm(nn.Linear(32, 32))
        self.replaced = nn.Linear(32, 32)
        self.replaced.forward = MethodType(lambda layer, hidden: functional.linear(hidden, layer.weight), self.replaced)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.again(functional.gelu(self.again(hidden)))
        hidden = self.norm(self.again(hidden) + self.embedding(torch.arange(hidden.shape[1])))
        hidden = self.down(functional.silu(self.up(hidden)) * self.twin(hidden))
        hidden = self.frozen(hidden) + self.adapter(hidden)
        hidden = self.weight_only(self.bias_only(hidden.transpose(0, 1)).transpose(0, 1).contiguous())
        return self.last(self.replaced(self.normed(self.inside(hidden) @ self.router)))


UNSPLIT = ["router", "embedding.weight", "inside.weight", "replaced.weight"]
UNSPLIT += [f"normed.parametrizations.weight.original{index}" for index in (0, 1)]


def mixed(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Mixed().to(dtype)


def test_frozen_shared_repeated_and_foreign_parameters(sample) -> None:
    """What is not split is reported, and no module changes its names."""
    for dtype, passes in sample(itertools.product(DTYPES, PASSES), 5):
        assert difference(lambda: mixed(dtype), data(3, 2, dtype=dtype), PASSES[passes]) == [], (dtype, passes)
    module = mixed(torch.float32)
    SplitBackward(WeightGradients()).apply(module, {})
    assert sorted(unsplit_matrices(module)) == sorted(UNSPLIT)
    assert module.state_dict().keys() == mixed(torch.float32).state_dict().keys()


def test_one_line_names_what_is_not_split(caplog: pytest.LogCaptureFixture) -> None:
    weight_gradients.report_unsplit([])
    assert not caplog.records
    weight_gradients.report_unsplit(["layers.0.mlp.gate.weight", "layers.11.mlp.gate.weight", "positions.weight"])
    (record,) = caplog.records
    assert "layers.*.mlp.gate.weight (2 times), positions.weight" in record.getMessage()


# --- gradients, hooks, inputs ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("passes", ["F0 I0", "F0 B0"])
def test_a_saved_input_changed_in_place_is_an_error(passes: str) -> None:
    split = Split(ChangesItsInput(nn.Linear(4, 4), nn.Linear(4, 4)), [(torch.randn(2, 4), torch.randn(2, 4))])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        split.run(passes)
