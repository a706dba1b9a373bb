"""Parameters that transformers keeps in fp32 in a model of bf16 compute in fp32 here too, in every layout.

The yardstick is the error of transformers itself, loaded by `from_pretrained(dtype=torch.bfloat16)` in one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from families import whole_model
from family_configs import Configuration
from harness import run_processes

from evenpipe import Pipeline

BATCHES, ROWS, TOKENS = 8, 4, 16
FAMILIES = ("ernie4_5_moe", "bailing_hybrid", "flint", "inkling_text", "hunyuan_v1_moe")
"""Routers, correction biases, decays, convolutions and sinks; Hunyuan's router is built in fp32."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "vocabulary": "first-last"},
    "zbv": {"schedule": "zbv", "vocabulary": "vocab-2"},
    "full checkpointing": {"schedule": "zb-h1", "checkpointing": "full"},
    "selective checkpointing": {"schedule": "1f1b", "checkpointing": "selective"},
    "compiled": {"schedule": "zbv", "compile_layers": True},
    "tensor ranks": {"tensor_parallel": 2},
    "shards": {"replicas": 2, "data_parallel": "shard", "reshard": True},
    "expert groups": {"replicas": 2, "expert_parallel": 2},
    "shards of expert groups": {"replicas": 2, "expert_parallel": 2, "data_parallel": "shard"},
}
CASES = [
    *((family, layout) for family in FAMILIES for layout in ("1f1b", "zbv")),
    *(("ernie4_5_moe", layout) for layout in LAYOUTS),
    *(("bailing_hybrid", layout) for layout in ("full checkpointing", "shards", "expert groups")),
    ("inkling_text", "shards"),
]


def in_bf16(cases: list[tuple[str, str]]) -> None:
    for family, layout in cases:
        exact = whole_model(Configuration(family).build(), torch.float32)
        pipeline = Pipeline(
            exact, compute_dtype=torch.bfloat16, microbatches=2, self_check=False, **LAYOUTS[layout]
        )
        errors = reference.Bf16Errors(exact)
        rows = ROWS // pipeline.replicas
        for number in range(BATCHES):
            ids = torch.randint(4, 251, (ROWS, TOKENS), generator=torch.Generator().manual_seed(number))
            own = ids[pipeline.replica * rows :][:rows]
            pipeline.zero_grad()
            log_probabilities, loss = pipeline.evaluate(own).log_probabilities, pipeline.step(own).loss
            found = pipeline.full_gradients()
            if torch.distributed.get_rank() == 0:
                errors.add(found, loss, ids, log_probabilities)
        pipeline.close()
        if torch.distributed.get_rank() == 0:
            errors.check(f"{family}, {layout}")


def test_they_err_no_more_than_in_one_process() -> None:
    run_processes(in_bf16, 2, list(dict.fromkeys(CASES)))
