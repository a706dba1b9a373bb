"""A mixture of 16 experts learns from real text on two devices of two replicas that share its experts, exactly as on
four devices; it goes on from a checkpoint with and without shared experts, and its export writes text."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import reference
import torch
from harness import run_processes
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from evenpipe import Pipeline

STEPS, HALF, SEQUENCES, TOKENS = 50, 25, 4, 64
CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=24,
    num_experts=16,
    num_experts_per_tok=4,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=TOKENS,
    output_router_logits=True,
    router_aux_loss_coef=0.01,
)
"""Its tokens are bytes."""


def rows(step: int) -> torch.Tensor:
    """[sequences, tokens] of the sources of asyncio."""
    files = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(one.read_bytes() for one in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - TOKENS, (SEQUENCES,), generator=generator)
    return torch.stack([text[start : start + TOKENS] for start in starts.tolist()]).long()


def train(folder: Path, replicas: int, members: int, first: int, last: int) -> list[float]:
    """Losses of steps `first` to `last`, from the checkpoint of step `first`; saves one at `HALF` and an export."""
    pipeline = Pipeline(
        CONFIG,
        replicas=replicas,
        expert_parallel=members,
        microbatches=SEQUENCES // replicas,
        parameter_dtype=torch.float64,
        self_check=False,
    )
    optimizer = reference.adamw(list(pipeline.parameters()), 4e-3)
    if first:
        pipeline.load_checkpoint(folder / f"step-{first:08d}", optimizer)
    count, losses = SEQUENCES // replicas, []
    for step in range(first, last):
        pipeline.zero_grad()
        losses.append(pipeline.step(rows(step)[pipeline.replica * count : (pipeline.replica + 1) * count]).loss)
        pipeline.clip_gradients(1.0)
        optimizer.step()
        if not first and step + 1 == HALF:
            pipeline.save_checkpoint(folder, HALF, optimizer)
    pipeline.save_pretrained(folder / "export")
    pipeline.close()
    return losses


def test_shared_experts_learn_as_on_one_device_each(tmp_path: Path) -> None:
    for name in ("shared", "alone"):
        (tmp_path / name).mkdir()
    shared = run_processes(train, 4, tmp_path / "shared", 2, 2, 0, STEPS)[0]
    alone = run_processes(train, 4, tmp_path / "alone", 1, 1, 0, STEPS)[0]
    assert shared == pytest.approx(alone, rel=1e-6)
    assert shared[-1] < 0.7 * shared[0], "it learns"
    for replicas, members in ((2, 1), (2, 2)):
        resumed = run_processes(train, 4, tmp_path / "shared", replicas, members, HALF, STEPS)[0]
        assert resumed == pytest.approx(shared[HALF:], rel=1e-6)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "shared" / "export", dtype=torch.float32)
    written = model.generate(torch.tensor([list(b"import ")]), max_new_tokens=16, do_sample=False)
    assert written.shape == (1, 23)
