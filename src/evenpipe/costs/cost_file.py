"""Cost files as TOML, for `--costs` of every command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError
from evenpipe.given import plain, write_text
from evenpipe.schedule import Costs

from .toml import toml_key, toml_lines


def write_costs(costs: Costs, path: str | Path, notes: Iterable[str] = ()) -> None:
    """Write a file that `read_costs` can read, with `notes` as comments at the top. Raises InputError if it cannot be
    written."""
    write_text(path, costs_to_toml(costs, notes))


def check_output(path: str | Path) -> None:
    """Raise InputError, before any measurement, if the cost file cannot be written."""
    if Path(path).suffix != ".toml":
        raise InputError(f"'{plain(path)}' cannot be written: the name of the cost file must end in .toml")
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"'{plain(path)}' cannot be written: there is no folder '{plain(Path(path).parent)}'")


def costs_to_toml(costs: Costs, notes: Iterable[str] = ()) -> str:
    """Return costs as TOML: times first, then tables."""
    lines = [f"# {plain(line)}".rstrip() for note in notes for line in note.split("\n")]
    tables: list[tuple[str, Mapping[str, Any]]] = []
    for name, value in costs.to_dict().items():
        if not isinstance(value, Mapping):
            lines += toml_lines({name: value})
        elif name == "links":
            tables += [(f"links.{toml_key(link)}", entries) for link, entries in value.items()]
        else:
            tables.append((name, value))
    for name, entries in tables:
        lines += ["", f"[{name}]", *toml_lines(entries)]
    return "\n".join(lines) + "\n"
