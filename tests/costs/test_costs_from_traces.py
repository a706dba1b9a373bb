"""Costs from traces: where steps ran exactly as some costs say, those costs are found again."""

from __future__ import annotations

import itertools
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_steps import measured, one_device, two_devices

from evenpipe.compare.measured import compare
from evenpipe.costs import BACKWARDS, completed, costs_of, one_by_one, with_backward, write_costs
from evenpipe.costs.cost_file import check_output, costs_to_toml
from evenpipe.costs.links import Size, link_of, with_links
from evenpipe.costs.slice_fit import slice_factors
from evenpipe.errors import InputError
from evenpipe.schedule import (
    SCHEDULES,
    Costs,
    Kind,
    Link,
    Pass,
    Transfer,
    add_communication,
    check_order,
    parts_of,
    plan_order,
    plan_program,
)
from evenpipe.schedule.files import read_costs
from evenpipe.schedule.trace import DeviceTrace, PassTime, Trace, WaitTime

COSTS = Costs(
    F=(3.0, 4.0),
    B=(6.0, 7.0),
    I=(3.0, 3.5),
    W=(2.0, 2.5),
    S=(1.0, 1.25),
    C=(0.25, 0.5),
    T=(0.75, 1.0),
    E=(0.5, 0.25),
    G=(0.25, 0.75),
    p2p=0.125,
    collectives={"broadcast": 0.25, "statistics": 0.125, "reduce": 0.375, "embedding": 0.0625},
)


def trace(schedule: str, mode: str, microbatches: int = 6, costs: Costs = COSTS) -> Trace:
    return measured(plan_program(schedule, 2, microbatches, mode, costs)[1], costs)


def test_pass_times_are_found_again() -> None:
    for schedule, mode, kinds in (
        ("1f1b", "first-last", "FB"),
        ("1f1b", "vocab-2", "FBSCTEG"),
        ("zb-h1", "first-last", "FIW"),
        ("zb-h1", "vocab-2", "FIWSCTEG"),
        ("gpipe", "vocab-1", "FBSTEG"),
    ):
        found = costs_of([trace(schedule, mode)])
        for kind in kinds:
            assert getattr(found, kind) == pytest.approx(getattr(COSTS, kind)), (schedule, mode, kind)
        assert found.contention == 1.0


def test_the_step_is_predicted_as_it_was_measured(sample) -> None:
    """From the means of the trace alone; every pass of it, to the last digit but one."""
    costs = Costs(F=3, B=6, I=3, W=2, S=1, C=0.25, T=0.75, E=0.5, G=0.25, O=4, L=3.5)
    for schedule, mode in sample(itertools.product(SCHEDULES, ("first-last", "vocab-2")), 8):
        comparison = compare(trace(schedule, mode, 4, costs))
        for row, again in zip(comparison.measured.events, comparison.predicted.events, strict=True):
            assert [(e.item, pytest.approx(e.start), pytest.approx(e.end)) for e in row] == [
                (e.item, e.start, e.end) for e in again
            ], (schedule, mode)
        figures = comparison.to_dict()
        assert figures["measured_waiting"] == pytest.approx(figures["predicted_waiting"])


def test_passes_of_a_step_count_on_average_and_steps_in_the_middle() -> None:
    """A step takes as long as all its passes together, slow ones too; a step that was disturbed is not what is asked
    for."""
    steps = [one_device(forwards) for forwards in ([1.0, 1.0, 4.0], [2.5, 2.5, 2.5], [9.0, 9.0, 9.0])]
    assert costs_of(steps[:1]).F == (2.0,)
    assert costs_of(steps).F == (2.5,)
    assert compare(steps[0]).simulation.makespan == pytest.approx(steps[0].timeline().makespan)


def test_transfers_that_a_device_waited_for_are_found_again() -> None:
    found = costs_of([trace("1f1b", "first-last")])
    assert found.p2p == pytest.approx(COSTS.p2p)
    found = costs_of([trace("1f1b", "vocab-2", 2)])
    for name in ("broadcast", "embedding"):
        assert found.collectives[name] == pytest.approx(COSTS.collectives[name]), name


def test_time_between_passes_that_is_no_wait_belongs_to_the_pass_before() -> None:
    found = costs_of([two_devices()])  # device 0 issues for 0.5 s, device 1 for 0.25 s
    assert (found.F, found.B) == ((2.5, 2.25), (2.5, 2.75))


def test_contention_is_told_from_what_passes_take_alone() -> None:
    for factor, devices in itertools.product((1.1, 1.25, 2.0), (2, 4)):
        forwards, backwards = (3.0, 4.0, 3.5, 4.5)[:devices], (6.0, 7.0, 6.5, 8.0)[:devices]
        costs = Costs(F=forwards, B=backwards, contention=factor)
        order = plan_order("1f1b", devices, 8, "first-last", costs)
        alone = measured(add_communication(one_by_one(order), costs), costs)
        busy = measured(add_communication(order, costs), costs)
        found = costs_of([busy], [alone])
        assert found.contention == pytest.approx(factor)
        assert (pytest.approx(costs.F), pytest.approx(costs.B)) == (found.F, found.B)
        assert compare(busy, found).simulation.makespan == pytest.approx(busy.timeline().makespan)


