"""On a GPU no mask of all pairs of tokens is ever there: the largest allocation of a layer, forward and backward, grows
in proportion to the tokens, with context ranks, slices and documents. Nor does the host wait: on torch's meta device
there is nothing to wait for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from families import tiny_config
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from evenpipe.attention.carry import Carries
from evenpipe.attention.function import OwnAttention
from evenpipe.attention.places import places_of_ranks
from evenpipe.attention.row_context import Alone, Keys, OnHost, RowContext, activated, documents_of
from evenpipe.memory import emulation
from evenpipe.model import build_stage, describe

LENGTHS = (8192, 32768, 131072)
DOCUMENT = 1000


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return found


class _Gathered(Alone):
    """Keys and values of several ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def keys(self, layer: int, key: Tensor, value: Tensor) -> Keys:
        return key.repeat(1, 1, self._ranks, 1), value.repeat(1, 1, self._ranks, 1)

    def keys_again(self, layer: int, *own: Tensor) -> Keys:
        return self.keys(layer, *own)

    def gradients(self, layer: int, key: Tensor, value: Tensor, dtype: torch.dtype) -> Keys:
        return super().gradients(layer, *(one.unflatten(2, (self._ranks, -1)).sum(2) for one in (key, value)), dtype)


def sight_of(way: str, length: int) -> RowContext:
    ranks = 4 if "ranks" in way else 1
    start = length // 2 if "slices" in way else 0
    positions = torch.arange(length)[None] % DOCUMENT if "documents" in way else torch.arange(length)[None]
    places = places_of_ranks(start, length, ranks, positions if "documents" in way else None)
    before = places_of_ranks(0, start, ranks, None) if start else []
    documents = documents_of(positions) if "documents" in way else None
    valid = torch.arange(length)[None] < length - 5 if "padding" in way else None
    own, keys = places[-1], torch.cat([*before, *places])
    there = [None if one is None else one.to("meta") for one in (own, keys, positions, documents, valid)]
    return RowContext(
        queries=there[0],
        keys=there[1],
        exchange=_Gathered(ranks) if ranks > 1 else Alone(),
        length=length,
        positions=there[2],
        documents=there[3],
        valid=there[4],
        separate=documents is not None,
        on_host=OnHost(own, keys, documents, valid),
        kernels_of="cuda",
    )


def largest(config: PreTrainedConfig, way: str, length: int) -> int:
    """Return the bytes of the largest tensor of a layer."""
    description = describe(config)
    stage = build_stage(description, 1, 2, is_first=False, is_last=False, dtype=torch.bfloat16, torch_device="meta")
    OwnAttention().apply(stage, {})
    row_context = sight_of(way, length)
    if "slices" in way:
        carries = Carries((length // 2, length))
        row_context.exchange = carries.exchange(0, 1, row_context.exchange)
        shape = (1, config.num_key_value_heads, length, config.head_dim)
        kept = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(2))
        row_context.exchange._carry._keys[1] = tuple(kept)
    hidden = torch.empty(
        (1, len(row_context.queries), config.hidden_size), dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    positions = row_context.positions[:, row_context.on_host.queries]
    with _Largest() as counted, activated(row_context):
        stage(hidden, position_ids=positions).backward(torch.empty_like(hidden))
    return counted.bytes


def flex_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, **_: Any) -> Any:
    """Allocates as torch's kernel."""
    assert mask.shape == (1, 1, query.shape[2], key.shape[2])
    return emulation._attention(query, key, value).transpose(1, 2).contiguous(), None


WAYS = ("ranks", "slices", "documents", "ranks, documents", "ranks, slices", "slices, documents", "ranks, padding")


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    return tiny_config(family, max_position_embeddings=LENGTHS[-1], **changes)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(8)
def test_the_largest_allocation_grows_with_the_tokens(family: str, way: str) -> None:
    """mistral has a window, which takes FlashAttention, but with padding FlexAttention."""
    with mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, flex_attention=flex_attention):
        sizes = [largest(config_of(family, head_dim=8), way, length) for length in LENGTHS]
    assert all(later <= 4.01 * earlier for earlier, later in pairwise(sizes)), sizes


def test_a_mask_of_all_pairs_would_be_seen() -> None:
    sizes = [
        largest(config_of("llama", head_dim=8, attn_implementation="eager"), "documents", length) for length in LENGTHS
    ]
    assert sizes[1] > 15 * sizes[0] and sizes[1] >= LENGTHS[1] ** 2, sizes
