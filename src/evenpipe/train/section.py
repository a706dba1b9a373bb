"""The base of all sections of the configuration: it checks values against the annotated types.

A section is a frozen, keyword-only dataclass with a docstring under every field. Building one, from TOML or in Python,
converts values that TOML does not have (lists become tuples, 1 becomes 1.0 for a number), and refuses wrong ones with
an `InputError` that names the field, its value and the accepted values.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from evenpipe.errors import InputError
from evenpipe.given import is_text, plain, shortened, shown

LARGEST = 1e100
"""Numbers of a configuration are smaller, so their sums and products stay far from the limits of floating point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Base of the sections. It checks types; `check` of each section checks ranges."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, annotation in field_types(type(self)).items():
            value = convert(f"{self.section}.{name}", getattr(self, name), annotation)
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Refuse values that have the right type but cannot work."""

    def require(self, name: str, holds: bool, accepted: str) -> None:
        """Raise an `InputError` that says what field `name` must be, unless the condition holds."""
        if not holds:
            raise InputError(f"{self.section}.{name} is {show(getattr(self, name))}, but must be {accepted}")

    def at_least(self, minimum: float, *names: str) -> None:
        """Require each of the named fields to be `minimum` or more, or None."""
        for name in names:
            value = getattr(self, name)
            self.require(name, value is None or value >= minimum, f"at least {minimum}")

    def positive(self, *names: str) -> None:
        """Require each of the named fields to be above 0, or None."""
        for name in names:
            value = getattr(self, name)
            self.require(name, value is None or value > 0, "above 0")

    def known(self, name: str, names: Iterable[str]) -> None:
        """Require the named field to be one of `names`; the error proposes the nearest."""
        value = getattr(self, name)
        if value not in names:
            raise InputError(unknown(f"{self.section}.{name}", value, names))


def field_types(section: type) -> dict[str, Any]:
    """Return the type of every field by name, in the order of the source."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in fields(section)}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean "..."?` with the most similar known name, or "" if there is no similar name."""
    close = difflib.get_close_matches(shortened(name), list(known), n=1, cutoff=0.5)
    return f'; did you mean "{close[0]}"?' if close else ""


def unknown(where: str, value: str, known: Iterable[str]) -> str:
    """Return the sentence about a value that is not one of the known names."""
    names = list(known)
    return f"{where} is {show(value)}, but must be one of {', '.join(names)}{nearest(value, names)}"


def show(value: Any) -> str:
    """Return a value as TOML writes it, without control characters; a long one is shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{shortened(plain(value))}"'
    if isinstance(value, (list, tuple)):
        return shortened("[" + ", ".join(show(item) for item in value) + "]")
    if value is None:
        return "none"
    if isinstance(value, (int, dict)):
        return shown(value)
    return shortened(plain(value))


def optional(annotation: Any) -> tuple[Any, bool]:
    """Return (the type without None, whether None is accepted)."""
    parts = [part for part in parts_of_union(annotation) if part is not type(None)]
    if len(parts) == len(parts_of_union(annotation)):
        return annotation, False
    assert len(parts) == 1, f"a field is one type or None, not {annotation}"
    return parts[0], True


def parts_of_union(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a field may have: a single one, one or None, or one or a word."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def takes_text(annotation: Any) -> bool:
    """Return whether a field of this type is text."""
    annotation, _ = optional(annotation)
    return annotation is str or get_origin(annotation) is Literal


def type_words(annotation: Any) -> str:
    """Return a field's type in the words of the help text."""
    annotation, is_optional = optional(annotation)
    if len(parts := parts_of_union(annotation)) > 1:
        words = " or ".join(map(type_words, parts))
    elif get_origin(annotation) is Literal:
        words = " | ".join(show(value) for value in get_args(annotation))
    elif get_origin(annotation) is tuple:
        item, *rest = get_args(annotation)
        words = f"list of {type_words(item)}" if rest == [...] else f"list of {1 + len(rest)} {type_words(item)}s"
    elif get_origin(annotation) is dict:
        words = "table"
    else:
        words = {bool: "true or false", int: "integer", float: "number", str: "text"}[annotation]
    return f"{words} or none" if is_optional else words


def convert(where: str, value: Any, annotation: Any) -> Any:
    """Return `value` as the annotated type. Raises an `InputError` that names the field `where`.

    None can be written "none", because TOML has no null, and a list with one item can be written as the item.
    """
    annotation, is_optional = optional(annotation)
    if is_optional and (value is None or value == "none"):
        return None
    if len(parts := parts_of_union(annotation)) > 1:  # a type, or words
        first, words = parts
        if value in get_args(words):
            return value
        if type(value) is not first:
            raise InputError(f"{where} is {show(value)}, but must be {_article(type_words(annotation))}")
        return convert(where, value, first)
    origin = get_origin(annotation)
    if origin is Literal:
        if value in get_args(annotation):
            return value
        raise InputError(unknown(where, value if isinstance(value, str) else show(value), get_args(annotation)))
    if origin is tuple:
        return _convert_list(where, value, annotation)
    if origin is dict and isinstance(value, dict):
        return dict(value)
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < LARGEST else math.inf
    if type(value) is annotation:
        if annotation in (int, float) and not abs(value) < LARGEST:
            raise InputError(f"{where} is {show(value)}, but must be a finite number below {LARGEST:g}")
        if annotation is str and not is_text(value):
            raise InputError(f"{where} is {show(value)}, but must be text, without NUL and halves of surrogate pairs")
        return value
    raise InputError(f"{where} is {show(value)}, but must be {_article(type_words(annotation))}")


def _convert_list(where: str, value: Any, annotation: Any) -> tuple[Any, ...]:
    item_types = get_args(annotation)
    any_length = item_types[-1] is ...
    is_item = takes_text(item_types[0]) if isinstance(value, str) else type(value) is item_types[0]
    if any_length and (is_item or (item_types[0] is float and type(value) is int)):
        value = [value]
    if not isinstance(value, (list, tuple)) or not (any_length or len(value) == len(item_types)):
        raise InputError(f"{where} is {show(value)}, but must be {_article(type_words(annotation))}")
    return tuple(convert(f"{where}[{index}]", item, item_types[0]) for index, item in enumerate(value))


def _article(words: str) -> str:
    if words.startswith(("text", "true")):
        return words
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"
