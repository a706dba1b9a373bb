"""Models compute in bf16 as exactly as in transformers, in every layout: what it keeps in fp32 is fp32 here too, and
buffers follow the dtype of their model.

The yardstick is the error of transformers itself, loaded by `from_pretrained(dtype=torch.bfloat16)` in one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import reference
import torch
import transformers
from families import whole_model
from family_configs import Configuration
from harness import run_processes

from evenpipe import Pipeline
from evenpipe.runtime import device

BATCHES, ROWS, TOKENS = 6, 4, 16
LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "vocabulary": "first-last"},
    "zbv": {"schedule": "zbv", "vocabulary": "vocab-2"},
    "full checkpointing": {"schedule": "zb-h1", "checkpointing": "full"},
    "selective checkpointing": {"schedule": "1f1b", "checkpointing": "selective"},
    "compiled": {"schedule": "zbv", "compile_layers": True},
    "tensor ranks": {"tensor_parallel": 2},
    "shards": {"replicas": 2, "data_parallel": "shard", "reshard": True},
    "expert groups": {"replicas": 2, "expert_parallel": 2},
    "compiled expert groups": {"replicas": 2, "expert_parallel": 2, "compile_layers": True},
    "shards of expert groups": {"replicas": 2, "expert_parallel": 2, "data_parallel": "shard"},
}
CASES = [
    *(("ernie4_5_moe", layout) for layout in LAYOUTS),  # routers and their biases
    ("bailing_hybrid", "zbv"),  # decays and convolutions
    ("bailing_hybrid", "shards"),
    ("bailing_hybrid", "tensor ranks"),
    ("inkling_text", "tensor ranks"),
    ("flint", "1f1b"),  # sinks of attention
    ("inkling_text", "shards"),
    ("hunyuan_v1_moe", "zbv"),  # routers that are built in fp32
    ("minimax", "zbv"),  # buffers in the model's dtype: decays of linear attention
    ("openai-gpt", "1f1b"),  # and a mask that scores are multiplied by
]


def model_of(family: str) -> transformers.PreTrainedModel:
    """Return a model whose routers have learned biases: large ones, whose differences bf16 does not hold."""
    model = whole_model(Configuration(family).build(), torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("correction_bias"):
                tensor.add_(8 + 0.05 * torch.randn_like(tensor))
    return model


def in_bf16(family: str, layout: str) -> None:
    exact = model_of(family)
    pipeline = Pipeline(exact, compute_dtype=torch.bfloat16, microbatches=2, self_check=False, **LAYOUTS[layout])
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


def run_cases(cases: list[tuple[str, str]]) -> list[str]:
    device.compile_layer = partial(device.compile_layer, backend="aot_eager")
    faults = []
    for family, layout in cases:
        try:
            in_bf16(family, layout)
        except AssertionError as error:
            faults.append(str(error))
    return faults


def test_they_err_no_more_than_in_one_process(sample) -> None:
    faults = run_processes(run_cases, 2, sample(CASES, 1))
    assert not any(faults), "\n".join(faults[0])
