"""What context ranks move, by the closed forms, and which way they take."""

from __future__ import annotations

from dataclasses import replace

from transformers import DeepseekV3Config, LlamaConfig

from evenpipe.model import describe
from evenpipe.model.context_exchange import choose, heads_divide, received
from evenpipe.model.description import Description
from evenpipe.model.flops import attention_of

# heads, heads of keys, ranks, tensor ranks, slices -> exchange, why. Moved by keys / by heads: 1.5 ranks r / (1 + r).
CHOICES = [
    ((32, 8, 2, 1, 1), "keys", "heads for tokens would move 1.67 times as much"),
    ((32, 8, 4, 1, 1), "heads", "gathered keys would move 1.20 times as much"),
    ((32, 8, 4, 1, 4), "keys", "heads for tokens would move 1.25 times as much"),
    ((32, 8, 8, 1, 4), "heads", "gathered keys would move 1.60 times as much"),
    ((32, 8, 4, 4, 1), "keys", "heads for tokens would move 1.00 times as much"),  # heads of keys are repeated
    ((32, 32, 2, 1, 1), "heads", "gathered keys would move 1.50 times as much"),
    ((12, 4, 8, 1, 1), "keys", "8 context ranks cannot share the heads"),
    ((24, 6, 4, 1, 1), "keys", "4 context ranks cannot share the heads"),
]


def llama(heads: int, of_keys: int) -> Description:
    sizes = {"hidden_size": 64 * heads, "num_attention_heads": heads, "num_key_value_heads": of_keys}
    return describe(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=9))


def test_the_way_that_moves_less() -> None:
    for (heads, of_keys, ranks, tensor_ranks, slices), exchange, reason in CHOICES:
        sizes = {"ranks": ranks, "tensor_ranks": tensor_ranks, "slices": slices}
        description = llama(heads, of_keys)
        assert choose(description, "auto", **sizes) == (exchange, reason)
        for wanted in ("keys", "heads"):
            assert choose(description, wanted, **sizes) == (wanted, "as given")


def test_elements_are_the_closed_forms() -> None:
    for heads, of_keys, ranks in [(32, 8, 2), (32, 8, 8), (32, 4, 4), (16, 16, 4)]:
        attention = attention_of(llama(heads, of_keys), 0)
        query, key = 64 * heads, 64 * of_keys
        sizes = {"ranks": ranks, "tensor_ranks": 1}
        assert received(attention, "keys", **sizes) == 3 * (ranks - 1) * 2 * key
        assert received(attention, "keys", **sizes, kept=True) == 2 * (ranks - 1) * 2 * key
        assert received(attention, "heads", **sizes) == 2 * (1 - 1 / ranks) * (2 * query + 2 * key)
        assert received(attention, "keys", ranks=ranks, tensor_ranks=2) == received(attention, "keys", **sizes) / 2


def test_latent_attention_exchanges_heads() -> None:
    """Its keys and values are expanded: as many as queries."""
    config = DeepseekV3Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=9, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=1,
    )  # fmt: skip
    assert choose(describe(config), "auto", ranks=2, tensor_ranks=1, slices=1).exchange == "heads"


def test_without_heads_nothing_is_exchanged() -> None:
    none = replace(attention_of(llama(4, 4), 0), heads=0, key_value_size=0)
    assert heads_divide(none, ranks=2, tensor_ranks=1)
