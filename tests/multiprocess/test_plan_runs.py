"""Plans for a CPU: the machine is measured, and what is planned runs as it stands; `evenpipe profile` and traces of
`evenpipe train` are files that the other commands read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import run_processes
from training_runs import prepared, train, write_config, write_tables
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from evenpipe.cli.main import main
from evenpipe.costs.hardware import KNOWN, find_hardware, hardware_from_dict, write_hardware
from evenpipe.errors import InputError
from evenpipe.processes.worker import initialise_worker
from evenpipe.schedule import Costs, Kind
from evenpipe.schedule.files import read_costs
from evenpipe.schedule.trace_file import read_trace
from evenpipe.train import build, hardware_profile, trainer
from evenpipe.train import profile as profile_module
from evenpipe.train.build import build_pipeline
from evenpipe.train.config import Config
from evenpipe.train.config_file import config_from_dict, load_config
from evenpipe.train.data import prepare
from evenpipe.train.export import export_checkpoint
from evenpipe.train.tokenizer import train_tokenizer

LLAMA = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "vocab_size": 16384}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1024}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
STEPS = 3


def write_run(config: dict[str, int], *, architecture: str = "llama", tokens: int = 256) -> None:
    """Write train.toml, a run whose plans are asked for."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"architecture": architecture, "self_check": False},
        "model.config": {**config, "num_attention_heads": 4},
        "data": {"files": "text.txt", "sequence_length": tokens, "validation_fraction": 0},
        "tokenizer": {"vocabulary_size": 300},
        "pipeline": {"processes": 2, "microbatches": 8},
        "training": {"steps": STEPS},
        "checkpoint": {"every_steps": "none"},
        "output": {"folder": "run", "tensorboard": False, "export": False},
    }
    write_tables(Path("train.toml"), tables)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in; processes are those of the tests."""

    def launch(function: Any, *arguments: Any, processes: int, **_: Any) -> list[Any]:
        return run_processes(function, processes, *arguments)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware_profile, "launch", launch)
    monkeypatch.setattr(profile_module, "launch", launch)
    Path("text.txt").write_text("def f(x):\n    return x\n" * 3000)
    write_run(LLAMA)


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


NOT_MEASURED = [
    (["--hardware", "--processes", "0"], "processes is 0"),
    (["--hardware", "--from", "trace.json"], "--from"),
    (["--hardware", "--microbatch-sizes", "1"], "CONFIG.toml is missing"),
    (["train.toml", "--hardware", "--microbatch-sizes", "0"], "microbatch sizes are [0]"),
    (["train.toml", "--hardware", "--microbatch-sizes", "a"], "microbatch-sizes"),
    (["train.toml", "--hardware", "--steps", "0"], "steps is 0"),
    (["train.toml", "--hardware", "--processes", "9"], "pipeline.processes is 9; it must be at most 8"),
    (["train.toml", "--processes", "2"], "--processes needs --hardware"),
]


def test_what_cannot_be_measured_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware_profile, "launch", lambda *_, **__: pytest.fail("something ran"))
    for arguments, message in NOT_MEASURED:
        assert main(["profile", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, arguments


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_plans_take_the_passes_that_were_measured(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a pipeline with two tensor ranks a device; what follows from them is seen in tests/costs."""
    sizes = ["--microbatch-sizes", "2", "--steps", "2"]
    config = ["train.toml", f"pipeline.processes={2 * ranks}", f"pipeline.tp={ranks}"]
    assert main(["profile", *config, "--hardware", *sizes, "-o", "host.toml"]) == 0
    hardware = find_hardware("host.toml")
    shapes = [(one.microbatch_size, one.devices, one.sequence, one.tp) for one in hardware.passes]
    assert shapes == [(2, 2, 256, ranks), (2, 2, 32, ranks)]
    capsys.readouterr()
    axes = ["--gpus", str(2 * ranks), "--pp", "2", "--tp", str(ranks)]
    plan = ["plan", "--model", "train.toml", *axes, "--hardware", "host.toml", "--no-cache"]
    assert main([*plan, "--schedule", "1f1b", "--microbatch-size", "1", "--workers", "1"]) == 0
    assert "pass times corrected by measurements of this model with microbatches of 2" in capsys.readouterr().out


