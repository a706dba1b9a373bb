"""Units of blocks are found by running them; blocks whose units need each other are refused.

How families pack their matrices is in test_cuts.py, which compares what is cut with the whole.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from evenpipe.tensor.units import Call, NoUnitsError, find_units

HIDDEN, WIDTH = 10, 12


def call(*, tokens: int = 5) -> Call:
    return Call((torch.randn(2, tokens, HIDDEN, dtype=torch.float64),), {})


class Attention(nn.Module):
    """Four heads of queries with sinks of their own, one of keys and values, and a scale that all heads share."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(HIDDEN, WIDTH), *(nn.Linear(HIDDEN, 3 * groups) for _ in range(2))
        self.sinks, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3))
        self.o = nn.Linear(WIDTH, HIDDEN)
        self.double()

    def forward(self, hidden: Tensor) -> Tensor:
        batch, tokens, _ = hidden.shape
        q, k, v = (
            matrix(hidden).view(batch, tokens, -1, 3).transpose(1, 2).repeat_interleave(WIDTH // matrix.out_features, 1)
            for matrix in (self.q, self.k, self.v)
        )
        sinks = self.sinks.view(1, -1, 1, 1).expand(batch, -1, tokens, 1)
        weights = torch.cat([(q * self.scale) @ k.mT, sinks], dim=-1).softmax(-1)[..., :-1]
        return self.o((weights @ v).transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    def __init__(self, activation: nn.Module, *, packed: bool = False, residual: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 12 * (1 + packed)), nn.Linear(12, HIDDEN)
        self.activation, self.packed, self.residual = activation, packed, residual
        self.double()

    def forward(self, hidden: Tensor) -> Tensor:
        up = self.up(hidden)
        if self.packed:
            gate, up = up.chunk(2, dim=-1)
            up = self.activation(gate) * up
        else:
            up = self.activation(up)
        return self.down(up) + (hidden if self.residual else 0)


def test_heads_and_their_parameters() -> None:
    torch.manual_seed(0)
    units = find_units(Attention(groups=2), call())
    assert (units.count, units.output, units.width) == (2, "o", WIDTH)
    assert units.segments == {"o": (WIDTH,), "q": (WIDTH,), "k": (6,), "v": (6,)}
    assert units.parameters == {"sinks": (4,)}  # the scale is every head's, so it stays whole


@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU(), nn.Tanh()])
def test_columns_of_an_mlp_even_if_an_input_hides_some(activation: nn.Module) -> None:
    torch.manual_seed(0)
    units = find_units(Mlp(activation), call())
    assert (units.count, dict(units.segments)) == (12, {"down": (12,), "up": (12,)})
    packed = find_units(Mlp(activation, packed=True), call())
    assert packed.segments["up"] == (12, 12)


def test_units_that_need_every_other_are_none() -> None:
    """A norm over all columns joins them, unless it is passed over."""
    torch.manual_seed(0)
    normed = Mlp(nn.LayerNorm(12).double())
    for block in (normed, Attention(groups=1)):
        with pytest.raises(NoUnitsError, match="needs every other"):
            find_units(block, call())
    assert find_units(normed, call(), passed=[normed.activation]).count == 12
    assert "forward" not in vars(normed.activation)
    with pytest.raises(NoUnitsError, match="1 linear layer"):
        find_units(nn.Sequential(nn.Linear(HIDDEN, HIDDEN)).double(), call())
