"""Pictures in files: the suffix of the name chooses the format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from evenpipe.errors import InputError
from evenpipe.given import plain, write_bytes

from .page import page
from .panel import Timelines
from .png import find_browser, png
from .svg import svg
from .trace import trace

EXTENSIONS = (".html", ".json", ".svg", ".png")
"""An interactive page, a trace for Perfetto, a vector picture and a bitmap."""


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

    title: heading of the page and the picture. memory: a curve per device in the picture; the page has a switch for it.
    waits: mark the waits of devices in the picture; the page and the trace always have them. unit_seconds: seconds per
    unit of time, if known. Raises InputError as `check_file` does, and if the file cannot be written.
    """
    path = check_file(file)

    def picture() -> str:
        return svg(timelines, title=title, memory=memory, waits=waits, unit_seconds=unit_seconds)

    write: dict[str, Callable[[], bytes]] = {
        ".html": lambda: page(timelines, title=title, unit_seconds=unit_seconds).encode(),
        ".json": lambda: trace(timelines, unit_seconds=unit_seconds).encode(),
        ".svg": lambda: picture().encode(),
        ".png": lambda: png(picture()),
    }
    write_bytes(path, write[path.suffix.lower()]())


def check_file(file: str | Path) -> Path:
    """The path of a picture. Raises InputError for an unknown suffix, for a folder that does not exist, and for
    .png if no program is installed that makes one."""
    path = Path(file)
    if path.suffix.lower() not in EXTENSIONS:
        raise InputError(
            f"'{plain(file)}' cannot be drawn: its name must end in .html (a page), .svg or .png (a picture; browsers"
            " print .svg as PDF) or .json (a trace for Perfetto)"
        )
    if not path.absolute().parent.is_dir():
        raise InputError(f"'{plain(file)}' cannot be written: there is no folder '{plain(path.parent)}'")
    if path.suffix.lower() == ".png":
        find_browser()
    return path
