"""A closed pipeline leaves no tensor of its own: those who train one model after another need the memory."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
from harness import run_processes
from transformers import LlamaConfig, MixtralConfig

from evenpipe import Pipeline, Recipe

LAYOUTS: dict[str, dict[str, Any]] = {
    "four devices": {"pp": 4, "schedule": "zbv"},
    "first-last": {"pp": 4, "vocabulary": "first-last"},
    "replicas": {"pp": 2, "dp": 2},
    "sharded replicas": {"pp": 2, "dp": 2, "data_parallel": "shard"},
    "freed after each pass": {"pp": 2, "dp": 2, "data_parallel": "shard", "reshard": True},
    "tensor ranks": {"pp": 2, "tp": 2, "schedule": "zb-h1"},
    "context ranks": {"pp": 2, "cp": 2},
    "slices": {"pp": 4, "slices": 2},
    "checkpointing": {"pp": 4, "checkpointing": "full"},
    "experts": {"pp": 2, "dp": 2, "ep": 2},
}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}


def train(options: dict[str, Any]) -> None:
    """Two steps in bf16 with fp32 masters, whose gradients are summed by hooks."""
    config = MixtralConfig(**SHAPE, num_local_experts=4) if "ep" in options else LlamaConfig(**SHAPE)
    recipe = Recipe.of(microbatches=4, sequence_length=16, **options)
    pipeline = Pipeline(config, recipe=recipe, compute_dtype=torch.bfloat16, self_check=False)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    for _ in range(2):
        pipeline.step(torch.arange(64).view(4, 16))
        pipeline.clip_gradients(1.0)
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