def test_devices_with_cores_of_their_own_do_not_slow_each_other_down() -> None:
    """Four devices on two cores: a forward of 1 and a backward of 3 seconds take no longer beside one other device, 1.5
    times as long beside two, and twice as long beside all."""
    program = add_communication(plan_order("gpipe", 4, 2, "first-last"))
    all_four, three, two = 2.0, 1.5, 1.0
    starts = {  # by kind and microbatch, of every device, and how many times as long it takes there
        (Kind.F, 0): [(0.0, all_four)] * 4,
        (Kind.F, 1): [(3.0, two)] * 2 + [(5.0, two)] * 2,
        (Kind.B, 0): [(10.0, three)] * 3 + [(20.0, 1.0)],
        (Kind.B, 1): [(30.0, all_four)] * 4,
    }
    devices = []
    for device, row in enumerate(program.rows):
        times = []
        for item in row:
            if isinstance(item, Pass):
                start, factor = starts[item.kind, item.microbatch][device]
                times.append(PassTime(item, start, start + factor * {Kind.F: 1.0, Kind.B: 3.0}[item.kind], 0.0))
        times.sort(key=lambda one: one.start)
        moved = next(item for item in row if isinstance(item, Transfer))
        waits = tuple(WaitTime(moved, None, one.end, other.start) for one, other in pairwise(times))
        devices.append(DeviceTrace(0.0, 40.0, tuple(times), waits, ()))
    found = costs_of([Trace(program, tuple(devices))], free=2)
    assert found.contention == 2
    assert (pytest.approx((1.0,) * 4), pytest.approx((3.0,) * 4)) == (found.F, found.B)


def test_orders_to_measure_are_sound_and_have_the_kinds_that_they_are_for(sample) -> None:
    kinds = {"whole": {Kind.B}, "split": {Kind.I, Kind.W}, "recomputed": {Kind.R, Kind.B}}
    backward = {Kind.B, Kind.I, Kind.W, Kind.R}
    for schedule, mode in sample(itertools.product(SCHEDULES, ("first-last", "vocab-1", "vocab-2")), 16):
        order = plan_order(schedule, 2, 4, mode)
        for name in BACKWARDS:
            variant = with_backward(order, name)
            assert check_order(variant).faults == (), (schedule, mode, name)
            assert {item.kind for row in variant.rows for item in row if item} & backward == kinds[name]
            assert with_backward(variant, name) == variant
        alone = one_by_one(order)
        assert check_order(alone).faults == (), (schedule, mode)
        for row, before in zip(alone.rows, order.rows, strict=True):
            parts = [part for item in before if item for part in parts_of(item)]
            assert sorted(map(str, row)) == sorted(map(str, parts))
            microbatches = [item.microbatch for item in row if item and item.microbatch is not None]
            assert microbatches == sorted(microbatches)


TIMES = st.floats(1e-6, 1e3)


@settings(max_examples=30, deadline=None)
@given(stage=st.lists(TIMES, min_size=2, max_size=2), time=TIMES, factor=st.floats(1, 2), size=st.integers(1, 10**9))
def test_a_cost_file_is_read_as_it_was_written(stage: list[float], time: float, factor: float, size: int) -> None:
    costs = Costs(
        F=tuple(stage),
        B=time,
        S=tuple(stage),
        contention=factor,
        collectives={"reduce": time},
        links={"p2p": Link(latency=time, bandwidth=time, bytes=size), "F:0>1": Link(latency=time)},
        memory={"F": time, "B": -time},
    )
    found = Costs.from_dict(tomllib.loads(costs_to_toml(costs, ["measured\nhere"])))
    assert (pytest.approx(costs.F, rel=1e-5), pytest.approx(costs.B, rel=1e-5)) == (found.F, found.B)
    assert found.contention == pytest.approx(costs.contention, rel=1e-5)
    assert found.links["p2p"].time == pytest.approx(costs.links["p2p"].time, rel=1e-4)
    assert found.memory == {"F": pytest.approx(time, rel=1e-5), "B": pytest.approx(-time, rel=1e-5)}


def test_a_cost_file_on_disk(tmp_path: Path) -> None:
    write_costs(costs_of([two_devices()]), tmp_path / "costs.toml", ["one line"])
    assert (tmp_path / "costs.toml").read_text().startswith("# one line\nF = [2.5, 2.25]\n")
    assert read_costs(tmp_path / "costs.toml") == costs_of([two_devices()])
    with pytest.raises(InputError, match="cannot be written"):
        write_costs(COSTS, tmp_path / "no" / "costs.toml")
    with pytest.raises(InputError, match=r"must end in \.toml"):
        check_output(tmp_path / "costs.json")
    with pytest.raises(InputError, match="there is no folder"):
        check_output(tmp_path / "no" / "costs.toml")


