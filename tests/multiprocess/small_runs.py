"""Small models of several families in any layout, and checkpoints that one layout leaves to the next."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from families import whole_model
from harness import run_processes
from small_families import CONFIGS, EXPERTS, small
from torch import Tensor
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    BioGptConfig,
    GptOssConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
)

from evenpipe import Pipeline, newest_checkpoint
from evenpipe.model import Description, describe
from evenpipe.model.fp64 import InFp64
from evenpipe.schedule import Order, add_recompute, plan_order

TOKENS, SEQUENCES = 16, 4
LAYER_TYPES = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    **CONFIGS,
    "gpt-oss": small(  # sinks, windows
        GptOssConfig,
        head_dim=4,
        num_local_experts=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        **EXPERTS,
        **LAYER_TYPES,
    ),
    "deepseek-v3": partial(CONFIGS["deepseek-v3"], v_head_dim=6),  # keys and values of two sizes
    # experts beside a shared one, which reads the same input as the router
    "qwen2-moe": small(
        Qwen2MoeConfig, num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=24, **EXPERTS
    ),
    "mixtral of 5 experts": partial(CONFIGS["mixtral"], num_local_experts=5),
    # Their own attention looks at other documents of a row.
    "opt": small(OPTConfig, "intermediate_size", ffn_dim=24, word_embed_proj_dim=16, dropout=0.0),
    "biogpt": small(
        BioGptConfig,
        **dict.fromkeys(
            ("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "layerdrop"), 0.0
        ),
    ),
    "afmoe": small(
        AfmoeConfig, head_dim=4, num_experts=4, num_dense_layers=1, moe_intermediate_size=8, **EXPERTS, **LAYER_TYPES
    ),
}


@dataclass(frozen=True)
class Case:
    family: str
    replicas: int = 1
    devices: int = 1
    context_ranks: int = 1
    tensor_ranks: int = 1
    members: int = 1
    """Replicas that share experts."""
    data_parallel: str = "replicate"
    schedule: str = "1f1b"
    mode: str = "vocab-2"
    checkpointing: str = "none"
    repeats: bool = False
    """With R."""
    tied: bool = False
    exchange: str = "keys"
    slices: int = 1
    microbatches: int = 4

    @property
    def processes(self) -> int:
        return self.replicas * self.devices * self.context_ranks * self.tensor_ranks

    def part(self, replica: int, rows: Tensor) -> Tensor:
        """The rows of one replica."""
        return rows.chunk(self.replicas)[replica]

    def order(self) -> str | Order:
        """The schedule as a pipeline takes it."""
        if not self.repeats:
            return self.schedule
        order = plan_order(self.schedule, self.devices, self.microbatches, "first-last", slices=self.slices)
        return add_recompute(order)


def noisy(family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> PreTrainedModel:
    """The same model in every process."""
    return whole_model(FAMILIES[family](**settings), dtype)


@cache
def described(family: str, tied: bool = False) -> Description:
    return describe(noisy(family, tie_word_embeddings=tied))


def opened(case: Case, **options: Any) -> Pipeline:
    usual = {
        "schedule": case.order(),
        "vocabulary": case.mode,
        "microbatches": case.microbatches,
        "activation_checkpointing": case.checkpointing,
        "dp": case.replicas,
        "cp": case.context_ranks,
        "tp": case.tensor_ranks,
        "ep": case.members,
        "context_exchange": case.exchange,
        "slices": case.slices,
        "data_parallel": case.data_parallel,
        "parameter_dtype": torch.float64,
        "self_check": False,
    }
    return Pipeline(described(case.family, case.tied), **usual | options)


# --- from layout to layout --------------------------------------------------------------------------------------------


def step_of_layout(folder: Path, case: Case, number: int, steps: int) -> float:
    """Train one step on the checkpoint of the layout before, save it, and return the loss; all of them export."""
    microbatches = SEQUENCES // case.replicas
    with InFp64(), contextlib.closing(opened(case, microbatches=microbatches, seed=number)) as pipeline:
        optimizer = reference.adamw(list(pipeline.parameters()))
        if number:
            pipeline.load_checkpoint(newest_checkpoint(folder, pipeline.process_group), optimizer)
        ids, labels = (
            case.part(pipeline.replica, rows) for rows in reference.batches(61, SEQUENCES, TOKENS, steps)[number]
        )
        pipeline.zero_grad()
        loss = pipeline.step(ids, labels).loss
        optimizer.step()
        pipeline.save_checkpoint(folder, number + 1, optimizer)
        pipeline.save_pretrained(folder / f"export-{number}")
    return loss


def continue_in_all(cases: list[Case], folder: Path) -> None:
    """Let layouts train one step each on what the one before has saved, and compare with one process, and so the last
    export."""
    with InFp64():
        model = copy.deepcopy(described(cases[0].family, cases[0].tied).model)
        expected = reference.train(model, reference.batches(61, SEQUENCES, TOKENS, len(cases)))
    losses = [
        run_processes(step_of_layout, case.processes, folder, case, number, len(cases))[0]
        for number, case in enumerate(cases)
    ]
    assert losses == pytest.approx(expected.losses, rel=1e-10)
    exported = AutoModelForCausalLM.from_pretrained(folder / f"export-{len(cases) - 1}", dtype=torch.float64)
    error, name = reference.worst({key: one.detach() for key, one in exported.named_parameters()}, expected.weights)
    assert error < 1e-8, name
