"""simulate, draw, check and search: what they print, their exit codes, and a table of wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenpipe.cli.main import main
from evenpipe.recipe.layout import runnable_order
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import EQUAL_COSTS, SCHEDULES, Costs, generate, plan_order, plan_program, time_order
from evenpipe.schedule.registry import describe

ROOT = Path(__file__).parents[2]
COSTS = ROOT / "examples" / "costs.toml"
COPIES = ROOT / "examples" / "copies.toml"
SIZE = ["--devices", "4", "--microbatches", "8"]
TABLE = ["--devices", "8", "--microbatches", "32"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to work in, with schedules and costs, sound and not."""
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
        "typing.csv": "0F0,0F1,0B0,0B1\n1F0,1B0,1Q1,1F1\n",
        "empty.csv": "",
        "gap.csv": "0F0,0B0\n2F0,2B0\n",
        "evaluates.csv": "0F0,0F1\n1F0,1F1\n",
        "latin.csv": b"0F0,\xe9",
        "missing.toml": "I = 1\nW = 1\n",
        "half.toml": "F = 1\nI = 1\n",
        "negative.toml": "F = 1\nB = -2\n",
        "infinite.toml": "F = 1\nB = inf\n",
        "word.toml": 'F = "one"\nB = 2\n',
        "list.toml": "F = [1, 1, 1]\nB = 2\n",
        "unknown.toml": "F = 1\nB = 2\nforwards = 3\n",
        "case.toml": "f = 1\nB = 2\n",
        "hop.toml": 'F = 1\nB = 2\n[links]\n"F:0-1" = {latency = 1}\n',
        "short.toml": "F = [1]\nB = 2\n",
        "plain.toml": "F = 1\nB = 2\n",
        "broken.toml": "F = = 1\n",
        "broken.json": '{"F": 1',
        "list.json": "[1, 2]",
        "deep.json": "[" * 100_000,
        "nan.json": '{"F": NaN, "B": 1}',
        "deep.toml": "F = " + "[" * 100_000,
        "costs.json": '{"F": 1, "I": 1, "W": 1, "bytes": 3}',
    }
    for name, text in files.items():
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return tmp_path


def printed(capsys, *arguments: str, code: int = 0) -> str:
    assert main(list(arguments)) == code
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def as_json(capsys, *arguments: str, code: int = 0) -> dict:
    return json.loads(printed(capsys, *arguments, "--json", code=code))


# --- simulate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_simulate_gives_the_figures_of_every_schedule(name, capsys):
    figures = as_json(capsys, "simulate", "--schedule", name, *SIZE)
    timeline = time_order(generate(name, 4, 8, costs=EQUAL_COSTS), EQUAL_COSTS)
    assert figures["schedule"] == name
    assert (figures["span"], figures["makespan"], figures["skew"], figures["bubble_rate"]) == pytest.approx(
        (timeline.span, timeline.makespan, timeline.skew, timeline.bubble_rate)
    )
    assert figures["busy"] == pytest.approx(timeline.busy)
    assert figures["peak_in_flight"] == list(timeline.peak_in_flight)
    assert figures["peak_bytes"] is None
    assert 0 < figures["bounds"]["span"]["value"] <= figures["span"] * (1 + 1e-9)


@pytest.mark.parametrize("mode", ["first-last", "redistribute", "interlaced", "vocab-1", "vocab-2", "balanced"])
def test_simulate_in_every_vocabulary_mode(mode, capsys):
    figures = as_json(capsys, "simulate", "--schedule", "1f1b", *SIZE, "--vocabulary", mode)
    timeline = time_order(plan_order("1f1b", 4, 8, mode, EQUAL_COSTS), EQUAL_COSTS)
    assert figures["vocabulary"] == {"balanced": "vocab-2"}.get(mode, mode)
    assert figures["span"] == pytest.approx(timeline.span)


