"""Faults with excerpts of the rows around them, and the report of a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evenpipe.errors import InputError
from evenpipe.words import count

from .passes import Item, Pass, Rows

SHOWN = 20
"""Most faults in an error message; a report has all of them."""
ROWS = 8
"""Most devices whose rows a message shows."""
AROUND = 4
"""Passes shown on either side of the marked one."""
PARTS = 4
"""Most parts shown of a joint pass."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, on `device`, at `position` of its row (from 0; None if something is missing).

    `rows` shows the passes around it, one line per device.
    """

    device: int
    position: int | None
    message: str
    rows: str = ""

    def __str__(self) -> str:
        location = (
            f"device {self.device}" if self.position is None else f"device {self.device}, position {self.position}"
        )
        return f"{location}: {self.message}" + (f"\n{self.rows}" if self.rows else "")


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


def excerpt(rows: Rows, marks: Mapping[int, int]) -> str:
    """One line for each of the first devices in `marks` (device -> position): the marked pass in brackets, and the
    passes around it.

    As in "  device 1: ... 1F1 1B0 [1F2] 1B1 ..."; an idle slot is a dot, [end] comes after the last pass.
    """
    lines = []
    for device in sorted(marks)[:ROWS]:
        row, position = rows[device], marks[device]
        start, stop = max(0, position - AROUND), min(len(row), position + AROUND + 1)
        words = [brief(row[index]) for index in range(start, stop)]
        if position < len(row):
            words[position - start] = f"[{words[position - start]}]"
        else:
            words.append("[end]")
        lines.append(
            f"  device {device}: {'... ' if start else ''}{' '.join(words)}{' ...' if stop < len(row) else ''}"
        )
    return "\n".join(lines)


def neighbours(rows: Rows, device: int, position: int) -> str:
    """The excerpt of a device and its neighbours, around one position."""
    return excerpt(rows, {near: position for near in (device - 1, device, device + 1) if 0 <= near < len(rows)})


def brief(item: Item | None) -> str:
    """The text of an item: a dot for an idle slot, and only the first parts of a joint pass with many parts."""
    if isinstance(item, Pass) and len(item.parts) > PARTS:
        return f"({';'.join(map(str, item.parts[:PARTS]))};...{len(item.parts) - PARTS} more){item.kind.value}"
    return "." if item is None else str(item)
