"""A simulated step: its timeline, and the figures derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evenpipe.schedule import Costs, Order, Program, Timeline, add_communication, check_program
from evenpipe.schedule.collection import collecting_rarely

from .bounds import Bound, program_bounds
from .critical_path import CriticalPath, critical_path
from .loop import TRANSFER, Loop
from .slack import slacks
from .timeline import timeline_of
from .work import COPIES, Work

END = "end"
"""The key of the wait after the last pass."""


@dataclass(frozen=True)
class Simulation:
    """One step of `program` under `costs`. Times are in the unit of the costs.

    waiting: per device, idle time by what the next pass waited for: the kind of a transfer as the device issues it, O
        or L for a copy, "end" after the last pass. Together with `timeline.busy` it adds up to the makespan.
    slowed: per device, the busy time lost to concurrent collectives and to the compute of other devices.
    """

    program: Program
    costs: Costs
    timeline: Timeline
    critical_path: CriticalPath
    waiting: tuple[dict[str, float], ...]
    slowed: tuple[float, ...]

    @property
    def span(self) -> float:
        """The longest time of any device from its first start to its last end."""
        return self.timeline.span

    @property
    def makespan(self) -> float:
        """The duration of the step, over all devices."""
        return self.timeline.makespan

    @property
    def bubble_rate(self) -> float:
        """Idle time over span, on the device with the longest span."""
        return self.timeline.bubble_rate

    @cached_property
    def timeline_with_slack(self) -> Timeline:
        """`timeline` with the slack of its events. The step is simulated again, so that only pictures pay for it."""
        work, loop = _run(self.program, self.costs)
        return timeline_of(self.program, self.costs, work, loop, slacks(work, loop, self.costs.engine))

    @cached_property
    def bounds(self) -> dict[str, Bound]:
        """The best lower bounds on "span" and "makespan": no order with the same kinds of pass and no more stage
        activations in flight on any device is shorter. If activations are copied to the host, bounds ignore memory."""
        return program_bounds(self.program, self.costs, self.timeline.peak_in_flight)

    def to_dict(self) -> dict[str, Any]:
        """All figures for JSON. Lists are per device."""
        timeline = self.timeline
        return {
            **timeline.to_dict(),
            "microbatches": self.program.microbatches,
            "slices": self.program.slices,
            "stages": self.program.placement.stages,
            "busy_by_kind": [{kind.value: time for kind, time in row.items()} for row in timeline.busy_by_kind],
            "waiting": list(self.waiting),
            "slowed": list(self.slowed),
            "peak_bytes": None if timeline.peak_bytes is None else list(timeline.peak_bytes),
            "critical_path": self.critical_path.to_dict(timeline.devices),
            "bounds": {of: bound.to_dict() for of, bound in self.bounds.items()},
        }


@collecting_rarely()
def simulate(schedule: Program | Order, costs: Costs) -> Simulation:
    """Simulate one step in the full model.

    For an order, communication is first planned with the same costs; a program should have passed `check_program`.
    Raises InputError if the program cannot complete (listing every fault), and if `costs` lack a kind that it needs.
    """
    program = add_communication(schedule, costs) if isinstance(schedule, Order) else schedule
    work, loop = _run(program, costs)
    timeline = timeline_of(program, costs, work, loop)
    waiting, slowed = _idle(work, loop, timeline.makespan)
    return Simulation(program, costs, timeline, critical_path(work, loop), waiting, slowed)


@collecting_rarely()
def makespan(program: Program, costs: Costs) -> float:
    """`simulate(program, costs).makespan`, without a timeline. Errors as of `simulate`."""
    work, loop = _run(program, costs)
    of_passes = (n for row in work.rows for n in row if not work.numbered.is_transfer(n))
    steps = [n for n in of_passes if work.overlapped.get(n) not in COPIES]
    return max(loop.end[n] for n in steps) - min(loop.start[n] for n in steps)


def _run(program: Program, costs: Costs) -> tuple[Work, Loop]:
    costs.check_devices(program.placement)
    work = Work(program, costs)
    loop = Loop(work, costs.overlap_slowdown, costs.engine, costs.contention)
    if not loop.run():
        check_program(program).raise_if_faulty()
        raise AssertionError("a sound program does not complete")
    return work, loop


def _idle(work: Work, loop: Loop, makespan: float) -> tuple[tuple[dict[str, float], ...], tuple[float, ...]]:
    """`waiting` and `slowed` of a simulation."""
    waiting, slowed = [], []
    for device, row in enumerate(work.rows):
        waits: dict[str, float] = {}
        clock = lost = 0.0
        for n in row:
            if n in work.overlapped or work.numbered.is_transfer(n):
                continue
            if loop.start[n] > clock:
                assert loop.why[n] == TRANSFER
                kind = work.numbered.item(loop.who[n], device).kind.value
                waits[kind] = waits.get(kind, 0.0) + loop.start[n] - clock
            clock = loop.end[n]
            lost += (clock - loop.start[n] - work.takes[n]) if max(loop.slowdown, loop.contention) > 1 else 0.0
        if makespan > clock:
            waits[END] = makespan - clock
        waiting.append(waits)
        slowed.append(lost)
    return tuple(waiting), tuple(slowed)
