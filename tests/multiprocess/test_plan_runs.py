"""Plans for a CPU: the machine is measured, what is planned runs as it stands, what is predicted to be slower is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from harness import run_processes

from evenpipe.cli.main import main
from evenpipe.costs.hardware import Hardware, find_hardware
from evenpipe.model import describe
from evenpipe.plan.configuration_search import search_configurations
from evenpipe.plan.configurations import Problem, Space, problem_of
from evenpipe.plan.evaluation import Evaluation
from evenpipe.train import hardware_profile, trainer
from evenpipe.train.config_file import config_from_dict, load_config, read_toml
from evenpipe.train.data import prepare
from evenpipe.train.planned_config import configured_model, planned_tables

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
        return run_processes(function, processes, *arguments, timeout_seconds=120)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware_profile, "launch", launch)
    Path("text.txt").write_text("def f(x):\n    return x\n" * 3000)
    Path("train.toml").write_text(CONFIG.format(steps=STEPS, folder="run"))
    return tmp_path


def test_the_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--hardware", "--processes", "2", "-o", "host.toml"]) == 0
    assert capsys.readouterr().out == "wrote host.toml\n"
    hardware = find_hardware("host.toml")
    assert hardware.torch_device == "cpu" and hardware.devices_per_node == 2
    assert 1e9 < hardware.peak("fp32") < 1e13 and 1e8 < hardware.memory_bandwidth < 1e12
    assert 1e-7 < hardware.operation_seconds < 1e-3 and hardware.contention >= 1
    assert 1e-6 < hardware.inside.latency_seconds < 0.1 and hardware.inside.bandwidth > 1e6
    for wrong in (["--hardware", "--processes", "0"], ["train.toml", "--hardware"], ["train.toml", "--processes", "2"]):
        assert main(["profile", *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_written_plan_runs_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.toml").write_text(CONFIG.format(steps=2, folder="planned"))
    hardware = hardware_profile.profile_hardware(2)
    from evenpipe.costs.hardware import write_hardware

    write_hardware(hardware, "host.toml")
    plan = ["plan", "--model", "train.toml", "--gpus", "2", "--hardware", "host.toml", "--pp", "2", "--no-cache"]
    assert main([*plan, "--schedule", "1f1b,zbv", "--workers", "1", "-o", "planned.toml"]) == 0
    assert "wrote planned.toml" in capsys.readouterr().out
    planned = load_config("planned.toml").pipeline
    done = subprocess.run(
        [sys.executable, "-m", "evenpipe.cli.main", "train", "planned.toml"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(Path("planned/report.json").read_text())
    assert report["steps"] == 2 and report["schedule"]["name"] == planned.schedule
    assert report["schedule"]["microbatches"] == planned.microbatches


ONE: dict[str, Any] = {"tp": (1,), "cp": (1,), "zero": (0,), "pp": (2,), "schedules": ("1f1b",)}
PLANS = {
    "balanced": Space(**ONE, microbatch_sizes=(1,), vocabularies=("vocab-2",)),
    "first-last": Space(**ONE, microbatch_sizes=(1,), vocabularies=("first-last",)),
    "redistribute": Space(**ONE, microbatch_sizes=(1,), vocabularies=("redistribute",)),
    "recomputed": Space(**ONE, microbatch_sizes=(1,), vocabularies=("first-last",), checkpointing=("full",)),
}
"""Name -> what the search may choose: one plan each."""


def test_plans_are_ordered_as_measured() -> None:
    """Pairs of plans whose predicted times differ by more than 5 %, on the hardware as it was just measured."""
    hardware = hardware_profile.profile_hardware(2)
    base = read_toml("train.toml")
    prepare(config_from_dict(base))
    problem = problem_of_tables(base, hardware)
    plans = {name: best(problem, space) for name, space in PLANS.items()}
    times = {name: min(step_seconds(planned_tables(problem, plan, base), name)) for name, plan in plans.items()}
    print({name: (round(plans[name].seconds, 3), round(times[name], 3)) for name in plans})
    wrong = [
        (one, other)
        for one, other in combinations(plans, 2)
        if abs(plans[one].seconds / plans[other].seconds - 1) > 0.05
        and (plans[one].seconds < plans[other].seconds) != (times[one] < times[other])
    ]
    assert not wrong, {name: (plans[name].seconds, times[name]) for name in plans}


def problem_of_tables(tables: dict[str, Any], hardware: Hardware) -> Problem:
    config = config_from_dict(tables)
    return problem_of(
        describe(configured_model(config)),
        hardware,
        gpus=2,
        sequence=config.data.sequence_length,
        sequences_per_step=config.pipeline.sequences_per_step,
        dtype="fp32",
    )


def best(problem: Problem, space: Space) -> Evaluation:
    found = search_configurations(problem, space, wanted=1, workers=1)
    assert found.best is not None, found.failed
    return found.best


def step_seconds(tables: dict[str, Any], name: str) -> list[float]:
    """Of the steps of a run, without the first two."""
    tables["output"]["folder"] = f"runs/{name}"
    config = config_from_dict(tables)
    prepare(config)
    run_processes(trainer.train, 2, config, timeout_seconds=120)
    lines = (config.run_folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return [step["seconds"] for step in steps if "seconds" in step][2:]
