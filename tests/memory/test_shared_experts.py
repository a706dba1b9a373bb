"""Estimates of experts that the members of a group share: what a member holds, keeps, and needs for a moment.

R rows and P pairs of the fullest member, D members that a token meets, S = n D / ep own and sent rows

kept F to B    b (R h + P F) + w P            w: bytes of a weight
kept I to W    b (2 R h + P (F + f)) + w P
and integers   8 (4 P + R) of pairs and rows, 8 (2 S + n) of rows and tokens, k S flags, 4 of each expert
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers
from families import EXPERTS, tiny_config

from evenpipe import Recipe
from evenpipe.costs.hardware import KNOWN
from evenpipe.errors import InputError
from evenpipe.memory.bytes import StageBytes
from evenpipe.memory.estimate import estimate
from evenpipe.memory.exchange import Sharing
from evenpipe.memory.parameters import Parameters
from evenpipe.memory.traced import StageTracer
from evenpipe.model import describe
from evenpipe.model.expert_rows import ExpertRows

BATCH, SEQUENCE, HIDDEN = 2, 12, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = {"mixtral": (4, 2, 96), "olmoe": (6, 3, 96), "gpt_oss": (4, 2, 96)}
"""Experts, choices and width of a layer's experts."""


@cache
def described(family: str):
    class_name, settings = EXPERTS[family]
    return describe(getattr(transformers, class_name)(**settings))


@cache
def traced(family: str, dtype: str, members: int, skew: float = 1.0, checkpointing: str = "none") -> StageBytes:
    tracer = StageTracer(
        described(family),
        microbatch_size=BATCH,
        sequence=SEQUENCE,
        compute_dtype=DTYPES[dtype],
        parameter_dtype=DTYPES[dtype],
        backwards="both",
        sharing=Sharing(members, skew),
    )
    return tracer.stage(1, 3, is_first=False, is_last=False, checkpointing=checkpointing)


def rows_of(family: str, members: int, skew: float = 1.0) -> ExpertRows:
    experts, choices, _ = SIZES[family]
    return ExpertRows(tokens=BATCH * SEQUENCE, choices=choices, experts=experts, members=members, skew=skew)


def integers(rows: ExpertRows) -> int:
    """Of a layout, and of the orders in which it sums."""
    pairs = 8 * (4 * rows.pairs + rows.rows)
    if rows.members == 1:
        return pairs + rows.pairs + 4 * rows.local
    sides = rows.own + sum(rows.sent)
    arrivals = 8 * rows.pairs + 2 * 4 * rows.local
    return pairs + arrivals + 8 * (2 * sides + rows.tokens) + rows.choices * sides + 4 * rows.local


def test_two_members_keep_rows_beside_pairs() -> None:
    alone, rows = (rows_of("mixtral", members) for members in (1, 2))
    assert (rows.rows, rows.pairs, rows.own, rows.sent) == (40, 48, 20, [0, 20])
    assert (integers(alone), integers(rows)) == (1792, 3176)


@pytest.mark.parametrize("skew", [1.0, 2.0])
@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", SIZES)
@pytest.mark.sampled(4)
def test_what_a_member_keeps(family: str, dtype: str, members: int, skew: float) -> None:
    """More than a process that has all experts keeps: there X is what the layer keeps anyway."""
    alone, found = traced(family, dtype, 1), traced(family, dtype, members, skew)
    before, rows = rows_of(family, 1), rows_of(family, members, skew)
    element, inner = DTYPES[dtype].itemsize, SIZES[family][2]
    weight = 4 if family == "mixtral" else element
    more, pairs = integers(rows) - integers(before), rows.pairs - before.pairs
    kept = element * (rows.rows * HIDDEN + pairs * 2 * inner) + weight * pairs + more
    assert found.stored - alone.stored == 2 * kept
    queued = element * (2 * (rows.rows - before.rows) * HIDDEN + pairs * 3 * inner) + weight * pairs + more
    assert found.queued - alone.queued == 2 * queued


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_what_a_member_holds(family: str) -> None:
    """ceil(E / ep) of the experts, and the gradients of these."""
    description = described(family)
    parameters, ends = Parameters(description), {"is_first": False, "is_last": False}
    of = {
        (members, which): parameters.stage(1, 3, 1, **ends, members=members, of=which)
        for members in (1, 3)
        for which in ("all", "others", "experts")
    }
    for members in (1, 3):
        every, others, experts = (of[members, which].elements for which in ("all", "others", "experts"))
        assert every == others + experts
    assert of[1, "others"].elements == of[3, "others"].elements
    assert of[3, "experts"].elements == of[1, "experts"].elements // 4 * 2
    for members in (1, 3):
        held = of[members, "all"]
        assert traced(family, "fp32", members).parameters.gradients == 4 * held.trained
        assert traced(family, "fp32", members).parameters.input_gradients == 4 * held.unsplit


def estimated(family: str = "mixtral", skew: float = 1.0, **options):
    recipe = Recipe.of(pp=2, sequence_length=32, microbatches=4, **options)
    return estimate(describe(tiny_config(family)), recipe, hardware=KNOWN["H200"], skew=skew)


def test_experts_are_sharded_over_the_same_member_of_all_groups() -> None:
    elements = 4 * 3 * HIDDEN * 96  # of one layer
    replicated = {ep: estimated(dp=4, ep=ep).devices[0].memory.terms for ep in (1, 2, 4)}
    for ep in (2, 4):
        assert replicated[1]["optimizer"] - replicated[ep]["optimizer"] == 2 * 8 * (elements - elements // ep)
    sharded = {
        ep: estimated(dp=4, ep=ep, data_parallel="shard").devices[0].memory.terms["optimizer"] for ep in (1, 2, 4)
    }
    assert sharded[1] == pytest.approx(sharded[2], abs=8) == pytest.approx(sharded[4], abs=8)


def test_a_skew_costs_activations() -> None:
    even, skewed = (estimated(dp=2, ep=2, skew=skew).devices[0].memory for skew in (1.0, 2.0))
    assert skewed.peak > even.peak
    assert all(skewed.terms[term] == even.terms[term] for term in ("parameters", "gradients", "optimizer"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dp": 2, "ep": 2, "skew": 0.5}, "skew is 0.5, expected a number of at least 1"),
        (
            {"family": "llama", "dp": 2, "ep": 2},
            "expert_parallel: 2, expected 1, since LlamaForCausalLM has no experts",
        ),
        ({"dp": 8, "ep": 8}, "expert_parallel: 8, expected at most 4, the number of experts in"),
    ],
)
def test_what_cannot_be_shared(options, said: str) -> None:
    with pytest.raises(InputError, match=said):
        estimated(**options)


def test_other_frameworks_share_no_experts() -> None:
    with pytest.raises(InputError, match="expert_parallel: 2, expected 1 with kernels of Megatron-LM"):
        estimate(describe(tiny_config("mixtral")), Recipe.of(dp=2, ep=2, sequence_length=32), kernels="megatron")
