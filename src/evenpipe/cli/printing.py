"""Printing on standard output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from evenpipe.given import plain_lines


def say(text: str, end: str = "\n") -> None:
    """Print text for people, with control characters from names and generated text escaped."""
    print(plain_lines(text), end=end, flush=True)


def say_json(values: Mapping[str, Any]) -> None:
    """Print one JSON object for programs."""
    print(json.dumps(values), flush=True)
