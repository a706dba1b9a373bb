"""Numbers, enumerations and quotations in messages."""

from __future__ import annotations

import pytest

from evenpipe.schedule.words import count, join, quoted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "device", "1 device"),
        (2, "device", "2 devices"),
        (0, "fault", "0 faults"),
        (3, "batch", "3 batches"),
        (2, "pass", "2 passes"),
    ],
)
def test_count(number: int, noun: str, text: str) -> None:
    assert count(number, noun) == text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a and b"),
        (["a", "b", "c"], "a, b and c"),
        (list("abcdefghij"), "a, b, c, d, e, f, g and 3 more"),
    ],
)
def test_join(words: list[str], text: str) -> None:
    assert join(words) == text


def test_quoted() -> None:
    assert quoted("2F0") == "'2F0'"
    assert quoted("x" * 5000) == f"'{'x' * 57}...'"