def test_simulate_with_costs_and_bytes(capsys):
    figures = as_json(capsys, "simulate", "--schedule", "1f1b", *SIZE, "--costs", "costs.json")
    assert figures["span"] == 33
    assert figures["peak_bytes"] == [12, 9, 6, 3]
    text = printed(capsys, "simulate", "--schedule", "1f1b", *SIZE, "--costs", "costs.json")
    assert "costs.json" in text
    assert "peak bytes" in text
    text = printed(capsys, "simulate", "--schedule", "1f1b", *SIZE)
    assert "equal (F = I = W = 1" in text
    step, busy, span, bubble = text.splitlines()[2:6]
    assert step.startswith("step       33  (no order is shorter: the step needs 3 before, 24 during and 6 after ")
    assert busy == "busy       72.7 % of the step, on average over devices"
    assert span.startswith("span       33")
    assert bubble == "bubble     9, 27.3 % of the span of the slowest device"
    assert "critical path" in text


@pytest.mark.parametrize("file", ["order.csv", "program.csv", "vocabulary.csv", "torch.csv"])
def test_simulate_a_file_as_it_stands(file, capsys):
    figures = as_json(capsys, "simulate", "--schedule", file)
    assert (figures["devices"], figures["microbatches"], figures["schedule"]) == (2, 2, file)
    mode = "vocab-2" if file in ("program.csv", "vocabulary.csv") else "first-last"
    assert figures["span"] == pytest.approx(time_order(plan_order("1f1b", 2, 2, mode), EQUAL_COSTS).span)
    assert as_json(capsys, "simulate", "--schedule", file, "--vocabulary", mode)["span"] == figures["span"]


def test_vocabulary_passes_are_added_to_a_file(capsys):
    figures = as_json(capsys, "simulate", "--schedule", "order.csv", "--vocabulary", "vocab-2")
    assert figures["span"] == as_json(capsys, "simulate", "--schedule", "vocabulary.csv")["span"]


def test_options_reach_the_schedule(capsys):
    figures = as_json(capsys, "simulate", "--schedule", "interleaved", *SIZE, "--stages-per-device", "4")
    assert (figures["stages"], figures["stages_per_device"]) == (16, 4)
    figures = as_json(capsys, "simulate", "--schedule", "gis", *SIZE, "--group-size", "2")
    assert figures["peak_in_flight"] == [2 + 4 - device for device in range(4)]
    figures = as_json(capsys, "simulate", "--schedule", "zbv", *SIZE, "--stages-per-device", "2")
    assert figures["stages_per_device"] == 2


def test_compared_schedules_do_the_same_work_per_device(capsys):
    found = as_json(capsys, "simulate", "--compare", "1f1b,zbv,interleaved", *SIZE, "--costs", "costs.json")
    names = [one["schedule"] for one in found["schedules"]]
    assert names == ["1f1b", "zbv", "interleaved"]
    assert [one["stages_per_device"] for one in found["schedules"]] == [1, 2, 2]
    for one in found["schedules"]:
        assert one["busy"] == pytest.approx([24] * 4)
    assert found["schedules"][0]["peak_bytes"][0] == 12
    assert found["schedules"][1]["peak_bytes"] == [1.5 * peak for peak in found["schedules"][1]["peak_in_flight"]]
    # What the first one shows alone it shows in company too.
    alone = as_json(capsys, "simulate", "--schedule", "zbv", *SIZE)
    both = as_json(capsys, "simulate", "--schedule", "zbv", "--compare", "1f1b", *SIZE)
    assert [one["schedule"] for one in both["schedules"]] == ["zbv", "1f1b"]
    assert both["schedules"][0]["span"] == alone["span"]
    assert both["schedules"][1]["busy"] == pytest.approx([48] * 4)


