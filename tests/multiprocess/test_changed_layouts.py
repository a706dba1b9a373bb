"""Every layout starts from the weights that one process starts from, and a checkpoint continues in any layout.

Each layout of a chain trains one step on what the one before has saved. Losses and the weights that are exported in the
end are those of transformers in one process.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from families import tiny_config
from harness import run_processes
from small_runs import Case, continue_in_all

from evenpipe import Pipeline
from evenpipe.model import build_stage, describe, initial_rows, initialize
from evenpipe.schedule import MODES

REPLICAS = [
    Case("", replicas=2, devices=2, data_parallel="shard", schedule="zbv"),
    Case("", devices=4, mode="vocab-1"),
    Case("", replicas=4, data_parallel="shard"),
    Case("", replicas=2, devices=2, schedule="interleaved"),
    Case("", replicas=2, devices=2, data_parallel="shard", mode="first-last", schedule="zb-h1"),
    Case("", replicas=4, mode="first-last"),
]
TENSOR_RANKS = [
    Case("", devices=2, tensor_ranks=2),
    Case("", devices=4, mode="first-last"),
    Case("", replicas=2, tensor_ranks=2, data_parallel="shard"),
    Case("", devices=2, schedule="zb-h1", mode="redistribute"),
]
PIECES = [
    Case("", context_ranks=2),
    Case("", replicas=2, data_parallel="shard", mode="first-last", slices=2),
    Case("", devices=2, schedule="zb-h1", mode="redistribute", slices=3),
    Case("", devices=2, context_ranks=2, schedule="zbv", exchange="heads", slices=2),
    Case("", replicas=2, context_ranks=2, data_parallel="shard"),
    Case(""),
]
MEMBERS = [
    Case("", replicas=2, devices=2, members=2),
    Case("", replicas=4, members=4, mode="first-last"),
    Case("", replicas=4, members=2, data_parallel="shard"),
    Case("", devices=2, schedule="zbv"),
    Case("", replicas=2, tensor_ranks=2, members=2),
    Case("", replicas=2, data_parallel="shard", members=2, mode="vocab-1"),
    Case(""),
]
CHAINS = {
    "replicas": (REPLICAS, (("llama", False), ("llama", True))),
    "tensor ranks": (
        TENSOR_RANKS,
        (("llama", True), ("phi3", False), ("gpt2", True), ("gpt-neox", False), ("starcoder2", False)),
    ),
    "pieces of sequences": (PIECES, (("llama", True), ("gemma2", False), ("gpt2", True))),
    "shared experts": (MEMBERS, (("mixtral of 5 experts", False), ("gpt-oss", False), ("deepseek-v3", False))),
}
"""Layouts, and the families that go through them; whether these are tied."""


@pytest.mark.parametrize(
    ("name", "family", "tied"), [(name, *family) for name, (_, families) in CHAINS.items() for family in families]
)
@pytest.mark.slow
def test_a_checkpoint_continues_in_any_layout(name: str, family: str, tied: bool, tmp_path: Path) -> None:
    continue_in_all([replace(case, family=family, tied=tied) for case in CHAINS[name][0]], tmp_path)


# --- initial weights, fresh or of a folder ----------------------------------------------------------------------------

SHARED_EXPERTS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 4},
    {"dp": 4, "ep": 2, "data_parallel": "shard"},
    {"dp": 2, "ep": 2, "tp": 2},
]
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        *({"vocabulary": mode} for mode in MODES),
        {"dp": 2, "schedule": "zbv"},
        {"dp": 2, "tp": 2},
        {"dp": 4, "data_parallel": "shard"},
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
