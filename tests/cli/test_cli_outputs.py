"""simulate, draw, check, search, estimate, explain: JSON, files, exit codes. Tables and pictures: see test_docs.py."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import as_json, printed, refused
from transformers import LlamaConfig

from evenpipe.cli.estimate import RecipeOptions
from evenpipe.cli.main import main
from evenpipe.compare.stage_costs import costs_for_stages, with_whole_vocabulary
from evenpipe.model import describe as describe_model
from evenpipe.recipe.layout import runnable_order
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import (
    EQUAL_COSTS,
    SCHEDULES,
    Timeline,
    VocabularyMode,
    generate,
    plan_order,
    plan_program,
    time_order,
)
from evenpipe.schedule.registry import describe

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZE = ["--devices", "4", "--microbatches", "8"]
TABLE = ["--devices", "8", "--microbatches", "32"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in, with schedules and costs."""
    monkeypatch.chdir(tmp_path)
    order, program = plan_program("1f1b", 2, 2, "vocab-2")
    files = {
        "order.csv": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
        "program.csv": program.to_csv(),
        "vocabulary.csv": order.to_csv(),
        "torch.csv": (
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
        ),
        "faulty.csv": "0F0,0F1,0B0,0B1,0B1\n1F0,1B0,1B1,1F1\n",
        "no-transfer.csv": "0F0,0SEND_F0,0F1,0RECV_B0,0B0,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1\n",
        "evaluates.csv": "0F0,0F1\n1F0,1F1\n",
        "diamond.csv": "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1\n3F0,3B0,3F1,3B1\n",
        "cut.csv": "0F0,0F0.1,0B0.1,0B0\n",
        "plain.toml": "F = 1\nB = 2\n",
        "costs.json": '{"F": 1, "I": 1, "W": 1, "bytes": 3}',
    }
    for name, text in files.items():
        Path(name).write_text(text)


def simulated(capsys: pytest.CaptureFixture[str], arguments: str, size: list[str] = SIZE) -> dict[str, Any]:
    return as_json(capsys, "simulate", *arguments.split(), *size)


def text_of(capsys: pytest.CaptureFixture[str], arguments: str, size: list[str] = SIZE) -> str:
    return printed(capsys, "simulate", *arguments.split(), *size)


# --- simulate ------------------------------------------------------------------------------------------------


def of_a_step(name: str, mode: str, devices: int = 4, microbatches: int = 8) -> Timeline:
    """What a named schedule takes if each device does equal work, and the vocabulary layers are part of it."""
    placement = generate(name, devices, microbatches).placement
    costs = costs_for_stages(EQUAL_COSTS, devices, placement.stages)
    if not VocabularyMode.of(mode).sharded:
        costs = with_whole_vocabulary(costs, placement)
    return time_order(plan_order(name, devices, microbatches, mode, costs), costs)


def test_simulate_gives_the_figures_of_every_schedule(sample, capsys):
    for name in sample(SCHEDULES, 4):
        figures = simulated(capsys, f"--schedule {name}")
        timeline = of_a_step(name, "vocab-2")
        assert (figures["schedule"], figures["vocabulary"]) == (name, "vocab-2")
        for field in ("span", "makespan", "skew", "bubble_rate", "busy"):
            assert figures[field] == pytest.approx(getattr(timeline, field)), name
        assert figures["lost"] == pytest.approx(1 - sum(timeline.busy) / 4 / timeline.makespan)
        assert (figures["peak_in_flight"], figures["peak_bytes"]) == (list(timeline.peak_in_flight), None)
        assert 0 < figures["bounds"]["span"]["value"] <= figures["span"] * (1 + 1e-9)


def test_a_step_is_the_same_work_alone_and_beside_others(capsys):
    """Also in another order, and for a file that says the same as a name."""
    steps = {
        ("1f1b", "first-last"): 58.6,
        ("1f1b", "vocab-2"): 39,
        ("zbv", "first-last"): 49.6,
        ("zbv", "vocab-2"): 31.9,
    }
    for names in ("1f1b,zbv", "zbv,1f1b"):
        rows = simulated(capsys, f"--compare {names} --vocabulary first-last,vocab-2")["schedules"]
        assert {(row["schedule"], row["vocabulary"]): row["makespan"] for row in rows} == pytest.approx(steps)
    for (name, mode), step in steps.items():
        assert simulated(capsys, f"--schedule {name} --vocabulary {mode}")["makespan"] == pytest.approx(step)
        assert of_a_step(name, mode).makespan == pytest.approx(step)
        Path("file.csv").write_text(plan_order(name, 4, 8, mode).to_csv())
        (as_file, _) = simulated(capsys, f"--compare file.csv,{name} --vocabulary {mode}")["schedules"]
        unchanged = simulated(capsys, "--schedule file.csv", [])
        assert unchanged["vocabulary"] is None and unchanged["makespan"] == as_file["makespan"]
    plain = simulated(capsys, "--schedule 1f1b --vocabulary first-last --costs plain.toml")
    assert plain["makespan"] == 33, "without times of the vocabulary layers there are none"
    assert "E is missing" in refused(capsys, "simulate", "--schedule", "1f1b", *SIZE, "--costs", "plain.toml")


