"""Export of what a pipeline of several processes has saved, and of a model that the disk does not hold."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_processes
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from evenpipe.checkpoints import save
from evenpipe.errors import RunError
from evenpipe.model.placement import Cut, Held, TensorPlacement
from evenpipe.train.export import export_checkpoint

IDS = torch.arange(24).reshape(2, 12) * 5 % 9


def build(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=9,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def save_as_a_pipeline(folder: Path, tied: bool, spread: bool) -> None:
    """Layer i on process i; the vocabulary's rows 3, 3, 3, 0, or whole on the first and the last process."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = build(tied)
    shards = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if "layers" in name or name == "model.norm.weight":
            if rank == (int(name.split(".")[2]) if "layers" in name else last):
                shards[name] = Held.whole(parameter)
        elif spread:
            rows = nn.Parameter(parameter.detach()[3 * rank : 3 * rank + 3].clone())
            shards[name] = Held(rows, TensorPlacement(shape, (Cut(("pp",), rank, last + 1),)))
        elif rank in (0, last):
            is_embedding = "embed" in name
            if tied or rank == (0 if is_embedding else last):
                is_copy = tied and rank == last
                shards[name] = Held(
                    parameter, TensorPlacement(shape, copied_along=frozenset({"pp"} if is_copy else ()))
                )
    optimizer = torch.optim.AdamW([shard.tensor for shard in shards.values()])
    save(folder, 1, shards, optimizer, {"model_config": model.config.to_dict(), "tied": tied})
    if rank == 0:  # one process of several, as at the end of a run: the others know nothing of it
        export_checkpoint(folder, folder / "by one of four")


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.sampled(2)
def test_a_sharded_checkpoint_becomes_one_model(tmp_path: Path, tied: bool, spread: bool) -> None:
    run_processes(save_as_a_pipeline, 4, tmp_path, tied, spread)
    loaded = AutoModelForCausalLM.from_pretrained(export_checkpoint(tmp_path, tmp_path / "model")).eval()
    for file in (tmp_path / "model").iterdir():
        assert (tmp_path / "by one of four" / file.name).read_bytes() == file.read_bytes()
    model = build(tied)
    expected = dict(model.named_parameters())
    assert dict(loaded.named_parameters()).keys() == expected.keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())
    with torch.no_grad():
        losses = [each(input_ids=IDS, labels=IDS).loss.item() for each in (loaded, model)]
    assert abs(losses[0] - losses[1]) <= 1e-6 * losses[1]


def export_with_a_file_size_limit(folder: Path) -> str:
    model = build(tied=False)
    shards = {name: Held.whole(parameter) for name, parameter in model.named_parameters()}
    save(folder, 1, shards, None, {"model_config": model.config.to_dict()})
    export_checkpoint(folder, folder / "model")
    earlier = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    try:
        export_checkpoint(folder, folder / "model")
    except RunError as error:
        assert sorted(path.name for path in folder.glob("[!.]*")) == ["model", "step-00000001"]
        assert {path.name: path.read_bytes() for path in (folder / "model").iterdir()} == earlier
        return str(error)
    return "nothing"


def test_a_disk_that_does_not_hold_it_leaves_the_earlier_export(tmp_path: Path) -> None:
    error = run_processes(export_with_a_file_size_limit, 1, tmp_path, group=False)[0]
    assert error.startswith(f"the model was not written to '{tmp_path}/model': ")
    assert "File too large" in error
