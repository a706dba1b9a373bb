"""The line of the user's program where an exception was raised, or that called the library that raised it."""

from __future__ import annotations

import site
import sysconfig
import traceback
from functools import cache
from pathlib import Path

import evenpipe


@cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of installed modules: of evenpipe, the standard library, and all packages."""
    paths = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    packages = Path(evenpipe.__file__).parent, *paths, site.getusersitepackages()
    return tuple(f"{path}/" for path in packages)


def user_line(error: BaseException) -> str:
    """Return the innermost line of the user's program in the traceback as Python prints it: file, line number, function
    and text. Empty if there is none, as for a function of a library."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith((*_libraries(), "<frozen"))]
    return "".join(traceback.format_list(user_frames[-1:])).rstrip("\n")
