"""Amounts of memory as users write them."""

from __future__ import annotations

import re

from evenpipe.errors import InputError
from evenpipe.given import plain, shortened

GIB = 1 << 30

MAX_BYTES = 2**63
"""8 EiB, more bytes than a system can count."""

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}

_BY_LETTERS = {unit.lower(): size for unit, size in UNITS.items()}


def gib_text(size: float) -> str:
    """Return bytes as GiB, or below 0.1 GiB as MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def parse_size(text: str, name: str = "memory") -> int:
    """Return the bytes of a text such as "80GiB" or "40 GB". Raises InputError, which begins with `name`, for a missing
    number or unit and for 0."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = "" if match is None else match[2]
    quoted = f"'{shortened(plain(text))}'"
    if match is None or unit.lower() not in _BY_LETTERS:
        why = ", which has no unit" if match is not None and not unit else ""
        raise InputError(f"{name} is {quoted}{why}; it must be a number and a unit, as in 80GiB")
    size = float(match[1]) * _BY_LETTERS[unit.lower()]
    if not 0.5 < size < MAX_BYTES:
        raise InputError(f"{name} is {quoted}; it must be more than 0 and less than 8 EiB")
    return round(size)
