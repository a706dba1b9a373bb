"""Numbers, lists, quotations and tables for messages, and the sentence about a value that is not accepted."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from evenpipe.errors import InputError
from evenpipe.given import plain, shortened, shown

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


def seconds_text(seconds: float) -> str:
    """Return a time in words, such as "4.03 s", "131.40 ms" or "12 us"; "-" for infinity."""
    if math.isinf(seconds):
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


def join(words: Sequence[str], limit: int = 8) -> str:
    """Return a list in words, "a, b and c", of at most `limit` entries; the last one counts omitted words."""
    shown = list(words) if len(words) <= limit else [*words[: limit - 1], f"{len(words) - limit + 1} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return rows of words in aligned columns: columns in `left` to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            word.ljust(width) if column in left else word.rjust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def show(value: Any) -> str:
    """A value in TOML syntax, without control characters, shortened if it is long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{shortened(plain(value))}"'
    if isinstance(value, (list, tuple)):
        return shortened("[" + ", ".join(show(item) for item in value) + "]")
    if value is None:
        return "none"
    if isinstance(value, (int, dict)):
        return shown(value)
    return shortened(plain(value))


def refused(where: str, value: Any, accepted: str) -> InputError:
    """The error about a value that is not accepted."""
    return InputError(f"{where} is {show(value)}; it must be {accepted}")


def unknown(where: str, value: Any, known: Iterable[Any]) -> InputError:
    """The error about a value that is not among the known ones; it proposes the nearest one."""
    names = [str(name) for name in known]
    return refused(where, value, f"one of {', '.join(names)}{nearest(str(value), names)}")


RENAMED = {
    "replicas": "dp",
    "context_parallel": "cp",
    "tensor_parallel": "tp",
    "expert_parallel": "ep",
    "memory_limit": "max_in_flight",
    "checkpointing": "activation_checkpointing",
    "clip_gradients": "clip_grad_norm_",
}
"""Old name of an option or method -> current name."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: its current name, `; did you mean "..."?`, or "" if no known name is
    similar."""
    known = list(known)
    if (current := RENAMED.get(name)) in known:
        return f"; {name} is {current} now"
    names = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(shortened(name).lower(), list(names), n=1, cutoff=0.5)
    return f'; did you mean "{names[close[0]]}"?' if close else ""


def quoted(text: str) -> str:
    """Return `text` in quotation marks, without control characters and shortened."""
    return f"'{plain(text)}'" if len(text) <= QUOTED else f"'{plain(text[: QUOTED - 3])}...'"
