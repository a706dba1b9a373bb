"""Compare a measured step with the predicted step of the same program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenpipe.costs import costs_of
from evenpipe.given import plain, shortened
from evenpipe.schedule import Costs, Event, Timeline
from evenpipe.schedule.trace import Trace
from evenpipe.simulate import Simulation, simulate
from evenpipe.words import count


@dataclass(frozen=True)
class Comparison:
    """A trace and the simulation of its program. Times of both are in seconds."""

    trace: Trace
    simulation: Simulation
    unit_seconds: float
    """Time unit of the costs of the simulation, in seconds."""

    @property
    def timelines(self) -> Mapping[str, Timeline]:
        """Return both by name, the measured timeline first; with tensor ranks, there is one for each rank."""
        measured = [trace.timeline() for trace in self.trace.by_rank]
        if len(measured) == 1:
            return {"measured": self.measured, "predicted": self.predicted}
        by_name = {f"measured, tensor rank {rank}": timeline for rank, timeline in enumerate(measured)}
        return {**by_name, "predicted": self.predicted}

    @property
    def measured(self) -> Timeline:
        return self.trace.timeline()

    @property
    def predicted(self) -> Timeline:
        """Return the predicted step, in seconds."""
        timeline, unit = self.simulation.timeline_with_slack, self.unit_seconds
        return timeline if unit == 1 else scaled(timeline, unit)

    @property
    def title(self) -> str:
        """Return the schedule, its vocabulary mode and its size, as far as the trace knows them."""
        about, program = self.trace.about, self.trace.program
        names = [shortened(plain(about[key])) for key in ("schedule", "vocabulary") if about.get(key)]
        step = [f"step {shortened(plain(about['step']))}"] if "step" in about else []
        ranks = 1 + len(self.trace.other_ranks)
        devices = count(program.devices, "device") + (f" of {ranks} tensor ranks" if ranks > 1 else "")
        size = [devices, count(program.microbatches, "microbatch")]
        return ", ".join([" + ".join(names), *size, *step] if names else [*size, *step])

    @property
    def allocations(self) -> str:
        """Return a line that says how often devices requested memory from the driver, summed over the tensor ranks of
        each; empty if this was not counted, as on a CPU."""
        by_device = zip(*(trace.devices for trace in self.trace.by_rank), strict=True)
        counted = [[device.allocations for device in ranks if device.allocations is not None] for ranks in by_device]
        if not any(counted):
            return ""
        calls = " ".join(str(sum(device.device_calls for device in ranks)) if ranks else "-" for ranks in counted)
        return f"calls of the CUDA driver for memory in the step, per device: {calls}"

    def to_dict(self) -> dict[str, Any]:
        """Return the step and idle times of both, in seconds; lists are per device."""
        measured, predicted = self.measured, self.predicted
        return {
            "measured": measured.makespan,
            "predicted": predicted.makespan,
            "measured_waiting": [sum(row.values()) for row in self.trace.waiting],
            "predicted_waiting": [predicted.makespan - busy for busy in predicted.busy],
        }


def compare(trace: Trace, costs: Costs | None = None, *, unit_seconds: float = 1.0) -> Comparison:
    """Simulate the program of `trace`.

    costs: by default those of the trace itself. unit_seconds: time unit of `costs`. Raises InputError if they lack a
    kind of pass of the program.
    """
    if costs is None:
        costs, unit_seconds = costs_of([trace]), 1.0
    return Comparison(trace, simulate(trace.program, costs), unit_seconds)


def scaled(timeline: Timeline, factor: float) -> Timeline:
    """Return `timeline` in another unit of time."""

    def row(events: tuple[Event, ...]) -> tuple[Event, ...]:
        return tuple(map(in_other_unit, events))

    def in_other_unit(event: Event) -> Event:
        slack = event.slack and event.slack._replace(time=event.slack.time * factor)
        return event._replace(start=event.start * factor, end=event.end * factor, slack=slack)

    memory = timeline.memory
    return Timeline(
        tuple(row(events) for events in timeline.events),
        timeline.stage_bytes,
        tuple(row(events) for events in timeline.concurrent),
        None if memory is None else tuple(tuple((time * factor, size) for time, size in curve) for curve in memory),
        exchange={kind: tuple(time * factor for time in times) for kind, times in timeline.exchange.items()},
        token_factors=timeline.token_factors,
    )
