"""Streams and memory of a GPU, played on the CPU: what is asked for runs late, in any order that the events allow.

Memory of the device that is given back is handed out again at once, as torch's allocator does, and what was in it is
overwritten by the stream that computes: whoever has not waited reads NaN.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

COPY, UPDATE = torch.ops.aten.copy_.default, torch.ops.aten._fused_adamw_.default
EMPTY = torch.ops.aten.empty.memory_format
COSTS = {COPY: 1, UPDATE: 2}


@dataclass(eq=False)
class Task:
    run: Callable[[], Any]
    behind: list[Task]
    end: int
    """The moment at which it would be over if every copy took 1 and every update 2."""
    done: bool = False


@dataclass(eq=False)
class Stream:
    device: Device
    last: Task | None = None

    def enqueue(self, run: Callable[[], Any], cost: int = 0, behind: Task | None = None) -> None:
        tasks = [task for task in (self.last, behind) if task is not None]
        self.last = Task(run, tasks, max((task.end for task in tasks), default=0) + cost)
        self.device.waiting.append(self.last)

    def record_event(self) -> Task | None:
        return self.last

    def wait_event(self, event: Task | None) -> None:
        if event is not None and self.device.orderly:
            self.enqueue(lambda: None, behind=event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.device.synchronizations += 1
        self.device.run_until(self.last)


@dataclass(eq=False)
class Device:
    """orderly: False ignores every wait between streams."""

    seed: int
    orderly: bool = True
    waiting: list[Task] = field(default_factory=list)
    free: list[Tensor] = field(default_factory=list)
    held = most_held = synchronizations = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.streams = [Stream(self)]
        self.current = self.computing = self.streams[0]

    def make_stream(self, torch_device: Any) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def run_until(self, task: Task | None) -> None:
        while task is not None and not task.done:
            self._run_one()

    def finish(self) -> None:
        while self.waiting:
            self._run_one()

    def _run_one(self) -> None:
        ready = [task for task in self.waiting if all(other.done for other in task.behind)]
        task = self.chance.choice(ready)
        self.waiting.remove(task)
        with _disable_current_modes():
            task.run()
        task.done = True

    # --- memory ------------------------------------------------------------------------------------------------

    def take(self, made: Tensor) -> Tensor:
        fits = [tensor for tensor in self.free if tensor.shape == made.shape]
        if fits:
            self.free = [tensor for tensor in self.free if tensor is not fits[-1]]
        memory = fits[-1] if fits else made.fill_(math.nan)
        given = memory.view_as(memory)
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        weakref.finalize(given, self._give, memory)
        return given

    def _give(self, memory: Tensor) -> None:
        self.held -= 1
        self.free.append(memory)
        self.computing.enqueue(lambda: memory.fill_(math.nan))


class Deferred(TorchDispatchMode):
    """Copies that need not block, and updates, go to the stream that is current; everything else happens at once."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (operation is COPY and True in args[2:]) or operation is UPDATE:
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach(), (args, kwargs))
            self.device.current.enqueue(lambda: operation(*args, **kwargs), COSTS[operation])
            return args[0] if operation is COPY else None
        result = operation(*args, **kwargs)
        return self.device.take(result) if operation is EMPTY else result


@contextmanager
def played(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.cuda's streams are the device's."""
    with monkeypatch.context() as patch, Deferred(device):
        patch.setattr(torch.cuda, "Stream", device.make_stream)
        patch.setattr(torch.cuda, "current_stream", lambda torch_device=None: device.current)
        patch.setattr(torch.cuda, "stream", device.on)
        yield
