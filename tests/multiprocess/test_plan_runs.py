"""Plans for a CPU: the machine is measured, and what is planned runs as it stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import run_processes

from evenpipe.cli.main import main
from evenpipe.costs.hardware import KNOWN, find_hardware, hardware_from_dict, write_hardware
from evenpipe.costs.timed_model import pass_costs
from evenpipe.model import describe
from evenpipe.plan.problem import problem_of
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Placement
from evenpipe.train import hardware_profile
from evenpipe.train import profile as profile_module
from evenpipe.train.config_file import load_config
from evenpipe.train.pipeline_sections import PipelineConfig
from evenpipe.train.planned_config import configured_model

CONFIG = """
[model]
architecture = "llama"
self_check = false
[model.config]
hidden_size = 256
intermediate_size = 704
num_hidden_layers = 8
num_attention_heads = 4
vocab_size = 16384
[data]
files = "text.txt"
sequence_length = 256
validation_fraction = 0
[tokenizer]
vocabulary_size = 300
[pipeline]
processes = 2
microbatches = 8
[training]
steps = {steps}
[checkpoint]
every_steps = "none"
[output]
folder = "{folder}"
tensorboard = false
export = false
"""
STEPS = 6


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in; processes are those of the tests."""

    def launch(function: Any, *arguments: Any, processes: int, **_: Any) -> list[Any]:
        return run_processes(function, processes, *arguments)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware_profile, "launch", launch)
    monkeypatch.setattr(profile_module, "launch", launch)
    Path("text.txt").write_text("def f(x):\n    return x\n" * 3000)
    Path("train.toml").write_text(CONFIG.format(steps=STEPS, folder="run"))
    return tmp_path


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.sampled(1)
def test_the_machine_is_measured(processes: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--hardware", "--processes", str(processes), "-o", "host.toml"]) == 0
    assert capsys.readouterr().out == "wrote host.toml\n"
    hardware = find_hardware("host.toml")
    assert hardware.torch_device == "cpu" and hardware.devices_per_node == processes
    assert 1e9 < hardware.peak("fp32") < 1e13 and 1e8 < hardware.memory_bandwidth < 1e12
    assert 1e-7 < hardware.operation_seconds < 1e-3 and hardware.contention >= 1
    assert 1e-6 < hardware.inside.latency_seconds < 0.1 and hardware.inside.bandwidth > 1e6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--hardware", "--processes", "0"], "processes is 0"),
        (["--hardware", "--from", "trace.json"], "--from"),
        (["--hardware", "--microbatch-sizes", "1"], "no CONFIG.toml"),
        (["train.toml", "--hardware", "--microbatch-sizes", "0"], "microbatch sizes are [0]"),
        (["train.toml", "--hardware", "--microbatch-sizes", "a"], "microbatch-sizes"),
        (["train.toml", "--hardware", "--steps", "0"], "steps is 0"),
        (["train.toml", "--hardware", "--processes", "9"], "pipeline.processes is 9, but must be at most 8"),
        (["train.toml", "--processes", "2"], "--processes needs --hardware"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    wrong: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware_profile, "launch", lambda *_, **__: pytest.fail("something ran"))
    assert main(["profile", *wrong]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_plans_take_the_passes_that_were_measured(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The pipeline that was measured is predicted with what its passes took, also one of two tensor ranks a device."""
    sizes = ["--microbatch-sizes", "2", "--steps", "2"]
    config = ["train.toml", f"pipeline.processes={2 * ranks}", f"pipeline.tensor_parallel={ranks}"]
    assert main(["profile", *config, "--hardware", *sizes, "-o", "host.toml"]) == 0
    hardware = find_hardware("host.toml")
    shapes = [(one.microbatch_size, one.devices, one.sequence, one.tensor_parallel) for one in hardware.passes]
    assert shapes == [(2, 2, 256, ranks), (2, 2, 32, ranks)]
    capsys.readouterr()
    axes = ["--gpus", str(2 * ranks), "--pp", "2", "--tp", str(ranks)]
    plan = ["plan", "--model", "train.toml", *axes, "--hardware", "host.toml", "--no-cache"]
    assert main([*plan, "--schedule", "1f1b", "--microbatch-size", "1", "--workers", "1"]) == 0
    assert "pass times corrected by measurements of this model with microbatches of 2" in capsys.readouterr().out
    for measured in hardware.passes:
        given = problem_of(
            describe(configured_model(load_config("train.toml"))),
            replace(hardware, passes=(measured,)),
            gpus=2 * ranks,
            sequence=measured.sequence,
            sequences_per_step=8,
            dtype="fp32",
        )
        size = measured.microbatch_size
        recipe = Recipe.of(pp=2, tp=ranks, microbatch_size=size, microbatches=4, layers_per_stage=(4, 4))
        costs = pass_costs(given, recipe, Placement.linear(2))
        for name in "FBIW":
            took = measured.seconds[name] + 2 * measured.seconds[f"stage_{name}"]
            assert sum(getattr(costs, name)) == pytest.approx(took)
        for name in "SCT":
            assert getattr(costs, name) == pytest.approx(measured.seconds[name])
        assert costs.p2p == pytest.approx(measured.seconds["p2p"])


@pytest.mark.slow
def test_a_written_plan_runs_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    """With activations and moments on the host, too, and then to the same bits."""
    Path("train.toml").write_text(CONFIG.format(steps=2, folder="run"))
    hardware = hardware_profile.profile_hardware(2)
    write_hardware(hardware, "host.toml")
    plan = ["plan", "--model", "train.toml", "--gpus", "2", "--hardware", "host.toml", "--pp", "2", "--no-cache"]
    assert main([*plan, "--schedule", "1f1b,zbv", "--workers", "1", "-o", "planned.toml"]) == 0
    assert "wrote planned.toml" in capsys.readouterr().out
    planned = load_config("planned.toml").pipeline
    report = trained("planned.toml")
    assert report["steps"] == 2 and report["schedule"]["name"] == planned.schedule
    assert report["schedule"]["microbatches"] == planned.microbatches
    assert load_config("planned.toml").offload.activations == "scheduled"

    same = ["--schedule", planned.schedule, "--vocabulary", planned.vocabulary, "--checkpointing", "none"]
    same += ["--microbatch-size", str(planned.microbatch_size), "--workers", "1", "-o", "on the host.toml"]
    assert main([*plan, *same, "--offload", "free", "--host-share", "0.5"]) == 0
    written = load_config("on the host.toml")
    assert written.offload.activations == "free" and written.optimizer.host_share == 0.5
    assert written.pipeline == planned
    assert losses("on the host", trained("on the host.toml")) == losses("planned", report)


EXPERTS = """moe_intermediate_size = 96
num_experts = 6
num_experts_per_tok = 2
"""


def plan_of_two_devices(
    name: str, ranks: int, given: list[str], capsys: pytest.CaptureFixture[str], *, experts: bool = False
) -> PipelineConfig:
    """Plan a small model for two devices of so many processes; the plan is one that runs."""
    config = CONFIG.format(steps=3, folder="run").replace("_layers = 8", "_layers = 2")
    if experts:
        config = config.replace('"llama"', '"qwen3_moe"').replace("num_attention", f"{EXPERTS}num_attention")
    Path("train.toml").write_text(config)
    host = KNOWN["A100-80G"].to_dict() | {"name": "host", "torch_device": "cpu", "devices_per_node": 4}
    write_hardware(hardware_from_dict(host), "host.toml")
    plan = ["plan", "--model", "train.toml", "--hardware", "host.toml", "--gpus", str(2 * ranks), "--pp", "2", *given]
    plan += ["--schedule", "1f1b", "--microbatch-size", "1", "--no-cache", "--workers", "1", "-o", f"{name}.toml"]
    assert main(plan) == 0
    assert "estimate only" not in capsys.readouterr().out
    return load_config(f"{name}.toml").pipeline


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["vocab-2", "first-last"])
def test_a_plan_with_tensor_ranks_runs(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two devices of two processes, as planned; the losses are those of the same plan without tensor parallelism."""
    found = {}
    for ranks, name in ((2, "shared"), (1, "alone")):
        planned = plan_of_two_devices(name, ranks, ["--tp", str(ranks), "--vocabulary", mode], capsys)
        assert (planned.processes, planned.tensor_parallel, planned.devices) == (2 * ranks, ranks, 2)
        found[name] = losses(name, trained(f"{name}.toml"))
    assert found["shared"] == pytest.approx(found["alone"], rel=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["vocab-2", "first-last"])
def test_a_plan_with_pieces_of_sequences_runs(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two devices of two context ranks; the losses are those of whole sequences."""
    found = {}
    for ranks, name in ((2, "pieces"), (1, "whole")):
        given = ["--cp", str(ranks), "--vocabulary", mode, "--zero", "0"]
        planned = plan_of_two_devices(name, ranks, given, capsys)
        assert (planned.processes, planned.context_parallel) == (2 * ranks, ranks)
        assert planned.devices == 2 and (planned.context_exchange == "auto") == (ranks == 1)
        found[name] = losses(name, trained(f"{name}.toml"))
    assert found["pieces"] == pytest.approx(found["whole"], rel=1e-4)


def test_a_plan_with_shared_experts_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Two devices of two replicas; the losses are those of replicas that have all experts."""
    found = {}
    for members, name in ((2, "shared"), (1, "alone")):
        given = ["--ep", str(members), "--vocabulary", "vocab-2", "--zero", "0"]
        planned = plan_of_two_devices(name, 2, given, capsys, experts=True)
        assert (planned.processes, planned.replicas, planned.expert_parallel) == (4, 2, members)
        found[name] = losses(name, trained(f"{name}.toml"))
        lines = [json.loads(line) for line in (Path(name) / "metrics.jsonl").read_text().splitlines()]
        assert all(len(line["expert_load_most"]) == 2 and min(line["expert_load_most"]) >= 1 for line in lines)
        picture = (Path(name) / "expert_load.svg").read_text()
        assert "layer 0" in picture and "layer 1" in picture
    assert found["shared"] == pytest.approx(found["alone"], rel=1e-4)


def trained(config: str) -> dict[str, Any]:
    """The report of `evenpipe train`."""
    done = subprocess.run(
        [sys.executable, "-m", "evenpipe.cli.main", "train", config],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder = load_config(config).run_folder
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def losses(folder: str, report: dict[str, Any]) -> list[float]:
    """Of all steps, to the last bit."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]
    assert len(found) == report["steps"]
    return found
