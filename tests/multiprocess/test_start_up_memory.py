"""Bytes while the stages of a pipeline are built and filled, beside those that it keeps between steps.

What is drawn or read on the host is counted too, although on a GPU it is not part of the device's memory; the small
copies of the checks before are not, nor is a live model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from families import EXPERTS, whole_model
from harness import run_processes
from torch._subclasses.fake_tensor import FakeTensor

from evenpipe import Pipeline
from evenpipe.memory.tracker import Tracker

LLAMA = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
PROCESSES, ROWS, LAYERS = 4, 512, 16
MOST = 1.1
"""Of the steady state."""
SHARD = {"data_parallel": "shard"}
RECIPES: dict[str, dict[str, Any]] = {
    "replicas": {"dp": 4, "data_parallel": "replicate"},
    "shards": {"dp": 4} | SHARD,
    "shards-vocab-2": {"dp": 2, "pp": 2, "vocabulary": "vocab-2"} | SHARD,
    "shards-tensor": {"dp": 2, "tp": 2} | SHARD,
    "shards-context": {"dp": 2, "cp": 2} | SHARD,
    "experts": {"dp": 4, "ep": 2} | SHARD,
    "experts-of-replicas": {"dp": 2, "pp": 2} | SHARD,
}


def config_of(recipe: str) -> transformers.PreTrainedConfig:
    if recipe.startswith("experts"):
        class_name, settings = EXPERTS["mixtral"]
        return getattr(transformers, class_name)(**(settings | {"vocab_size": ROWS, "num_hidden_layers": LAYERS}))
    return transformers.LlamaConfig(**LLAMA, vocab_size=ROWS, num_hidden_layers=LAYERS, max_position_embeddings=32)


class RealTensors(Tracker):
    """Counts those with memory only, and lets FSDP2 ask what shapes an operation gives."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types:
            return operation(*args, **(kwargs or {}))
        return super().__torch_dispatch__(operation, types, args, kwargs)

    def _see(self, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            super()._see(tensor)


def count(recipe: str, source: str, folder: Path) -> tuple[int, int, int]:
    """Return the most bytes at start-up, those of parameters and of AdamW's moments behind a step, and those of this
    process's parameters together with one whole layer and one whole vocabulary matrix."""
    model: Any = folder if source == "folder" else config_of(recipe)
    if source == "live model":
        torch.manual_seed(dist.get_rank())
        model = whole_model(model, torch.float32)
    options = {"microbatches": 2, "schedule": "1f1b", "vocabulary": "first-last"} | RECIPES[recipe]
    build, above = Pipeline._build, 0

    def counted(pipeline: Pipeline, *arguments: Any, **named: Any) -> None:
        nonlocal above
        live = pipeline.description.model
        with RealTensors() as tracker:
            tracker.add(*(() if live is None else (*live.parameters(), *live.buffers())))
            with tracker.span() as span:
                build(pipeline, *arguments, **named)
        above = span.above

    with mock.patch.object(Pipeline, "_build", counted):
        pipeline = Pipeline(model, self_check=False, **options)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    pipeline.step(torch.randint(0, ROWS, (4, 32), generator=torch.Generator().manual_seed(0)))
    optimizer.step()
    parameters, shapes = [*pipeline.parameters()], pipeline.description.shapes
    moments = [one for state in optimizer.state.values() for one in state.values()]
    pipeline.close()
    layer = sum(4 * shape.numel() for name, shape in shapes.items() if ".layers.0." in name)
    return above, held_by(parameters + moments), held_by(parameters) + layer + 4 * shapes["lm_head.weight"].numel()


def held_by(tensors: list[torch.Tensor]) -> int:
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(one.nbytes() for one in storages.values())


@pytest.mark.parametrize("source", ["config", "folder", "live model"])
@pytest.mark.parametrize("recipe", [*RECIPES])
@pytest.mark.sampled(5)
def test_no_process_ever_holds_more_than_its_shards_and_one_layer(recipe: str, source: str, tmp_path: Path) -> None:
    if source == "folder":
        transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config_of(recipe))).save_pretrained(tmp_path)
    for rank, (peak, steady, expected) in enumerate(run_processes(count, PROCESSES, recipe, source, tmp_path)):
        print(f"{recipe}, {source}, process {rank}: {peak / steady:.2f} of the steady state")
        assert peak <= MOST * min(steady, expected)
