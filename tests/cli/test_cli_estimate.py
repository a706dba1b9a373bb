"""`evenpipe estimate` and `evenpipe explain`: what they print, their JSON, files and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_run import as_json
from small_run import printed as printed_by
from transformers import LlamaConfig

from evenpipe.cli.main import main

TERMS = ("parameters", "gradients", "optimizer", "activations", "vocabulary", "buffers", "transient")
LAYOUT = "--dp 2 --tp 2 --zero 1 --sequence 8192 --vocabulary first-last"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the config of Llama-3.1-8B."""
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
    LlamaConfig(architectures=["LlamaForCausalLM"], max_position_embeddings=131072, **sizes, **heads).save_pretrained(
        "llama-8b"
    )


def printed(capsys: pytest.CaptureFixture[str], arguments: str, code: int = 0) -> str:
    return printed_by(capsys, "estimate", "--model", *arguments.split(), code=code)


def estimated(capsys: pytest.CaptureFixture[str], arguments: str, code: int = 0) -> dict[str, Any]:
    return as_json(capsys, "estimate", "--model", *arguments.split(), code=code)


def test_json_has_every_key_and_adds_up(capsys):
    figures = estimated(capsys, "llama-8b --pp 4 --schedule zbv --gpu-memory 80GiB")
    assert figures["fits"] is True and figures["verdict"] == "fits" and figures["gpu_memory"] == 80 * 2**30
    assert figures["parallelism"] == {"dp": 1, "ep": 1, "tp": 1, "cp": 1, "pp": 4, "zero": 0, "gpus": 4}
    assert figures["layers_per_stage"] == [4] * 8 and figures["vocabulary"] == "vocab-2"
    assert [device["stages"] for device in figures["devices"]] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    for device in figures["devices"]:
        tensors = sum(device[term] for term in TERMS)
        assert 0 <= device["peak_allocated"] - tensors < 512
        assert device["peak_allocated"] < device["peak_reserved"] < device["process"]["most"] < 80 * 2**30
        assert device["binding_event"].split()[0] in "F B I W S C T E G optimizer"


@pytest.mark.slow
def test_a_folder_and_a_file_are_the_same_and_quantised_weights_count_whole(capsys):
    folder, file = (estimated(capsys, f"{name} {LAYOUT}") for name in ("llama-8b", "llama-8b/config.json"))
    assert folder["devices"] == file["devices"] and folder["fits"] is None
    config = json.loads(Path("llama-8b/config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    Path("quantised.json").write_text(json.dumps(config))
    plain = printed(capsys, "llama-8b --pp 2")
    assert main(["estimate", "--model", "quantised.json", "--pp", "2"]) == 0
    quantised = capsys.readouterr()
    assert quantised.out == plain and quantised.err.count("\n") == 1
    assert quantised.err.startswith("evenpipe: the weights of this model are quantised")


def test_the_papers_rule_is_in_the_table(capsys):
    text = printed(capsys, f"llama-8b {LAYOUT} --kernels megatron --gpu-memory 80GiB --compare-to-paper")
    lines = text.splitlines()
    assert lines[:2] == [
        "LlamaForCausalLM: 32 layers, 8.03 B parameters, vocabulary 128256",
        "4 GPUs: dp 2, tp 2, zero 1",
    ]
    row = lines[6].split()
    assert row[:2] == ["0", "32"] and sum(map(float, row[2:9])) == pytest.approx(float(row[9]), abs=0.05)
    assert "fits: device 0 needs" in text and "of 80" not in text
    assert "paper     44.87 GiB" in text and "84 % of the card: its rule (80 %) rejects it." in text


def test_exit_codes_tell_the_verdict(capsys):
    assert estimated(capsys, "llama-8b --pp 2 --gpu-memory 40GiB", code=1)["verdict"] == "does not fit"
    text = printed(capsys, "llama-8b --pp 2 --gpu-memory 40GiB", code=1)
    assert "does not fit: device 0 needs" in text and "available: 40.00 GiB" in text
    assert "does not fit too: device 1." in text
    others = "--kernels megatron --checkpointing mlp"  # whose times are unknown, but not their memory
    assert estimated(capsys, f"llama-8b --pp 2 --hardware B200 {others}")["verdict"] == "fits"
    most = max(device["process"]["most"] for device in estimated(capsys, "llama-8b --pp 2")["devices"])
    card = f"llama-8b --pp 2 --gpu-memory {most - 2**20}B"
    risky = estimated(capsys, card)
    assert risky["verdict"] == "at risk" and risky["fits"] is False
    assert estimated(capsys, f"{card} --strict", code=1) == risky


def test_a_picture_of_every_device(capsys):
    text = printed(capsys, "llama-8b --pp 4 --hardware h200 -o memory.svg")
    assert text.rstrip().endswith("wrote memory.svg")
    picture = Path("memory.svg").read_text()
    assert picture.count(">device ") == 4
    for term in ("parameters", "gradients", "optimizer", "activations"):
        assert f">{term}</text>" in picture


# --- explain ---


def test_explain_prints_a_report_and_writes_a_page(capsys):
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "max_position_embeddings": 2048}
    LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000).save_pretrained("model")
    text = printed_by(capsys, "explain", "model", "--gpus", "4")
    assert "evenpipe plan --model model --gpus 4 --hardware H100-80G --sequence 2048 --explain" in text
    figures = as_json(capsys, "explain", "model", "--gpus", "4", "-o", "page.html")
    assert figures["usual"]["vocabulary"] == "first-last" and len(figures["usual"]["devices"]) == 4
    assert figures["next"][0].startswith("evenpipe plan ")
    assert "1f1b, vocab-2" in Path("page.html").read_text(encoding="utf-8")
