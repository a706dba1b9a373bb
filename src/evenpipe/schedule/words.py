"""Format numbers, lists, quotations and tables for messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from evenpipe.given import plain
from evenpipe.words import count, join

__all__ = ["QUOTED", "count", "join", "quoted", "table"]

QUOTED = 60
"""Longest quotation, in characters."""


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return rows of words in aligned columns: those in `left` to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            word.ljust(width) if column in left else word.rjust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def quoted(text: str) -> str:
    """Return `text` in quotation marks, without control characters and shortened."""
    return f"'{plain(text)}'" if len(text) <= QUOTED else f"'{plain(text[: QUOTED - 3])}...'"
