"""simulate, draw, check and search: JSON, files and exit codes. Tables and pictures: the pages of test_docs.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import as_json, printed, refused

from evenpipe.recipe.layout import runnable_order
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import EQUAL_COSTS, SCHEDULES, generate, plan_order, plan_program, time_order
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


def test_simulate_gives_the_figures_of_every_schedule(sample, capsys):
    for name in sample(SCHEDULES, 4):
        figures = simulated(capsys, f"--schedule {name}")
        timeline = time_order(generate(name, 4, 8, costs=EQUAL_COSTS), EQUAL_COSTS)
        assert figures["schedule"] == name
        for field in ("span", "makespan", "skew", "bubble_rate", "busy"):
            assert figures[field] == pytest.approx(getattr(timeline, field)), name
        assert (figures["peak_in_flight"], figures["peak_bytes"]) == (list(timeline.peak_in_flight), None)
        assert 0 < figures["bounds"]["span"]["value"] <= figures["span"] * (1 + 1e-9)


def test_simulate_a_file_as_it_stands(capsys):
    for file in ("order.csv", "program.csv", "vocabulary.csv", "torch.csv"):
        figures = simulated(capsys, f"--schedule {file}", [])
        assert (figures["devices"], figures["microbatches"], figures["schedule"]) == (2, 2, file)
        mode = "vocab-2" if file in ("program.csv", "vocabulary.csv") else "first-last"
        assert figures["span"] == pytest.approx(time_order(plan_order("1f1b", 2, 2, mode), EQUAL_COSTS).span)
        assert simulated(capsys, f"--schedule {file} --vocabulary {mode}", [])["span"] == figures["span"]
    added = simulated(capsys, "--schedule order.csv --vocabulary vocab-2", [])
    assert added["span"] == simulated(capsys, "--schedule vocabulary.csv", [])["span"]


def test_options_reach_the_schedules_that_have_them(capsys):
    figures = simulated(capsys, "--schedule interleaved --stages-per-device 4")
    assert (figures["stages"], figures["stages_per_device"]) == (16, 4)
    assert simulated(capsys, "--schedule gis --group-size 2")["peak_in_flight"] == [6, 5, 4, 3]
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
    lines = printed(capsys, "simulate", "--help").partition("\nschedules:\n")[2].splitlines()
    for name in SCHEDULES:
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert describe(name) and line.endswith(describe(name))


# --- slices and graphs ------------------------------------------------------------------------------------------


def test_sequences_are_cut_into_slices(capsys):
    figures = simulated(capsys, "--schedule 1f1b --devices 4 --microbatches 4 --slices 3", [])
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
        assert checked["barriers"] == (file in ("program.csv", "vocabulary.csv"))
    assert as_json(capsys, "check", "order.csv", "--costs", "costs.json")["peak_bytes"] == [6, 3]
    costs = str(EXAMPLES / "costs.toml")
    assert as_json(capsys, "check", "order.csv", "--memory-limit", "2,1", "--costs", costs)["sound"]
    assert as_json(capsys, "check", "order.csv", "--bytes-limit", "6,3", "--costs", "costs.json")["sound"]


FAULTY = {
    # arguments: words of each fault
    "faulty.csv": ["0B1 is already at position 3", "1B1 comes before 1F1 at position 3"],
    "faulty.csv --costs plain.toml": ["0B1 is already at position 3"],
    "no-transfer.csv": [f"{name} is missing" for name in ("0SEND_F1", "0RECV_B1", "1RECV_F1", "1SEND_B1")],
    "order.csv --memory-limit 1": ["limit of 1"],
    "program.csv --memory-limit 2,1": ["limit of 1"],
    "order.csv --bytes-limit 6,2 --costs costs.json": ["limit of 2"],
}


def test_every_fault_is_listed(capsys):
    for arguments, words in FAULTY.items():
        text = printed(capsys, "check", *arguments.split(), code=1)
        checked = as_json(capsys, "check", *arguments.split(), code=1)
        assert not checked["sound"] and len(checked["faults"]) >= len(words)
        assert text.startswith(f"{len(checked['faults'])} fault")
        for word in words:
            assert word in text and any(word in fault["what"] for fault in checked["faults"])
        assert all({"device", "position", "what", "rows"} == set(fault) for fault in checked["faults"])


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
    arguments = ["search", "--devices", "2", "--microbatches", "2", "--placement", "v", "--memory-limit", "1"]
    assert printed(capsys, *arguments, code=1) == "no order fits the memory limit\n"
    assert as_json(capsys, *arguments, code=1) == {"possible": False}


def test_search_without_its_solver(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    unnamed = ("--placement", "1,0,0")  # no schedule has this placement, so that the solver is needed
    assert refused(capsys, "search", "--devices", "2", "--microbatches", "2", *unnamed) == (
        "evenpipe: search needs OR-tools, which is not installed: pip install 'evenpipe[search]'\n"
    )
