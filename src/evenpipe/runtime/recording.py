"""What a device did in one step: when each pass computed, what it waited for, and when each transfer was issued.

Times are those of this process's `time.perf_counter`; `clock` measures what lies between the clocks of processes, and
`trace` brings the records of all devices together. On a GPU the times are those of its stream: events are put into it
while the step runs, and read when it is over.

The walker asks for two time stamps per pass, per wait and per transfer; everything else is done after the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from evenpipe.schedule import Pass, Transfer


@dataclass(frozen=True, slots=True)
class PassTime:
    """When a pass computed on this device. Seconds on this process's clocks."""

    item: Pass
    start: float
    """Its inputs were there."""
    end: float
    processor: float
    """Processor time of the walking thread inside the pass; on a GPU the time to launch it."""


@dataclass(frozen=True, slots=True)
class WaitTime:
    """This device stood still until a transfer was complete, or found it complete already."""

    transfer: str
    """Text of the transfer as this device issued it."""
    needed_by: str
    """Text of the pass that uses it; empty where a send was waited for, so that its memory can be given back."""
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TransferTime:
    """When this device issued a transfer: the call lasted from `issued` to `returned`."""

    item: Transfer
    issued: float
    returned: float


@dataclass(slots=True)
class StepRecord:
    """What a device did in one step."""

    start: float = 0.0
    end: float = 0.0
    busy: float = 0.0
    """Processor seconds of the walking thread inside passes; on a GPU the time to launch them, not to run them."""
    passes: list[PassTime] = field(default_factory=list)
    """This and what follows is filled when the walker records. In the order in which things ended."""
    waits: list[WaitTime] = field(default_factory=list)
    transfers: list[TransferTime] = field(default_factory=list)


class Recording:
    """Collects raw stamps while a step runs.

    Attributes:
        stamp: takes a time stamp. What it returns has a meaning after `finish` only.
        passes, waits, transfers: tuples in the order of the fields of `PassTime`, `WaitTime` and `TransferTime`.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.passes: list[tuple[Pass, Any, Any, float]] = []
        self.waits: list[tuple[str, str, Any, Any]] = []
        self.transfers: list[tuple[Transfer, Any, Any]] = []
        self._torch_device = torch_device
        self.stamp: Callable[[], Any] = time.perf_counter
        if torch_device.type == "cuda":
            torch.cuda.synchronize(torch_device)
            self._clock = time.perf_counter()
            self.stamp = self._event
            self._first = self._event()

    def finish(self, record: StepRecord) -> None:
        """Puts what was collected into `record`; on a GPU after all of it has run."""
        seconds = self._seconds()
        record.passes = [PassTime(item, seconds(a), seconds(b), used) for item, a, b, used in self.passes]
        record.waits = [WaitTime(what, by, seconds(a), seconds(b)) for what, by, a, b in self.waits]
        record.transfers = [TransferTime(item, seconds(a), seconds(b)) for item, a, b in self.transfers]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._torch_device))
        return event

    def _seconds(self) -> Callable[[Any], float]:
        if self._torch_device.type != "cuda":
            return float
        torch.cuda.synchronize(self._torch_device)
        first, clock = self._first, self._clock
        return lambda event: clock + first.elapsed_time(event) / 1000  # elapsed_time: milliseconds
