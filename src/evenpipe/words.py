"""Numbers, lists, quotations and tables for messages."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

from evenpipe.given import plain

QUOTED = 60
"""Longest quotation, in characters."""


def count(number: float, noun: str, form: str = "") -> str:
    """Return a number with its noun: "1 device", "2 devices", "3 microbatches", "0 entries".

    form: how the number is written, such as "," for "2,000 tokens".
    """
    if number == 1:
        return f"{number:{form}} {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:{form}} {noun[:-1]}ies"
    return f"{number:{form}} {noun}{'es' if noun.endswith(('ch', 'sh', 'ss', 'x')) else 's'}"


def join(words: Sequence[str], most: int = 8) -> str:
    """Return a list in words, "a, b and c"; beyond `most` entries the rest is counted."""
    shown = list(words) if len(words) <= most else [*words[: most - 1], f"{len(words) - most + 1} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


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


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: the nearest known name, and all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0)
    return f", did you mean '{near[0]}'? Accepted: {', '.join(names)}"


def quoted(text: str) -> str:
    """Return `text` in quotation marks, without control characters and shortened."""
    return f"'{plain(text)}'" if len(text) <= QUOTED else f"'{plain(text[: QUOTED - 3])}...'"
