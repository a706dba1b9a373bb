"""Untrusted input: reading and writing files, and quoting them in messages.

Names and contents of files must neither control the terminal nor make a message long: control characters are shown as
escapes (`plain`), and values are quoted and shortened (`shown`).
"""

from __future__ import annotations

import difflib
import errno
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError, RunError

LONGEST = 200
"""Longest value in a message, in characters."""
DEEPEST = 100
"""Deepest nesting of tables and lists in a file."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers that mean a full disk."""

_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_LINES = re.compile(f"[{_CONTROLS}]")
_IN_A_LINE = re.compile(f"[\t\n{_CONTROLS}]")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def hub_options() -> dict[str, bool]:
    """Return options for `from_pretrained` of a possible hub name. If the hub cannot be reached, only earlier downloads
    are used; otherwise its library would retry for a minute and a half."""
    import socket
    import urllib.parse
    import urllib.request

    from huggingface_hub import constants

    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname
    if urllib.request.getproxies():  # a proxy may reach the hub even if we cannot
        return {}
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return {"local_files_only": True}
    return {}


def find_file(source: str, name: str) -> Path | None:
    """Return the path of a file of a local folder or a hub name; None if it is missing or the hub cannot be reached."""
    if Path(source).exists():
        path = Path(source, name)
        return path if path.is_file() else None
    from transformers.utils import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        cached_path = cached_file(source, name, **quiet, **hub_options())
    except (OSError, ValueError):  # not a name that the hub can have
        return None
    return None if cached_path is None else Path(cached_path)


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def nearest_path(name: str) -> str:
    """Return the end of a sentence about a missing file or folder, `; did you mean "runs/quickstart"?`, or "" if its
    folder has no similar name."""
    path = Path(name)
    try:
        names = [] if path.exists() else [neighbour.name for neighbour in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f'; did you mean "{plain(path.parent / near[0])}"?' if near else ""


def plain_lines(text: str) -> str:
    """Return `text` with control characters and characters that cannot be encoded as escapes (`\\x1b`)."""
    return _IN_LINES.sub(_escape, text)


def plain(text: object) -> str:
    """As `plain_lines`, but in one line: line ends and tabs are also escaped."""
    return _IN_A_LINE.sub(_escape, str(text))


def reason_of(error: BaseException) -> str:
    """Return the text of another library's error in one line, shortened; its type if it has no text."""
    return shortened(plain(" ".join(str(error).split())), 2 * LONGEST).rstrip(".") or type(error).__name__


def shown(value: object) -> str:
    """Return the repr of a value in one line, without control characters, shortened if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number with too many digits, a list in a list in a list ...
        text = f"a {type(value).__name__} that is too large to show"
    return shortened(plain(text))


def shortened(text: str, length: int = LONGEST) -> str:
    """Return `text`, without its middle if it is longer than `length` characters."""
    half = length // 2 - 3
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


def check_new(path: Path) -> None:
    """Raise InputError if the file or folder to write already exists."""
    if path.exists():
        raise InputError(f"{json.dumps(plain(path))} exists already; -o names another one")


def read_text(path: str | Path, name: str = "") -> str:
    """Return the text of a UTF-8 file. Messages call it `name` instead of its path.

    Raises InputError if it cannot be read.
    """
    name = name or plain(path)
    if not str(path):
        raise InputError("the name of a file is empty")
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 at byte {error.start}") from None
    except (OSError, ValueError) as error:  # ValueError: a character that paths cannot have
        raise InputError(f"{name} cannot be read: {_why(error)}") from None


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file. Raises InputError if it cannot be written, RunError if the disk is full."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file. Raises as `write_text` does."""
    try:
        Path(path).write_bytes(content)
    except (OSError, ValueError) as error:
        kind = RunError if isinstance(error, OSError) and error.errno in FULL else InputError
        raise kind(f"{plain(path)} cannot be written: {_why(error)}") from None


def read_toml(path: str | Path, name: str = "") -> dict[str, Any]:
    """Return the tables of a TOML file. Raises InputError, with `name` as in `read_text`."""
    return parse_toml(read_text(path, name), name or plain(path))


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Parse TOML. Raises InputError for invalid TOML, and for values that `check_values` refuses."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not TOML: {_why(error)}") from None
    check_values(values, name)
    return values


def read_json(path: str | Path) -> Any:
    """Return the value in a JSON file. Raises InputError for invalid JSON, for a duplicate key in a table, and for
    values that `check_values` refuses."""
    text, name = read_text(path), plain(path)
    try:
        values = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not JSON: {_why(error)}") from None
    check_values(values, name)
    return values


def check_values(values: Any, name: str) -> None:
    """Raise InputError for values that parsers accept but that cannot be used: whole numbers beyond 64 bits, texts with
    NUL or half of a surrogate pair, and nesting deeper than `DEEPEST`."""
    layer: list[Any] = [values]
    for _ in range(DEEPEST):
        layer = [inner for value in layer for inner in _inner_values(value)]
        for value in layer:
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise InputError(f"{name} contains a whole number beyond 64 bits: {shown(value)}")
            if isinstance(value, str) and _NO_TEXT.search(value):
                raise InputError(f"{name} contains a text with an invalid character: {shown(value)}")
        if not layer:
            return
    raise InputError(f"{name} has more than {DEEPEST} nested tables or lists")


def is_text(value: str) -> bool:
    """Return whether a text has neither NUL nor half of a surrogate pair, so that a file can contain it or be named by
    it."""
    return not _NO_TEXT.search(value)


def _inner_values(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else ()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        duplicate = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(duplicate)} appears twice in one table")
    return table


def _why(error: Exception) -> str:
    """Return the reason for a system or parser error in words."""
    if isinstance(error, OSError):
        return error.strerror or plain(error)
    if isinstance(error, RecursionError):
        return f"it has more than {DEEPEST} nested tables or lists"
    if "int_max_str_digits" in str(error):
        return "it contains a whole number with thousands of digits"
    return plain(error)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
