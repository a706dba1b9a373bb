"""Traces as JSON files, for drawing, for `evenpipe profile`, and for other programs.

    {
     "format": "evenpipe trace", "version": 1,
     "about": {"schedule": "1f1b", "vocabulary": "vocab-2", "step": 12, "machine": "...", ...},
     "placement": [0, 1],                     device of each stage
     "microbatches": 8, "vocabulary": "vocab-2", "forward_only": false,
     "costs": {"F": [1.0, 1.2], ...},         the costs that arranged the order, as in a cost file; null if unknown
     "devices": [
      {
       "row": "E0,ROWS0,0F0,...",             the device's row of the program
       "start": 0.0, "end": 0.412,
       "clock": {"offset": 3.1e-05, "drift": 0.0, "uncertainty": 1.2e-05},
       "allocations": {"requests": 5120, "device_allocations": 0, "device_frees": 0, "retries": 0},   absent on a CPU
       "passes": [["E0", start, end, processor], ...],
       "waits": [["X0", "S0", start, end], ...],                  the pass that uses it, or "" for a send
       "transfers": [["ROWS0", issued, returned, complete], ...], complete: null if nobody waited for it
       "copies": [["0O0", start, end], ...]     to the host and back; absent if there are none. Waits for them name
      },                                        0O0, or 0L0, in place of a transfer
      ...
     ],
     "other_ranks": [[{"start": 0.0, ...}, ...], ...]       the devices again as tensor ranks 1, 2, ... saw the step,
    }                                                       without the rows; absent without tensor ranks

All times are seconds from the start of the device that began first; offsets between clocks are corrected ("clock" gives
them). Passes and transfers are in the order of the row. Fields as in `schedule.trace`. A reader of version 1 refuses
other versions; what a version adds, its number says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError
from evenpipe.given import plain, read_json, shown
from evenpipe.words import count

from .cost_values import LARGEST
from .costs import Costs
from .passes import Kind, Pass, Transfer
from .placement import Edge, Placement
from .program import Program
from .text import rows_to_csv
from .trace import Allocations, Clock, CopyTime, DeviceTrace, PassTime, Trace, TransferTime, WaitTime

FORMAT, VERSION = "evenpipe trace", 2
_DIGITS = 9
"""Decimal places of seconds: nanoseconds."""


def trace_to_dict(trace: Trace) -> dict[str, Any]:
    """A trace as a dict for JSON."""
    program = trace.program
    return {
        "format": FORMAT,
        "version": VERSION,
        "about": dict(trace.about),
        "placement": list(program.placement.stage_device),
        "microbatches": program.microbatches,
        **({} if program.slices == 1 else {"slices": program.slices}),
        **_unless_empty(edges=[] if program.placement.is_chain else list(map(list, program.placement.edges))),
        "vocabulary": program.vocabulary.value,
        "forward_only": program.forward_only,
        "costs": None if trace.costs is None else trace.costs.to_dict(),
        "devices": [
            {"row": rows_to_csv([row]).rstrip("\n"), **_device_to_dict(device)}
            for row, device in zip(program.rows, trace.devices, strict=True)
        ],
        **_unless_empty(other_ranks=[list(map(_device_to_dict, devices)) for devices in trace.other_ranks]),
    }


def _device_to_dict(device: DeviceTrace) -> dict[str, Any]:
    """Everything but the row."""
    return {
        "start": round(device.start, _DIGITS),
        "end": round(device.end, _DIGITS),
        "clock": dict(zip(_CLOCK, astuple(device.clock), strict=True)),
        **_unless_empty(allocations=device.allocations and asdict(device.allocations)),
        "passes": [[str(p.item), *_rounded(p.start, p.end, p.processor)] for p in device.passes],
        "waits": [[str(w.transfer), str(w.needed_by or ""), *_rounded(w.start, w.end)] for w in device.waits],
        "transfers": [[str(t.item), *_rounded(t.issued, t.returned, t.complete)] for t in device.transfers],
        **_unless_empty(copies=[[str(c.item), *_rounded(c.start, c.end)] for c in device.copies]),
    }


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a file that `read_trace` reads, atomically. Raises InputError if it cannot be written."""
    text = json.dumps(trace_to_dict(trace), ensure_ascii=False, separators=(",", ":"))
    for mark in ('"devices":[', '"row":', '"start":', '"passes":', '"waits":', '"transfers":', '"copies":'):
        text = text.replace(mark, "\n" + mark)  # a few lines, not one, so that people can read and compare files
    target = Path(path)
    partial = target.with_name(target.name + ".part")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def read_trace(path: str | Path) -> Trace:
    """The trace in a file. Raises InputError with one sentence that names the file and the error."""
    values = read_json(path)
    try:
        return trace_from_dict(values)
    except InputError as error:
        raise InputError(f"{plain(path)}: {error}") from None


