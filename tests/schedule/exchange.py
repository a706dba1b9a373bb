"""Stands in place of communicators: all devices are threads of one process, one of which runs at a time.

It follows the stricter of the two models of queues in `evenpipe.schedule.walk`: a transfer completes when all its
members have it at the head of what they have issued. It is carried out as late as can be. Where no device can go on,
the step has failed at once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from threading import Lock
from typing import Any

import torch
from schedule_oracle import Carried, same_transfer
from torch import Tensor

from evenpipe.schedule import Placement, Transfer
from evenpipe.schedule.passes import parse_item

MOST_DEVICES = 8
_threads = ThreadPoolExecutor(MOST_DEVICES, "device")


class StandstillError(Exception):
    """No device can go on."""


class StoppedError(Exception):
    """Another device has failed."""


@lru_cache(maxsize=4096)
def _identity(what: str, placement: Placement) -> Carried:
    item = parse_item(what)
    assert isinstance(item, Transfer)
    return same_transfer(item, placement)


@dataclass(slots=True, eq=False)
class Operation:
    """One end of a transfer, and its handle."""

    exchange: Exchange
    device: int
    what: str
    same: tuple[Any, ...]
    """Equal on all members."""
    members: tuple[int, ...]
    tensor: Tensor
    carry_out: Callable[..., object]
    """Called once for all members, with their tensors in the order of `members`."""
    done: bool = False

    def wait(self, needed_by: str = "") -> None:
        self.exchange.wait(self)


class Exchange:
    """Between the devices of one step, and whose turn it is."""

    def __init__(self, placement: Placement, rng: random.Random) -> None:
        self.placement, self.rng, devices = placement, rng, placement.devices
        self.queues: list[deque[Operation]] = [deque() for _ in range(devices)]
        self._awaited: list[Operation | None] = [None] * devices
        self._going = set(range(devices))
        self._turn = [Lock() for _ in range(devices)]
        self._back = Lock()
        self._failure: Exception | None = None
        for lock in (*self._turn, self._back):
            lock.acquire()

    def run(self, devices: Sequence[Callable[[], object]]) -> None:
        """All devices to their ends. Raises what the first one fails with, StandstillError where none can go on."""
        assert len(devices) <= MOST_DEVICES, "each needs a thread, or the others wait for it forever"
        threads = [_threads.submit(self._thread, device, walk) for device, walk in enumerate(devices)]
        while self._going:
            ready = self._ready()
            if not ready and self._failure is None:
                try:
                    self._carry_out()
                except Exception as error:
                    self._failure = error
                ready = self._ready()
            if not ready and self._failure is None:
                stand = {device: one.what for device in self._going if (one := self._awaited[device])}
                self._failure = StandstillError(f"devices wait for ever: {stand}")
            # After a failure each device gets one more turn, in which it stops.
            self._turn[self.rng.choice(ready) if self._failure is None else min(self._going)].release()
            self._back.acquire()
        for thread in threads:
            thread.result()
        if self._failure is not None:
            raise self._failure

    def wait(self, operation: Operation) -> None:
        """Carries out what has to be, and gives others their turn until the operation is done."""
        self._carry_out(operation)
        if not operation.done:
            device = operation.device
            self._awaited[device] = operation
            self._back.release()
            self._turn[device].acquire()
            self._awaited[device] = None
            if self._failure is not None:
                raise StoppedError

    def _thread(self, device: int, walk: Callable[[], object]) -> None:
        self._turn[device].acquire()
        try:
            if self._failure is None:
                walk()
        except Exception as error:
            if self._failure is None:
                self._failure = error
        finally:
            self._going.discard(device)
            self._back.release()

    def _ready(self) -> list[int]:
        return [device for device in sorted(self._going) if (one := self._awaited[device]) is None or one.done]

    def _carry_out(self, wanted: Operation | None = None) -> None:
        """Transfers that all members have at the head of their queues; only until the one that is wanted is done."""
        moving = True
        while moving and not (wanted is not None and wanted.done):
            moving = False
            for queue in self.rng.sample(self.queues, len(self.queues)):
                if queue and (ends := self._ends(queue[0])):
                    for end in ends:
                        self.queues[end.device].popleft()
                        end.done = True
                    ends[0].carry_out(*(end.tensor for end in ends))
                    moving = True
                    break

    def _ends(self, one: Operation) -> list[Operation]:
        """Of the same transfer, in the order of its members; none while it is not everyone's turn."""
        heads = [queue[0] for member in one.members if member < len(self.queues) and (queue := self.queues[member])]
        return heads if [head.same for head in heads] == [one.same] * len(one.members) else []


