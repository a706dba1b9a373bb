"""Merge the records of all processes of a pipeline: a `Trace` of a step on the clock of the first process."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from evenpipe import __version__
from evenpipe.communication.calls import gather_numbers
from evenpipe.communication.clock import Conversion
from evenpipe.communication.communicator import Communicator
from evenpipe.runtime.recording import StepRecord
from evenpipe.schedule import Costs, Pass, Program
from evenpipe.schedule.trace import Allocations, Clock, CopyTime, DeviceTrace, PassTime, Trace, TransferTime, WaitTime

Times = dict[str, Any]
"""Times of a device as lists of numbers. Their passes and transfers are omitted: they follow from its row."""


def gather_trace(
    record: StepRecord,
    program: Program,
    communicator: Communicator | None,
    members: Sequence[int],
    torch_device: torch.device,
    *,
    costs: Costs | None = None,
    about: Mapping[str, Any] | None = None,
) -> Trace | None:
    """Return on the first process the records of all devices and all their tensor ranks for a step of `program`, and
    None on the others. Collective over the communicator.

    Every process sends its times, as text, to the first member.

    communicator: of the members and possibly other processes; None for a single process.
    members: global ranks, device by device.
    costs, about: as in `Trace`; those of the first process are used.
    """
    local_times = _times(record)
    if communicator is None:
        gathered = [local_times]
    else:
        text = json.dumps(local_times).encode("ascii")
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch_device)
        sizes = gather_numbers(communicator, [len(text)], "sizes of traces", "a trace", torch_device)
        counts = [size if member in members else 0 for member, (size,) in zip(communicator.members, sizes, strict=True)]
        root = members[0]
        rows = data
        if communicator.rank == root:
            rows = torch.empty(sum(counts), dtype=torch.uint8, device=torch_device)
            rows[communicator.own_rows(counts)] = data
        communicator.gather_rows(rows, counts, root, "traces").wait("a trace")
        if communicator.rank != root:
            return None
        parts = dict(zip(communicator.members, rows.cpu().split(counts), strict=True))
        gathered = [json.loads(parts[member].numpy().tobytes()) for member in members]
    begin = min(times["start"] for times in gathered)
    ranks = len(gathered) // program.placement.devices
    first, *other_ranks = (
        tuple(_device(times, program, device, begin) for device, times in enumerate(gathered[rank::ranks]))
        for rank in range(ranks)
    )
    return Trace(program, first, costs, {**(about or {}), **machine(torch_device)}, tuple(other_ranks))


def machine(torch_device: torch.device) -> dict[str, Any]:
    """Return the facts that a measurement depends on besides the program: hardware and versions, for readers."""
    cuda = torch_device.type == "cuda"
    return {
        "machine": torch.cuda.get_device_name(torch_device) if cuda else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "evenpipe": __version__,
    }


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _times(record: StepRecord) -> Times:
    """Return the times of this process, on the clock of the first process."""
    convert = record.clock
    assert isinstance(convert, Conversion), "the step was not recorded"
    return {
        "start": convert(record.start),
        "end": convert(record.end),
        "clock": [convert.start.offset, convert.drift, convert.uncertainty],
        "passes": [(convert(entry.start), convert(entry.end), entry.processor) for entry in record.passes],
        "waits": [
            (
                str(entry.transfer),
                "" if entry.needed_by is None else str(entry.needed_by),
                convert(entry.start),
                convert(entry.end),
            )
            for entry in record.waits
        ],
        "transfers": [
            (
                str(entry.item),
                convert(entry.issued),
                convert(entry.returned),
                None if entry.complete is None else convert(entry.complete),
            )
            for entry in record.transfers
        ],
        "copies": [(str(entry.item), convert(entry.start), convert(entry.end)) for entry in record.copies],
        "allocations": None if record.allocations is None else astuple(record.allocations),
    }


def _device(times: Times, program: Program, device: int, begin: float) -> DeviceTrace:
    """Return one device's times with the passes and transfers of its row, in seconds from `begin`."""
    row = program.rows[device]
    items: dict[str, Any] = {str(item): item for item in row if item is not None}
    passes = [item for item in row if isinstance(item, Pass)]
    return DeviceTrace(
        times["start"] - begin,
        times["end"] - begin,
        tuple(
            PassTime(item, start - begin, end - begin, processor)
            for item, (start, end, processor) in zip(passes, times["passes"], strict=True)
        ),
        tuple(
            WaitTime(items[text], items[user] if user else None, start - begin, end - begin)
            for text, user, start, end in times["waits"]
        ),
        tuple(
            TransferTime(items[text], issued - begin, returned - begin, None if arrived is None else arrived - begin)
            for text, issued, returned, arrived in times["transfers"]
        ),
        Clock(*times["clock"]),
        tuple(CopyTime(items[text], start - begin, end - begin) for text, start, end in times["copies"]),
        None if times["allocations"] is None else Allocations(*times["allocations"]),
    )
