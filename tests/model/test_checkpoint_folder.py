"""Hugging Face folders are read in parts, written in parts, and loaded by transformers.

Stored tensors that the config does not mention are kept or reported, as in transformers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from families import EXPERTS, FAMILIES, build_stages, tiny_config, tokens_and_labels, whole_model
from safetensors.torch import load_file, save_file

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.model import (
    as_stored,
    build_stage,
    describe,
    disk_tensors,
    fill_parameters,
    fill_rows,
    load_parameters,
    load_rows,
    persistent_buffers,
    save_tensors,
    weight_files,
    write_folder_metadata,
)


@pytest.fixture
def saved(tmp_path):
    """Write a whole model with transformers; return it and the folder."""

    def save(name: str, tied: bool = False, **options):
        model = whole_model(tiny_config(name, tied=tied), dtype=torch.float32)
        model.save_pretrained(tmp_path / "given", **options)
        return model, tmp_path / "given"

    return save


WAYS = [(name, tied) for name in FAMILIES for tied in (False, True)]
WAYS += [(name, False) for name in EXPERTS] + [("mixtral", True)]


@pytest.mark.parametrize(("name", "tied"), WAYS)
@pytest.mark.sampled(8)
def test_from_folder_to_stages_to_folder(name, tied, saved, tmp_path) -> None:
    model, given = saved(name, tied, max_shard_size="40KB")
    description = describe(given)
    tensors = {}
    for stage in build_stages(description, (1, 3), dtype=torch.float32):
        fill_parameters(stage, description)
        tensors |= dict(stage.named_parameters()) | dict(persistent_buffers(stage))
    for key in description.vocabulary_names:
        tensors[key] = torch.cat([fill_rows(description, key, 0, 300), fill_rows(description, key, 300, 503)])
    whole = dict(model.named_parameters()) | dict(persistent_buffers(model))
    assert tensors.keys() == whole.keys() == description.shapes.keys()
    assert all(torch.equal(tensors[key], whole[key]) for key in whole)

    written = tmp_path / "written"
    write_folder_metadata(description, written, torch.float32)
    save_tensors(written, disk_tensors(description, tensors.items()), max_shard_size=40_000)
    read, report = transformers.AutoModelForCausalLM.from_pretrained(written, output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens, _ = tokens_and_labels()
    read.config._experts_implementation = model.config._experts_implementation
    assert torch.equal(read.eval()(tokens).logits, model.eval()(tokens).logits)
    ours, theirs = (
        {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
        for folder in (written, given)
    )
    assert ours.keys() == theirs.keys(), "names on disk are those that transformers writes"
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert {json.loads((written / "config.json").read_text())[key] for key in ("dtype", "model_type")} == {
        "float32",
        model.config.model_type,
    }


def test_tensors_are_drawn_one_by_one(tmp_path) -> None:
    """Check that the tensors of a full shard are freed before the next shard begins."""
    import weakref

    alive = weakref.WeakSet()
    most = 0

    def made():
        nonlocal most
        for index in range(12):
            tensor = torch.full((100,), float(index))
            alive.add(tensor.untyped_storage())
            yield f"t{index}", tensor
            del tensor
            most = max(most, len(alive))

    save_tensors(tmp_path, made(), max_shard_size=1200)
    assert most <= 3


def test_views_are_written_alone(tmp_path) -> None:
    whole = torch.arange(1000.0)
    save_tensors(tmp_path, [("a", whole[10:20]), ("b", whole[20:30]), ("c", whole.view(10, 100).T)])
    read = load_file(tmp_path / "model.safetensors")
    assert torch.equal(read["a"], whole[10:20]) and torch.equal(read["c"], whole.view(10, 100).T)
    assert (tmp_path / "model.safetensors").stat().st_size < 1020 * 4 + 400
    with pytest.raises(InputError, match="no tensor to write"):
        save_tensors(tmp_path, [])


def test_loaded_rows_do_not_hold_the_whole_matrix_and_values_are_cast(saved) -> None:
    model, folder = saved("llama")
    description = describe(folder)
    rows = load_rows(description, folder, "lm_head.weight", 100, 110)
    assert rows.untyped_storage().nbytes() == 10 * 64 * 4
    stage = build_stage(description, 0, 1, is_first=True, is_last=False, dtype=torch.bfloat16)
    load_parameters(stage, description, folder)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(stage.get_parameter(name), model.get_parameter(name).bfloat16())


def test_a_folder_of_the_base_model_alone_has_its_layers(saved, tmp_path) -> None:
    model, _ = saved("llama")
    model.model.save_pretrained(tmp_path / "base")
    shutil.copy(tmp_path / "given" / "config.json", tmp_path / "base" / "config.json")
    description = describe(tmp_path / "base")
    stage = build_stage(description, 1, 3, is_first=False, is_last=False)
    fill_parameters(stage, description)
    assert all(torch.equal(parameter, model.get_parameter(name)) for name, parameter in stage.named_parameters())
    with pytest.raises(InputError, match=r"has no tensor for lm_head\.weight"):
        fill_rows(description, "lm_head.weight", 0, 5)


def test_more_than_ten_experts_keep_their_order(tmp_path) -> None:
    model = whole_model(tiny_config("mixtral", num_local_experts=12), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    description = describe(tmp_path)
    stage = build_stage(description, 1, 2, is_first=False, is_last=False)
    fill_parameters(stage, description)
    assert all(torch.equal(parameter, model.get_parameter(name)) for name, parameter in stage.named_parameters())


# --- tensors that the config does not mention ------------------------------------------------------------------------


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
    assert said == (
        []
        if tied
        else [
            f"{folder}: {EMBEDDING} and {HEAD} differ, so both are kept, as transformers does"
            ", though its config has tie_word_embeddings = true"
        ]
    )
    ours, theirs = losses(folder)
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_matrices_that_differ_are_both_written_back(tmp_path) -> None:
    folder = rewrite(save(tmp_path / "given"), change_all)
    pipeline = Pipeline(folder, microbatches=1, self_check=False)
    pipeline.save_pretrained(tmp_path / "written")
    given, written = (load_file(tmp_path / name / "model.safetensors") for name in ("given", "written"))
    assert given.keys() == written.keys() and all(torch.equal(given[name], written[name]) for name in given)
    assert json.loads((tmp_path / "written" / "config.json").read_text())["tie_word_embeddings"] is False


def test_matrices_that_differ_are_refused_where_the_code_has_one(tmp_path) -> None:
    folder = rewrite(save(tmp_path), change_all)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "one", "auto_map": {"AutoConfig": "one.Config", "AutoModelForCausalLM": "one.One"}}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["One"]}))
    (folder / "one.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\nclass Config(LlamaConfig):\n    model_type = 'one'\n"
        "class One(LlamaForCausalLM):\n    config_class = Config\n    def __init__(self, config):\n"
        "        config.tie_word_embeddings = True\n        super().__init__(config)\n"
    )
    with pytest.raises(InputError) as caught:
        as_stored(describe(folder, trust_remote_code=True))
    said = f"{EMBEDDING} and {HEAD} differ; they must be equal, since One has one matrix for both"
    assert str(caught.value) == f"{folder}: {said}"


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