def test_compare_prints_a_table(capsys):
    text = printed(capsys, "simulate", "--compare", "1f1b,v-half,order.csv", "--devices", "2", "--microbatches", "2")
    *_, above, head, first, second, third = text.splitlines()
    assert above.split() == ["stages", "per", "bubble", "%", "of", "the", "stages", "microbatches"]
    assert head.split()[:6] == ["schedule", "device", "step", "bound", "busy", "%"]
    assert head.split()[6:] == ["span", "slowest", "device", "in", "flight", "in", "flight"]
    assert (first.split()[:2], second.split()[:2], third.split()[:2]) == (
        ["1f1b", "1"],
        ["v-half", "2"],
        ["order.csv", "1"],
    )
    assert first.split()[2:] == third.split()[2:]
    assert "costs are those of a stage of 1f1b; in all schedules a device does the same work" in text
    text = printed(capsys, "simulate", "--compare", "all", *SIZE)
    everything = list(SCHEDULES)
    assert [line.split()[0] for line in text.splitlines()[-len(everything) :]] == everything


def test_tables_show_which_step_is_shorter_though_its_slowest_device_idles_more(capsys):
    text = printed(capsys, "simulate", "--schedule", "zbv", "--vocabulary", "first-last,vocab-2", *TABLE)
    whole, sharded = (line.split() for line in text.splitlines()[-2:])
    assert whole == ["zbv", "first-last", "2", "396.8", "396.8", "54.8", "396.8", "0.0", "16", "8"]
    assert sharded == ["zbv", "vocab-2", "2", "224.6", "224.6", "96.9", "224.6", "3.1", "18", "9", "<-", "shortest"]
    _, found = as_json(capsys, "simulate", "--schedule", "zbv", "--vocabulary", "first-last,vocab-2", *TABLE)[
        "schedules"
    ]
    assert found["mean_busy"] == pytest.approx(sum(found["busy"]) / (8 * found["makespan"]))


def test_all_of_the_shortest_steps_are_marked(capsys):
    text = printed(capsys, "simulate", "--compare", "1f1b,zbv,v-budget", *TABLE)
    assert [line.split()[0] for line in text.splitlines() if line.endswith("  <- shortest")] == ["zbv", "v-budget"]


SORTED = {
    # the rows of 1f1b, zbv, v-half with copies.toml, whose steps are 117, 99.5 and 104.5
    "step": ["zbv", "v-half", "1f1b"],
    "busy": ["zbv", "v-half", "1f1b"],
    "span": ["zbv", "v-half", "1f1b"],
    "bubble": ["zbv", "v-half", "1f1b"],
    "in-flight": ["v-half", "1f1b", "zbv"],  # 5, 8 and 8 microbatches
    "bytes": ["v-half", "1f1b", "zbv"],
}


@pytest.mark.parametrize("by", SORTED)
@pytest.mark.sampled(2)
def test_rows_are_sorted_the_best_first(by, capsys):
    arguments = ["simulate", "--compare", "1f1b,zbv,v-half", *TABLE, "--costs", str(COPIES), "--sort", by]
    assert [line.split()[0] for line in printed(capsys, *arguments).splitlines()[-3:]] == SORTED[by]
    assert [one["schedule"] for one in as_json(capsys, *arguments)["schedules"]] == SORTED[by]
    assert main([*arguments[:-2], "--sort", "name"]) == 2


def test_one_schedule_has_no_rows_to_sort(capsys):
    assert main(["simulate", "--schedule", "zbv", *SIZE, "--sort", "step"]) == 2
    assert "--sort is given, but there is only one schedule" in capsys.readouterr().err


def test_modes_side_by_side(capsys):
    text = printed(capsys, "simulate", "--schedule", "1f1b", "--vocabulary", "vocab-1,vocab-2", *SIZE)
    assert [line.split()[:2] for line in text.splitlines()[-2:]] == [["1f1b", "vocab-1"], ["1f1b", "vocab-2"]]


def test_modes_that_shard_and_modes_that_do_not_have_the_same_work(capsys):
    arguments = ["simulate", "--schedule", "zbv", "--vocabulary", "first-last,vocab-2", *SIZE]
    whole, sharded = as_json(capsys, *arguments)["schedules"]
    assert sum(whole["busy"]) == pytest.approx(sum(sharded["busy"]))
    assert max(whole["busy"]) > 1.1 * max(sharded["busy"])
    assert as_json(capsys, *arguments[:3], *SIZE)["busy"] != whole["busy"]
    assert "first and last stage also do the vocabulary work" in printed(capsys, *arguments)