@pytest.mark.slow
def test_a_written_plan_runs_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    """With activations and moments on the host, too, and then to the same bits."""
    hardware = hardware_profile.profile_hardware(2)
    write_hardware(hardware, "host.toml")
    plan = ["plan", "--model", "train.toml", "--gpus", "2", "--hardware", "host.toml", "--pp", "2", "--no-cache"]
    assert main([*plan, "--schedule", "1f1b,zbv", "--workers", "1", "-o", "planned.toml"]) == 0
    assert "wrote planned.toml" in capsys.readouterr().out
    planned = load_config("planned.toml").pipeline
    report = trained("planned.toml")
    assert report["steps"] == STEPS and report["schedule"]["name"] == planned.schedule
    assert report["schedule"]["microbatches"] == planned.microbatches
    assert load_config("planned.toml").offload.activations == "scheduled"

    same = ["--schedule", planned.schedule, "--vocabulary", planned.vocabulary, "--checkpointing", "none"]
    same += ["--microbatch-size", str(planned.microbatch_size), "--workers", "1", "-o", "on the host.toml"]
    assert main([*plan, *same, "--offload", "free", "--host-share", "0.5"]) == 0
    written = load_config("on the host.toml")
    assert written.offload.activations == "free" and written.optimizer.host_share == 0.5
    assert written.pipeline == planned
    assert losses("on the host", trained("on the host.toml")) == losses("planned", report)


def write_host() -> None:
    host = KNOWN["A100-80G"].to_dict() | {"name": "host", "torch_device": "cpu", "devices_per_node": 4}
    write_hardware(hardware_from_dict(host), "host.toml")


AXES: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    # options of a plan for two devices of two processes each, those of the plan whose losses it has, and its fields
    "tensor ranks": (["--tp", "2"], ["--tp", "1", "--gpus", "2"], {"tp": 2}),
    "pieces of sequences": (["--cp", "2"], ["--cp", "1", "--gpus", "2"], {"cp": 2}),
    "shared experts": (["--ep", "2"], ["--ep", "1"], {"dp": 2, "ep": 2}),
}


