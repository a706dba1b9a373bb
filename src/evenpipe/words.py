"""Numbers and lists in the words of messages."""

from __future__ import annotations

from collections.abc import Sequence


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
