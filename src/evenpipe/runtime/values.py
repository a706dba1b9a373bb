"""Values that the passes and transfers of a device exchange within a step.

    results of passes ---> put ---> transfers out ---> sent, until they have arrived
                                    transfers in  ---> arriving ---> taken by the first pass that uses them

A value is what an edge between two stages, or a collective, carries for one unit: one tensor or more. Its only user
takes it, so memory is freed where the program says, and no value is left at the end of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from evenpipe.communication.communicator import Handle
from evenpipe.runtime.recording import Recording
from evenpipe.schedule import Pass, Transfer, TransferKind
from evenpipe.schedule.placement import Edge

Key = tuple[Edge | TransferKind, int]
"""The edge or collective that carries a value, and its unit. An edge has the direction of the data: (2, 3) forward,
(3, 2) back."""

SENDS_IN_FLIGHT = 2
"""How many transfers of a kind between the same devices may be pending before the oldest is awaited. This bounds the
memory of sends whose arrival is unknown. Waiting for an earlier transfer at a later point of the program cannot
deadlock, because all rows are parts of one list."""


class Values:
    """The values of the current step, and the time at which the current pass had all its inputs.

    Attributes:
        recording: takes time stamps, if the step is recorded.
    """

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.busy = 0.0
        """CPU seconds inside passes since `clear`."""
        self.taken = self.made = 0
        """Number of values that the current pass has taken, and stored."""
        self._stored: dict[Key, tuple[Tensor, ...]] = {}
        self._arriving: dict[Key, tuple[tuple[Tensor, ...], tuple[Handle, ...]]] = {}
        self._sent: dict[Transfer, list[Handle]] = {}
        self._pass = ""
        self._ready = False
        self._ready_at: Any = None
        self._processor = 0.0

    # --- passes ----------------------------------------------------------------------------------------------

    def begin(self, text: str) -> None:
        """Begin a pass, which now collects its inputs."""
        self._pass = text
        self._ready = False
        self.taken = self.made = 0

    def ready(self) -> None:
        """Note that the pass has its inputs and starts to compute. Of passes that run as one, the first counts."""
        if not self._ready:
            self._ready = True
            if self.recording is not None:
                self._ready_at = self.recording.stamp()
            self._processor = time.thread_time()

    def finish(self, item: Pass) -> None:
        """End a pass."""
        processor = time.thread_time() - self._processor
        self.busy += processor
        if self.recording is not None:
            self.recording.passes.append((item, self._ready_at, self.recording.stamp(), processor))

    # --- values ----------------------------------------------------------------------------------------------

    def put(self, key: Key, *tensors: Tensor) -> None:
        """Store a value made on this device, for a pass here or for a transfer."""
        assert key not in self._stored and key not in self._arriving, f"{key} exists already"
        self._stored[key] = tensors
        self.made += 1

    def give(self, key: Key) -> tuple[Tensor, ...]:
        """Return a value made on this device, for a transfer."""
        return self._stored.pop(key)

    def take(self, key: Key) -> tuple[Tensor, ...]:
        """Return a value made here or received, for a pass; wait until it has arrived."""
        self.taken += 1
        value = self._stored.pop(key, None)
        if value is not None:
            return value
        tensors, handles = self._arriving.pop(key)
        for handle in handles:
            self._wait(handle, self._pass)
        return tensors

    def arriving(self, key: Key, tensors: tuple[Tensor, ...], *handles: Handle) -> None:
        """Register a pending transfer whose result a pass will use."""
        assert key not in self._stored and key not in self._arriving, f"{key} exists already"
        self._arriving[key] = (tensors, handles)

    # --- sent values ---------------------------------------------------------------------------------------------

    def sent(self, item: Transfer, handle: Handle) -> None:
        """Register a message of a sent transfer. The transfer is kept until `arrived`, or until too many of its kind
        are pending."""
        messages = self._sent.get(item)
        if messages is not None:
            messages.append(handle)
            return
        self._sent[item] = [handle]
        same_kind = [
            transfer for transfer in self._sent if transfer.kind is item.kind and transfer.members == item.members
        ]
        if len(same_kind) > SENDS_IN_FLIGHT:
            self.arrived(same_kind[0])

    def arrived(self, item: Transfer) -> None:
        """Release a sent transfer, after waiting for it if needed."""
        for handle in self._sent.pop(item, ()):
            self._wait(handle, "")

    def wait_for_copy(self, text: str, wait: Callable[[], None]) -> None:
        """Wait for a copy that the current pass needs; `text` is that of the pass that requested it."""
        if self.recording is None:
            wait()
            return
        started = self.recording.stamp()
        wait()
        self.recording.waits.append((text, self._pass, started, self.recording.stamp()))

    def _wait(self, handle: Handle, needed_by: str) -> None:
        if self.recording is None:
            handle.wait(needed_by)
            return
        started = self.recording.stamp()
        handle.wait(needed_by)
        self.recording.waits.append((handle.label, needed_by, started, self.recording.stamp()))

    # --- the step --------------------------------------------------------------------------------------------

    def all_arrived(self) -> None:
        """At the end of a step: wait for all pending sends."""
        while self._sent:
            self.arrived(next(iter(self._sent)))

    @property
    def left(self) -> tuple[Key, ...]:
        """Return the values that were not taken."""
        return (*self._stored, *self._arriving)

    def clear(self) -> None:
        """Discard what a failed step has left."""
        self._stored.clear()
        self._arriving.clear()
        self._sent.clear()
        self.busy = 0.0
