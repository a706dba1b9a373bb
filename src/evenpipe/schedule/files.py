"""Schedules and costs from files; every error names the file."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from evenpipe.errors import InputError

from .costs import Costs
from .order import Order
from .passes import Transfer
from .program import Program
from .text import rows_from_csv


def read_schedule(path: str | Path) -> Order | Program:
    """The schedule in a CSV file: a program when the file has transfers, else an order.

    Raises InputError when the file cannot be read, and for a cell that is no pass and no transfer, with row and column.
    """
    text = _read(path)
    try:
        rows = rows_from_csv(text)
        has_transfers = any(isinstance(item, Transfer) for row in rows for item in row)
        return Program.from_csv(text) if has_transfers else Order.from_csv(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_order(path: str | Path) -> Order:
    """The order in a CSV file; of a program, its compute passes. Raises InputError as `read_schedule` does."""
    schedule = read_schedule(path)
    return schedule.order if isinstance(schedule, Program) else schedule


def write_schedule(schedule: Order | Program, path: str | Path) -> None:
    """Write a CSV file that `read_schedule` reads. Raises InputError where it cannot be written."""
    try:
        Path(path).write_text(schedule.to_csv(), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def read_costs(path: str | Path) -> Costs:
    """The costs in a file: JSON when its name ends in .json, else TOML.

    Raises InputError when the file cannot be read or is neither, and as `Costs.from_dict` does.
    """
    text = _read(path)
    if str(path).endswith(".json"):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}") from None
    else:
        try:
            values = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"{path} is not TOML: {error}") from None
    try:
        return Costs.from_dict(values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _read(path: str | Path) -> str:
    if not str(path):
        raise InputError("the name of a file is empty")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start}") from None
