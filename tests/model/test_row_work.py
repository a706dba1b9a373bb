"""Closed forms: work of layers along a row, what context ranks move, rows and pairs of members of an expert group."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
from transformers import DeepseekV3Config, LlamaConfig

from evenpipe.model import RowWork, describe, slice_ends
from evenpipe.model.context_exchange import choose
from evenpipe.model.description import Description
from evenpipe.model.expert_rows import TRANSFERS, ExpertRows

# --- rows ------------------------------------------------------------------------------------------------------------


WORKS = {
    "no attention": RowWork(per_token=3.0, per_key=()),
    "whole rows": RowWork(per_token=5.0, per_key=((None, 0.25),)),
    "windows": RowWork(per_token=5.0, per_key=((None, 0.25), (24, 1.0))),
}


def counted(work: RowWork, tokens: int) -> float:
    """Token by token."""
    keys = [(min(place + 1, window or tokens), each) for window, each in work.per_key for place in range(tokens)]
    return work.per_token * tokens + sum(count * each for count, each in keys)


def test_closed_form() -> None:
    for work, tokens in itertools.product(WORKS.values(), (0, 1, 2, 23, 24, 25, 100)):
        assert work.on(tokens) == pytest.approx(counted(work, tokens))
        assert work.attention(tokens) == pytest.approx(counted(work, tokens) - work.per_token * tokens)


def test_slices_have_equal_work_as_far_as_the_multiple_allows() -> None:
    cases = [(96, 4, 1), (96, 3, 8), (64, 8, 8), (4096, 4, 2), (12288, 5, 6), (131072, 16, 4)]
    for work, (length, slices, multiple) in itertools.product(WORKS.values(), cases):
        ends = slice_ends(work, length, slices, multiple)
        lengths = [end - start for start, end in pairwise((0, *ends))]
        assert sum(lengths) == length and len(lengths) == slices and min(lengths) >= multiple
        step = 384 if multiple == 6 and length == 12288 else 128 if length >= 512 * slices else multiple
        assert all(end % multiple == 0 and end % step == 0 for end in ends[:-1])
        for number, end in enumerate(ends[:-1], 1):
            if lengths[number - 1] > step and lengths[number] > step:
                target = work.on(length) * number / slices
                assert work.on(end - step) < target < work.on(end + step)
    assert slice_ends(WORKS["windows"], 77, 1, 11) == (77,)


@pytest.mark.parametrize("share", [0.2, 0.7])
@pytest.mark.parametrize("name", ["whole rows", "windows"])
def test_measured_slices_tell_the_share_of_attention(name: str, share: float) -> None:
    true = WORKS[name].with_share(share, 120)
    ends = (0, 48, 72, 120)
    times = [2.5 * (true.on(end) - true.on(start)) for start, end in pairwise(ends)]
    found = WORKS[name].as_measured(times, [48, 24, 48], 120)
    assert found.share(120) == pytest.approx(share)
    assert slice_ends(found, 120, 5, 1) == slice_ends(true, 120, 5, 1)
    assert WORKS["no attention"].as_measured(times, [48, 24, 48], 120) == WORKS["no attention"]


# --- context ranks ---------------------------------------------------------------------------------------------------


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


def test_latent_attention_exchanges_heads() -> None:
    """Its keys and values are expanded: as many as queries."""
    config = DeepseekV3Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=9, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=1,
    )  # fmt: skip
    assert choose(describe(config), "auto", ranks=2, tensor_ranks=1, slices=1).exchange == "heads"


# --- members of an expert group --------------------------------------------------------------------------------------


def test_a_single_member_keeps_every_token():
    alone = ExpertRows(tokens=24, choices=3, experts=5)
    assert (alone.rows, alone.pairs, alone.own, alone.sent, alone.met) == (24, 72, 24, [0], 1.0)
    assert alone.traffic(64, 4, TRANSFERS["F"]) == 0


def test_every_set_of_experts_once():
    """The first member has the most experts; where there are too few, the last ones have none."""
    for (experts, members), choices in itertools.product([(7, 2), (5, 4), (16, 8), (6, 4)], (1, 2, 3)):
        sets = list(itertools.combinations(range(experts), choices))
        rows = ExpertRows(tokens=len(sets), choices=choices, experts=experts, members=members)
        owners = [{expert // rows.local for expert in chosen} for chosen in sets]
        goes = [sum(member in met for met in owners) for member in range(members)]
        assert [rows.own, *rows.sent[1:]] == goes
        assert rows.met == pytest.approx(sum(map(len, owners)) / len(sets))
        assert rows.rows == goes[0] * members
        assert rows.pairs == sum(expert < rows.local for chosen in sets for expert in chosen) * members
        assert rows.traffic(64, 2, TRANSFERS["F"]) == 2 * sum(rows.sent) * 64 * 2


def test_skew_is_limited_by_what_there_is():
    twice = ExpertRows(tokens=100, choices=2, experts=8, members=2, skew=2.0)
    even = ExpertRows(tokens=100, choices=2, experts=8, members=2)
    assert (even.rows, even.pairs) == (157, 200)
    assert (twice.rows, twice.pairs) == (200, 400)
    assert ExpertRows(tokens=100, choices=2, experts=8, members=2, skew=9.0).pairs == 400
