"""Traces as JSON files, for drawing, for `evenpipe profile`, and for other programs.

    {
     "format": "evenpipe trace", "version": 2,
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
them). Passes and transfers are in the order of the row. Fields as in `schedule.trace`. Readers refuse other
versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NotRequired

from annotated_types import Gt, Lt
from pydantic import Strict
from typing_extensions import TypedDict

from evenpipe.declaration import LARGEST, Accepts, NonNegativeInt, check_table, strict_table
from evenpipe.errors import InputError
from evenpipe.given import plain, read_json, shown
from evenpipe.words import count, refused

from .costs import Costs
from .passes import Kind, Pass, Transfer
from .placement import Placement
from .program import Program
from .text import rows_to_csv
from .trace import Allocations, Clock, CopyTime, DeviceTrace, PassTime, Trace, TransferTime, WaitTime

Seconds = Annotated[float, Gt(-LARGEST), Lt(LARGEST), Accepts("number of seconds")]
PassEntry = Annotated[tuple[str, Seconds, Seconds, Seconds], Strict(False)]
WaitEntry = Annotated[tuple[str, str, Seconds, Seconds], Strict(False)]
TransferEntry = Annotated[tuple[str, Seconds, Seconds, Seconds | None], Strict(False)]
CopyEntry = Annotated[tuple[str, Seconds, Seconds], Strict(False)]


@strict_table
class ClockTable(TypedDict):
    """`Clock`."""

    offset: Seconds
    drift: Seconds
    uncertainty: Seconds


@strict_table
class AllocationsTable(TypedDict):
    """`Allocations`."""

    requests: NonNegativeInt
    device_allocations: NonNegativeInt
    device_frees: NonNegativeInt
    retries: NonNegativeInt


@strict_table
class RankTable(TypedDict):
    """What one rank of a device saw."""

    start: Seconds
    end: Seconds
    clock: ClockTable
    allocations: NotRequired[AllocationsTable]
    passes: list[PassEntry]
    waits: list[WaitEntry]
    transfers: list[TransferEntry]
    copies: NotRequired[list[CopyEntry]]


@strict_table
class DeviceTable(RankTable):
    """A device, and its row of the program."""

    row: str


@strict_table
class TraceTable(TypedDict):
    """The file."""

    about: dict[str, Any]
    placement: list[int]
    microbatches: int
    slices: NotRequired[int]
    edges: NotRequired[list[Annotated[tuple[int, int], Strict(False)]]]
    vocabulary: str
    forward_only: bool
    costs: dict[str, Any] | None
    devices: list[DeviceTable]
    other_ranks: NotRequired[list[list[RankTable]]]


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
        "clock": asdict(device.clock),
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
    table: TraceTable = check_table(TraceTable, values)
    texts, stage_device = [device["row"] for device in table["devices"]], table["placement"]
    if not all(0 <= device < len(texts) for device in stage_device):
        raise refused("placement", stage_device, f"the device of each stage, 0 to {len(texts) - 1}")
    capacity = sum(text.count(",") + 1 for text in texts)
    if len(stage_device) > capacity:
        raise InputError(
            f"placement has {count(len(stage_device), 'stage')}, but the rows have only {capacity} passes and transfers"
        )
    program = Program.from_csv(
        "".join(text + "\n" for text in texts),
        placement=Placement(len(texts), tuple(stage_device), tuple(table.get("edges", ()))),
        microbatches=table["microbatches"],
        vocabulary=table["vocabulary"],
        forward_only=table["forward_only"],
        slices=table.get("slices", 1),
    )
    devices = tuple(_device(row, program, number, f"devices[{number}]") for number, row in enumerate(table["devices"]))
    other_ranks = []
    for rank, rows in enumerate(table.get("other_ranks", [])):
        if len(rows) != program.devices:
            raise refused(f"other_ranks[{rank}]", rows, f"a list of {count(program.devices, 'device')}")
        other_ranks.append(
            tuple(_device(row, program, number, f"other_ranks[{rank}][{number}]") for number, row in enumerate(rows))
        )
    costs = None if table["costs"] is None else Costs.from_dict(table["costs"])
    return Trace(program, devices, costs, dict(table["about"]), tuple(other_ranks))


def _device(table: RankTable, program: Program, number: int, where: str) -> DeviceTrace:
    """A rank of device `number`; error messages call it `where`."""
    passes = {str(item): item for item in program.rows[number] if isinstance(item, Pass)}
    transfers = {str(item): item for item in program.rows[number] if isinstance(item, Transfer)}

    def pass_of(text: str, where: str) -> Pass:
        if text not in passes:
            raise refused(where, text, "a pass of the row")
        return passes[text]

    def transfer_of(text: str, where: str) -> Transfer:
        if text not in transfers:
            raise refused(where, text, "a transfer of the row")
        if not transfers[text].members:
            raise refused(where, text, "a transfer that a pass of this placement needs")
        return transfers[text]

    def copy_of(text: str, where: str) -> Pass:
        copy = pass_of(text, where)
        if copy.kind not in (Kind.O, Kind.L):
            raise refused(where, text, "a copy to the host or back")
        return copy

    pass_times, waits, sent, copies = [], [], [], []
    for index, (text, start, end, processor) in enumerate(table["passes"]):
        entry_name = f"{where}.passes[{index}]"
        pass_times.append(PassTime(pass_of(text, entry_name), *_ordered(entry_name, start, end), processor))
    for index, (text, needed_by, start, end) in enumerate(table["waits"]):
        entry_name = f"{where}.waits[{index}]"
        user = None if needed_by == "" else pass_of(needed_by, entry_name)
        awaited = copy_of(text, entry_name) if text in passes else transfer_of(text, entry_name)
        waits.append(WaitTime(awaited, user, *_ordered(entry_name, start, end)))
    for index, (text, issued, returned, complete) in enumerate(table["transfers"]):
        entry_name = f"{where}.transfers[{index}]"
        sent.append(TransferTime(transfer_of(text, entry_name), *_ordered(entry_name, issued, returned), complete))
    for index, (text, start, end) in enumerate(table.get("copies", [])):
        entry_name = f"{where}.copies[{index}]"
        copies.append(CopyTime(copy_of(text, entry_name), *_ordered(entry_name, start, end)))
    if [entry.item for entry in pass_times] != list(passes.values()):
        raise InputError(f"{where}.passes are not the passes of devices[{number}].row in the same order")
    known = {entry.item for entry in sent}
    for index, wait in enumerate(waits):
        if isinstance(wait.transfer, Transfer) and wait.transfer not in known:
            raise InputError(f"{where}.waits[{index}] is for {wait.transfer}, which is not in {where}.transfers")
    return DeviceTrace(
        *_ordered(where, table["start"], table["end"]),
        tuple(pass_times),
        tuple(waits),
        tuple(sent),
        Clock(**table["clock"]),
        tuple(copies),
        Allocations(**table["allocations"]) if "allocations" in table else None,
    )


def _ordered(where: str, start: float, end: float) -> tuple[float, float]:
    if end < start:
        raise InputError(f"{where} ends at {end} s, before its start at {start} s")
    return start, end


def _unless_empty(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def _rounded(*times: float | None) -> list[float | None]:
    return [None if seconds is None else round(seconds, _DIGITS) for seconds in times]
