"""Pictures in files: the suffix of the name says which kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from evenpipe.errors import InputError
from evenpipe.given import plain, write_text

from .page import page
from .panel import Timelines
from .svg import svg
from .trace import trace

EXTENSIONS = (".html", ".json", ".svg")
"""A page to explore, a trace for Perfetto, a picture."""


def draw(
    timelines: Timelines,
    file: str | Path,
    *,
    title: str = "",
    memory: bool = False,
    waits: bool = False,
    unit_seconds: float | None = None,
) -> None:
    """Draw into `file`; its suffix is one of `EXTENSIONS`. An existing file is replaced.

    title: heading of the page and the picture. memory: a curve per device in the picture; the page has a switch for
    it. waits: in the picture, what idle devices wait for; the page and the trace always have it. unit_seconds: what one
    unit of time lasts, where known. Raises InputError as `check_file` does, and when the file cannot be written.
    """
    write: dict[str, Callable[[], str]] = {
        ".html": lambda: page(timelines, title=title, unit_seconds=unit_seconds),
        ".json": lambda: trace(timelines, unit_seconds=unit_seconds),
        ".svg": lambda: svg(timelines, title=title, memory=memory, waits=waits, unit_seconds=unit_seconds),
    }
    path = check_file(file)
    write_text(path, write[path.suffix.lower()]())


def check_file(file: str | Path) -> Path:
    """The path of a picture to be drawn. Raises InputError for an unknown suffix or a folder that does not exist."""
    path = Path(file)
    if path.suffix.lower() not in EXTENSIONS:
        raise InputError(
            f"'{plain(file)}' cannot be drawn: its name must end in .html (a page), .svg (a picture, which browsers can"
            " print as PDF and other programs turn into PNG) or .json (a trace for Perfetto)"
        )
    if not path.absolute().parent.is_dir():
        raise InputError(f"'{plain(file)}' cannot be written: there is no folder '{plain(path.parent)}'")
    return path
