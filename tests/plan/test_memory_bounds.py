"""Configurations that a bound rejects lack at least as much as it says, if they are evaluated."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from planned_problems import problem

from evenpipe.memory.states import Dtypes
from evenpipe.plan.bounds import work_bound
from evenpipe.plan.configuration import Configuration
from evenpipe.plan.configuration_search import head_layers
from evenpipe.plan.evaluation import evaluate
from evenpipe.plan.problem import Problem
from evenpipe.plan.space import Space, configurations, layouts

QUEUES = {"microbatch_sizes": (8, 16), "schedules": ("zb-h1", "v-half")}
NARROW = Dtypes(gradients="bf16", masters="bf16", moments="bf16")
CASES: dict[str, tuple[Any, ...]] = {
    # model, GiB of a GPU, sequence, space, other options of the problem
    "tensor ranks": ("llama", 40, 65536, {"tp": (2,)}),
    "deep": ("llama", 48, 65536, {"pp": (8,)}),
    "slices": ("llama", 36, 131072, {"pp": (4,), "slices": (4,), "schedules": ("1f1b", "interleaved")}),
    "masks": ("gemma", 16, 8192, {}),
    "large masks": ("gemma", 16, 32768, {"tp": (4, 8)}),
    "queues of one microbatch": ("llama", 40, 8192, {"pp": (2, 4, 8), **QUEUES}),
    "experts": ("qwen", 20, 4096, {"pp": (2, 4), "microbatch_sizes": (2, 4), "schedules": ("1f1b", "zb-h1")}),
    "FSDP": ("llama", 16, 8192, {"pp": (1, 2)}, {"kernels": "fsdp"}),
    "fp8": ("llama", 24, 8192, {}, {"kernels": "transformer-engine,products=fp8,parameters=cast", "dtypes": NARROW}),
    "unfused attention": ("llama", 24, 4096, {}, {"kernels": "megatron,attention=unfused", "dtypes": NARROW}),
}
LONG = {"slices", "masks", "large masks", "experts"}


def config(model: str) -> Any:
    """Attention of Gemma, with soft caps, runs operation by operation: layers share masks of all pairs of tokens."""
    from transformers import Gemma2Config, LlamaConfig, Qwen3MoeConfig

    heads = {"num_attention_heads": 32}
    match model:
        case "llama":
            sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 16, "vocab_size": 128256}
            return LlamaConfig(**sizes, **heads, num_key_value_heads=8, tie_word_embeddings=False)
        case "qwen":
            sizes = {"hidden_size": 2048, "moe_intermediate_size": 1024, "num_hidden_layers": 8, "num_experts": 64}
            return Qwen3MoeConfig(**sizes, **heads, num_key_value_heads=4, num_experts_per_tok=8)
        case _:
            return Gemma2Config(num_hidden_layers=26)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in CASES]
)
@pytest.mark.sampled(1)
def test_what_is_rejected_lacks_at_least_what_the_bound_says(name: str) -> None:
    model, memory, sequence, space, *others = CASES[name]
    sizes = {"memory": memory, "sequence": sequence, "sequences_per_step": 16}
    given = problem(config(model), hardware="H100-80G", **sizes, **(others[0] if others else {}))
    seen = 0
    for one, lacking in islice(rejected(given, Space(**space)), 24):
        found = evaluate(given, one)
        if not found.fault:
            seen += 1
            assert lacking <= -found.devices[found.worst].spare, one.name
    assert seen > 4


def rejected(given: Problem, space: Space) -> Iterator[tuple[Configuration, int]]:
    """Configurations in any order, with the bytes that they lack at least."""
    draw = random.Random(0)
    found = layouts(given, space)
    for layout in draw.sample(found, len(found)):
        possible = list(configurations(given, space, layout, head_layers(given, layout)))
        for one in draw.sample(possible, min(2, len(possible))):
            if lacking := work_bound(given, one, traced=True).shortfall:
                yield one, lacking
