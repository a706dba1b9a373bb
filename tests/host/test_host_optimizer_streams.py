"""Moments that come to a GPU and go: the streams wait for all that they have to, and for nothing else.

Streams and memory of a GPU are played on the CPU: what is asked for runs late, in any order that the events allow.
Memory of the device that is given back is handed out again at once, as torch's allocator does, and what was in it is
overwritten by the stream that computes: whoever has not waited reads NaN.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_host_optimizer import groups, model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from evenpipe.host import optimizer as host_optimizer
from evenpipe.host.optimizer import MOMENTS, HostAdamW
from evenpipe.host.pool import PAGE, PinnedSlab

COPY, UPDATE = torch.ops.aten.copy_.default, torch.ops.aten._fused_adamw_.default
COSTS = {COPY: 1, UPDATE: 2}


@dataclass(eq=False)
class Task:
    run: Callable[[], Any]
    behind: list[Task]
    end: int
    """The moment at which it would be over if every copy took 1 and every update 2."""
    done: bool = False


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.last: Task | None = None

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
        self.wait_event(other.last)

    def synchronize(self) -> None:
        self.device.synchronizations += 1
        while self.last is not None and not self.last.done:
            self.device.run_one()


class Device(TorchDispatchMode):
    """Copies that need not block, and updates, go to the stream that is current; everything else happens at once."""

    held = most_held = synchronizations = 0

    def __init__(self, seed: int, *, orderly: bool = True) -> None:
        """orderly: False ignores every wait between streams."""
        super().__init__()
        self.chance, self.orderly = random.Random(seed), orderly
        self.waiting: list[Task] = []
        self.free: list[Tensor] = []
        self.streams = [Stream(self)]
        self.current = self.computing = self.streams[0]

    def make_stream(self, torch_device: Any) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run_one(self) -> None:
        task = self.chance.choice([task for task in self.waiting if all(other.done for other in task.behind)])
        self.waiting.remove(task)
        with _disable_current_modes():
            task.run()
        task.done = True

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (operation is COPY and True in args[2:]) or operation is UPDATE:
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach(), (args, kwargs))
            self.current.enqueue(lambda: operation(*args, **kwargs), COSTS[operation])
            return args[0] if operation is COPY else None
        result = operation(*args, **kwargs)
        return self.take(result) if operation is torch.ops.aten.empty.memory_format else result

    def take(self, made: Tensor) -> Tensor:
        fits = [index for index, tensor in enumerate(self.free) if tensor.shape == made.shape]
        memory = self.free.pop(fits[-1]) if fits else made.fill_(math.nan)
        view = memory.view_as(memory)
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        weakref.finalize(view, self.give, memory)
        return view

    def give(self, memory: Tensor) -> None:
        self.held -= 1
        self.free.append(memory)
        self.computing.enqueue(lambda: memory.fill_(math.nan))


def optimizer_on_a_gpu(module: nn.Module, device: Device, monkeypatch: pytest.MonkeyPatch) -> HostAdamW:
    """Parameters on the CPU, with moments that travel over the device's streams."""
    monkeypatch.setattr(HostAdamW, "_stream", lambda self, group, pieces: pieces and self._stream_to_gpu(group, pieces))
    monkeypatch.setattr(torch.cuda, "Stream", device.make_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda torch_device=None: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.on)
    return HostAdamW(groups(module), lr=1e-2, fused=True, bucket_bytes=1024)


def steps(device: Device, monkeypatch: pytest.MonkeyPatch, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a tensor that has been through the streams and of torch's, moments as a step leaves them."""
    ours, theirs = model(), model()
    optimizer = optimizer_on_a_gpu(ours, device, monkeypatch)
    resident = torch.optim.AdamW(groups(theirs), lr=1e-2, fused=True)
    parameters = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    pairs = []
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        for own, other in parameters:
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        resident.step()
        with device:
            optimizer.step()
        for own, other in parameters:  # while the device still computes
            pairs += [(optimizer.state[own][name].clone(), resident.state[other][name].clone()) for name in MOMENTS]
        while device.waiting:
            device.run_one()
        pairs += [(own.detach().clone(), other.detach().clone()) for own, other in parameters]
    return pairs


def test_no_order_that_the_events_allow_changes_a_bit(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in sample(range(30), 3):
        device = Device(seed)
        assert all(torch.equal(ours, theirs) for ours, theirs in steps(device, monkeypatch)), seed
        assert device.most_held == 3 * len(MOMENTS), "buckets"
        assert device.held == 0
        assert device.synchronizations == 4, "one in each step"


def test_without_the_events_it_is_noticed(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in sample(range(5), 1):
        pairs = steps(Device(seed, orderly=False), monkeypatch)
        assert not all(torch.equal(ours, theirs) for ours, theirs in pairs), seed


def test_copies_in_and_copies_out_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket's copies take 2, to and fro, and its update 2: all three at once, but for the first and the last."""
    device, module = Device(0), nn.Linear(64, 64, bias=False)
    optimizer = optimizer_on_a_gpu(module, device, monkeypatch)
    module.weight.grad = torch.ones_like(module.weight)
    with device:
        optimizer.step()
    buckets = module.weight.numel() * 4 // 1024
    assert max(stream.last.end for stream in device.streams if stream.last is not None) == 2 * (buckets + 2)


# --- where moments lie ------------------------------------------------------------------------------------------


class OrdinarySlab(PinnedSlab):
    """Memory that is not locked."""

    def __init__(self, size: int) -> None:
        assert size & (size - 1) == 0
        self.size, self._bytes = size, torch.zeros(size, dtype=torch.uint8)


def test_moments_share_locked_slabs_and_are_loaded_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment on the "meta" device, that has no values, would not come back."""
    slabs: list[PinnedSlab] = []
    monkeypatch.setattr(host_optimizer, "PinnedSlab", lambda size: slabs.append(OrdinarySlab(size)) or slabs[-1])
    whole, module = model(), model().to("meta")
    resident = torch.optim.AdamW(whole.parameters(), fused=True)
    for parameter in whole.parameters():
        parameter.grad = torch.ones_like(parameter)
    resident.step()
    optimizer = HostAdamW(module.parameters(), share=0.6, fused=True)
    saved = resident.state_dict()
    before = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    assert 0 < len(optimizer.hosted) < len(list(module.parameters()))
    places = []
    for own, other in zip(module.parameters(), whole.parameters(), strict=True):
        state = optimizer.state[own]
        assert state.keys() == resident.state[other].keys()
        for name in MOMENTS:
            assert state[name].device.type == ("cpu" if own in optimizer.hosted else "meta")
            if own in optimizer.hosted:
                assert state[name] is optimizer.moment_on_host(own, name)
                assert torch.equal(state[name], resident.state[other][name])
                places.append((state[name].data_ptr(), state[name].data_ptr() + state[name].nbytes))
    places.sort()
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(places))
    (slab,) = slabs
    assert slab.size < 2 * sum(-(-(end - begin) // PAGE) * PAGE for begin, end in places)
    assert all(saved["state"][number].keys() == state.keys() for number, state in before["state"].items())


def test_a_parameter_without_elements_has_nothing_on_the_host() -> None:
    """As a shard of rows may be."""
    empty, other = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.zeros(3, 4))
    optimizer = HostAdamW([empty, other], fused=True)
    assert optimizer.hosted == {other} and optimizer.moment_on_host(empty, "exp_avg") is None
    empty.grad, other.grad = torch.zeros_like(empty), torch.ones_like(other)
    optimizer.step()
    assert optimizer.state[empty]["exp_avg"].shape == (0, 4) and other.min() < 0
