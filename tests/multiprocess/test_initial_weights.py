"""Every layout starts from the weights that one process starts from, fresh or of a folder."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from families import tiny_config
from harness import run_processes

from evenpipe import Pipeline
from evenpipe.model import build_stage, describe, initial_rows, initialize
from evenpipe.schedule.planning import MODES

SHARED_EXPERTS: list[dict[str, Any]] = [
    {"replicas": 2, "expert_parallel": 2},
    {"replicas": 4, "expert_parallel": 4},
    {"replicas": 4, "expert_parallel": 2, "data_parallel": "shard"},
    {"replicas": 2, "expert_parallel": 2, "tensor_parallel": 2},
]
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        *({"vocabulary": mode} for mode in MODES),
        {"replicas": 2, "schedule": "zbv"},
        {"replicas": 2, "tensor_parallel": 2},
        {"replicas": 4, "data_parallel": "shard"},
    ],
    "mixtral": SHARED_EXPERTS,
    "gpt_oss": SHARED_EXPERTS,
}
"""Of four processes."""


def differing(family: str, layouts: list[dict[str, Any]], folder: Path) -> list[str]:
    """Return names of layouts and parameters that differ from one process: fresh, and of a folder."""
    config = tiny_config(family, num_hidden_layers=4 if family == "llama" else 2)
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    faults = []
    expected = (fresh(config), dict(transformers.AutoModelForCausalLM.from_pretrained(folder).named_parameters()))
    for layout in layouts:
        for model, weights in zip((config, str(folder)), expected, strict=True):
            with closing(Pipeline(model, microbatches=2, seed=5, self_check=False, **layout)) as pipeline:
                held = pipeline.full_state_dict()
            if dist.get_rank() == 0:
                faults += [f"{layout} {name}" for name in weights if not torch.equal(held[name], weights[name])]
    return faults


def fresh(config: transformers.PreTrainedConfig) -> dict[str, torch.Tensor]:
    description = describe(config)
    stage = build_stage(description, 0, description.layers, is_first=True, is_last=True)
    initialize(stage, description, 5)
    rows = {
        name: initial_rows(description, name, 0, description.vocabulary_size, 5)
        for name in description.vocabulary_names
    }
    return dict(stage.named_parameters()) | rows


@pytest.mark.parametrize("family", LAYOUTS)
@pytest.mark.sampled(1)
def test_every_layout_starts_alike(family: str, tmp_path: Path, sample) -> None:
    assert not run_processes(differing, 4, family, sample(LAYOUTS[family], 2), tmp_path)[0]
