"""The paper's formula: its authors' own unit tests, and what a reader of arXiv 2411.06465 can check by hand."""

from __future__ import annotations

import pytest
from llamas import llama

from evenpipe.memory.paper import PaperShape, paper_estimate, paper_shape
from evenpipe.recipe.parallelism import Parallelism

GIB = 2**30
LLAMA_8B = PaperShape(
    hidden_size=4096, mlp_size=14336, heads=32, key_value_heads=8, layers=32, vocabulary=128256, tied=False
)

# `okoge-kaz/Megatron-LM` (v0.9.0-tsubame), tools/memory_estimate/tests_memory_consumption_estimator.py:
# tp, cp, pp, microbatch size, GPUs -> GiB of states, GiB of activations. Sequence 8192.
AUTHORS = [
    (2, 1, 1, 1, 4, 44.87260437011719, 22.64453125),
    (1, 2, 1, 1, 4, 67.30887222290039, 22.64453125),
    (2, 1, 2, 1, 128, 11.919273376464844, 20.75),
    (2, 2, 1, 2, 128, 23.137436628341675, 22.64453125),
]


def test_the_authors_values() -> None:
    for tp, cp, pp, size, gpus, states, activations in AUTHORS:
        parallelism = Parallelism(dp=gpus // (tp * cp * pp), tp=tp, cp=cp, pp=pp, data_parallel="shard-optimizer")
        found = paper_estimate(LLAMA_8B, parallelism, sequence=8192, microbatch_size=size)
        assert (found.states / GIB, found.activations / GIB) == pytest.approx((states, activations), rel=1e-9)


def test_it_rejects_what_is_above_80_percent() -> None:
    found = paper_estimate(LLAMA_8B, Parallelism(dp=2, tp=2, data_parallel="shard-optimizer"), sequence=8192)
    assert found.fits(int(found.total / 0.79)) and not found.fits(int(found.total / 0.81))


def test_interleaving_adds_what_its_factor_says() -> None:
    """1 + (p - 1) / (p V), on all activations."""
    plain = paper_estimate(LLAMA_8B, Parallelism(pp=4), sequence=4096)
    interleaved = paper_estimate(LLAMA_8B, Parallelism(pp=4), sequence=4096, stages_per_device=2)
    assert interleaved.activations / plain.activations == pytest.approx(1 + 3 / 8)
    assert interleaved.states == plain.states


def test_a_config_gives_the_shape() -> None:
    assert paper_shape(llama()) == LLAMA_8B
