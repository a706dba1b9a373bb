"""Check the schedule in a file, for the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenpipe.words import count

from .check import check_order, check_program
from .check_limit import Limits
from .costs import Costs, PassTimes
from .faults import Fault
from .files import read_schedule
from .held import peak_activations
from .order import Order
from .passes import Pass, parts_of
from .placement import Edge
from .program import Program

SHOWN = 1000
"""Most faults in the text report; JSON has all of them."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """The result of checking `schedule`; `in_flight` and `peak_bytes` are per device, the latter None without bytes."""

    schedule: Order | Program
    faults: tuple[Fault, ...]
    in_flight: tuple[int, ...]
    peak_bytes: tuple[float, ...] | None

    @property
    def sound(self) -> bool:
        """Whether there are no faults."""
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict for JSON."""
        return {
            "sound": self.sound,
            "faults": [
                {"device": fault.device, "position": fault.position, "message": fault.message, "rows": fault.rows}
                for fault in self.faults
            ],
            "transfers": isinstance(self.schedule, Program),
            "devices": self.schedule.devices,
            "microbatches": self.schedule.microbatches,
            "slices": self.schedule.slices,
            "stage_device": list(self.schedule.placement.stage_device),
            "edges": list(map(list, self.schedule.placement.edges)),
            "vocabulary": self.schedule.vocabulary.value,
            "peak_in_flight": list(self.in_flight),
            "peak_bytes": None if self.peak_bytes is None else list(self.peak_bytes),
        }

    def text(self) -> str:
        """The report as text: up to `SHOWN` faults, with the rows around them, or a description of the order."""
        if not self.sound:
            lines = [count(len(self.faults), "fault"), *map(str, self.faults[:SHOWN])]
            hidden = len(self.faults) - SHOWN
            return "\n".join([*lines, f"and {hidden} more; --json lists all"] if hidden > 0 else lines)
        description = "a program with transfers" if isinstance(self.schedule, Program) else "an order"
        if self.schedule.forward_only:
            description += ", for evaluation,"
        placement = self.schedule.placement
        devices = " ".join(map(str, placement.stage_device))
        cut = "" if self.schedule.slices == 1 else f" of {count(self.schedule.slices, 'slice')}"
        lines = [
            f"sound: {description} of {count(placement.devices, 'device')} and "
            f"{count(self.schedule.microbatches, 'microbatch')}{cut}",
            f"{'device of stage 0' if placement.stages == 1 else f'devices of stages 0 to {placement.last_stage}'}: "
            f"{devices}",
            f"most stage activations in flight, per device: {' '.join(map(str, self.in_flight))}",
        ]
        if self.schedule.vocabulary.sharded:
            lines.append(f"vocabulary passes: {self.schedule.vocabulary}")
        if self.peak_bytes is not None:
            lines.append(f"most bytes of activations, per device: {' '.join(f'{peak:g}' for peak in self.peak_bytes)}")
        return "\n".join(lines)


def check_file(
    path: str | Path,
    costs: Costs | None = None,
    max_in_flight: float | Sequence[float] | None = None,
    bytes_limit: float | Sequence[float] | None = None,
    *,
    edges: Sequence[Edge] = (),
) -> FileReport:
    """Every fault of the order or program in a CSV file.

    edges: of the stages; a chain by default. max_in_flight: most stage activations per device. bytes_limit: most bytes,
    with the sizes of `costs`. Raises InputError if the file contains no schedule, if `costs` have lists of the wrong
    length or lack a kind that a sound schedule has, and for a limit in bytes without costs that have bytes.
    """
    schedule = read_schedule(path, edges)
    limits = Limits(activations=max_in_flight, bytes=bytes_limit, costs=costs)
    order, peak_bytes = schedule.order, None
    report = check_program(schedule, limits) if isinstance(schedule, Program) else check_order(schedule, limits)
    if costs is not None:
        times, sizes = PassTimes(costs, order.placement, order.slices), costs.stage_bytes(order.placement)
        if report.ok:
            for device in range(order.devices):
                for item in order.passes(device):
                    times.of(item, device)
        if sizes is not None:
            rows = (_known(order, device) for device in range(order.devices))
            peak_bytes = tuple(peak_activations(row, sizes, costs.token_factors) for row in rows)
    return FileReport(schedule, report.faults, report.in_flight, peak_bytes)


def _known(order: Order, device: int) -> Iterator[Pass]:
    """The passes of a device whose stages exist."""
    for item in order.passes(device):
        if all(component.stage is None or component.stage < order.placement.stages for component in parts_of(item)):
            yield item
