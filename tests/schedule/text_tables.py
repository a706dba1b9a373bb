"""Orders and tables of cases as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from evenpipe.schedule import Order


def order_of(text: str, **given: Any) -> Order:
    """Of the rows of all devices, with a bar between them, and spaces or commas between passes."""
    return Order.from_csv(text.replace(" ", ",").replace("|", "\n"), **given)


def cases(table: str) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """The cases of a text: a line each, with options as JSON behind a semicolon, and indented lines below it.

    Lines that begin with # are comments.
    """
    table = "\n".join(line for line in table.split("\n") if not line.startswith("# "))
    for case in re.split(r"\n(?! )", table.strip("\n")):
        first, *below = case.split("\n    ")
        words, _, options = first.partition(" ; ")
        yield words, json.loads(options or "{}"), below
