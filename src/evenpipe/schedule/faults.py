"""Faults, and the report of a check."""

from __future__ import annotations

from dataclasses import dataclass

from evenpipe.errors import InputError

from .words import count

SHOWN = 20
"""Most faults in the message of an error; a report has all."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, on `device`, at `position` of its row (from 0; None if something is missing).

    `rows` shows the passes around it, one line per device.
    """

    device: int
    position: int | None
    what: str
    rows: str = ""

    def __str__(self) -> str:
        place = f"device {self.device}" if self.position is None else f"device {self.device}, position {self.position}"
        return f"{place}: {self.what}" + (f"\n{self.rows}" if self.rows else "")


@dataclass(frozen=True, slots=True)
class Report:
    """All faults of an order or program, and the most stage activations in flight on each device."""

    faults: tuple[Fault, ...]
    in_flight: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no faults."""
        return not self.faults

    def raise_if_faulty(self) -> None:
        """Raise InputError that lists the faults, if there are any."""
        if self.ok:
            return
        lines = [f"the schedule has {count(len(self.faults), 'fault')}"]
        lines += [str(fault) for fault in self.faults[:SHOWN]]
        if len(self.faults) > SHOWN:
            lines.append(f"and {len(self.faults) - SHOWN} more")
        raise InputError("\n".join(lines))
