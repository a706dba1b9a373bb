"""Random orders with random budgets for offload: what every plan must hold.

    python tests/schedule/offload_builds.py 2000

| what                     | must hold                                                                              |
|--------------------------|----------------------------------------------------------------------------------------|
| the order                | passes the checker; without its copies it is the order that was given                  |
| with a limit             | no device holds more, or the plan says by how much                                     |
| bytes that it tells      | are those of the simulator                                                             |
| without forcing          | the step is at most 2 % longer than with everything on the device                      |
| a host limit             | is kept, from when a copy begins to when it is back                                    |
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import (
    MODES,
    SCHEDULES,
    CopyEngine,
    Costs,
    Kind,
    Order,
    add_communication,
    add_recompute,
    check_order,
    check_program,
    generate,
    plan_offload,
    plan_order,
    without_offload,
)
from evenpipe.schedule.registry import options_of
from evenpipe.simulate import Simulation, simulate

SLOWER = 0.02
"""By which a step may be longer where no memory forces it."""


def random_build(seed: int) -> tuple[Order, Costs, dict[str, Any]] | None:
    """An order without copies, costs, and arguments of `plan_offload`; None where a schedule is not so large."""
    chance = random.Random(seed)
    name = chance.choice(list(SCHEDULES))
    devices = chance.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16])
    microbatches = chance.randint(1, max(2, 40 // devices) + devices)
    options = {"stages_per_device": chance.randint(1, 4)} if "stages_per_device" in options_of(name) else {}
    mode = chance.choice(MODES)
    try:
        placement = generate(name, devices, microbatches, **options).placement
    except InputError:
        return None
    even = chance.random() < 0.4

    def times(count: int) -> tuple[float, ...]:
        return tuple(1.0 if even else chance.uniform(0.5, 2.0) for _ in range(count))

    k = chance.choice([0.1, 0.25, 0.5, 0.8, 1.0, 1.3, 2.0, 4.0])
    forward, inputs, weights = (times(placement.stages) for _ in range(3))
    one_way = tuple(k * (f + i + w) / 2 for f, i, w in zip(forward, inputs, weights, strict=True))
    size = max(2, devices // chance.choice([1, 2, 4]))
    groups = tuple(tuple(range(first, min(devices, first + size))) for first in range(0, devices, size))
    costs = Costs(
        F=forward,
        I=inputs,
        W=weights,
        **{name: tuple(0.3 * time for time in times(devices)) for name in "STEG"},
        O=one_way,
        L=one_way,
        p2p=chance.choice([0.0, 0.1]),
        bytes=tuple(float(round(8 * time)) for time in times(placement.stages)),
        engine=CopyEngine(streams=chance.choice([1, 2]), shared=chance.choice([(), groups])),
    )
    order = plan_order(name, devices, microbatches, mode, costs, offload="none", **options)
    if chance.random() < 0.2:
        order = add_recompute(order)
        costs = with_recompute(costs)
    given: dict[str, Any] = {}
    if chance.random() < 0.5:
        peaks = simulate(order, costs).timeline.peak_bytes
        assert peaks is not None
        given["limit"] = [max(1.0, chance.uniform(0.1, 1.1) * peak) for peak in peaks]
    elif chance.random() < 0.2:
        given["allow_stalls"] = True
    if chance.random() < 0.3:
        given["host_limit"] = chance.uniform(1, 6) * max(costs.bytes)  # type: ignore[arg-type, type-var]
    return order, costs, given


def with_recompute(costs: Costs) -> Costs:
    """A forward keeps a tenth, R makes the rest; copies move the tenth."""
    sizes = costs.bytes
    assert isinstance(sizes, tuple)
    tenth, rest = tuple(size / 10 for size in sizes), tuple(size * 0.9 for size in sizes)
    lost = tuple(-size for size in sizes)
    deltas = {"F": tenth, "R": rest, "B": lost, "W": lost, "D": tuple(-size for size in tenth), "L": tenth}
    return replace(costs, memory=deltas)


def check_build(seed: int) -> str:
    """Raises AssertionError; what came of it, in a word."""
    build = random_build(seed)
    if build is None:
        return "refused"
    order, costs, given = build
    plan = plan_offload(order, costs, **given)
    check_order(plan.order).raise_if_faulty()
    check_program(add_communication(plan.order, costs)).raise_if_faulty()
    assert without_offload(plan.order) == order
    before, after = simulate(order, costs), simulate(plan.order, costs)
    peaks = after.timeline.peak_bytes
    assert peaks is not None
    assert plan.peak_bytes == pytest.approx(peaks)
    assert all(most <= was * (1 + 1e-9) for most, was in zip(peaks, before.timeline.peak_bytes or (), strict=True))
    forced = given.get("allow_stalls", False)
    if "limit" in given:
        for most, limit, over in zip(peaks, given["limit"], plan.over, strict=True):
            assert most <= limit + over + 1e-6
        free = plan_offload(order, costs, **{**given, "limit": None})
        assert free.peak_bytes is not None
        forced = any(low > limit * (1 + 1e-9) for low, limit in zip(free.peak_bytes, given["limit"], strict=True))
    if not forced:
        assert after.makespan <= before.makespan * (1 + SLOWER), (after.makespan, before.makespan)
    if "host_limit" in given:
        assert max(on_host(after, costs)) <= given["host_limit"] * (1 + 1e-9) or forced
    return "forced" if forced else "moved" if sum(plan.moved) else "kept"


def on_host(simulation: Simulation, costs: Costs) -> list[float]:
    """The most bytes of each device on the host, from the start of a copy there to the end of that back."""
    sizes = costs.memory_deltas(simulation.program.placement)
    assert sizes is not None
    most = []
    for row in simulation.timeline.concurrent:
        changes = []
        for event in row:
            if event.item.kind in (Kind.O, Kind.L):
                assert event.item.stage is not None
                size = sizes[Kind.L][event.item.stage]
                changes.append((event.start, 1, size) if event.item.kind is Kind.O else (event.end, 0, -size))
        held, peak = 0.0, 0.0
        for _, _, size in sorted(changes):
            held += size
            peak = max(peak, held)
        most.append(peak)
    return most


if __name__ == "__main__":
    found: dict[str, int] = {}
    for number in range(int(sys.argv[1])):
        try:
            came = check_build(number)
        except BaseException:
            print("seed", number)
            raise
        found[came] = found.get(came, 0) + 1
    print(found)