@pytest.mark.parametrize("mode", ["vocab-2", "first-last"])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.sampled(1)
def test_a_plan_with_another_axis_runs(axis: str, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As planned, with the losses of a plan without that axis."""
    if axis == "shared experts":
        write_run({**SMALL, **EXPERTS}, architecture="qwen3_moe", tokens=64)
    else:
        write_run(SMALL, tokens=64)
    write_host()
    plan = ["plan", "--model", "train.toml", "--hardware", "host.toml", "--gpus", "4", "--pp", "2", "--vocabulary"]
    plan += [mode, "--schedule", "1f1b", "--microbatch-size", "1", "--no-cache", "--workers", "1"]
    plan += [] if axis == "tensor ranks" else ["--zero", "0"]
    *options, fields = AXES[axis]
    curves = []
    for name, axis_options in zip(("with", "without"), options, strict=True):
        assert main([*plan, *axis_options, "-o", f"{name}.toml"]) == 0
        assert "estimate only" not in capsys.readouterr().out
        curves.append(losses(name, trained(f"{name}.toml")))
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    planned = load_config("with.toml").pipeline
    assert (planned.processes, planned.devices) == (4, 2)
    assert {field: getattr(planned, field) for field in fields} == fields
    assert (planned.context_exchange == "auto") == (axis != "pieces of sequences")
    if axis == "shared experts":
        lines = [json.loads(line) for line in Path("with/metrics.jsonl").read_text().splitlines()]
        assert all(len(line["expert_load_most"]) == 2 and min(line["expert_load_most"]) >= 1 for line in lines)
        picture = Path("with/expert_load.svg").read_text()
        assert "layer 0" in picture and "layer 1" in picture


def trained(config: str) -> dict[str, Any]:
    """Train as the file says; return the report."""
    path = Path(config).absolute()
    prepare(load_config(path), say=lambda text: None)
    train(path)
    report: dict[str, Any] = json.loads((load_config(path).run_folder / "report.json").read_text())
    return report


def losses(folder: str, report: dict[str, Any]) -> list[float]:
    """Of all steps, to the last bit."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]
    assert len(found) == report["steps"]
    return found


# --- plans with data --------------------------------------------------------------------------------------------------

TEXT = "The committee met on a rainy day, and said little about what it had found in the old harbour.\n"
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
SHAPE |= {"max_position_embeddings": 256, "num_key_value_heads": 4}
CASES: dict[str, tuple[Callable[[], PreTrainedConfig], int, list[str]]] = {
    # model, processes, options of the plan
    "a tokenizer is trained": (lambda: LlamaConfig(**SHAPE, vocab_size=1000), 2, ["--data", "texts", "--batch", "8"]),
    "a tokenizer is given": (
        lambda: Qwen3Config(**SHAPE, vocab_size=512, head_dim=16, tie_word_embeddings=True),
        4,
        ["--data", "lines.jsonl", "--tokenizer", "tokenizer", "--batch", "16", "--pp", "2", "--zero", "3"],
    ),
    "the batch follows from the data": (
        lambda: LlamaConfig(**SHAPE, vocab_size=300),
        3,
        ["--data", "texts", "--pp", "3"],
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_a_plan_with_data_trains_as_it_is_written(name: str) -> None:
    make, processes, options = CASES[name]
    make().save_pretrained("model")
    write_host()
    Path("texts").mkdir()
    for number in range(4):
        Path(f"texts/{number}.txt").write_text(TEXT * 200)
    Path("lines.jsonl").write_text("\n".join(json.dumps({"body": TEXT * 20}) for _ in range(40)))
    train_tokenizer([TEXT], 300, "<|endoftext|>").save_pretrained("tokenizer")
    plan = ["plan", "--model", "model", "--gpus", str(processes), "--hardware", "host.toml", "--sequence", "64"]
    assert main([*plan, *options, "--schedule", "1f1b", "--workers", "1", "--no-cache", "-o", "run.toml"]) == 0
    config = load_config("run.toml", ["training.steps=2"])
    assert config.pipeline.processes == processes
    prepare(config, say=lambda text: None)
    train(Path("run.toml").absolute(), "training.steps=2")
    assert json.loads((config.run_folder / "report.json").read_text())["steps"] == 2
    exported = json.loads((export_checkpoint(config.run_folder, "exported") / "config.json").read_text())
    assert exported["vocab_size"] == make().vocab_size, "as planned"


# --- the layers of each stage of a run on a known GPU: the first process weighs memory for all ------------------------

SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8}


def split_taken(pipeline: dict[str, Any], gib: int) -> tuple[int, ...] | None:
    """On one of four processes that believe to have A100s with so much memory. By time, stages have 3, 3, 4 and 0
    layers."""
    run = config_from_dict(
        {
            "model": {"architecture": "llama"},
            "data": {"corpus": "python-standard-library", "sequence_length": 4096},
            "pipeline": {"processes": 4, "vocabulary": "redistribute", "microbatches": 16, **pipeline},
        }
    )
    model = LlamaConfig(**SIZES, num_hidden_layers=10, vocab_size=128256, max_position_embeddings=4096)
    torch.cuda.get_device_name = lambda device: "NVIDIA A100-SXM4-80GB"
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=gib * 2**30)
    return build._fitting(run, run.recipe(), model, torch.device("cuda")).layers_per_stage


def test_all_processes_take_a_split_that_fits_unless_one_is_given() -> None:
    given = {"layers_per_stage": [3, 3, 2, 2]}
    for pipeline, gib, expected in (({}, 14, (2, 4, 4, 0)), ({}, 40, None), (given, 14, (3, 3, 2, 2))):
        assert run_processes(split_taken, 4, pipeline, gib) == [expected] * 4


# --- profiles and traces, which other commands read -------------------------------------------------------------------


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


SHARED_PARAMETERS = [
    ["pipeline.cp=2"],
    ["pipeline.dp=2"],
    ["pipeline.dp=2", "pipeline.data_parallel=shard", "pipeline.reshard=true"],
]


@pytest.mark.slow
@pytest.mark.parametrize("shared", SHARED_PARAMETERS, ids=["context", "replicas", "sharded"])
def test_devices_that_share_parameters_have_every_kind_of_pass(shared: list[str]) -> None:
    """Passes are measured in other orders than that of the run, which sum gradients at other places."""
    profiled("1f1b", "vocab-2", "pipeline.processes=4", *shared)


@pytest.mark.slow
def test_a_device_of_two_tensor_ranks_has_the_costs_of_one_device() -> None:
    """The first process returns them, and the file arranges the orders of all ranks. Every rank sends its share."""
    ranks = ["pipeline.processes=4", "pipeline.tp=2"]
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