def trace_from_dict(values: Any) -> Trace:
    """The trace of a dict from `trace_to_dict`. Raises InputError naming the missing or wrong field."""
    if not isinstance(values, Mapping) or values.get("format") != FORMAT:
        raise InputError('not a trace of evenpipe; those begin with "format": "evenpipe trace"')
    if values.get("version") != VERSION:
        raise InputError(
            f"version {shown(values.get('version'))} of the format, but this evenpipe reads version {VERSION}"
        )
    rows = _field(values, "devices", list)
    texts = [_field(_table(row, f"devices[{number}]"), "row", str) for number, row in enumerate(rows)]
    stage_device = _field(values, "placement", list)
    if not all(type(device) is int and 0 <= device < len(rows) for device in stage_device):
        raise InputError(f"placement is {shown(stage_device)}, expected the device of each stage, 0 to {len(rows) - 1}")
    most = sum(text.count(",") + 1 for text in texts)
    if len(stage_device) > most:
        raise InputError(
            f"placement has {count(len(stage_device), 'stage')}, but the rows have only {most} passes and transfers"
        )
    program = Program.from_csv(
        "".join(text + "\n" for text in texts),
        placement=Placement(len(rows), tuple(stage_device), _edges(values)),
        microbatches=_field(values, "microbatches", int),
        vocabulary=_field(values, "vocabulary", str),
        forward_only=_field(values, "forward_only", bool),
        slices=_field(values, "slices", int) if "slices" in values else 1,
    )
    costs = values.get("costs")
    devices = tuple(_device(row, program, number, f"devices[{number}].") for number, row in enumerate(rows))
    about = _field(values, "about", Mapping)
    others = tuple(_other_ranks(values, program)) if "other_ranks" in values else ()
    return Trace(program, devices, None if costs is None else Costs.from_dict(costs), dict(about), others)


def _other_ranks(values: Mapping[str, Any], program: Program) -> Iterator[tuple[DeviceTrace, ...]]:
    for place, rows in enumerate(_field(values, "other_ranks", list)):
        where = f"other_ranks[{place}]"
        if not isinstance(rows, list) or len(rows) != program.devices:
            raise InputError(f"{where} is {shown(rows)}, expected a list of {count(program.devices, 'device')}")
        yield tuple(
            _device(_table(row, f"{where}[{number}]"), program, number, f"{where}[{number}].")
            for number, row in enumerate(rows)
        )


def _edges(values: Mapping[str, Any]) -> tuple[Edge, ...]:
    edges = _field(values, "edges", list) if "edges" in values else []
    for number, edge in enumerate(edges):
        if not isinstance(edge, list) or len(edge) != 2 or not all(type(stage) is int for stage in edge):
            raise InputError(f"edges[{number}] is {shown(edge)}, expected a list of two stages")
    return tuple((source, target) for source, target in edges)


