"""evenpipe plan: what it prints and writes, and its exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_run import as_json, refused
from small_run import printed as printed_by
from transformers import LlamaConfig

from evenpipe.cli import printing
from evenpipe.cli.main import main
from evenpipe.costs.hardware import KNOWN, hardware_from_dict, write_hardware
from evenpipe.train.config_file import load_config

TRAINING = """
[model]
architecture = "llama"
[model.config]
hidden_size = 256
intermediate_size = 512
num_hidden_layers = 8
num_attention_heads = 4
[data]
files = "text.txt"
sequence_length = 128
[tokenizer]
vocabulary_size = 4096
[pipeline]
processes = 2
microbatches = 4
nccl_channels = 8
timeout_seconds = 120
[training]
steps = 7
[output]
folder = "runs/small"
export_folder = "exported"
[checkpoint]
folder = "saved"
"""
QUICK = ["--workers", "1", "--no-cache"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in, with a model's config, a training configuration and a machine of two processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(printing, "EVERY_SECONDS", float("inf"))  # on a busy machine too
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
    LlamaConfig(**sizes, vocab_size=128256).save_pretrained("model")
    Path("train.toml").write_text(TRAINING)
    Path("text.txt").write_text("def f(x):\n    return x\n" * 200)
    host = {"name": "host", "torch_device": "cpu", "devices_per_node": 2, "contention": 1.1}
    write_hardware(hardware_from_dict(KNOWN["A100-80G"].to_dict() | host), "host.toml")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    return printed_by(capsys, "plan", *arguments, *QUICK, code=code)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    return as_json(capsys, "plan", *arguments, *QUICK, code=code)


SMALL = ["--model", "model", "--gpus", "4", "--sequence", "2048", "--batch", "32", "--cp", "1", "--zero", "1"]
HOST = ["--model", "train.toml", "--gpus", "2", "--hardware", "host.toml", "--schedule", "1f1b"]


def test_json_has_every_figure(capsys):
    answer = planned(capsys, *SMALL, "--schedule", "1f1b,zbv", "--best", "4", "--explain")
    assert len(answer["plans"]) == 4 and answer["evaluated"] >= 4
    times = [plan["seconds"] for plan in answer["plans"]]
    assert times == sorted(times)
    for plan in answer["plans"]:
        assert plan["dp"] * plan["tp"] * plan["cp"] * plan["pp"] == 4
        assert plan["dp"] * plan["microbatches"] * plan["microbatch_size"] == 32
        assert plan["fits"] and 0 < plan["model_flops_utilization"] < 0.9
        assert plan["tokens_per_second"] == pytest.approx(32 * 2048 / plan["seconds"])
        assert len(plan["devices"]) == plan["pp"] and len(plan["checkpointing"]) == 16
        assert all(device["spare"] >= 0 and device["event"] for device in plan["devices"])


@pytest.mark.slow
def test_if_nothing_fits_it_says_what_would(capsys):
    narrow = (*SMALL, "--gpu-memory", "9GiB", "--schedule", "1f1b", "--tp", "1", "--cp", "1")
    near = planned(capsys, *narrow, code=1)
    assert near["plans"] == [] and near["nearest"]["lacking_bytes"] > 0
    host, more = near["would_fit"]
    assert host["change"].startswith("--host-share 1")
    gpus = int(more["change"].removesuffix(" GPUs"))
    assert gpus in (8, 16, 32, 64)
    assert printed(capsys, *narrow, "--explain", code=1).count("out of memory by") > 1
    text = printed(capsys, *narrow, code=1).splitlines()
    assert text[1] == "no plan fits"
    assert text[2].startswith(f"nearest: {near['nearest']['name']}: out of memory by ")
    assert text[3] == "would fit:"
    assert [line.split(":")[0].strip() for line in text[4:]] == [host["change"], more["change"]]
    wider = (*(str(gpus) if argument == "4" else argument for argument in narrow), "--best", "1")
    assert planned(capsys, *wider)["plans"][0]["name"] == more["plan"]


def test_plans_for_a_cpu_are_written_for_training(capsys):
    out = printed(capsys, *HOST[:-2], "-o", "planned.toml")
    assert "wrote planned.toml" in out and "2 GPUs (host" in out
    config = load_config("planned.toml")
    assert config.pipeline.processes == 2 and config.pipeline.timeout_seconds == 120
    assert config.pipeline.nccl_channels == 8 and config.pipeline.nccl_high_priority
    assert config.pipeline.sequences_per_step == 4, "the batch is that of the configuration"
    assert config.training.steps == 7 and config.data.files == ("text.txt",)
    assert config.model.config["hidden_size"] == 256


FOLDERS = [
    # output.folder of the configuration, name of the file, folder of the planned run
    ("runs/small", "planned.toml", "runs/planned"),
    ("runs/small", "runs.toml", "runs/runs"),
    ("runs/planned", "planned.toml", "runs/planned-planned"),
    ("here", "planned.toml", "planned"),
    (None, "planned.toml", "runs/planned"),
]


def test_a_plan_gets_folders_of_its_own(capsys, sample):
    """Or it would resume the run that it was planned from, or write over its model."""
    for before, name, own in sample(FOLDERS, 1):
        text = TRAINING.replace("runs/small", before) if before else TRAINING[: TRAINING.index("[output]")]
        Path("train.toml").write_text(text)
        assert f"wrote {name}; the run will write to {own}" in printed(capsys, *HOST, "-o", name)
        config = load_config(name)
        assert set(config.folders.values()) == {Path(own), Path(own) / "data", Path(own) / "checkpoints"}
        assert config.export_folder == Path(own) / "model"
        Path(name).unlink()


@pytest.mark.slow
def test_estimates_only_are_called_so(capsys):
    plan = ["--dp", "2", "--schedule", "1f1b", "--best", "1"]
    assert "estimate only" not in printed(capsys, *SMALL[:-2], *plan)
    plan = [*SMALL, *plan]
    assert "estimate only" in printed(capsys, *plan)
    assert main(["plan", *plan, "-o", "no.toml", *QUICK]) == 2
    assert "is an estimate only, evenpipe train does not run it: data_parallel" in capsys.readouterr().err


@pytest.mark.slow
def test_tensor_parallelism_is_planned_where_the_model_can_be_cut(capsys):
    """Three groups of heads: three ranks share them. Two would need half a head of keys and values."""
    model = LlamaConfig(
        hidden_size=768, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=12, num_key_value_heads=3
    )
    model.save_pretrained("three")
    plan = ["--model", "three", "--gpus", "6", "--sequence", "768", "--batch", "12", "--schedule", "1f1b", "--cp", "1"]
    plans = planned(capsys, *plan, "--best", "40")["plans"]
    assert {row["tp"] for row in plans} == {1, 3} and all(row["runnable"] for row in plans)
    printed(capsys, *plan, "--tp", "3", "--pp", "2", "-o", "planned.toml")
    pipeline = load_config("planned.toml").pipeline
    assert (pipeline.processes, pipeline.tensor_parallel, pipeline.devices) == (6, 3, 2)
    error = refused(capsys, "plan", *plan, "--tp", "2", *QUICK)
    assert "self_attn cannot be cut so: 2 ranks cannot share 3 heads of keys and values" in error


@pytest.mark.slow
def test_the_cache_answers_again(capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    arguments = ["plan", *SMALL, "--schedule", "1f1b", "--workers", "1"]
    first = as_json(capsys, *arguments)
    (path,) = Path("cache/evenpipe/plan").glob("*.json")
    entries = path.read_text()
    assert as_json(capsys, *arguments) == first and path.read_text() == entries
