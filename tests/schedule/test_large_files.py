"""Files that are large or strange are checked in a time linear in their size; what is said of them stays readable."""

from __future__ import annotations

import json

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import EQUAL_COSTS, Order, Placement, check_order, time_order
from evenpipe.schedule.check_file import SHOWN, check_file
from evenpipe.schedule.dependencies import Dependencies
from evenpipe.schedule.graph import Graph
from evenpipe.schedule.passes import Kind
from evenpipe.schedule.trace_file import trace_from_dict

PARTS, LINES, STAGES = 4_000, 20_000, 1_000_000


def joint(first: str, second: str) -> str:
    """One device that runs `PARTS` passes as one."""
    parts = ";".join(f"0{first}{i};0{second}{i}" for i in range(PARTS // 2))
    return f"({parts})OVERLAP_F_B\n"


def test_each_part_of_a_joint_pass_is_looked_at_once(monkeypatch):
    asked = 0
    rule = Dependencies.rule

    def counted(self, *what):
        nonlocal asked
        asked += 1
        return rule(self, *what)

    monkeypatch.setattr(Dependencies, "rule", counted)
    order = Order.from_csv(joint("F", "B"))
    graph = Graph.of(order)
    assert asked <= 4 * PARTS
    assert (graph.places[0].joint, graph.places[0].odd) == ([0], [0])
    assert check_order(order).ok
    assert time_order(order, EQUAL_COSTS).span == 3 * PARTS / 2


def test_a_fault_in_a_long_joint_pass_shows_its_beginning():
    report = check_order(Order.from_csv(joint("B", "F")))
    assert report.faults[0].what == (
        "0B0 comes before the part of (0B0;0F0;0B1;0F1;...3996 more)OVERLAP_F_B that it needs"
    )
    assert len(report.faults) == PARTS // 2 + 1
    assert max(len(str(fault)) for fault in report.faults) < 500


def test_many_lines_are_checked():
    report = check_order(Order.from_csv("".join(f"{i}F0,{i}B0\n" for i in range(LINES))))
    assert report.ok
    assert len(report.in_flight) == LINES


def test_thousands_of_faults_are_counted(tmp_path):
    path = tmp_path / "faults.csv"
    devices = LINES // 4
    path.write_text("".join(f"{i}F0\n" for i in range(devices - 1)) + f"{devices - 1}F0,{devices - 1}B0\n")
    report = check_file(path)
    lines = report.text().splitlines()
    assert lines[0] == f"{devices - 1} faults"
    assert lines[-1] == f"and {devices - 1 - SHOWN} more; --json lists all"
    assert len(lines) == SHOWN + 2
    assert len(report.to_dict()["faults"]) == devices - 1


def test_stages_of_devices_are_found_at_once():
    placement = Placement(2, (0,) * STAGES + (1,))
    assert len(placement.stages_of(0)) == STAGES
    assert placement.stages_of(1) == (STAGES,)
    with pytest.raises(InputError, match="device 1 holds no stage"):
        Placement(10**9, (0,))


def test_rules_are_made_where_there_are_passes():
    dependencies = Dependencies(Placement.looped(2, 500))
    assert dependencies.rule(1, Kind.F, 1).waits
    assert len(dependencies._rules) == 1
    assert dependencies.rule(0, Kind.F, 1) == dependencies.rule(0, Kind.F, 1000) == dependencies.rule(2, Kind.S, None)


def test_a_trace_with_more_stages_than_passes_is_refused():
    values = {
        "format": "evenpipe trace",
        "version": 1,
        "about": {},
        "placement": [0] * STAGES,
        "microbatches": 1,
        "barriers": 0,
        "forward_only": False,
        "devices": [{"row": "0F0,0B0"}],
    }
    with pytest.raises(InputError, match="placement has 1000000 stages, but the rows have only 2 passes"):
        trace_from_dict(json.loads(json.dumps(values)))
