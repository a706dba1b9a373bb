"""Printing on standard output, and progress on standard error."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from evenpipe.given import plain, plain_lines

if TYPE_CHECKING:
    from evenpipe.compare.case_report import CaseTable

EVERY_SECONDS = 60.0
"""Time between two progress lines if stderr is not a terminal."""


def say(text: str, end: str = "\n") -> None:
    """Print text for people, with control characters from names and generated text escaped."""
    print(plain_lines(text), end=end, flush=True)


def say_json(values: Mapping[str, Any]) -> None:
    """Print one JSON object for programs."""
    print(json.dumps(values), flush=True)


def say_report(report: Any, *, as_json: bool) -> None:
    """Print a report that has both forms: `text()` for people, `to_dict()` for programs."""
    if as_json:
        say_json(report.to_dict())
    else:
        say(report.text())


def say_table(table: CaseTable) -> None:
    """Print a table: with rules and colours on a terminal, and as aligned plain text elsewhere."""
    if not sys.stdout.isatty():
        say(table.text())
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    say("\n".join(table.above))
    shown = Table(box=SIMPLE_HEAD)
    for column, name in enumerate(table.head):
        is_word = column < table.left or not name
        shown.add_column(Text(name), justify="left" if is_word else "right", no_wrap=is_word)
    for row in table.rows:  # Text, since names of files may have brackets, which would be markup
        shown.add_row(*(Text(plain(word)) for word in row), style="bold" if row[-1] else "")
    Console(file=sys.stdout, highlight=False).print(shown)


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A function that shows progress on stderr: on a terminal in one line that is removed at the end, elsewhere
    in a line per minute."""
    last, terminal = time.monotonic(), sys.stderr.isatty()

    def show(text: str) -> None:
        nonlocal last
        if terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{plain(text)[:width]}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - last >= EVERY_SECONDS:
            last = time.monotonic()
            print(plain(text), file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
