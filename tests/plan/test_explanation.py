"""What `evenpipe explain` says about a model: against arithmetic by hand, and against the planner; models as people
train them."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import planned_problems
import pytest
from planned_problems import MODELS

from evenpipe.cli.main import _app, _module_of, main
from evenpipe.errors import InputError
from evenpipe.plan.explanation import Explanation, explain
from evenpipe.plan.problem import Problem

LLAMA_3_8B = MODELS / "llama-3.1-8b.json"
GEMMA_2_2B = MODELS / "gemma-2-2b.json"


def problem(config: Path, gpus: int, **options: Any) -> Problem:
    return planned_problems.problem(
        config, hardware="H100-80G", gpus=gpus, **{"sequences_per_step": 8 * gpus, **options}
    )


@pytest.fixture(scope="module")
def llama_on_eight() -> Explanation:
    return explain(problem(LLAMA_3_8B, 8), "llama", pp=8)


def test_the_output_layer_in_layers(llama_on_eight: Explanation) -> None:
    """Llama 3 8B: 128256 x 4096 over the 218 112 000 parameters of a layer. In time about the same: a layer has
    attention and norms beside its matrices, the output layer has the loss."""
    found = llama_on_eight
    assert found.matrix_layers == pytest.approx(128256 * 4096 / 218_112_000, rel=1e-6)
    assert found.head_layers == pytest.approx(found.matrix_layers, rel=0.2)


def test_the_usual_way_is_late_on_the_device_of_the_output_layer_and_vocab_2_on_none(
    llama_on_eight: Explanation,
) -> None:
    found = llama_on_eight
    work = found.usual.busy
    assert max(work) == work[-1]
    # Four layers on each device: the last one has the output layer beside them.
    layers = work[1] / 4
    assert work[-1] / layers == pytest.approx(4 + found.head_layers, rel=0.02)
    balanced = next(one for one in found.alternatives if one.configuration.recipe.vocabulary == "vocab-2")
    assert max(balanced.busy) < 1.01 * min(balanced.busy)
    # No bubble is longer than the ramp: 8 - 1 of 64 + 7 microbatches.
    assert found.usual.seconds / balanced.seconds == pytest.approx(work[-1] / balanced.busy[0], rel=0.1)
    assert found.best.seconds <= balanced.seconds < found.usual.seconds


@pytest.mark.slow
def test_a_deep_pipeline_is_compared_without_schedules_that_have_more_stages_than_layers() -> None:
    found = explain(problem(GEMMA_2_2B, 16), "gemma", pp=16)  # 26 layers
    assert {one.configuration.schedule_name for one in found.all} == {"1f1b", "zb-h1"}


def test_copies_to_the_host_lower_the_fullest_device_and_cost_no_time(llama_on_eight: Explanation) -> None:
    found = llama_on_eight
    shards = (one for one in found.alternatives if one.configuration.recipe.vocabulary == "vocab-2")
    kept, free = (one for one in shards if one.configuration.schedule == "v-half")
    assert free.configuration.offload == "free"
    peaks = [max(use.peak_bytes for use in one.devices) for one in (free, kept)]
    assert peaks[0] < 0.95 * peaks[1] and free.seconds <= 1.01 * kept.seconds
    assert "v-half, offload  vocab-2" in found.text()


def test_the_gains_of_the_schedule_and_of_shards_are_told_apart(llama_on_eight: Explanation) -> None:
    """Every schedule stands there with whole vocabulary layers and with shards."""
    found = llama_on_eight
    seconds = {
        (one.configuration.schedule, one.configuration.recipe.vocabulary): one.seconds
        for one in found.alternatives
        if one.configuration.offload != "free"
    }
    for schedule in ("1f1b", "zb-h1", "v-half"):
        assert {(schedule, "redistribute"), (schedule, "vocab-2")} <= seconds.keys()
    best = found.best.configuration
    assert best.schedule != "1f1b" and best.recipe.vocabulary == "vocab-2"
    shards, schedule = (found.gains[name][1] for name in ("shards", "schedule"))
    assert shards == seconds[best.schedule, "redistribute"] / found.best.seconds > 1
    assert schedule == seconds["1f1b", "vocab-2"] / found.best.seconds > 1
    assert found.to_dict()["gains"] == {"shards": shards, "schedule": schedule}
    text = found.text()
    assert f"{shards:.2f} times as fast as {best.schedule} + redistribute, which is the gain of the shards" in text
    assert f"{schedule:.2f} times as fast as 1f1b + vocab-2, which is the gain of the schedule" in text


@pytest.mark.slow
def test_a_large_vocabulary_is_most_of_a_small_model() -> None:
    found = explain(problem(GEMMA_2_2B, 8), "gemma", pp=8)
    assert found.head_layers > 5
    text = found.text()
    assert "tied" in text.splitlines()[0]
    assert "device 7   3 layers + output" in text
    assert found.usual.seconds / found.best.seconds > 1.8


@pytest.mark.slow
def test_nothing_fits_and_it_is_said_by_how_much() -> None:
    small = problem(LLAMA_3_8B, 4, sequences_per_step=16, memory=12, kernels="transformers")
    text = explain(small, "llama").text()
    assert "does not fit, even with full recomputation" in text
    assert "GiB too much" in text


@pytest.mark.slow
def test_the_picture_has_both_ways_on_one_axis_in_seconds() -> None:
    found = explain(problem(LLAMA_3_8B, 4), "llama", pp=4)
    timelines = found.timelines()
    assert list(timelines) == ["1f1b, first-last", "1f1b, vocab-2"]
    usual, balanced = timelines.values()
    assert usual.devices == 4
    assert balanced.makespan < usual.makespan
    # A microbatch takes the last device as long as the report says.
    assert usual.busy[-1] == pytest.approx(8 * found.usual.busy[-1], rel=1e-6)


def test_it_says_what_it_does_and_the_commands_to_go_on_with_are_commands() -> None:
    """For the same problem: its batch, kernels and memory too."""
    lines: list[str] = []
    of_others = replace(problem(LLAMA_3_8B, 4), kernels_name="megatron", memory_bytes=90 * 10**9)
    found = explain(of_others, "folder/with model", pp=4, progress=lines.append)
    search, written, _ = (command.split("folder/with model' ")[-1] for command in found.commands())
    same = (
        f"--gpus 4 --hardware H100-80G --sequence 4096 --batch {of_others.sequences_per_step} --gpu-memory 90000000000B"
    )
    assert search == f"{same} --kernels megatron --explain"
    assert written == f"{same} --data FOLDER -o run.toml"
    assert "alternative 1 of 9: 1f1b, first-last" in lines and "alternative 9 of 9: v-half, vocab-2, free" in lines
    for command in found.commands():
        program, name, *arguments = shlex.split(command)
        assert program == "evenpipe"
        app = _app(_module_of([name]), wants_help=False)
        context = app.commands[name].make_context(name, arguments)
        assert context.args == [] and context.params.get("model", "folder/with model") == "folder/with model"


def test_what_cannot_be_is_one_sentence() -> None:
    for gpus, options, message in (
        (1, {}, "gpus is 1; it must be at least 2"),
        (7, {"pp": 3}, "gpus is 7"),
        (8, {"tp": 3}, "tp"),
        (67, {}, "gpus is 67, but no pipeline of at least 4 devices divides"),
    ):
        with pytest.raises(InputError, match=message):
            explain(problem(LLAMA_3_8B, gpus), "llama", **options)


@pytest.mark.slow
def test_layers_that_other_frameworks_do_not_cut_in_a_known_way_are_refused() -> None:
    asked = problem(MODELS / "nemotron-h-8b.json", 64, kernels="megatron")
    with pytest.raises(InputError, match="tp: 8, but in Megatron-LM layers cannot be shared that have mixer"):
        explain(asked, "nemotron-h", pp=8, tp=8)


# --- dense models, mixtures, models with windows, state spaces or pictures ------------------------------------------

PIPELINE = ["--pp", "8", "--sequence", "4096", "--json"]
OPTIONS = {
    "estimate": ["--hardware", "H100-80G", "--model"],
    "plan": [
        *("--gpus", "64", "--batch", "256", "--tp", "1", "--cp", "1", "--zero", "1", "--microbatch-size", "1"),
        *("--no-cache", "--model"),
    ],
    "explain": ["--gpus", "64", "--tp", "1"],
}


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("command", OPTIONS)
@pytest.mark.slow
def test_a_command_answers(command: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([command, *PIPELINE, *OPTIONS[command], str(path)])
    out, err = capsys.readouterr()
    if code == 2:  # it says in a sentence what is missing
        assert out == "" and err.startswith("evenpipe: error: ") and "must be" in err and err.count("\n") == 1, err
        return
    found = json.loads(out)
    if command == "estimate":
        assert found["verdict"] in ("fits", "at risk", "does not fit") and len(found["devices"]) == 8
    elif command == "plan":
        assert code == (0 if found["plans"] else 1)
        assert found["plans"] or "nearest" in found
    else:
        assert code == 0 and found["others"] and found["next"]
