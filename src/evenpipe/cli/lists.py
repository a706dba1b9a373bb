"""Options that take several values with commas between them."""

from __future__ import annotations

from evenpipe.errors import InputError
from evenpipe.given import plain


def words(name: str, text: str) -> tuple[str, ...]:
    """The values of option --`name`. Raises InputError where there is none."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise InputError(f"--{name.replace('_', '-')} is '{plain(text)}', expected one value or several with commas")
    return found


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """The numbers of option --`name`. Raises InputError for anything else."""
    try:
        return tuple(int(word) for word in words(name, text))
    except ValueError:
        raise InputError(
            f"--{name.replace('_', '-')} is '{plain(text)}', expected whole numbers such as 1,2,4"
        ) from None
