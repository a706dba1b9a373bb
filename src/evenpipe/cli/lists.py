"""Parse options that take several values, separated by commas."""

from __future__ import annotations

from evenpipe.errors import InputError
from evenpipe.given import plain


def words(name: str, text: str) -> tuple[str, ...]:
    """Return the values of option --`name`. Raises InputError if it has none."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise InputError(
            f"--{name.replace('_', '-')} is '{plain(text)}', expected one value, or several separated by commas"
        )
    return found


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Return the numbers of option --`name`. Raises InputError for anything else."""
    try:
        return tuple(int(word) for word in words(name, text))
    except ValueError:
        raise InputError(
            f"--{name.replace('_', '-')} is '{plain(text)}', expected whole numbers such as 1,2,4"
        ) from None
