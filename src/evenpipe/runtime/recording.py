"""The record of a device's step: when each pass computed, what it waited for, and when each transfer was issued.

Times are those of this process's clock; `clock` measures the offsets between the clocks of processes, and `trace`
merges the records of all devices. On a GPU the times are those of its stream: events are recorded in the stream during
the step, and read afterwards. The walker takes two time stamps per pass, wait and transfer; everything else is done
after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from evenpipe.communication import clock
from evenpipe.communication.clock import Conversion
from evenpipe.schedule import Pass, Transfer
from evenpipe.schedule.trace import Allocations, CopyTime, PassTime, TransferTime, WaitTime


@dataclass(slots=True)
class StepRecord:
    """The record of a step of a device."""

    start: float = 0.0
    end: float = 0.0
    busy: float = 0.0
    """CPU seconds of the main thread inside passes; on a GPU the time to launch them, not to run them."""
    passes: list[PassTime] = field(default_factory=list)
    """This and the following fields are filled only if the walker records, in the order of completion."""
    waits: list[WaitTime] = field(default_factory=list)
    transfers: list[TransferTime] = field(default_factory=list)
    copies: list[CopyTime] = field(default_factory=list)
    allocations: Allocations | None = None
    """None on a CPU."""
    clock: Conversion | None = None
    """From this process's clock to that of the first process."""


COUNTERS = ("allocation.all.allocated", "num_device_alloc", "num_device_free", "num_alloc_retries")
"""Keys in `torch.cuda.memory_stats` for the fields of `Allocations`."""


class Recording:
    """Collects raw stamps while a step runs, in the order of completion.

    Attributes:
        stamp: takes a time stamp, which can be read only after `finish`.
        passes: pass, start, end, CPU seconds.
        waits: text of the transfer or copy, text of the pass that needs it or "", start, end.
        transfers: transfer, time of issue, time when the call returned.
        copies: text of the pass that requested the copy, and two stamps.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.passes: list[tuple[Pass, Any, Any, float]] = []
        self.waits: list[tuple[str, str, Any, Any]] = []
        self.transfers: list[tuple[Transfer, Any, Any]] = []
        self.copies: list[tuple[str, Sequence[Any]]] = []
        self._torch_device = torch_device
        self._clock = 0.0
        self.stamp: Callable[[], Any] = clock.now
        if torch_device.type == "cuda":
            torch.cuda.synchronize(torch_device)
            self._clock = clock.now()
            self.stamp = self._event
        self._allocations = self._counted()
        self._first: Any = self.stamp()

    def finish(self, record: StepRecord) -> None:
        """Store the collected data in `record`; on a GPU this waits until everything has run."""
        last = self.stamp()
        seconds = self._seconds()
        record.start, record.end = seconds(self._first), seconds(last)
        record.passes = [PassTime(item, seconds(a), seconds(b), used) for item, a, b, used in self.passes]
        passes = {str(item): item for item, *_ in self.passes}
        transfers = {str(item): item for item, *_ in self.transfers}
        record.waits = [
            WaitTime(transfers.get(text) or passes[text], passes.get(needed_by), seconds(a), seconds(b))
            for text, needed_by, a, b in self.waits
        ]
        arrived: dict[str, float] = {}
        for text, _, _, end in self.waits:
            arrived.setdefault(text, seconds(end))
        record.transfers = [
            TransferTime(item, seconds(a), seconds(b), arrived.get(str(item))) for item, a, b in self.transfers
        ]
        record.copies = [CopyTime(passes[text], *map(seconds, stamps)) for text, stamps in self.copies]
        now = self._counted()
        if self._allocations is not None and now is not None:
            record.allocations = now.since(self._allocations)

    def _counted(self) -> Allocations | None:
        """Return the counters of the GPU's allocator since the start of the process; None on a CPU."""
        if self._torch_device.type != "cuda":
            return None
        statistics = torch.cuda.memory_stats(self._torch_device)
        return Allocations(*(statistics[name] for name in COUNTERS))

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._torch_device))
        return event

    def _seconds(self) -> Callable[[Any], float]:
        if self._torch_device.type != "cuda":
            return float
        torch.cuda.synchronize(self._torch_device)
        first, begun = self._first, self._clock
        return lambda event: begun + first.elapsed_time(event) / 1000  # elapsed_time: milliseconds
