"""Balance: the most bytes of tensors on each of several devices in a real step; what a closed pipeline leaves; and the
counter of bytes itself.

How many bytes there are after each item is compared with estimates by test_estimated_memory.py; that a step leaves
nothing, and receives into few buffers, is seen in test_schedules.py.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from harness import run_processes
from small_families import CONFIGS

from evenpipe import Pipeline, Recipe
from evenpipe.runtime.accounting import ByteCounter

TOKENS = 64
BALANCED = [
    # microbatches, vocabulary, and the largest id in the data
    (9, 4096, 4096),
    (11, 4096, 4096),
    (9, 4001, 500),  # all on the first device's shard
]


def count(cases: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The most bytes in the second step of each case, and those of parameters."""
    counts = []
    for microbatches, vocabulary, largest_id in cases:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "max_position_embeddings": TOKENS}
        config = CONFIGS["llama"](vocab_size=vocabulary, **sizes)
        pipeline = Pipeline(config, schedule="v-half", microbatches=microbatches, self_check=False)
        ids = torch.randint(0, largest_id, (microbatches, TOKENS), generator=torch.Generator().manual_seed(0))
        pipeline.step(ids)
        with pipeline.count_bytes() as counted:
            pipeline.step(ids)
        counts.append((counted.peak, counted.started["parameters"]))
        pipeline.close()
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_v_half_with_a_sharded_vocabulary_takes_the_same_memory_on_every_device(devices: int) -> None:
    """As in arXiv 2411.05288, section 6.4."""
    for case, counts in zip(BALANCED, zip(*run_processes(count, devices, BALANCED), strict=True), strict=True):
        peaks, parameters = zip(*counts, strict=True)
        assert max(peaks) <= 1.05 * min(peaks), f"{case}: {peaks}"
        assert max(parameters) <= 1.02 * min(parameters), f"{case}: {parameters}"


# --- what a closed pipeline leaves: nothing, since those who train one model after another need the memory ------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "four devices": {"pp": 4, "schedule": "zbv"},
    "first-last": {"pp": 4, "vocabulary": "first-last"},
    "replicas": {"pp": 2, "dp": 2},
    "sharded replicas": {"pp": 2, "dp": 2, "data_parallel": "shard"},
    "freed after each pass": {"pp": 2, "dp": 2, "data_parallel": "shard", "reshard": True},
    "tensor ranks": {"pp": 2, "tp": 2, "schedule": "zb-h1"},
    "context ranks": {"pp": 2, "cp": 2},
    "slices": {"pp": 4, "slices": 2},
    "checkpointing": {"pp": 4, "activation_checkpointing": "full"},
    "experts": {"pp": 2, "dp": 2, "ep": 2},
}


def train(options: dict[str, Any]) -> None:
    """Two steps in bf16 with fp32 masters, whose gradients are summed by hooks."""
    config = CONFIGS["mixtral" if "ep" in options else "llama"](num_hidden_layers=8)
    recipe = Recipe.of(microbatches=4, sequence_length=16, **options)
    pipeline = Pipeline(config, recipe=recipe, compute_dtype=torch.bfloat16, self_check=False)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    for _ in range(2):
        pipeline.step(torch.arange(64).view(4, 16) % 61)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        pipeline.zero_grad()
    pipeline.close()


def left_by_each(layouts: list[str]) -> dict[str, list[str]]:
    left, before = {}, numbers()
    for name in layouts:
        train(LAYOUTS[name])
        left[name] = [str(tuple(one.shape)) for key, one in numbers().items() if key not in before]
    return left


def numbers() -> dict[int, torch.Tensor]:
    """Every tensor of floating point that lives."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at an object can warn
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return {id(one): one for one in tensors if one.is_floating_point() and one.numel() > 1}


def test_closed_pipelines_leave_no_tensors(sample) -> None:
    layouts = sample(LAYOUTS, 2)
    assert run_processes(left_by_each, 4, layouts) == [{name: [] for name in layouts}] * 4


# --- the counter: its sums are compared with estimates by test_estimated_memory.py ---------------------------------


def test_the_counter_sees_what_is_made_in_a_backward_and_who_made_it() -> None:
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.kept = value.new_ones(100)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            gone = gradient.new_empty(1000)
            return gradient + gone.zero_().sum()

    value = torch.zeros(10, requires_grad=True)
    with ByteCounter({"mine": [value, value.view(2, 5)]}) as counted:
        output = Doubles.apply(value)
        with_graph = counted.live
        output.backward(torch.ones(10))
        del output
    assert counted.started == {"mine": 40}
    assert with_graph == 40 + 400 + 40
    assert [(made.bytes, made.operation) for made in counted.survivors()] == [(40, "aten.add.Tensor")], "the gradient"
    assert counted.most(lambda made: made.bytes == 4000) == (4000, 1)
    assert counted.peak >= with_graph + 4000 + 40
    value.grad = None
    assert counted.survivors() == [] and counted.live == 40
