"""A pipeline that is saved, stopped and started again goes on as if nothing had happened; elsewhere too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_processes
from transformers import AutoModelForCausalLM, LlamaConfig

from evenpipe import Pipeline
from evenpipe.checkpoints.checkpoint import find_latest, load, prepare_folder, save
from evenpipe.train.export import export_checkpoint

VOCABULARY = 103


def batch(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(step))


def run(folder: Path, mode: str, tied: bool, until: int) -> tuple[list[float], float]:
    """Trains from the newest checkpoint to a step and saves; gives the losses of its steps, and one of evaluation."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    pipeline = Pipeline(config, vocabulary=mode, microbatches=2, self_check=False)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=5e-3)
    group = pipeline.process_group
    prepare_folder(folder, group)
    found = find_latest(folder, group)
    step = 0
    if found.checkpoint is not None:
        step = found.checkpoint.step
        assert load(found.checkpoint, pipeline.parameter_shards(), optimizer, group)["step"] == step
    losses = []
    while step < until:
        step += 1
        losses.append(pipeline.step(batch(step)).loss)
        pipeline.clip_gradients(1.0)
        optimizer.step()
        pipeline.zero_grad()
    metadata = {"step": step, "model_config": config.to_dict(), "tied": pipeline.description.tied}
    save(folder, step, pipeline.parameter_shards(), optimizer, metadata, group)
    evaluated = pipeline.evaluate(batch(0)).loss
    if dist.get_rank() == 0:  # while the others are already past it
        export_checkpoint(folder, folder / "model")
    return losses, evaluated


@pytest.mark.parametrize(("mode", "tied"), [("vocab-2", True), ("vocab-2", False), ("first-last", True)])
def test_stopped_and_started_again_it_is_the_same_run_bit_for_bit(tmp_path: Path, mode: str, tied: bool) -> None:
    whole, evaluated = run_processes(run, 2, tmp_path / "whole", mode, tied, 4)[0]
    first, _ = run_processes(run, 2, tmp_path / "parts", mode, tied, 2)[0]
    second, again = run_processes(run, 2, tmp_path / "parts", mode, tied, 4)[0]
    assert first + second == whole
    assert again == evaluated


@pytest.mark.parametrize("tied", [True, False])
def test_it_goes_on_with_other_processes_and_modes(tmp_path: Path, tied: bool) -> None:
    whole, _ = run_processes(run, 4, tmp_path / "whole", "vocab-2", tied, 5)[0]
    layouts = [(4, "vocab-2"), (2, "first-last"), (3, "vocab-1"), (1, "vocab-2"), (2, "interlaced")]
    losses = []
    for until, (processes, mode) in enumerate(layouts, start=1):
        part, evaluated = run_processes(run, processes, tmp_path / "parts", mode, tied, until)[0]
        losses += part
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "parts" / "model").eval()
        with torch.no_grad():
            loss = exported(input_ids=batch(0), labels=batch(0)).loss.item()
        assert abs(loss - evaluated) <= 1e-6 * loss
    assert losses == pytest.approx(whole, rel=1e-6)
