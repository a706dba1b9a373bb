"""`evenpipe estimate`: what it prints, its JSON, its exit codes, and a table of wrong input."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig

from evenpipe.cli.main import main

TERMS = ("parameters", "gradients", "optimizer", "activations", "vocabulary", "buffers", "transient")
LAYOUT = ["--dp", "2", "--tp", "2", "--zero", "1", "--sequence", "8192", "--vocabulary", "first-last"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with the config of Llama-3.1-8B, and another one."""
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )
    config.save_pretrained(tmp_path / "llama-8b")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    return tmp_path


def printed(capsys, *arguments: str, code: int = 0) -> str:
    assert main(["estimate", *arguments]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_json_has_every_key_and_adds_up(capsys) -> None:
    found = json.loads(
        printed(capsys, "--model", "llama-8b", "--pp", "4", "--schedule", "zbv", "--gpu-memory", "80GiB", "--json")
    )
    assert found["fits"] is True and found["verdict"] == "fits" and found["gpu_memory"] == 80 * 2**30
    assert found["parallelism"] == {"dp": 1, "ep": 1, "tp": 1, "cp": 1, "pp": 4, "zero": 0, "gpus": 4}
    assert found["layers_per_stage"] == [4] * 8 and found["vocabulary"] == "vocab-2"
    assert [device["stages"] for device in found["devices"]] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    for device in found["devices"]:
        tensors = sum(device[term] for term in TERMS)
        assert 0 <= device["peak_allocated"] - tensors < 512
        assert device["peak_allocated"] < device["peak_reserved"] < device["process"]["most"] < 80 * 2**30
        assert device["binding_event"].split()[0] in "F B I W S C T E G optimizer"


def test_a_folder_and_a_file_are_the_same(capsys) -> None:
    texts = [
        json.loads(printed(capsys, "--model", name, *LAYOUT, "--json")) for name in ("llama-8b", "llama-8b/config.json")
    ]
    assert texts[0]["devices"] == texts[1]["devices"] and texts[0]["fits"] is None


def test_quantised_weights_count_as_if_they_were_not(capsys, tmp_path) -> None:
    config = json.loads((tmp_path / "llama-8b" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "quantised.json").write_text(json.dumps(config))
    assert main(["estimate", "--model", "llama-8b", "--pp", "2"]) == 0
    plain = capsys.readouterr()
    assert main(["estimate", "--model", "quantised.json", "--pp", "2"]) == 0
    quantised = capsys.readouterr()
    assert quantised.out == plain.out and not plain.err
    assert (
        quantised.err.startswith("evenpipe: the weights of this model are quantised") and quantised.err.count("\n") == 1
    )


def test_the_table_for_people(capsys) -> None:
    text = printed(
        capsys, "--model", "llama-8b", *LAYOUT, "--kernels", "megatron", "--gpu-memory", "80GiB", "--compare-to-paper"
    )
    lines = text.splitlines()
    assert lines[0] == "LlamaForCausalLM: 32 layers, 8.03 B parameters, vocabulary 128256"
    assert lines[1] == "4 GPUs: dp 2, tp 2, zero 1"
    head, row = lines[5].split(), lines[6].split()
    assert head[:9] == ["device", "layers", *TERMS]
    assert row[:2] == ["0", "32"] and sum(map(float, row[2:9])) == pytest.approx(float(row[9]), abs=0.05)
    assert "fits: device 0 needs" in text and "of 80" not in text
    # the authors' own values for this layout, and their rule
    assert "paper     44.87 GiB" in text and "22.64 GiB" in text
    assert "84 % of the card: its rule (80 %) rejects it." in text


AUTHORS = [
    (("--dp", "2", "--tp", "2"), 1, 44.873, 22.645),
    (("--dp", "2", "--cp", "2"), 1, 67.309, 22.645),
    (("--dp", "32", "--tp", "2", "--pp", "2"), 1, 11.919, 20.750),
    (("--dp", "32", "--tp", "2", "--cp", "2"), 2, 23.137, 22.645),
]


@pytest.mark.parametrize(("axes", "size", "states", "activations"), AUTHORS)
def test_the_papers_own_values(capsys, axes, size, states, activations) -> None:
    """GiB, from its authors' unit tests: to 0.1 %."""
    found = json.loads(
        printed(
            capsys,
            *("--model", "llama-8b", *axes, "--zero", "1", "--sequence", "8192", "--microbatch-size", str(size)),
            *("--vocabulary", "first-last", "--compare-to-paper", "--json"),
        )
    )["paper"]
    assert found["states"] / 2**30 == pytest.approx(states, rel=1e-3)
    assert found["activations"] / 2**30 == pytest.approx(activations, rel=1e-3)


def test_exit_codes_tell_the_verdict(capsys) -> None:
    run = ("--model", "llama-8b", "--pp", "2", "--json")
    assert json.loads(printed(capsys, *run, "--gpu-memory", "40GiB", code=1))["verdict"] == "does not fit"
    assert json.loads(printed(capsys, *run, "--hardware", "B200"))["verdict"] == "fits"
    most = max(device["process"]["most"] for device in json.loads(printed(capsys, *run))["devices"])
    card = ("--gpu-memory", f"{most - 2**20}B")
    risky = json.loads(printed(capsys, *run, *card))
    assert risky["verdict"] == "at risk" and risky["fits"] is False
    assert json.loads(printed(capsys, *run, *card, "--strict", code=1)) == risky


def test_it_says_what_is_in_the_way(capsys) -> None:
    text = printed(capsys, "--model", "llama-8b", "--pp", "2", "--gpu-memory", "40GiB", code=1)
    assert "does not fit: device 0 needs" in text and "available: 40.00 GiB" in text
    assert "does not fit too: device 1." in text


def test_a_picture_of_every_device(capsys, tmp_path) -> None:
    file = tmp_path / "memory.svg"
    out = printed(capsys, "--model", "llama-8b", "--pp", "4", "--hardware", "h200", "-o", str(file))
    assert out.rstrip().endswith(f"wrote {file}")
    text = file.read_text()
    assert text.count(">device ") == 4
    for term in ("parameters", "gradients", "optimizer", "activations"):
        assert f">{term}</text>" in text


MODEL = ("--model", "llama-8b")
WRONG = [
    (("--model", "nowhere"), "model = 'nowhere' is neither a folder with a config.json"),
    (("--model", "empty"), "model = 'empty' is neither a folder with a config.json"),
    (("--model", "none.json"), "the model is 'none.json', but there is no such file"),
    (("--model", "broken.json"), "broken.json"),
    ((*MODEL, "--dp", "0"), "dp is 0, expected a whole number of at least 1"),
    ((*MODEL, "--tp", "3"), "tp is 3, expected a divisor of the model's 32 attention heads"),
    ((*MODEL, "--pp", "33"), "33 with 33 stages, but the model has 32 layers"),
    ((*MODEL, "--cp", "3"), "sequence is 4096, expected a multiple of cp = 3"),
    ((*MODEL, "--gpu-memory", "80"), "is '80', which has no unit, expected a number and a unit, as in 80GiB"),
    ((*MODEL, "--gpu-memory", "much"), "--gpu-memory is 'much', expected a number and a unit, as in 80GiB"),
    ((*MODEL, "--hardware", "H10"), "hardware 'H10' is unknown, did you mean"),
    ((*MODEL, "--schedule", "1f1c"), "schedule '1f1c' is unknown, did you mean '1f1b'"),
    ((*MODEL, "--vocabulary", "vocab-3"), "vocabulary mode 'vocab-3' is unknown"),
    ((*MODEL, "--kernels", "none"), "kernels is 'none', expected one of"),
    ((*MODEL, "--layers-per-stage", "a"), "--layers-per-stage is 'a', expected whole numbers such as 1,2,4"),
    ((*MODEL, "--checkpointing", "all"), "checkpointing: 'all', expected one of"),
    ((*MODEL, "--sequence", "-1"), "sequence is -1, expected a whole number of at least 1"),
    ((*MODEL, "--offload-optimizer", "2"), "offloaded is 2.0, expected a share between 0 and 1"),
    ((*MODEL, "-o", "memory.png"), "--output is 'memory.png', but the name of the picture must end in .svg"),
    ((*MODEL, "-o", "nowhere/memory.svg"), "there is no folder 'nowhere'"),
    ((*MODEL, "--gpus", "8"), "estimate has no argument --gpus, did you mean --"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG, ids=lambda value: " ".join(value)[:50])
def test_wrong_input_is_one_sentence(capsys, arguments, sentence) -> None:
    assert main(["estimate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1
    assert err.startswith("evenpipe: ") and sentence in err


def test_the_split_is_that_of_a_run_on_the_hardware(capsys) -> None:
    """By memory, where the split by time does not fit and another one does."""
    run = ["--model", "llama-8b", "--dp", "2", "--zero", "3", "--pp", "4", "--vocabulary", "redistribute", "--sequence"]
    run += ["4096", "--checkpointing", "selective", "--json", "--hardware", "H100-80G"]
    roomy, tight = (json.loads(printed(capsys, *run, "--gpu-memory", size)) for size in ("80GiB", "40GiB"))
    assert (roomy["layers_per_stage"], tight["layers_per_stage"]) == ([7, 9, 9, 7], [6, 8, 9, 9])
    assert roomy["fits"] and tight["fits"]


@pytest.mark.parametrize("mode", ["redistribute", "vocab-2"])
def test_choices_of_other_frameworks_on_known_hardware(capsys, mode: str) -> None:
    """Their times are unknown, but not their memory."""
    run = ["--model", "llama-8b", "--tp", "2", "--pp", "2", "--vocabulary", mode, "--kernels", "megatron", "--json"]
    peaks = []
    for choice in ("none", "mlp", "full"):
        found = json.loads(printed(capsys, *run, "--hardware", "H200", "--checkpointing", choice))
        peaks.append(max(device["peak_allocated"] for device in found["devices"]))
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3