def test_options_go_to_the_schedules_that_have_them(capsys):
    found = as_json(capsys, "simulate", "--compare", "1f1b,interleaved,gis", *SIZE, "--stages-per-device", "4")
    assert [one["stages_per_device"] for one in found["schedules"]] == [1, 4, 4]


def test_help_lists_every_schedule_in_a_line(capsys):
    lines = printed(capsys, "simulate", "--help").partition("\nschedules:\n")[2].splitlines()
    for name in SCHEDULES:
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert line.endswith(describe(name))
        assert 10 < len(describe(name)) < 130


# --- activations on the host, without a cost file ------------------------------------------------------------


def test_simulate_shows_what_copies_to_the_host_leave_on_a_device(capsys):
    arguments = ["simulate", "--schedule", "1f1b", *SIZE, "--offload"]
    found = as_json(capsys, *arguments, "free")
    assert (found["peak_in_flight"], found["peak_on_device"]) == ([4, 3, 2, 1], [2, 2, 2, 1])
    assert found["peak_bytes"] == [2, 2, 2, 1]  # a forward stores 1
    assert found["makespan"] == 33
    text = printed(capsys, *arguments, "free")
    assert "bytes: a forward of a stage stores 1" in text
    head, first = (line.split() for line in text.splitlines()[8:10])
    assert head[-6:] == ["flight", "on", "the", "device", "peak", "bytes"]
    assert first == ["0", "24", "72.7", "4", "2", "2"]
    assert as_json(capsys, *arguments, "2")["peak_bytes"] == [2, 2, 2, 1]  # a limit of two activations
    found = as_json(capsys, *arguments, "none")
    assert (found["peak_on_device"], found["peak_bytes"]) == (found["peak_in_flight"], None)


def test_tables_have_what_is_on_the_device_beside_what_is_in_flight(capsys):
    text = printed(capsys, "simulate", "--compare", "1f1b,po-h", *TABLE, "--sort", "on-device")
    po_h, base = (line.split() for line in text.splitlines()[-2:])
    assert (po_h[0], po_h[7:11]) == ("po-h", ["13", "5", "6.5", "2.5"])
    assert (base[0], base[7:]) == ("1f1b", ["8", "8", "8", "8"])


def test_draw_shows_what_is_on_the_device(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    arguments = ["draw", "--schedule", "1f1b", *SIZE, "--memory"]
    assert "peak 4 in flight" in printed(capsys, *arguments)
    text = printed(capsys, *arguments, "--offload", "free")
    assert "peak 2 on the device of 4 in flight" in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith(" ")][:4] == ["2", "2", "2", "1"]


# --- draw ----------------------------------------------------------------------------------------------------


def test_draw_to_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = printed(capsys, "draw", "--schedule", "1f1b", "--vocabulary", "first-last,vocab-2", *SIZE)
    assert "1f1b, first-last" in text
    assert "1f1b, vocab-2" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("suffix", ["html", "svg", "json"])
def test_draw_to_a_file(suffix, capsys):
    assert printed(capsys, "draw", "--compare", "1f1b,zbv", *SIZE, "-o", f"step.{suffix}") == f"wrote step.{suffix}\n"
    text = Path(f"step.{suffix}").read_text()
    assert "1f1b" in text
    assert "zbv" in text
    if suffix == "json":
        json.loads(text)


DIAMOND = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1\n3F0,3B0,3F1,3B1\n"
EDGES = ("--edges", "0>1,0>2,1>3,2>3")


