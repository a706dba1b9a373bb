"""Estimates of experts that the members of a group share: what a member holds, and what cannot be shared.

`tests/multiprocess/test_memory_of_experts.py` compares what a member keeps and needs for a moment with real runs.
"""

from __future__ import annotations

import pytest
from families import tiny_config

from evenpipe import Recipe
from evenpipe.costs.hardware import KNOWN
from evenpipe.errors import InputError
from evenpipe.memory.estimate import estimate
from evenpipe.memory.exchange import Sharing
from evenpipe.memory.parameters import Parameters
from evenpipe.memory.traced import StageTracer
from evenpipe.model import describe

EXPERTS, HIDDEN, INNER = 4, 64, 96
"""Of a layer of mixtral."""


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.sampled(1)
def test_what_a_member_holds(family: str) -> None:
    """ceil(E / ep) of the experts, and the gradients of these."""
    description, ends = describe(tiny_config(family)), {"is_first": False, "is_last": False}
    of = {
        (members, which): Parameters(description).stage(1, 3, 1, **ends, members=members, of=which)
        for members in (1, 3)
        for which in ("all", "others", "experts")
    }
    for members in (1, 3):
        held = of[members, "all"]
        sharing = Sharing(members, 1.0)
        tracer = StageTracer(description, microbatch_size=2, sequence=12, backwards="both", sharing=sharing)
        traced = tracer.stage(1, 3, **ends).parameters
        assert held.elements == of[members, "others"].elements + of[members, "experts"].elements
        assert (traced.gradients, traced.input_gradients) == (4 * held.trained, 4 * held.unsplit)
    assert of[1, "others"].elements == of[3, "others"].elements
    assert of[3, "experts"].elements == of[1, "experts"].elements // 4 * 2


def estimated(family: str = "mixtral", skew: float = 1.0, kernels: str = "transformers", **options):
    recipe = Recipe.of(pp=2, sequence_length=32, microbatches=4, **options)
    return estimate(describe(tiny_config(family)), recipe, hardware=KNOWN["H200"], skew=skew, kernels=kernels)


def test_experts_are_sharded_over_the_same_member_of_all_groups(sample) -> None:
    elements = EXPERTS * 3 * HIDDEN * INNER  # of one layer

    def optimizer(ep: int, data_parallel: str) -> int:
        return estimated(dp=4, ep=ep, data_parallel=data_parallel).devices[0].memory.terms["optimizer"]

    for ep in sample((2, 4), 1):
        assert optimizer(1, "replicate") - optimizer(ep, "replicate") == 2 * 8 * (elements - elements // ep)
        assert optimizer(1, "shard") == pytest.approx(optimizer(ep, "shard"), abs=8)


def test_a_skew_costs_activations() -> None:
    even, skewed = (estimated(dp=2, ep=2, skew=skew).devices[0].memory for skew in (1.0, 2.0))
    assert skewed.peak > even.peak
    assert all(skewed.terms[term] == even.terms[term] for term in ("parameters", "gradients", "optimizer"))


def test_what_cannot_be_shared() -> None:
    cases = [
        ({"dp": 2, "ep": 2, "skew": 0.5}, "skew is 0.5, expected a number of at least 1"),
        (
            {"family": "llama", "dp": 2, "ep": 2},
            "expert_parallel: 2, expected 1, since LlamaForCausalLM has no experts",
        ),
        ({"dp": 8, "ep": 8}, "expert_parallel: 8, expected at most 4, the number of experts in"),
        ({"dp": 2, "ep": 2, "kernels": "megatron"}, "expert_parallel: 2, expected 1 with kernels of Megatron-LM"),
    ]
    for options, words in cases:
        with pytest.raises(InputError, match=words):
            estimated(**options)
