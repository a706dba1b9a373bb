"""Stored tensors that the config does not mention are kept or reported, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from families import tiny_config, tokens_and_labels, whole_model
from safetensors.torch import load_file, save_file

from evenpipe import Pipeline
from evenpipe.model import as_stored, describe, weight_files

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(folder: Path, name: str = "llama", tied: bool = True, **changes) -> Path:
    whole_model(tiny_config(name, tied=tied, **changes), torch.float32).save_pretrained(folder)
    return folder


def rewrite(folder: Path, change) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def losses(folder: Path) -> tuple[float, float]:
    """Return the losses of the pipeline and of transformers in one process, both loaded from the same folder."""
    ids, _ = tokens_and_labels()
    pipeline = Pipeline(folder, microbatches=1, self_check=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return pipeline.evaluate(ids).loss, model(ids, labels=ids).loss.item()


def change_one_number(tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 1.0


def change_all(tensors) -> None:
    tensors[HEAD] = torch.randn(tensors[EMBEDDING].shape, generator=torch.Generator().manual_seed(0))


def store_twice_in_other_dtypes(tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].bfloat16().float()
    tensors[EMBEDDING] = tensors[HEAD].bfloat16()


TIES = [
    # change of the stored tensors, given "tie_word_embeddings": true, and whether the model stays tied
    (lambda tensors: None, True),
    (lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}), True),
    (store_twice_in_other_dtypes, True),
    (lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}), True),
    (change_one_number, False),
    (change_all, False),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("change", "tied"), TIES)
def test_a_tie_holds_where_the_files_hold_one_matrix(tmp_path, monkeypatch, change, tied) -> None:
    monkeypatch.setattr(weight_files, "BLOCK_ELEMENTS", 1000)
    folder, said = rewrite(save(tmp_path), change), []
    description = as_stored(describe(folder), say=said.append)
    assert description.tied is tied and description.source == str(folder)
    assert len(said) == (not tied) and all(EMBEDDING in text and HEAD in text for text in said)
    ours, theirs = losses(folder)
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_matrices_that_differ_are_both_written_back(tmp_path) -> None:
    folder = rewrite(save(tmp_path / "given"), change_all)
    pipeline = Pipeline(folder, microbatches=1, self_check=False)
    pipeline.save_pretrained(tmp_path / "written")
    given, written = (load_file(tmp_path / name / "model.safetensors") for name in ("given", "written"))
    assert given.keys() == written.keys() and all(torch.equal(given[name], written[name]) for name in given)
    assert json.loads((tmp_path / "written" / "config.json").read_text())["tie_word_embeddings"] is False


def test_tensors_without_a_place_are_left_out_and_named(tmp_path, caplog) -> None:
    folder = save(tmp_path, tied=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    ours, theirs = losses(folder)
    assert ours == pytest.approx(theirs, rel=1e-6)
    (said,) = [record.message for record in caplog.records if record.name.startswith("evenpipe")]
    surplus = [name for name in load_file(folder / "model.safetensors") if name.startswith("model.layers.3.")]
    assert f"holds {len(surplus)} tensors" in said and "model.layers.3.input_layernorm.weight" in said
    assert f"and {len(surplus) - 8} more" in said


OTHER_TENSORS = [
    # family, name on disk, whether it is reported: as in transformers
    ("llama", "value_head.weight", True),
    ("llama", "model.layers.0.self_attn.q_proj.weight_scale", True),
    ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", False),
    ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias", False),
    ("deepseek_v3", "model.layers.61.self_attn.q_a_proj.weight", False),
    ("deepseek_v3", "model.layers.61.mlp.experts.0.up_proj.weight", False),
    ("mixtral", "model.layers.7.block_sparse_moe.experts.1.w1.weight", True),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "name", "is_said"), OTHER_TENSORS)
def test_what_transformers_means_to_ignore_is_not_named(tmp_path, family, name, is_said) -> None:
    folder = rewrite(save(tmp_path, family, tied=False), lambda tensors: tensors.update({name: torch.zeros(2)}))
    said: list[str] = []
    as_stored(describe(folder), say=said.append)
    assert bool(said) is is_said
    assert not said or said[0].endswith(name)


def test_the_single_file_goes_before_the_shards(tmp_path) -> None:
    folder = save(tmp_path, tied=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    model.save_pretrained(tmp_path / "other", max_shard_size="100KB")
    for file in (tmp_path / "other").glob("model*"):
        file.rename(folder / file.name)
    ours, theirs = losses(folder)
    assert ours == pytest.approx(theirs, rel=1e-6)
