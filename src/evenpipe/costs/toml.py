"""Values as TOML: for cost files, hardware files and configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

DIGITS = 6
"""Significant digits of a measured number."""


def toml_lines(table: Mapping[str, Any], digits: int | None = DIGITS) -> Iterator[str]:
    """Return a line for each entry of a table that is not None."""
    return (f"{toml_key(key)} = {toml_value(value, digits)}" for key, value in table.items() if value is not None)


def toml_value(value: Any, digits: int | None = DIGITS) -> str:
    """Return an inline table, a list, a string, a boolean or a number as TOML.

    digits: significant digits of floating-point numbers; None: all.
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(toml_lines(value, digits)) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(element, digits) for element in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return (
            '"'
            + "".join(f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char for char in escaped)
            + '"'
        )
    if isinstance(value, float) and value and digits is not None:
        return f"{value:.{digits}g}"
    return repr(value)


def toml_key(name: Any) -> str:
    """Return a key, quoted if necessary."""
    text = str(name)
    return text if text.replace("_", "").replace("-", "").isalnum() and text.isascii() else toml_value(text)
