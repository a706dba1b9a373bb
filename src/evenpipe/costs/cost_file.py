"""Cost files as TOML, for `--costs` of every command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError
from evenpipe.given import plain, write_text
from evenpipe.schedule import Costs


def write_costs(costs: Costs, path: str | Path, notes: Iterable[str] = ()) -> None:
    """Write a file that `read_costs` reads, with `notes` as comments at the top. Raises InputError if it cannot be
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
            quoted = ((link if link.isidentifier() else f'"{link}"', said) for link, said in value.items())
            tables += [(f"links.{link}", said) for link, said in quoted]
        else:
            tables.append((name, value))
    for name, said in tables:
        lines += ["", f"[{name}]", *toml_lines(said)]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Return a value as TOML: a table in one line, a list, a text or a number."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'
    return str(value) if isinstance(value, int) else f"{value:.6g}" if value else "0.0"


def toml_lines(table: Mapping[str, Any]) -> list[str]:
    """Return a line for each entry of a table."""
    return [f"{key} = {toml_value(value)}" for key, value in table.items()]
