"""The rows of a schedule around a fault, for error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .passes import Item, Pass

AROUND = 4
"""Passes shown on either side of the marked one."""

PARTS = 4
"""Most parts shown of passes that run as one."""


def excerpt(rows: Sequence[Sequence[Item | None]], marks: Mapping[int, int]) -> str:
    """Return one line per device of `marks` (device -> position), with the passes around the marked one, in brackets.

    As in "  device 1: ... 1F1 1B0 [1F2] 1B1 ..."; an idle slot is a dot, [end] comes after the last pass.
    """
    lines = []
    for device in sorted(marks):
        row, position = rows[device], marks[device]
        start, stop = max(0, position - AROUND), min(len(row), position + AROUND + 1)
        words = [_word(row[index], index == position) for index in range(start, stop)]
        if position >= len(row):
            words.append("[end]")
        lines.append(
            f"  device {device}: {'... ' if start else ''}{' '.join(words)}{' ...' if stop < len(row) else ''}"
        )
    return "\n".join(lines)


def neighbours(rows: Sequence[Sequence[Item | None]], device: int, position: int) -> str:
    """Return the excerpt of a device and its neighbours, around one position."""
    return excerpt(rows, {near: position for near in (device - 1, device, device + 1) if 0 <= near < len(rows)})


def brief(item: Item | None) -> str:
    """Return the text of an item: a dot for an idle slot, and only the first parts of many passes that run as one."""
    if isinstance(item, Pass) and len(item.parts) > PARTS:
        return f"({';'.join(map(str, item.parts[:PARTS]))};...{len(item.parts) - PARTS} more){item.kind.value}"
    return "." if item is None else str(item)


def _word(item: Item | None, marked: bool) -> str:
    text = brief(item)
    return f"[{text}]" if marked else text
