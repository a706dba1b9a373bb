"""Tables of wrong input: each call must be refused in one sentence that names what the table says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from evenpipe.errors import InputError


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    """Return the sentence with which `call(*arguments)` is refused; "" if it is accepted."""
    try:
        call(*arguments)
    except InputError as caught:
        return str(caught)
    return ""


def missing_words(sentence: str, words: Iterable[str]) -> str:
    """Return what is wrong with a sentence that must be one line and contain all words; "" if it is right."""
    missing = [word for word in words if word not in sentence]
    if missing or not sentence or "\n" in sentence:
        return f"{missing} not in {sentence!r}"
    return ""


def wrong_refusals(call: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> list[str]:
    """Return what is wrong with the sentences of `call(*arguments)` over all cases, (*arguments, words)."""
    faults = []
    for *arguments, words in cases:
        sentence = refusal(call, *arguments)
        fault = missing_words(sentence, [words] if isinstance(words, str) else words)
        if fault:
            faults.append(f"{arguments}: {fault}")
    return faults
