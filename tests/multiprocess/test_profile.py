"""`evenpipe profile` and `evenpipe train --trace` on real processes: files that the other commands read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import run_processes
from training_runs import prepared, write_config

from evenpipe.cli.main import main
from evenpipe.errors import InputError
from evenpipe.processes.worker import initialise_worker
from evenpipe.schedule import Costs, Kind
from evenpipe.schedule.files import read_costs
from evenpipe.schedule.trace_file import read_trace
from evenpipe.train import profile as profile_module
from evenpipe.train import trainer
from evenpipe.train.build import build_pipeline
from evenpipe.train.config import Config
from evenpipe.train.config_file import load_config


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in; processes are those of the tests."""

    def launch(function: Any, *arguments: Any, processes: int, **_: Any) -> list[Any]:
        return run_processes(function, processes, *arguments)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile_module, "launch", launch)


def write(schedule: str, vocabulary: str) -> None:
    write_config(Path(), {"pipeline.schedule": schedule, "pipeline.vocabulary": vocabulary})


def profiled(schedule: str, vocabulary: str, *options: str) -> Costs:
    """Run the command, and check that the file has every kind of pass."""
    write(schedule, vocabulary)
    assert main(["profile", "config.toml", *options, "--steps", "1", "-o", "costs.toml"]) == 0
    assert Path("costs.toml").read_text().startswith("# Seconds per microbatch, measured: ")
    costs = read_costs("costs.toml")
    stages = 4 if schedule == "zbv" else 2
    counts = dict.fromkeys("FBIWR", stages) | {kind: 2 for kind in "SCTEG" if vocabulary == "vocab-2"}
    for kind, count in counts.items():
        times = getattr(costs, kind)
        assert len(times) == count and min(times) > 0, kind
    return costs


@pytest.mark.parametrize(
    ("schedule", "vocabulary", "communicators"), [("1f1b", "vocab-2", "one"), ("zbv", "first-last", "per-pair")]
)
@pytest.mark.sampled(1)
def test_profile_writes_what_other_commands_read(
    schedule: str, vocabulary: str, communicators: str, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = profiled(schedule, vocabulary, f"pipeline.communicators={communicators}")
    assert capsys.readouterr().out == "wrote costs.toml\n"
    assert costs.contention >= 1
    assert costs.p2p > 0 or costs.links["p2p"].time > 0
    if vocabulary == "vocab-2":
        assert {*costs.collectives, *costs.links} >= {"broadcast", "statistics", "reduce", "embedding"}
    for other in {"zbv"} if schedule == "zbv" else {"zb-h1", schedule}:
        size = ["--devices", "2", "--microbatches", "6", "--vocabulary", vocabulary]
        assert main(["simulate", "--schedule", other, *size, "--costs", "costs.toml", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["makespan"] > 0
        assert main(["draw", "--schedule", other, *size, "--costs", "costs.toml", "-o", "picture.svg"]) == 0
        capsys.readouterr()


SHARED = [
    ["pipeline.context_parallel=2"],
    ["pipeline.replicas=2"],
    ["pipeline.replicas=2", "pipeline.data_parallel=shard", "pipeline.reshard=true"],
]


@pytest.mark.slow
@pytest.mark.parametrize("shared", SHARED, ids=["context", "replicas", "sharded"])
def test_devices_that_share_parameters_have_every_kind_of_pass(shared: list[str]) -> None:
    """Passes are measured in other orders than that of the run, which sum gradients at other places."""
    profiled("1f1b", "vocab-2", "pipeline.processes=4", *shared)


@pytest.mark.slow
def test_a_device_of_two_tensor_ranks_has_the_costs_of_one_device() -> None:
    """The first process returns them, and the file arranges the orders of all ranks. Every rank sends its share."""
    ranks = ["pipeline.processes=4", "pipeline.tensor_parallel=2"]
    profiled("1f1b", "vocab-2", *ranks)
    config = load_config("config.toml", [*ranks, "pipeline.schedule=zb-h1", 'pipeline.costs="costs.toml"'])
    programs, profiles = zip(*run_processes(programs_and_profile, 4, config), strict=True)
    assert len(set(programs)) == 1
    assert profiles[0] and profiles[1:] == ({}, {}, {})
    hidden = 16 * 4 * 32  # bytes of a microbatch
    assert {name: size[0] for name, size in profiles[0]["sizes"].items()} == {
        "p2p": hidden / 2,
        "broadcast": hidden / 2,
        "reduce": hidden / 2,
        "embedding": hidden / 4,
    }


def programs_and_profile(config: Config) -> tuple[str, dict[str, Any]]:
    """The program of a process, and what it returns of a profile."""
    worker = initialise_worker()
    pipeline = build_pipeline(config, 301, 0, worker.torch_device, self_check=False)
    return pipeline.program.to_csv(), profile_module.measure_pipeline(pipeline, config, 1, 0, ())


def test_profile_refuses_what_does_not_go_together() -> None:
    write("1f1b", "vocab-2")
    config = load_config("config.toml", ["pipeline.processes=5"])
    with pytest.raises(InputError, match="at most 4, the layers of the model"):
        profile_module.profile(config, steps=1)
    with pytest.raises(InputError, match="steps is 0"):
        profile_module.profile(load_config("config.toml"), steps=0)


def test_training_writes_traces_of_chosen_steps(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"pipeline.schedule": "zb-h1", "output.trace_steps": [1, 3], "training.steps": 3}
    run_processes(trainer.train, 2, load_config(prepared(Path(), changes)))
    assert sorted(path.name for path in Path("run/traces").iterdir()) == ["step-00000001.json", "step-00000003.json"]
    trace = read_trace("run/traces/step-00000003.json")
    assert trace.about["schedule"] == "zb-h1" and trace.about["step"] == 3
    assert {entry.item.kind for entry in trace.devices[0].passes} >= {Kind.F, Kind.I, Kind.S, Kind.C, Kind.T}
    capsys.readouterr()
    assert main(["draw", "run/traces/step-00000003.json", "-o", "step.html"]) == 0
    assert main(["profile", "--from", "run/traces/step-00000001.json", "run/traces/step-00000003.json"]) == 0
    assert "\nF = [" in capsys.readouterr().out
