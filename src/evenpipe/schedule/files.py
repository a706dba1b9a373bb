"""Read schedules and costs from files; every error names the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evenpipe.errors import InputError
from evenpipe.given import plain, read_json, read_text, read_toml, write_text

from .costs import Costs
from .order import Order
from .passes import Transfer
from .placement import Edge
from .program import Program
from .text import rows_from_csv


def read_schedule(path: str | Path, edges: Sequence[Edge] = ()) -> Order | Program:
    """The schedule in a CSV file: a program if the file has transfers, else an order. Its stages are a chain,
    or a graph with these edges.

    Raises InputError if the file cannot be read, and for a cell that is neither a pass nor a transfer, with row and
    column.
    """
    text = read_text(path)
    try:
        rows = rows_from_csv(text)
        has_transfers = any(isinstance(item, Transfer) for row in rows for item in row)
        return Program.from_csv(text, edges=edges) if has_transfers else Order.from_csv(text, edges=edges)
    except InputError as error:
        raise InputError(f"{plain(path)}: {error}") from None


def read_order(path: str | Path) -> Order:
    """The order in a CSV file; for a program, its compute passes. Raises InputError as `read_schedule` does."""
    return read_schedule(path).order


def write_schedule(schedule: Order | Program, path: str | Path) -> None:
    """Write a CSV file that `read_schedule` reads. Raises InputError if it cannot be written."""
    write_text(path, schedule.to_csv())


def read_costs(path: str | Path) -> Costs:
    """The costs in a file: JSON if its name ends in .json, else TOML.

    Raises InputError if the file cannot be read or parsed, and as `Costs.from_dict` does.
    """
    values = read_json(path) if str(path).endswith(".json") else read_toml(path)
    try:
        return Costs.from_dict(values)
    except InputError as error:
        raise InputError(f"{plain(path)}: {error}") from None
