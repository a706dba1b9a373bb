"""Measured above predicted, with waits: in the terminal, as SVG, as a page, as a trace for Perfetto, and by command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from drawn_timelines import SAMPLE, rectangles, timeline, two_devices
from traced_steps import measured
from traced_steps import two_devices as traced

from evenpipe.cli.main import main
from evenpipe.compare.measured import compare, scaled
from evenpipe.draw import svg, terminal, trace
from evenpipe.draw.kinds import STYLES
from evenpipe.schedule import Costs, Kind, TransferKind, plan_program
from evenpipe.schedule.trace import Allocations
from evenpipe.schedule.trace_file import write_trace
from evenpipe.simulate import simulate


def test_svg_has_a_bar_in_each_wait_and_its_kind_in_the_legend() -> None:
    without, text = svg(two_devices(), width=1200), svg(two_devices(), width=1200, waits=True)
    blue = STYLES[Kind.F].colour
    assert rectangles(without, blue) == rectangles(text, blue)
    for kind, device, (start, end) in ((TransferKind.RECV_B, 0, (2, 9)), (TransferKind.RECV_F, 1, (0, 3))):
        colour = STYLES[kind].colour
        assert not rectangles(without, colour)
        bar, chip = rectangles(text, colour)
        x, y, width, height, _ = rectangles(text, blue)[device]  # 0F0 from 0 to 2, 1F0 from 3 to 5
        unit = (width + 0.8) / 2  # boxes leave a light line between neighbours
        assert bar.width == pytest.approx((end - start) * unit, abs=0.1)
        assert bar.x == pytest.approx(x - 0.4 + (start - (0, 3)[device]) * unit, abs=0.1)
        assert y < bar.y and bar.y + bar.height < y + height  # within the row, and lower than a pass
        assert chip.width == SAMPLE and chip.height < SAMPLE / 2  # a thin bar in the legend, too
        assert f"waits for {kind.value}" in text and "waits for" not in without


def test_the_terminal_says_how_long_each_device_waited_for_what_and_colours_idle_columns_by_it() -> None:
    lines = terminal(two_devices(), width=60, colour="none", waits=True).splitlines()
    assert "device 0 waited for  RECV_B 7" in lines and "device 1 waited for  RECV_F 3" in lines
    silent = terminal(timeline("0F0 0 1, 0B0 1 2"), width=60, colour="none", waits=True)
    assert "device 0 waited for  nothing" in silent
    plain, text = (terminal(two_devices(), width=80, colour="truecolor", waits=waits) for waits in (False, True))
    receive = STYLES[TransferKind.RECV_B].colour
    code = ";".join(str(int(receive[place : place + 2], 16)) for place in (1, 3, 5))
    assert f"38;2;{code}m·" in text and "waited" not in plain and f"38;2;{code}m·" not in plain


def test_perfetto_has_waits_in_a_thread_of_their_own() -> None:
    events = json.loads(trace(two_devices(), unit_seconds=1e-6))["traceEvents"]
    waits = [event for event in events if event["ph"] == "X" and event["tid"] == 2]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in waits] == [
        (2, "1RECV_F0", 0.0, 3.0),
        (1, "0RECV_B0", 2.0, 7.0),
    ]


COSTS = Costs(F=0.01, B=0.02, I=0.01, W=0.01, S=0.004, C=0.001, T=0.002, E=0.0005, G=0.0005, p2p=0.0005)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    _, program = plan_program("zb-h1", 2, 4, "vocab-2", COSTS)
    write_trace(measured(program, COSTS), tmp_path / "step.json")
    write_trace(traced(), tmp_path / "hand.json")
    return tmp_path / "step.json"


@pytest.mark.parametrize("suffix", [".svg", ".html", ".json"])
def test_every_format_has_measured_above_predicted(file: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", str(file), "-o", f"out{suffix}"]) == 0
    text = (file.parent / f"out{suffix}").read_text(encoding="utf-8")
    assert capsys.readouterr().out == f"wrote out{suffix}\n"
    assert 0 < text.index("measured") < text.index("predicted")
    if suffix == ".svg":
        boxes = rectangles(text, STYLES[Kind.F].colour)
        assert len(boxes) == 2 * 8 + 1  # both panels, and the legend
        assert [box.width for box in boxes[:8]] == pytest.approx([box.width for box in boxes[8:16]], abs=0.02)


def test_calls_of_the_driver_for_memory_stand_below_where_they_were_counted(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = traced()
    first, second = trace.devices
    write_trace(replace(trace, devices=(first, replace(second, allocations=Allocations(80, 4, 3, 0)))), "gpu.json")
    line = "calls of the CUDA driver for memory in the step, per device: - 7"
    for arguments, said in ((["gpu.json"], line), (["gpu.json", "-o", "out.svg"], line), (["hand.json"], "")):
        assert main(["draw", *arguments]) == 0
        written = capsys.readouterr().out
        assert written.endswith(f"\n{line}\n") if said else "driver" not in written


def test_costs_from_a_file_predict_in_their_unit(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("costs.toml").write_text("F = 2000\nB = 2750\np2p = 500\n")  # milliseconds
    assert main(["draw", "hand.json", "--costs", "costs.toml", "--unit-seconds", "0.001"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step 12 s" in lines[lines.index("measured") + 1]
    assert "step 10.5 s" in lines[lines.index("predicted") + 1]  # 2 + 0.5 + 2 + 2.75 + 0.5 + 2.75
    assert compare(traced()).title == "1f1b + first-last, 2 devices, 1 microbatch, step 3"


def test_the_slack_of_a_prediction_is_in_its_unit() -> None:
    _, program = plan_program("zb-h1", 2, 4, "vocab-2", COSTS)
    plain = simulate(program, COSTS).timeline_with_slack
    rows = zip(plain.events[0], scaled(plain, 1000.0).events[0], strict=True)
    slacks = [(event.slack.time, other.slack.time) for event, other in rows if event.slack and other.slack]
    assert len(slacks) == len(plain.events[0]) and any(slack for slack, _ in slacks)
    assert [other for _, other in slacks] == [slack * 1000 for slack, _ in slacks]


WRONG = [
    (["draw", "costs.toml"], "costs.toml is not JSON"),
    (["draw", "out.json"], "not a trace of evenpipe"),
    (["draw", "hand.json", "--schedule", "1f1b"], "--schedule is given, but the trace hand.json has a schedule"),
    (["draw", "step.json", "--costs", "costs.toml"], "costs.E is missing, but the order has E0"),
    (["profile"], "profile needs either CONFIG.toml or --from TRACE.json, but neither is given"),
    (["profile", "config.toml", "--from", "hand.json"], "but both are given"),
    (["profile", "--from", "nowhere.json"], "nowhere.json cannot be read"),
    (["profile", "--from", "out.json"], "not a trace of evenpipe"),
    (["profile", "--from", "hand.json", "-o", "costs.json"], "must end in .toml"),
    (["profile", "nowhere.toml"], "nowhere.toml"),
]


def test_wrong_input_is_one_sentence(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("costs.toml").write_text("F = 1\nB = 2\n")
    Path("out.json").write_text('{"traceEvents": []}')
    for arguments, message in WRONG:
        assert main(arguments) == 2
        written = capsys.readouterr()
        assert written.out == "" and message in written.err and written.err.count("\n") == 1, arguments