def test_sequences_are_cut_into_slices(capsys):
    found = as_json(capsys, "simulate", "--schedule", "1f1b", "--devices", "4", "--microbatches", "4", "--slices", "3")
    assert (found["microbatches"], found["slices"]) == (4, 3)
    assert found["bubble"] == 3 * 3
    assert found["peak_in_flight"] == [6, 5, 4, 3]
    small = ("--devices", "2", "--microbatches", "2", "--slices", "2")
    assert printed(capsys, "draw", "--schedule", "1f1b", *small, "-o", "cut.svg") == "wrote cut.svg\n"
    assert ">0.1</text>" in Path("cut.svg").read_text()
    Path("cut.csv").write_text("0F0,0F0.1,0B0.1,0B0\n")
    assert "sound: an order of 1 device and 1 microbatch of 2 slices" in printed(capsys, "check", "cut.csv")
    assert as_json(capsys, "simulate", "--schedule", "cut.csv")["slices"] == 2


def test_stages_may_form_a_graph(capsys):
    Path("diamond.csv").write_text(DIAMOND)
    assert as_json(capsys, "check", "diamond.csv", *EDGES)["edges"] == [[0, 1], [0, 2], [1, 3], [2, 3]]
    graph = as_json(capsys, "simulate", "--schedule", "diamond.csv", *EDGES)
    chain = as_json(capsys, "simulate", "--schedule", "diamond.csv")
    assert graph["makespan"] < chain["makespan"]
    printed(capsys, "draw", "--schedule", "diamond.csv", *EDGES, "-o", "diamond.html")
    printed(capsys, "simulate", "--schedule", "diamond.csv", *EDGES, "--vocabulary", "vocab-2")


# --- check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["order.csv", "program.csv", "vocabulary.csv", "torch.csv", "evaluates.csv"])
def test_sound_files(file, capsys):
    assert printed(capsys, "check", file).startswith("sound: ")
    found = as_json(capsys, "check", file)
    assert (found["sound"], found["faults"]) == (True, [])
    assert (found["devices"], found["microbatches"], found["stage_device"]) == (2, 2, [0, 1])
    assert found["transfers"] == (file in ("program.csv", "torch.csv"))
    assert found["barriers"] == (file in ("program.csv", "vocabulary.csv"))


FAULTY = [
    # file, arguments, words of each fault
    ("faulty.csv", (), ["0B1 is already at position 3", "1B1 comes before 1F1 at position 3"]),
    (
        "no-transfer.csv",
        (),
        ["0SEND_F1 is missing", "0RECV_B1 is missing", "1RECV_F1 is missing", "1SEND_B1 is missing"],
    ),
    ("order.csv", ("--memory-limit", "1"), ["limit of 1"]),
    ("program.csv", ("--memory-limit", "2,1"), ["limit of 1"]),
    ("order.csv", ("--bytes-limit", "6,2", "--costs", "costs.json"), ["limit of 2"]),
    ("faulty.csv", ("--costs", "plain.toml"), ["0B1 is already at position 3"]),
]


@pytest.mark.parametrize(("file", "arguments", "words"), FAULTY, ids=lambda value: str(value))
def test_every_fault_is_listed(file, arguments, words, capsys):
    text = printed(capsys, "check", file, *arguments, code=1)
    found = as_json(capsys, "check", file, *arguments, code=1)
    assert not found["sound"]
    assert len(found["faults"]) >= len(words)
    assert text.startswith(f"{len(found['faults'])} fault")
    for word in words:
        assert word in text
        assert any(word in fault["what"] for fault in found["faults"])
    assert all({"device", "position", "what", "rows"} == set(fault) for fault in found["faults"])


def test_check_with_costs(capsys):
    assert as_json(capsys, "check", "order.csv", "--costs", "costs.json")["peak_bytes"] == [6, 3]
    assert as_json(capsys, "check", "order.csv", "--memory-limit", "2,1", "--costs", str(COSTS))["sound"]
    assert as_json(capsys, "check", "order.csv", "--bytes-limit", "6,3", "--costs", "costs.json")["sound"]


# --- search --------------------------------------------------------------------------------------------------


