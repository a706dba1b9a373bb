"""The configuration in words: every field with its type, default and docstring, read from the source of the classes."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

from evenpipe.train.config_file import sections
from evenpipe.train.section import Section, field_types, show, type_words

WIDTH = 110


@dataclass(frozen=True, slots=True)
class FieldHelp:
    """One field of the configuration in words."""

    section: str
    name: str
    type: str
    default: str
    text: str


def describe_section(section: type[Section]) -> list[FieldHelp]:
    """Return the fields of one section, in the order of the source."""
    texts = _docstrings(section)
    defaults = default_of(section)
    return [
        FieldHelp(section.section, name, type_words(annotation), show(defaults[name]), texts[name])
        for name, annotation in field_types(section).items()
    ]


def configuration_help() -> str:
    """Return the text of `evenpipe train --help`: each section, and each field with type, default and meaning."""
    lines = []
    for section in sections().values():
        lines += ["", f"[{section.section}]  {inspect.getdoc(section)}"]
        for field in describe_section(section):
            lines.append(f"  {field.name} = {field.default}   ({field.type})")
            lines += textwrap.wrap(field.text, WIDTH, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines).strip("\n")


def default_of(section: type[Section]) -> dict[str, Any]:
    """Return the default of every field of a section, by name."""
    return {field.name: _default(field) for field in dataclasses.fields(section)}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    assert field.default_factory is not dataclasses.MISSING, f"{field.name} has no default"
    return field.default_factory()


def _docstrings(section: type) -> dict[str, str]:
    """Return the string below each field in the class body."""
    body = _classes(section.__module__)[section.__name__].body
    texts = {}
    for statement, below in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = below.value if isinstance(below, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[statement.target.id] = " ".join(inspect.cleandoc(value.value).split())
    return texts


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