def _device(values: Mapping[str, Any], program: Program, number: int, where: str) -> DeviceTrace:
    passes = {str(item): item for item in program.rows[number] if isinstance(item, Pass)}
    transfers = {str(item): item for item in program.rows[number] if isinstance(item, Transfer)}

    def entries(name: str, shape: int) -> Iterator[tuple[str, list[Any]]]:
        """Each entry of a list, and what messages call it."""
        for index, entry in enumerate(_field(values, name, list, where)):
            at = f"{where}{name}[{index}]"
            if not isinstance(entry, list) or len(entry) != shape or not isinstance(entry[0], str):
                raise InputError(f"{at} is {shown(entry)}, expected a list of a text and {shape - 1} more")
            yield at, entry

    def pass_of(text: Any, where: str) -> Pass:
        if text not in passes:
            raise InputError(f"{where} is {shown(text)}, which is not a pass of the row")
        return passes[text]

    def transfer_of(text: Any, where: str) -> Transfer:
        if text not in transfers:
            raise InputError(f"{where} is {shown(text)}, which is not a transfer of the row")
        if not transfers[text].members:
            raise InputError(f"{where} is {shown(text)}, a transfer that no pass of this placement needs")
        return transfers[text]

    def copy_of(text: Any, where: str) -> Pass:
        copy = pass_of(text, where)
        if copy.kind not in (Kind.O, Kind.L):
            raise InputError(f"{where} is {shown(text)}, which is not a copy to the host or back")
        return copy

    done, waits, sent, copies = [], [], [], []
    for at, (text, start, end, processor) in entries("passes", 4):
        done.append(PassTime(pass_of(text, at), *_ordered(at, start, end), _seconds(at, processor)))
    for at, (text, needed_by, start, end) in entries("waits", 4):
        user = None if needed_by == "" else pass_of(needed_by, at)
        what = copy_of(text, at) if text in passes else transfer_of(text, at)
        waits.append(WaitTime(what, user, *_ordered(at, start, end)))
    for at, (text, issued, returned, complete) in entries("transfers", 4):
        found = None if complete is None else _seconds(at, complete)
        sent.append(TransferTime(transfer_of(text, at), *_ordered(at, issued, returned), found))
    for at, (text, start, end) in entries("copies", 3) if "copies" in values else ():
        copies.append(CopyTime(copy_of(text, at), *_ordered(at, start, end)))
    if [entry.item for entry in done] != [item for item in program.rows[number] if isinstance(item, Pass)]:
        raise InputError(f"{where}passes are not the passes of devices[{number}].row in the same order")
    there = {entry.item for entry in sent}
    for index, wait in enumerate(waits):
        if isinstance(wait.transfer, Transfer) and wait.transfer not in there:
            raise InputError(f"{where}waits[{index}] is for {wait.transfer}, which is not in {where}transfers")
    clock = _table(values.get("clock"), f"{where}clock")
    return DeviceTrace(
        *_ordered(where.rstrip("."), values.get("start"), values.get("end")),
        tuple(done),
        tuple(waits),
        tuple(sent),
        Clock(*(_seconds(f"{where}clock.{name}", clock.get(name)) for name in _CLOCK)),
        tuple(copies),
        _allocations(values["allocations"], f"{where}allocations") if "allocations" in values else None,
    )


def _allocations(value: Any, where: str) -> Allocations:
    table = _table(value, where)
    counts = {entry.name: _field(table, entry.name, int, f"{where}.") for entry in fields(Allocations)}
    for name, number in counts.items():
        if number < 0:
            raise InputError(f"{where}.{name} is {number}, expected at least 0")
    return Allocations(**counts)


def _field(values: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    value = values.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {list: "a list", str: "a text", int: "a whole number", bool: "true or false"}.get(kind, "a table")
        raise InputError(
            f"{where}{name} is {shown(value)}, expected {words}" if name in values else f"{where}{name} is missing"
        )
    return value


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where} is {shown(value)}, expected a table")
    return value


def _seconds(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise InputError(f"{where} has the time {shown(value)}, expected seconds")
    return float(value)


def _ordered(where: str, start: Any, end: Any) -> tuple[float, float]:
    first, last = _seconds(where, start), _seconds(where, end)
    if last < first:
        raise InputError(f"{where} ends at {last} s, before its start at {first} s")
    return first, last


def _unless_empty(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def _rounded(*times: float | None) -> list[float | None]:
    return [None if seconds is None else round(seconds, _DIGITS) for seconds in times]


_CLOCK = ("offset", "drift", "uncertainty")
