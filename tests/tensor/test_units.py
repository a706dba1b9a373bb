"""Units of blocks are found by running them, in any packing of their matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from evenpipe.tensor.units import Call, NoUnitsError, find_units

HEADS, SIZE, HIDDEN = 4, 3, 10


def call(*, tokens: int = 5) -> Call:
    return Call((torch.randn(2, tokens, HIDDEN, dtype=torch.float64),), {})


class Attention(nn.Module):
    """Attention with packed or separate matrices, and fewer heads of keys and values."""

    def __init__(self, packing: str, groups: int = HEADS) -> None:
        super().__init__()
        self.packing, self.groups = packing, groups
        width, narrow = HEADS * SIZE, groups * SIZE
        if packing == "apart":
            self.q, self.k, self.v = nn.Linear(HIDDEN, width), nn.Linear(HIDDEN, narrow), nn.Linear(HIDDEN, narrow)
        elif packing == "transposed":
            self.qkv = Conv1D(width + 2 * narrow, HIDDEN)
        else:
            self.qkv = nn.Linear(HIDDEN, width + 2 * narrow)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.scale = nn.Parameter(torch.randn(SIZE))
        self.o = nn.Linear(width, HIDDEN)
        self.double()

    def forward(self, hidden: Tensor) -> Tensor:
        batch, tokens, _ = hidden.shape
        if self.packing == "apart":
            q, k, v = self.q(hidden), self.k(hidden), self.v(hidden)
        elif self.packing == "interleaved":  # GPT-NeoX: queries, keys and values head by head
            q, k, v = self.qkv(hidden).view(batch, tokens, HEADS, 3 * SIZE).chunk(3, dim=-1)
        else:
            narrow = self.groups * SIZE
            q, k, v = self.qkv(hidden).split([HEADS * SIZE, narrow, narrow], dim=-1)
        q, k, v = (one.reshape(batch, tokens, -1, SIZE).transpose(1, 2) for one in (q, k, v))
        k, v = (one.repeat_interleave(HEADS // self.groups, dim=1) for one in (k, v))
        scores = (q * self.scale) @ k.mT
        sinks = self.sinks.view(1, -1, 1, 1).expand(batch, -1, tokens, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
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


WIDTH = HEADS * SIZE


@pytest.mark.parametrize(
    ("packing", "groups", "units", "segments"),
    [
        ("apart", 4, 4, {"q": (WIDTH,), "k": (WIDTH,), "v": (WIDTH,)}),
        ("apart", 2, 2, {"q": (WIDTH,), "k": (WIDTH // 2,), "v": (WIDTH // 2,)}),
        ("packed", 4, 4, {"qkv": (WIDTH, WIDTH, WIDTH)}),
        ("packed", 2, 2, {"qkv": (WIDTH, WIDTH // 2, WIDTH // 2)}),
        ("transposed", 4, 4, {"qkv": (WIDTH, WIDTH, WIDTH)}),
        ("interleaved", 4, 4, {"qkv": (3 * WIDTH,)}),
    ],
)
def test_heads_and_their_parameters(packing: str, groups: int, units: int, segments: dict) -> None:
    torch.manual_seed(0)
    found = find_units(Attention(packing, groups), call())
    assert (found.count, found.output, found.width) == (units, "o", WIDTH)
    assert found.segments == {"o": (WIDTH,), **segments}
    assert found.parameters == {"sinks": (HEADS,)}  # the scale is every head's, so it stays whole


def test_one_head_of_keys_and_values_cannot_be_cut() -> None:
    torch.manual_seed(0)
    with pytest.raises(NoUnitsError, match="needs every other"):
        find_units(Attention("apart", 1), call())


@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU(), nn.Tanh()])
def test_columns_of_an_mlp_even_if_an_input_hides_some(activation: nn.Module) -> None:
    torch.manual_seed(0)
    found = find_units(Mlp(activation), call())
    assert (found.count, dict(found.segments)) == (12, {"down": (12,), "up": (12,)})
    packed = find_units(Mlp(activation, packed=True), call())
    assert packed.segments["up"] == (12, 12)


def test_a_norm_over_all_columns_joins_them_unless_it_is_passed() -> None:
    torch.manual_seed(0)
    block = Mlp(nn.LayerNorm(12).double())
    with pytest.raises(NoUnitsError, match="needs every other"):
        find_units(block, call())
    assert find_units(block, call(), passed=[block.activation]).count == 12
    assert "forward" not in vars(block.activation)


def test_one_matrix_has_no_units() -> None:
    with pytest.raises(NoUnitsError, match="1 linear layer"):
        find_units(nn.Sequential(nn.Linear(HIDDEN, HIDDEN)).double(), call())