@dataclass(frozen=True, slots=True)
class Line:
    """A communicator as one device sees it: what the walker asks of `Communicator`."""

    exchange: Exchange
    name: str
    members: tuple[int, ...]
    device: int

    def _issue(
        self, verb: str, what: str, members: tuple[int, ...], tensor: Tensor, carry_out: Callable[..., object]
    ) -> Operation:
        assert self.device in members, f"{what}: device {self.device} is not one of {members}"
        same = (self.name, verb, members, _identity(what, self.exchange.placement))
        operation = Operation(self.exchange, self.device, what, same, members, tensor, carry_out)
        self.exchange.queues[self.device].append(operation)
        return operation

    def send(self, tensor: Tensor, peer: int, what: str) -> Operation:
        return self._issue("hop", what, (self.device, peer), tensor, _copy)

    def receive(self, buffer: Tensor, peer: int, what: str) -> Operation:
        return self._issue("hop", what, (peer, self.device), buffer.fill_(torch.nan), _copy)

    def broadcast(self, tensor: Tensor, root: int, what: str) -> Operation:
        def carry_out(*tensors: Tensor) -> None:
            for other in tensors:
                _copy(tensors[self.members.index(root)], other)

        return self._issue(f"broadcast from {root}", what, self.members, tensor, carry_out)

    def reduce(self, tensor: Tensor, root: int, what: str) -> Operation:
        def carry_out(*tensors: Tensor) -> None:
            total = torch.stack(tensors).sum(0)
            for member, one in zip(self.members, tensors, strict=True):
                _copy(total, one) if member == root else one.fill_(torch.nan)

        return self._issue(f"reduce to {root}", what, self.members, tensor, carry_out)

    def all_gather(self, tensor: Tensor, what: str, output: Tensor) -> Operation:
        output.fill_(torch.nan)[self.members.index(self.device)] = tensor

        def carry_out(*outputs: Tensor) -> None:
            rows = [one[place].clone() for place, one in enumerate(outputs)]
            for one in outputs:
                for place, row in enumerate(rows):
                    _copy(row, one[place])

        return self._issue("all-gather", what, self.members, output, carry_out)

    def gather_rows(self, rows: Tensor, counts: Sequence[int], root: int, what: str) -> Operation:
        return self._rows(rows, counts, root, what, to_root=True)

    def scatter_rows(self, rows: Tensor, counts: Sequence[int], root: int, what: str) -> Operation:
        return self._rows(rows, counts, root, what, to_root=False)

    def own_rows(self, counts: Sequence[int]) -> slice:
        return self._parts(counts)[self.members.index(self.device)]

    def _parts(self, counts: Sequence[int]) -> list[slice]:
        return [slice(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]

    def _rows(self, rows: Tensor, counts: Sequence[int], root: int, what: str, *, to_root: bool) -> Operation:
        def carry_out(*tensors: Tensor) -> None:
            whole = tensors[self.members.index(root)]
            for member, part, one in zip(self.members, self._parts(counts), tensors, strict=True):
                if member != root:
                    _copy(one, whole[part]) if to_root else _copy(whole[part], one)

        return self._issue(f"rows {'to' if to_root else 'from'} {root}", what, self.members, rows, carry_out)


def _copy(source: Tensor, target: Tensor) -> None:
    assert source.shape == target.shape, f"{tuple(source.shape)} is sent, {tuple(target.shape)} is received"
    target.copy_(source)