def test_the_lost_time_comes_first(capsys):
    lines = text_of(capsys, "--schedule 1f1b").splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["work", "lost", "step", "span", "bubble"]
    assert lines[2].split()[1] == "22.1"
    assert "lower bound 36.2 = 3 ramp-up + 27.2 busy + 6 ramp-down on device 3)" in lines[3]
    rows = text_of(capsys, "--compare 1f1b,zbv").splitlines()[-3:]
    assert rows[0].split()[:6] == ["schedule", "vocabulary", "device", "lost", "%", "step"]
    assert [row.split()[3] for row in rows[1:]] == ["22.1", "4.7"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_table_with_rules_in_which_brackets_stay(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    Path("[red]order.csv").write_text(Path("order.csv").read_text())
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert main(["simulate", "--compare", "[red]order.csv,1f1b"]) == 0
    assert "[red]order.csv" in terminal.getvalue() and "────" in terminal.getvalue()


def test_simulate_a_file_as_it_stands(capsys):
    for file in ("order.csv", "program.csv", "vocabulary.csv", "torch.csv"):
        figures = simulated(capsys, f"--schedule {file}", [])
        assert (figures["devices"], figures["microbatches"], figures["schedule"]) == (2, 2, file)
        mode = "vocab-2" if file in ("program.csv", "vocabulary.csv") else "first-last"
        assert figures["span"] == pytest.approx(of_a_step("1f1b", mode, 2, 2).span)
        assert simulated(capsys, f"--schedule {file} --vocabulary {mode}", [])["span"] == figures["span"]
    added = simulated(capsys, "--schedule order.csv --vocabulary vocab-2", [])
    assert added["span"] == simulated(capsys, "--schedule vocabulary.csv", [])["span"]


def test_options_reach_the_schedules_that_have_them(capsys):
    figures = simulated(capsys, "--schedule interleaved --stages-per-device 4")
    assert (figures["stages"], figures["stages_per_device"]) == (16, 4)
    assert simulated(capsys, "--schedule gis --group-size 2 --vocabulary first-last")["peak_in_flight"] == [6, 5, 4, 3]
    assert simulated(capsys, "--schedule zbv --stages-per-device 2")["stages_per_device"] == 2
    compared = simulated(capsys, "--compare 1f1b,interleaved,gis --stages-per-device 4")["schedules"]
    assert [row["stages_per_device"] for row in compared] == [1, 4, 4]


@pytest.mark.parametrize("by", ["step", "in-flight", "bytes"])
@pytest.mark.sampled(1)
def test_rows_are_sorted_the_best_first(by, capsys):
    """Steps are 117, 99.5 and 104.5; and 8, 8 and 5 microbatches are in flight."""
    arguments = f"--compare 1f1b,zbv,v-half --costs {EXAMPLES / 'copies.toml'} --sort {by}"
    best_first = ["zbv", "v-half", "1f1b"] if by == "step" else ["v-half", "1f1b", "zbv"]
    assert [row["schedule"] for row in simulated(capsys, arguments, TABLE)["schedules"]] == best_first


def test_help_lists_every_schedule_in_a_line(capsys):
    lines = printed(capsys, "simulate", "--help").partition("\n  schedules:\n")[2].splitlines()
    for name in SCHEDULES:
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert describe(name) and line.endswith(describe(name))


# --- slices and graphs ------------------------------------------------------------------------------------------


def test_sequences_are_cut_into_slices(capsys):
    options = "--devices 4 --microbatches 4 --slices 3 --vocabulary first-last --costs plain.toml"
    figures = simulated(capsys, f"--schedule 1f1b {options}", [])
    assert (figures["microbatches"], figures["slices"], figures["bubble"]) == (4, 3, 3 * 3)
    assert figures["peak_in_flight"] == [6, 5, 4, 3]
    small = ("--devices", "2", "--microbatches", "2", "--slices", "2")
    printed(capsys, "draw", "--schedule", "1f1b", *small, "-o", "cut.svg")
    assert ">0.1</text>" in Path("cut.svg").read_text()
    assert "sound: an order of 1 device and 1 microbatch of 2 slices" in printed(capsys, "check", "cut.csv")
    assert simulated(capsys, "--schedule cut.csv", [])["slices"] == 2


def test_stages_may_form_a_graph(capsys):
    edges = ("--edges", "0>1,0>2,1>3,2>3")
    assert as_json(capsys, "check", "diamond.csv", *edges)["edges"] == [[0, 1], [0, 2], [1, 3], [2, 3]]
    graph = simulated(capsys, "--schedule diamond.csv", [*edges])
    assert graph["makespan"] < simulated(capsys, "--schedule diamond.csv", [])["makespan"]
    printed(capsys, "draw", "--schedule", "diamond.csv", *edges, "-o", "diamond.html")
    text_of(capsys, "--schedule diamond.csv --vocabulary vocab-2", [*edges])


# --- check ---------------------------------------------------------------------------------------------------


def test_sound_files(capsys):
    for file in ("order.csv", "program.csv", "vocabulary.csv", "torch.csv", "evaluates.csv"):
        assert printed(capsys, "check", file).startswith("sound: ")
        checked = as_json(capsys, "check", file)
        assert (checked["sound"], checked["faults"]) == (True, [])
        assert (checked["devices"], checked["microbatches"], checked["stage_device"]) == (2, 2, [0, 1])
        assert checked["transfers"] == (file in ("program.csv", "torch.csv"))
        assert (checked["vocabulary"] == "vocab-2") == (file in ("program.csv", "vocabulary.csv"))
    assert as_json(capsys, "check", "order.csv", "--costs", "costs.json")["peak_bytes"] == [6, 3]
    costs = str(EXAMPLES / "costs.toml")
    assert as_json(capsys, "check", "order.csv", "--max-in-flight", "2,1", "--costs", costs)["sound"]
    assert as_json(capsys, "check", "order.csv", "--bytes-limit", "6,3", "--costs", "costs.json")["sound"]


FAULTY = {
    # arguments: words of each fault
    "faulty.csv": ["0B1 is already at position 3", "1B1 comes before 1F1 at position 3"],
    "faulty.csv --costs plain.toml": ["0B1 is already at position 3"],
    "no-transfer.csv": [f"{name} is missing" for name in ("0SEND_F1", "0RECV_B1", "1RECV_F1", "1SEND_B1")],
    "order.csv --max-in-flight 1": ["limit of 1"],
    "program.csv --max-in-flight 2,1": ["limit of 1"],
    "order.csv --bytes-limit 6,2 --costs costs.json": ["limit of 2"],
}


def test_every_fault_is_listed(capsys):
    for arguments, words in FAULTY.items():
        text = printed(capsys, "check", *arguments.split(), code=1)
        checked = as_json(capsys, "check", *arguments.split(), code=1)
        assert not checked["sound"] and len(checked["faults"]) >= len(words)
        assert text.startswith(f"{len(checked['faults'])} fault")
        for word in words:
            assert word in text and any(word in fault["message"] for fault in checked["faults"])
        assert all({"device", "position", "message", "rows"} == set(fault) for fault in checked["faults"])


# --- search --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["first-last", "vocab-1", "vocab-2"])
def test_what_search_writes_is_sound_and_can_be_trained(mode, capsys):
    pytest.importorskip("ortools")
    size = ["--devices", "2", "--microbatches", "2", "--placement", "v", "--vocabulary", mode]
    best = as_json(capsys, "search", *size, "--seconds", "2", "-o", "best.csv")
    assert best["possible"] and as_json(capsys, "check", "best.csv")["sound"]
    assert simulated(capsys, "--schedule best.csv", [])["span"] == best["span"] == best["value"]
    order, program = plan_program("best.csv", 2, 2, mode)
    assert order.placement.stage_device == (0, 1, 1, 0)
    assert runnable_order(Recipe.of(pp=2, microbatches=2, schedule="best.csv")) == order == program.order


def test_search_says_when_nothing_fits(capsys):
    pytest.importorskip("ortools")
    arguments = ["search", "--devices", "2", "--microbatches", "2", "--placement", "v", "--max-in-flight", "1"]
    assert printed(capsys, *arguments, code=1) == "no order fits the memory limit\n"
    assert as_json(capsys, *arguments, code=1) == {"possible": False}


def test_search_without_its_solver(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    unnamed = ("--placement", "1,0,0")  # no schedule has this placement, so that the solver is needed
    assert refused(capsys, "search", "--devices", "2", "--microbatches", "2", *unnamed) == (
        "evenpipe: search needs OR-tools, which is not installed: pip install 'evenpipe[search]'\n"
    )


# ---- estimate and explain


TERMS = ("parameters", "gradients", "optimizer", "activations", "vocabulary", "buffers", "transient")
LAYOUT = "--dp 2 --tp 2 --zero 1 --sequence 8192 --vocabulary first-last"


@pytest.fixture(autouse=True)
def llama_8b(folder: None) -> None:
    """The config of Llama-3.1-8B."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
    config = LlamaConfig(architectures=["LlamaForCausalLM"], max_position_embeddings=131072, **sizes, **heads)
    config.save_pretrained("llama-8b")


def estimate(capsys: pytest.CaptureFixture[str], arguments: str, code: int = 0) -> str:
    return printed(capsys, "estimate", "--model", *arguments.split(), code=code)


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
    plain = estimate(capsys, "llama-8b --pp 2")
    assert main(["estimate", "--model", "quantised.json", "--pp", "2"]) == 0
    quantised = capsys.readouterr()
    assert quantised.out == plain and quantised.err.count("\n") == 1
    assert quantised.err.startswith("evenpipe: the weights of this model are quantised")


def test_every_second_layer_computes_again_and_parameters_are_freed_between_passes(capsys):
    def first(options: str) -> dict[str, int]:
        return estimated(capsys, f"llama-8b --dp 2 --zero 3 --pp 4 --vocabulary first-last {options}")["devices"][0]

    model = describe_model(LlamaConfig(num_hidden_layers=5))
    recipe = RecipeOptions(checkpointing="full/2").recipe(model, ours=True)
    assert recipe.activation_checkpointing == ("none", "full", "none", "full", "none")
    none, some, full = (first(f"--checkpointing {choice}")["activations"] for choice in ("none", "full/2", "full"))
    assert full < some < none
    kept, freed = (first(f"--schedule interleaved --stages-per-device 4 {option}") for option in ("", "--reshard"))
    assert freed["parameters"] < kept["parameters"]


def test_the_papers_rule_is_in_the_table(capsys):
    text = estimate(capsys, f"llama-8b {LAYOUT} --kernels megatron --gpu-memory 80GiB --compare-to-paper")
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
    text = estimate(capsys, "llama-8b --pp 2 --gpu-memory 40GiB", code=1)
    assert "does not fit: device 0 needs" in text and "available: 40.00 GiB" in text
    assert "does not fit too: device 1." in text
    others = "--kernels megatron --checkpointing full"
    assert estimated(capsys, f"llama-8b --pp 2 --hardware B200 {others}")["verdict"] == "fits"
    most = max(device["process"]["most"] for device in estimated(capsys, "llama-8b --pp 2")["devices"])
    card = f"llama-8b --pp 2 --gpu-memory {most - 2**20}B"
    risky = estimated(capsys, card)
    assert risky["verdict"] == "at risk" and risky["fits"] is False
    assert estimated(capsys, f"{card} --strict", code=1) == risky


def test_a_picture_of_every_device(capsys):
    text = estimate(capsys, "llama-8b --pp 4 --hardware h200 -o memory.svg")
    assert text.rstrip().endswith("wrote memory.svg")
    picture = Path("memory.svg").read_text()
    assert picture.count(">device ") == 4
    for term in ("parameters", "gradients", "optimizer", "activations"):
        assert f">{term}</text>" in picture


# --- explain ---


def test_explain_prints_a_report_and_writes_a_page(capsys):
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "max_position_embeddings": 2048}
    LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000).save_pretrained("model")
    text = printed(capsys, "explain", "model", "--gpus", "4")
    assert "evenpipe plan --model model --gpus 4 --hardware H100-80G --sequence 2048 --batch 32 --explain" in text
    figures = as_json(capsys, "explain", "model", "--gpus", "4", "-o", "page.html")
    assert figures["usual"]["vocabulary"] == "first-last" and len(figures["usual"]["devices"]) == 4
    assert figures["next"][0].startswith("evenpipe plan ")
    assert "1f1b, vocab-2" in Path("page.html").read_text(encoding="utf-8")