def test_two_sizes_tell_latency_from_bandwidth() -> None:
    expected = {
        (0.3, 0.2): (0.1, 1000.0),  # 100 bytes more take 0.1 s more
        (0.3, 0.1): (0.0, 200 / 0.3),  # more than in proportion: no latency
        (0.3, 0.295): None,  # lost in noise
        (0.3, 0.4): None,
        (0.3, 0.0): None,  # not measured
    }
    for (time, other), figures in expected.items():
        link = link_of(time, other, Size(200.0, 100.0))
        assert (link is None) == (figures is None), (time, other)
        if link is not None:
            assert (link.latency, link.bandwidth) == pytest.approx(figures, abs=1e-12)
            assert link.bytes == 200.0 and link.time == pytest.approx(time)


def test_links_take_the_place_of_durations() -> None:
    costs = Costs(F=1, B=2, p2p=0.3, collectives={"reduce": 0.3, "statistics": 0.1})
    other = Costs(F=1, B=2, p2p=0.2, collectives={"reduce": 0.3})
    found = with_links(costs, other, {"p2p": Size(200, 100), "reduce": Size(200, 100)})
    assert found.p2p == 0.0 and found.links["p2p"].time == pytest.approx(0.3)
    assert found.collectives == {"reduce": 0.3, "statistics": 0.1}


def test_a_weight_gradient_that_is_split_off_runs_behind_the_next_backward() -> None:
    variant = with_backward(plan_order("1f1b", 2, 3, "first-last"), "split")
    assert [str(item) for item in variant.passes(1)] == ["1F0", "1I0", "1F1", "1I1", "1W0", "1F2", "1I2", "1W1", "1W2"]


def test_passes_of_a_microbatch_take_what_they_took() -> None:
    for own, other, expected in (
        (Costs(F=[2, 2], B=[4, 5]), Costs(F=[3, 2], I=[2, 2], W=[1, 1]), {"B": [4, 5], "I": [3, 2], "W": [1, 1]}),
        (Costs(F=[2], I=[2], W=[1]), Costs(F=[1], B=[4]), {"I": [2], "W": [1], "B": [3]}),
        (Costs(F=[2], B=[4]), Costs(F=[1.5], B=[4], R=[2]), {"B": [4], "R": [1.5]}),
        (Costs(F=[9], B=[4]), Costs(F=[1], B=[4], R=[2]), {"B": [4], "R": [1]}),
        (Costs(F=[2], B=[4]), Costs(F=[3], B=[5]), {"B": [4]}),
    ):
        assert completed(own, other) == Costs(F=own.F, **expected)


def test_what_gives_no_costs_is_refused() -> None:
    with pytest.raises(InputError, match="there is no trace"):
        costs_of([])
    with pytest.raises(InputError, match="different placements"):
        costs_of([two_devices(), trace("zbv", "first-last", 4, Costs(F=1, B=2, I=1, W=1))])
    with pytest.raises(InputError, match='backward is "half"; it must be one of whole, split, recomputed'):
        with_backward(plan_order("1f1b", 2, 2, "first-last"), "half")


# --- slices ----------------------------------------------------------------------------------------------------------


def test_factors_of_measured_slices() -> None:
    """Of 1f1b with two slices, whose passes take these times, one after the other."""
    seconds = {Kind.F: (1.0, 3.0), Kind.B: (3.0, 5.0), Kind.S: (3.0, 1.0)}
    _, program = plan_program("1f1b", 1, 2, "vocab-2", slices=2)
    clock, passes = 0.0, []
    for item in program.order.passes(0):
        passes.append(PassTime(item, clock, clock + seconds.get(item.kind, (0.5, 0.5))[item.slice], 0.0))
        clock = passes[-1].end
    measured = Trace(program, (DeviceTrace(0.0, clock, tuple(passes), (), ()),))
    found = slice_factors([measured])
    assert found == {"F": (0.5, 1.5), "B": (0.75, 1.25), "tokens": (1.5, 0.5)}
    assert slice_factors([measured], [48, 16]) == found
    assert slice_factors([measured], [16, 48])["tokens"] == (0.5, 1.5)
    own = Costs(F=(2.0,), B=(4.0,), slices={"F": (0.5, 1.5), "tokens": (1.0, 1.0)})
    other = Costs(F=(2.0,), I=(2.0,), W=(2.0,), slices={"F": (0.7, 1.3), "I": (0.2, 1.8)})
    assert completed(own, other).slices == {"F": (0.5, 1.5), "I": (0.2, 1.8), "tokens": (1.0, 1.0)}
