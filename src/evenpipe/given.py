"""What others gave us: files that are read and written, and their words in our messages.

Whoever wrote a file, or named one, decides neither what a terminal does nor how long a message is: controls are shown
as escapes (`plain`), values are quoted and cut short (`shown`).
"""

from __future__ import annotations

import difflib
import errno
import json
import re
import socket
import tomllib
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError, RunError

LONGEST = 200
"""Characters that a message shows of a value."""
DEEPEST = 100
"""Tables and lists inside each other that a file may have."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a disk that has no room."""

_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_LINES = re.compile(f"[{_CONTROLS}]")
_IN_A_LINE = re.compile(f"[\t\n{_CONTROLS}]")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def hub_options() -> dict[str, bool]:
    """Options for `from_pretrained` of a name that may be the hub's: where no network leads there, only what was
    downloaded before is looked at, as the hub's own library would try again and again for a minute and a half."""
    from huggingface_hub import constants

    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname
    if urllib.request.getproxies():  # a proxy knows the way where we do not
        return {}
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return {"local_files_only": True}
    return {}


def beside(name: str) -> str:
    """The end of a sentence about a file or folder that does not exist: `; did you mean "runs/quickstart"?`, where one
    of a similar name is in that place."""
    path = Path(name)
    try:
        names = [] if path.exists() else [one.name for one in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f'; did you mean "{plain(path.parent / near[0])}"?' if near else ""


def plain_lines(text: str) -> str:
    """`text` as a terminal may have it: characters that control it, or that no encoding has, as escapes (`\\x1b`)."""
    return _IN_LINES.sub(_escape, text)


def plain(text: object) -> str:
    """The same in one line: line ends and tabs too are escapes."""
    return _IN_A_LINE.sub(_escape, str(text))


def shown(value: object) -> str:
    """A value as Python writes it, in one line, without controls; a long one is cut short."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number with too many digits, a list in a list in a list ...
        text = f"a {type(value).__name__} that is too large to show"
    return shortened(plain(text))


def shortened(text: str, most: int = LONGEST) -> str:
    """A text of at most `most` characters: a longer one without its middle."""
    half = most // 2 - 3
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def read_text(path: str | Path, name: str = "") -> str:
    """The text of a UTF-8 file. `name`: what messages call it, instead of its path.

    Raises InputError where it cannot be read.
    """
    name = name or plain(path)
    if not str(path):
        raise InputError("the name of a file is empty")
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 at byte {error.start}") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a character that no path has
        raise InputError(f"{name} cannot be read: {_why(error)}") from None


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file. Raises InputError where it cannot be written, RunError where the disk is full."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file. Raises as `write_text` does."""
    try:
        Path(path).write_bytes(content)
    except (OSError, ValueError) as error:
        kind = RunError if isinstance(error, OSError) and error.errno in FULL else InputError
        raise kind(f"{plain(path)} cannot be written: {_why(error)}") from None


def read_toml(path: str | Path, name: str = "") -> dict[str, Any]:
    """The tables of a TOML file. Raises InputError, with `name` as in `read_text`."""
    return parse_toml(read_text(path, name), name or plain(path))


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Tables from TOML. Raises InputError for what is not, and for values that `check_values` refuses."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not TOML: {_why(error)}") from None
    check_values(values, name)
    return values


def read_json(path: str | Path) -> Any:
    """The value in a JSON file. Raises InputError for what is not JSON, for a key that stands twice in one table, and
    for values that `check_values` refuses."""
    text, name = read_text(path), plain(path)
    try:
        values = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not JSON: {_why(error)}") from None
    check_values(values, name)
    return values


def check_values(values: Any, name: str) -> None:
    """Raise InputError for what parsers take and nobody can use: whole numbers beyond 64 bits, texts with NUL or with
    half of a surrogate pair, and what lies deeper than `DEEPEST`."""
    layer: list[Any] = [values]
    for _ in range(DEEPEST):
        layer = [one for value in layer for one in _inside(value)]
        for value in layer:
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise InputError(f"{name} holds a whole number beyond 64 bits: {shown(value)}")
            if isinstance(value, str) and _NO_TEXT.search(value):
                raise InputError(f"{name} holds a text with a character that no text has: {shown(value)}")
        if not layer:
            return
    raise InputError(f"{name} has more than {DEEPEST} tables or lists inside each other")


def is_text(value: str) -> bool:
    """Whether a text has neither NUL nor half of a surrogate pair, so that files can have it in them and as a name."""
    return not _NO_TEXT.search(value)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else ()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(twice)} stands twice in one table")
    return table


def _why(error: Exception) -> str:
    """An error of the system or of a parser in words."""
    if isinstance(error, OSError):
        return error.strerror or plain(error)
    if isinstance(error, RecursionError):
        return f"it has more than {DEEPEST} tables or lists inside each other"
    if "int_max_str_digits" in str(error):
        return "it holds a whole number of thousands of digits"
    return plain(error)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