def test_search_writes_what_check_accepts(capsys):
    pytest.importorskip("ortools")
    arguments = ["search", "--devices", "2", "--microbatches", "3", "--split-backward", "-o", "best.csv"]
    found = as_json(capsys, *arguments)
    assert found["proved"]
    assert found["possible"]
    assert as_json(capsys, "check", "best.csv")["sound"]
    assert as_json(capsys, "simulate", "--schedule", "best.csv")["span"] == found["span"] == found["value"]
    text = printed(capsys, *arguments)
    assert text.splitlines()[:2] == ["step 10, devices busy 90.0 % of it on average", "span 9: no order is shorter"]
    assert "zb-h1" in text
    assert "bubble 0, 0.0 % of the span of the slowest device" in text


@pytest.mark.parametrize("mode", ["first-last", "vocab-1", "vocab-2"])
def test_what_search_writes_can_be_trained(mode, capsys):
    pytest.importorskip("ortools")
    arguments = ["--devices", "2", "--microbatches", "2", "--placement", "v", "--vocabulary", mode]
    printed(capsys, "search", *arguments, "--seconds", "2", "-o", "best.csv")
    order, program = plan_program("best.csv", 2, 2, mode)
    assert order.placement.stage_device == (0, 1, 1, 0)
    assert runnable_order(Recipe.of(pp=2, microbatches=2, schedule="best.csv")) == order == program.order


def test_search_says_when_nothing_fits(capsys):
    pytest.importorskip("ortools")
    arguments = ["search", "--devices", "2", "--microbatches", "2", "--placement", "v", "--memory-limit", "1"]
    assert printed(capsys, *arguments, code=1) == "no order fits the memory limit\n"
    assert as_json(capsys, *arguments, code=1) == {"possible": False}


# --- wrong input ---------------------------------------------------------------------------------------------

