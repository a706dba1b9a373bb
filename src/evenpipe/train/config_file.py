"""Reads a `Config` from a TOML file and `section.key=value` overrides.

An unknown section or key is an error that names the nearest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_origin

from evenpipe import given
from evenpipe.declaration import field_types, takes_text
from evenpipe.errors import InputError
from evenpipe.train.config import Config
from evenpipe.words import nearest, refused, show


def sections() -> dict[str, type]:
    """Return the dataclass of every section by name, in the order of the configuration."""
    return field_types(Config)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file and apply overrides such as `pipeline.processes=2`.

    Raises `InputError` with one sentence for a missing file, broken TOML, an unknown name or an unusable value.
    """
    return config_from_dict(apply_overrides(read_toml(path), overrides))


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    return given.read_toml(path, f"the configuration {show(str(path))}")


def apply_overrides(tables: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return tables with each `section.key=value` applied; `model.config.NAME=value` changes that table.

    A value is read as TOML; a value that is not TOML, or for a text field, is text.
    """
    result = {name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()}
    for override in overrides:
        path, equals, text = override.partition("=")
        section, *keys = path.split(".")
        if not equals or not keys or not all(keys) or not section:
            near = " or ".join(f"{field}=value" for field in fields_called(path))
            near = f"; did you mean {near}?" if near else ""
            raise refused("the override", override, f"written section.key=value{near}")
        annotation = _known_key(section, keys[0])
        inside_table = get_origin(annotation) is dict
        if len(keys) != (2 if inside_table else 1):
            form = f"{section}.{keys[0]}.NAME=value" if inside_table else f"{section}.{keys[0]}=value"
            raise refused("the override", override, f"written {form}")
        value = _toml_value(text)
        if takes_text(annotation) and not isinstance(value, str):
            value = text
        table = result.setdefault(section, {})
        if not isinstance(table, dict):
            raise refused(f"[{section}]", table, "a table")
        if inside_table:
            table[keys[0]] = {**table.get(keys[0], {}), keys[1]: value}
        else:
            table[keys[0]] = value
    return result


def config_from_dict(tables: Mapping[str, Any]) -> Config:
    """Return a `Config` from tables of TOML, or from its own `asdict`. Raises `InputError`."""
    built: dict[str, Any] = {}
    for name, table in tables.items():
        kind = _known_section(name)
        if not isinstance(table, Mapping):
            raise refused(f"[{name}]", table, "a table")
        for key in table:
            _known_key(name, key)
        built[name] = kind(**table)
    for name in ("model", "data"):
        if name not in built:
            built[name] = _known_section(name)()
    return Config(**built)


def fields_called(name: str) -> list[str]:
    """Return the fields of that name, as `section.key`; `name` may have that form too."""
    fields = [f"{section}.{key}" for section, table in sections().items() for key in field_types(table)]
    return [field for field in fields if name in (field, field.partition(".")[2])]


def _known_key(section: str, key: str) -> Any:
    """Return the type of a field. Raises InputError for an unknown section or key."""
    keys = field_types(_known_section(section))
    if key not in keys:
        name = given.shortened(given.plain(f"{section}.{key}"))
        raise InputError(f"{name} is no field of the configuration{nearest(key, keys)}; known: {', '.join(keys)}")
    return keys[key]


def _known_section(name: str) -> type:
    known = sections()
    if name not in known:
        title = given.shortened(given.plain(f"[{name}]"))
        raise InputError(f"{title} is no section of the configuration{nearest(name, known)}; known: {', '.join(known)}")
    return known[name]


def _toml_value(text: str) -> Any:
    try:
        parsed = given.parse_toml(f"value = {text}", "an override")
    except InputError:
        return text
    return parsed["value"] if set(parsed) == {"value"} else text
