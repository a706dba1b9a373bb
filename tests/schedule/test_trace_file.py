"""Trace files: what is written is read again, and what is not a trace is refused in one sentence that says why."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from traced_steps import measured, two_devices

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Link, plan_program
from evenpipe.schedule.trace import Allocations
from evenpipe.schedule.trace_file import read_trace, trace_from_dict, trace_to_dict, write_trace

COSTS = Costs(F=1, B=2, I=1, W=1, S=0.5, C=0.1, T=0.3, E=0.1, G=0.1, p2p=0.05, collectives={"reduce": 0.2})
SCHEDULES = [("1f1b", "first-last"), ("interleaved", "vocab-2"), ("zb-h1", "vocab-1"), ("dualpipe-v", "first-last")]


@pytest.mark.parametrize(("schedule", "mode"), SCHEDULES)
def test_a_trace_survives_its_file(tmp_path: Path, schedule: str, mode: str) -> None:
    _, program = plan_program(schedule, 2, 6, mode, COSTS)
    trace = measured(program, COSTS)
    write_trace(trace, tmp_path / "step.json")
    found = read_trace(tmp_path / "step.json")
    assert found.program == trace.program
    assert found.costs == COSTS
    assert trace_to_dict(found) == trace_to_dict(trace)
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]


def test_all_fields_survive_and_other_tensor_ranks_have_no_row_of_their_own() -> None:
    trace = two_devices()
    assert trace_from_dict(json.loads(json.dumps(trace_to_dict(trace)))) == trace
    first, second = trace.devices
    ranks = replace(trace, other_ranks=((replace(first, end=first.end + 1), second),))
    values = json.loads(json.dumps(trace_to_dict(ranks)))
    assert trace_from_dict(values) == ranks
    assert [one.devices for one in ranks.by_rank] == [trace.devices, ranks.other_ranks[0]]
    assert "row" not in values["other_ranks"][0][0] and "other_ranks" not in trace_to_dict(trace)
    for wrong, message in (
        ([[]], r"^other_ranks\[0\] is \[\], expected a list of 2 devices$"),
        ([[{}, {}]], r"^other_ranks\[0\]\[0\]\.passes is missing$"),
        ([values["other_ranks"][0][::-1]], r"^other_ranks\[0\]\[0\]\."),
        ({}, "^other_ranks is {}, expected a list$"),
    ):
        with pytest.raises(InputError, match=message):
            trace_from_dict({**values, "other_ranks": wrong})


def test_allocations_survive_where_they_were_counted() -> None:
    trace = two_devices()
    first, second = trace.devices
    counted = Allocations(5140, 6, 4, 2).since(Allocations(20, 3, 2, 1))
    assert (counted, counted.device_calls) == (Allocations(5120, 3, 2, 1), 5)
    counting = replace(trace, devices=(first, replace(second, allocations=counted)))
    values = json.loads(json.dumps(trace_to_dict(counting)))
    assert trace_from_dict(values) == counting
    first, second = values["devices"]
    assert second["allocations"] == {"requests": 5120, "device_allocations": 3, "device_frees": 2, "retries": 1}
    assert "allocations" not in first  # as on a CPU, and in every file from before they were counted


def test_costs_survive_with_everything_that_they_can_say() -> None:
    costs = Costs(
        F=(1.0, 2.0),
        I=1,
        W=2,
        contention=1.25,
        overlap_slowdown=1.5,
        links={
            "p2p": Link(latency=0.1, bandwidth=5.0, bytes=2.0),
            "F:0>1": Link(latency=0.0),
            "replicas": Link(bandwidth=1.0),
        },
        sharding={"UNSHARD": (1.0, 2.0)},
        memory={"F": 3.0, "B": (-1.0, -2.0)},
        engine={"bandwidth": 2.0, "shared": [[0, 1]]},  # type: ignore[arg-type]
    )
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    assert Costs(F=1, B=2).to_dict() == {"F": 1.0, "B": 2.0}


def _without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values.pop(name)


def _device(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda values: change(values["devices"][1])


def _counts(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """Allocations of a device, with changes; None leaves one out."""
    counts = {"requests": 9, "device_allocations": 1, "device_frees": 0, "retries": 0, **changes}
    return _device(lambda device: device.update(allocations={k: v for k, v in counts.items() if v is not None}))


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another format": (lambda v: v.update(format="chrome"), 'not a trace of evenpipe; those begin with "format"'),
    "a later version": (lambda v: v.update(version=2), "version 2 of the format, but this evenpipe reads version 1"),
    "no devices": (_without("devices"), "devices is missing"),
    "no order": (_device(_without("row")), "row is missing"),
    "a word that is no pass": (_device(lambda d: d.update(row="1F0,9Z9")), "row 2, column 2 .*: '9Z9' is not a pass"),
    "another placement": (lambda v: v.update(placement=[0, 7]), r"placement is \[0, 7\], expected"),
    "text for a number": (lambda v: v.update(microbatches="1"), "microbatches is '1', expected a whole number"),
    "a pass of no row": (_device(lambda d: d["passes"][0].__setitem__(0, "0F0")), "'0F0', which is not a pass of the"),
    "an unknown transfer": (_device(lambda d: d["waits"][0].__setitem__(0, "X9")), "not a transfer of the row"),
    "passes out of order": (_device(lambda d: d["passes"].reverse()), r"are not the passes of devices\[1\].row in the"),
    "a pass left out": (_device(lambda d: d["passes"].pop()), "passes are not the passes of"),
    "a time that is text": (_device(lambda d: d["passes"][0].__setitem__(1, "soon")), "the time 'soon'"),
    "a time that is not finite": (_device(lambda d: d["passes"][0].__setitem__(1, float("nan"))), "the time nan"),
    "an end before its start": (_device(lambda d: d["passes"][0].__setitem__(2, 1.0)), "before its start at 3.0 s"),
    "three of four": (_device(lambda d: d["waits"][0].pop()), "expected a list of a text and 3 more"),
    "no clock": (_device(_without("clock")), r"devices\[1\].clock is None, expected a table"),
    "allocations without a table": (_device(lambda d: d.update(allocations=[9])), r"is \[9\], expected a table"),
    "a count left out": (_counts(retries=None), r"devices\[1\].allocations.retries is missing"),
    "half a call": (_counts(device_frees=0.5), "allocations.device_frees is 0.5, expected a whole number"),
    "fewer calls than none": (_counts(requests=-1), "allocations.requests is -1, expected at least 0"),
    "costs that are none": (lambda v: v.update(costs={"F": -1}), "costs: F must be a finite number"),
}


def test_damage_is_one_sentence_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    for name, (change, message) in DAMAGE.items():
        values = copy.deepcopy(trace_to_dict(two_devices()))
        change(values)
        path.write_text(json.dumps(values), encoding="utf-8")
        with pytest.raises(InputError, match=message) as error:
            read_trace(path)
        assert str(error.value).startswith(str(path)) and "\n" not in str(error.value), name


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(two_devices(), tmp_path / "no" / "step.json")