SIMULATE = ["simulate", "--schedule", "1f1b", *SIZE]
SEARCH = ["search", "--devices", "2", "--microbatches", "2"]
WRONG = [
    # arguments, words of the sentence
    (["simulate", "--schedule", "1f2b", *SIZE], ["'1f2b' is unknown", "did you mean '1f1b'", "zbv"]),
    (["simulate", "--compare", "1f1b,zb", *SIZE], ["'zb' is unknown"]),
    (["simulate", *SIZE], ["--schedule"]),
    (["simulate", "--compare", ",", *SIZE], ["--schedule"]),
    (["simulate", "--schedule", "1f1b,zbv", *SIZE], ["takes one schedule", "use --compare 1f1b,zbv for several"]),
    (["simulate", "--schedule", "costs.json"], ["'costs.json' is not the name of a schedule", "must end in .csv"]),
    (["draw", "--schedule", "nowhere.txt"], ["'nowhere.txt' is not the name of a schedule", "must end in .csv"]),
    (["simulate", "--schedule", "1f2b"], ["'1f2b' is unknown"]),
    (["simulate", "--schedule", "1f1b", "--devices", "99999999999", "--microbatches", "4"], ["too many to simulate"]),
    (["simulate", "--schedule", "gis", *SIZE, "--stages-per-device", "999999999"], ["too many to simulate"]),
    ([*SIMULATE, "--vocabulary", ","], ["--vocabulary is ','", "vocab-2"]),
    (["simulate", "--schedule", "1f1b", "--devices", "4"], ["microbatches", "not given"]),
    (["simulate", "--schedule", "1f1b", "--microbatches", "4"], ["devices", "not given"]),
    (["simulate", "--schedule", "1f1b", "--devices", "4", "--microbatches", "0"], ["microbatches", "at least 1", "0"]),
    (["simulate", "--schedule", "1f1b", "--devices", "-1", "--microbatches", "4"], ["devices", "at least 1", "-1"]),
    ([*SIMULATE, "--stages-per-device", "2"], ["'1f1b' has 1 stage per device, not 2"]),
    (["simulate", "--schedule", "zbv", *SIZE, "--stages-per-device", "4"], ["'zbv' has 2 stages per device, not 4"]),
    (["simulate", "--schedule", "gis", *SIZE, "--stages-per-device", "0"], ["stages_per_device", "at least 1"]),
    ([*SIMULATE, "--group-size", "2"], ["'1f1b' has no option 'group_size'", "its options: none"]),
    (["simulate", "--schedule", "looped-bfs", *SIZE, "--group-size", "2"], ["its options: stages_per_device"]),
    (["simulate", "--compare", "1f1b,zbv", *SIZE, "--group-size", "2"], ["none of 1f1b, zbv has this option"]),
    ([*SIMULATE, "--memory-limit", "many"], ["--memory-limit is 'many'", "number"]),
    ([*SIMULATE, "--memory-limit", "0"], ["memory_limit", "above 0"]),
    ([*SIMULATE, "--vocabulary", "vocab2"], ["'vocab2' is unknown", "did you mean 'vocab-2'"]),
    (["simulate", "--schedule", "order.csv", "--devices", "3"], ["order.csv", "2 devices", "not 3"]),
    (["simulate", "--schedule", "vocabulary.csv", "--vocabulary", "vocab-1"], ["has 1 barrier,", "has 2"]),
    (["simulate", "--schedule", "torch.csv", "--vocabulary", "vocab-1"], ["torch.csv", "has transfers"]),
    (["simulate", "--schedule", "faulty.csv"], ["faulty.csv: the schedule has", "faults"]),
    (["simulate", "--schedule", "nowhere.csv"], ["nowhere.csv cannot be read", "No such file"]),
    ([*SIMULATE, "--costs", "nowhere.toml"], ["nowhere.toml cannot be read", "No such file"]),
    ([*SIMULATE, "--costs", "missing.toml"], ["missing.toml", "F is missing"]),
    ([*SIMULATE, "--costs", "half.toml"], ["half.toml", "B is missing"]),
    ([*SIMULATE, "--costs", "negative.toml"], ["negative.toml", "B", "at least 0", "-2"]),
    ([*SIMULATE, "--costs", "infinite.toml"], ["B must be a finite number"]),
    ([*SIMULATE, "--costs", "word.toml"], ["F must be a finite number", "'one'"]),
    ([*SIMULATE, "--costs", "list.toml"], ["F has 3 numbers for 4 stages"]),
    ([*SIMULATE, "--costs", "short.toml"], ["F has 1 number for 4 stages"]),
    ([*SIMULATE, "--costs", "unknown.toml"], ["unknown key 'forwards'. Accepted: F, B, I, W,"]),
    ([*SIMULATE, "--costs", "case.toml"], ["unknown key 'f', did you mean F? Accepted: F, B,"]),
    ([*SIMULATE, "--costs", "hop.toml"], ["links: unknown key 'F:0-1', did you mean F:0>1?"]),
    ([*SIMULATE, "--costs", "broken.toml"], ["broken.toml is not TOML", "line 1"]),
    ([*SIMULATE, "--costs", "broken.json"], ["broken.json is not JSON"]),
    ([*SIMULATE, "--costs", "list.json"], ["list.json", "must be a table"]),
    ([*SIMULATE, "--costs", "nan.json"], ["F must be a finite number"]),
    ([*SIMULATE, "--costs", "deep.json"], ["deep.json is not JSON"]),
    ([*SIMULATE, "--costs", "deep.toml"], ["deep.toml is not TOML"]),
    ([*SIMULATE, "--costs", "."], [". cannot be read: Is a directory"]),
    ([*SIMULATE, "--vocabulary", "vocab-2", "--costs", "plain.toml"], ["costs: ", " is missing, but the order has "]),
    (["simulate", "--schedule", "zb-h1", *SIZE, "--costs", "plain.toml"], ["is missing, but the order has"]),
    (
        ["simulate", "--compare", "1f1b,zbv", "--devices", "3", "--microbatches", "3", "--costs", "list.toml"],
        ["6", "F"],
    ),
    (["draw", "--schedule", "1f1b", *SIZE, "-o", "step.gif"], ["step.gif", ".html", ".svg", ".png", ".json"]),
    (["draw", "--schedule", "1f1b", *SIZE, "-o", "nowhere/step.svg"], ["nowhere"]),
    (["draw", "--schedule", "1f1b", *SIZE, "--unit-seconds", "0"], ["unit"]),
    (["check", "typing.csv"], ["typing.csv: row 2, column 3 (device 1, position 2): '1Q1' is not a pass"]),
    (["check", "empty.csv"], ["empty.csv: the file is empty"]),
    (["check", "gap.csv"], ["gap.csv: stage 1 appears in no row"]),
    (["check", "latin.csv"], ["latin.csv is not UTF-8 at byte 4"]),
    (["check", "nowhere.csv"], ["nowhere.csv cannot be read"]),
    (["check", "order.csv", "--memory-limit", "1,2,3"], ["memory_limit has 3 numbers for 2 devices"]),
    (["check", "order.csv", "--bytes-limit", "5"], ["bytes"]),
    (["check", "order.csv", "--bytes-limit", "5", "--costs", "plain.toml"], ["bytes"]),
    (["check", "vocabulary.csv", "--costs", "plain.toml"], ["is missing, but the order has"]),
    (["search", "--devices", "100000", "--microbatches", "100000"], ["too many to simulate"]),
    ([*SEARCH, "-o", "best.txt"], ["best.txt", "must end in .csv"]),
    ([*SEARCH, "-o", "nowhere/best.csv"], ["there is no folder 'nowhere'"]),
    ([*SEARCH, "--placement", "round"], ["placement is 'round'", "linear, looped, v"]),
    ([*SEARCH, "--placement", "0,2"], ["stage 1 is placed on device 2"]),
    ([*SEARCH, "--placement", "0,0"], ["device 1 holds no stage"]),
    ([*SEARCH, "--placement", "v", "--stages-per-device", "3"], ["placement 'v' has 2 stages per device, not 3"]),
    ([*SEARCH, "--vocabulary", "interlaced"], ["not interlaced"]),
    ([*SEARCH, "--memory-limit", "-1"], ["memory_limit", "above 0"]),
    ([*SEARCH, "--seconds", "0"], ["seconds", "above 0"]),
    (["search", "--devices", "2", "--microbatches", "0"], ["microbatches", "at least 1"]),
    (["simulate", "--schedule", "1f1b", *SIZE, "--slices", "0"], ["slices must be", "at least 1, not 0"]),
    (["simulate", "--schedule", "dualpipe-v", *SIZE, "--slices", "2"], ["must be passes of their own"]),
    (["simulate", "--schedule", "1f1b", *SIZE, "--edges", "0-1"], ["'0-1' is not an edge"]),
    (
        ["search", "--devices", "8", "--microbatches", "200", "--split-backward", "--memory-limit", "8"],
        ["small cases", "4800 passes"],
    ),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=lambda value: " ".join(value))
@pytest.mark.parametrize("output", ["text", "json"])
def test_wrong_input_is_one_sentence(arguments, words, output, capsys):
    if output == "json" and arguments[0] == "draw":
        return
    assert main([*arguments, *(["--json"] if output == "json" else [])]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    sentence = shown.err.splitlines()[0]
    assert sentence.startswith("evenpipe: ")
    for word in words:
        assert word in sentence
    if "faults" not in sentence:
        assert len(shown.err.splitlines()) == 1


def test_search_without_its_solver(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "ortools.sat.python", None)
    assert main([*SEARCH, "--placement", "1,0,0"]) == 2  # where nothing has a name, so that the solver is needed
    assert capsys.readouterr().err == (
        "evenpipe: search needs OR-tools, which is not installed: pip install 'evenpipe[search]'\n"
    )


def test_the_example_costs_have_every_kind():
    from evenpipe.schedule.files import read_costs

    costs = read_costs(COSTS)
    assert isinstance(costs, Costs)
    assert None not in (costs.F, costs.I, costs.W, costs.S, costs.T, costs.E, costs.G, costs.bytes)
