"""Configurations that a bound rejects lack at least as much as it says, if they are evaluated."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from evenpipe.costs.hardware import KNOWN
from evenpipe.memory.sizes import GIB
from evenpipe.model import describe
from evenpipe.plan.bounds import work_bound
from evenpipe.plan.configuration import Configuration
from evenpipe.plan.configuration_search import head_layers
from evenpipe.plan.evaluation import evaluate
from evenpipe.plan.problem import Problem, problem_of
from evenpipe.plan.space import Space, configurations, layouts

LLAMA = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=False,
)
EXPERTS = Qwen3MoeConfig(
    hidden_size=2048,
    moe_intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=4,
    num_experts=64,
    num_experts_per_tok=8,
)
GEMMA = Gemma2Config(num_hidden_layers=26)
"""Its attention, with soft caps, runs operation by operation: layers share masks of all pairs of tokens."""


@pytest.mark.parametrize(
    ("model", "memory", "sequence", "space"),
    [
        (LLAMA, 40, 65536, {"tp": (2,)}),
        (LLAMA, 48, 65536, {"pp": (8,)}),
        (LLAMA, 36, 131072, {"pp": (4,), "slices": (4,), "schedules": ("1f1b", "interleaved")}),
        (GEMMA, 16, 8192, {}),
        (GEMMA, 16, 32768, {"tp": (4, 8)}),
        (LLAMA, 40, 8192, {"pp": (2, 4, 8), "microbatch_sizes": (8, 16), "schedules": ("zb-h1", "v-half")}),
        (EXPERTS, 20, 4096, {"pp": (2, 4), "microbatch_sizes": (2, 4), "schedules": ("1f1b", "zb-h1")}),
    ],
    ids=["tensor ranks", "deep", "slices", "masks", "large masks", "queues of one microbatch", "experts"],
)
def test_what_is_rejected_lacks_at_least_what_the_bound_says(
    model: PreTrainedConfig, memory: int, sequence: int, space: dict[str, Any]
) -> None:
    problem = problem_of(
        describe(model),
        KNOWN["H100-80G"],
        gpus=8,
        sequence=sequence,
        sequences_per_step=16,
        memory_bytes=memory * GIB,
        kernels="fused",
    )
    seen = 0
    for one, bound in islice(_rejected(problem, Space(**space)), 24):
        found = evaluate(problem, one)
        if not found.fault:
            seen += 1
            assert bound <= -found.devices[found.worst].spare, one.name
    assert seen > 4


def _rejected(problem: Problem, space: Space) -> Iterator[tuple[Configuration, int]]:
    """Configurations in any order, with the bytes that they lack at least."""
    draw = random.Random(0)
    found = layouts(problem, space)
    for layout in draw.sample(found, len(found)):
        possible = list(configurations(problem, space, layout, head_layers(problem, layout)))
        for one in draw.sample(possible, min(2, len(possible))):
            if lacking := work_bound(problem, one, traced=True).lacking:
                yield one, lacking
