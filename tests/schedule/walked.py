"""The real walkers of all devices of a program, in one process and on a tiny model: what becomes of a step.

`exchange` carries what they send, the host is one whose copies come late, replicas are one that misses what is not
gathered, and the model is linear layers of width 4.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from blocking_copies import BlockingCopies
from exchange import Exchange, Line
from torch import Tensor, nn
from torch.nn import functional

from evenpipe.host.copies import Move, Ticket
from evenpipe.host.offload import Activations
from evenpipe.host.pool import HostPool
from evenpipe.layers.weight_gradients import SplitBackward, WeightGradients
from evenpipe.model import EdgeSpec, EdgeTensor
from evenpipe.parallel.parameters import Matrix
from evenpipe.runtime.batch import Batch, Microbatch
from evenpipe.runtime.inputs import IGNORE_INDEX
from evenpipe.runtime.transport import Transport
from evenpipe.runtime.vocabulary_layers import EmbeddingShard, OutputShard
from evenpipe.runtime.walker import Walker
from evenpipe.schedule import Kind, Pass, Program
from evenpipe.schedule.passes import GATHERING_KINDS, REDUCING_KINDS, SHARDING_KINDS
from evenpipe.schedule.placement import Edge
from evenpipe.schedule.sharding import ParameterUse, Part, part_of
from evenpipe.vocabulary import LossOptions, Shard
from evenpipe.vocabulary.shards import split

HIDDEN, VOCABULARY, TOKENS = 4, 7, 3
EXACT = 1e-10

CPU, META = torch.device("cpu"), torch.device("meta")


class ResultError(Exception):
    """All devices came to the ends of their rows, and what they found is not what one process finds."""


# --- the host ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Slab:
    size: int


class LateCopies:
    """In the order in which they are asked for, and only when somebody waits."""

    def __init__(self) -> None:
        self._host: dict[tuple[int, int], Tensor] = {}
        self._queue: deque[tuple[Ticket, Sequence[Move], bool]] = deque()

    def out(self, moves: Sequence[Move]) -> Ticket:
        return self._ask(moves, to_host=True)

    def back(self, moves: Sequence[Move], behind: Ticket) -> Ticket:
        return self._ask(moves, to_host=False)

    def wait(self, ticket: Ticket) -> None:
        while not ticket.over:
            one, moves, to_host = self._queue.popleft()
            for storage, slot in moves if moves and moves[0][0].device == CPU else ():
                there = torch.empty(0, dtype=torch.uint8).set_(storage)
                if to_host:
                    self._host[slot.slab, slot.offset] = there.clone()
                    there.fill_(255)  # nan: it is not to be used until it is back
                else:
                    there.copy_(self._host.pop((slot.slab, slot.offset)))
            one.over = True

    def close(self) -> None:
        pass

    def _ask(self, moves: Sequence[Move], *, to_host: bool) -> Ticket:
        ticket = Ticket(False, [])
        self._queue.append((ticket, moves, to_host))
        return ticket


# --- the model --------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """A linear layer, whose weight gradient can wait, and a scale, whose gradient is made in I."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + torch.rand(HIDDEN, dtype=torch.float64))
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)

    incoming = outgoing = EdgeSpec((EdgeTensor("hidden", ("sequences", "tokens", HIDDEN), torch.float64),))

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """others: of further stages before this one."""
        hidden = sum(others, hidden)
        return hidden + torch.tanh(self.linear(hidden * self.scale))


@lru_cache(maxsize=32)
def _stages(count: int, torch_device: torch.device) -> list[Stage]:
    torch.manual_seed(count)
    stages = [Stage().to(torch_device) for _ in range(count)]
    for stage in stages:
        SplitBackward(WeightGradients()).apply(stage, {})
    return stages


@lru_cache(maxsize=32)
def _values(count: int) -> list[list[Tensor]]:
    """Of the parameters of each stage; those of the modules may be lost in a step that fails."""
    return [[parameter.detach().clone() for parameter in stage.parameters()] for stage in _stages(count, CPU)]


def _restore(count: int, stage: int) -> None:
    for parameter, value in zip(_stages(count, CPU)[stage].parameters(), _values(count)[stage], strict=True):
        parameter.data.copy_(value)


@lru_cache(maxsize=1)
def _matrices() -> tuple[Tensor, Tensor]:
    """Embedding and output layer."""
    torch.manual_seed(0)
    return torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64), torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64)


@lru_cache(maxsize=32)
def _batch(count: int) -> Batch:
    torch.manual_seed(count)
    microbatches = []
    for _ in range(count):
        targets = torch.randint(VOCABULARY, (TOKENS,))
        targets[0] = IGNORE_INDEX
        weights = torch.full((TOKENS,), 1 / count / (TOKENS - 1), dtype=torch.float64)
        microbatches.append(Microbatch(torch.randint(VOCABULARY, (1, TOKENS)), targets, weights, None, None))
    return Batch(tuple(microbatches), count, TOKENS, count * (TOKENS - 1))


@lru_cache(maxsize=64)
def _expected(edges: tuple[Edge, ...], stages: int, microbatches: int) -> tuple[Tensor, list[Tensor]]:
    """Loss, and the gradients of all stages' parameters, the embedding and the output layer, in one process."""
    modules = _stages(stages, CPU)
    for stage in range(stages):
        _restore(stages, stage)
    embedding, head = (matrix.clone().requires_grad_() for matrix in _matrices())
    loss = torch.zeros((), dtype=torch.float64)
    for microbatch in _batch(microbatches).microbatches:
        outputs: list[Tensor] = []
        for stage, module in enumerate(modules):
            module.linear._weight_gradients = WeightGradients()  # type: ignore[assignment]
            inputs = [outputs[source] for source, target in edges if target == stage]
            outputs.append(module(*inputs or [embedding[microbatch.token_ids]]))
        logits = outputs[-1].view(TOKENS, HIDDEN) @ head.T
        losses = functional.cross_entropy(logits, microbatch.targets, reduction="none", ignore_index=IGNORE_INDEX)
        loss = loss + losses @ microbatch.weights
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return loss.detach(), list(torch.autograd.grad(loss, [*parameters, embedding, head]))


# --- replicas ---------------------------------------------------------------------------------------------------------


class Replica:
    """One of several, of which the others do the same: parameters that the row gathers are NaN while they are not
    there, and gradients are what they were when they were summed, or NaN if they never were though others are."""

    def __init__(self, program: Program, device: int, held: dict[Part, list[nn.Parameter]]) -> None:
        row = [item for item in program.rows[device] if isinstance(item, Pass) and item.kind in SHARDING_KINDS]
        self._gathers = {part_of(item) for item in row if item.kind in GATHERING_KINDS}
        self._sums = any(item is not None and item.kind in REDUCING_KINDS for row in program.rows for item in row)
        self._held = held
        self._whole = {part: [one.detach().clone() for one in held.get(part, ())] for part in self._gathers}
        self._pending: set[Part] = set()
        self._there: set[Part] = set()
        self._summed: dict[Part, list[Tensor | None]] = {}

    def begin(self, *, gradients: bool) -> None:
        for part in self._gathers:
            self._poison(part)

    def run(self, item: Pass) -> None:
        part = part_of(item)
        if item.kind in GATHERING_KINDS:
            assert part not in self._pending | self._there
            self._pending.add(part)
        elif item.kind in REDUCING_KINDS:
            assert part not in self._summed
            held = self._held.get(part, ())
            self._summed[part] = [None if one.grad is None else one.grad.clone() for one in held]
        else:
            assert part in self._pending | self._there
            self._pending.discard(part)
            self._there.discard(part)
            self._poison(part)

    def ready(self, part: Part) -> None:
        self._pending.remove(part)
        self._there.add(part)
        for one, whole in zip(self._held.get(part, ()), self._whole[part], strict=True):
            one.data.copy_(whole)  # as FSDP2 does, unseen by autograd

    def finish(self) -> None:
        for part, held in self._held.items():
            for one, gradient in zip(held, self._summed.get(part, [None] * len(held)), strict=True):
                if self._sums:
                    one.grad = gradient if part in self._summed else torch.full_like(one, math.nan)

    def _poison(self, part: Part) -> None:
        for one in self._held.get(part, ()):
            one.data.fill_(math.nan)


def _parts(
    program: Program, device: int, stages: dict[int, Stage], matrices: dict[Kind, nn.Parameter | None]
) -> dict[Part, list[nn.Parameter]]:
    """What belongs to each part of a device; the row tells whether vocabulary layers are parts of their own."""
    placement, sharded = program.placement, program.vocabulary.sharded
    held: dict[Part, list[nn.Parameter]] = {number: list(stage.parameters()) for number, stage in stages.items()}
    users = ParameterUse.of_row(placement, program.vocabulary, program.rows[device])
    for kind, stage in ((Kind.E, placement.first_stage), (Kind.S, placement.last_stage)):
        using = users.parts(Pass(kind, None, 0) if sharded else Pass(Kind.F, stage, 0))
        parameter = matrices[kind]
        if using and parameter is not None:
            held.setdefault(using[-1], []).append(parameter)
    return held


@dataclass(slots=True)
class Device:
    """What a device holds, for one step."""

    walker: Walker
    pool: HostPool
    embedding: nn.Parameter | None
    head: nn.Parameter | None
    output: OutputShard | None


def _device(program: Program, device: int, exchange: Exchange, torch_device: torch.device) -> Device:
    placement, sharded = program.placement, program.vocabulary.sharded
    queue, pool = WeightGradients(), HostPool(Slab, powers=True)
    stages: dict[int, Any] = {}
    for stage in placement.stages_of(device):
        stages[stage] = module = _stages(placement.stages, torch_device)[stage]
        module.zero_grad()
        if torch_device == CPU:
            _restore(placement.stages, stage)
        module.linear._weight_gradients = queue  # type: ignore[assignment]
    shards = split(VOCABULARY, placement.devices) if sharded else [Shard(0, VOCABULARY, VOCABULARY)]
    part = device if sharded else 0
    embedding, head = (
        nn.Parameter(matrix[shards[part].start : shards[part].stop].clone().to(torch_device))
        if sharded or device == holder
        else None
        for matrix, holder in zip(_matrices(), (placement.first_device, placement.last_device), strict=True)
    )
    output = None
    if head is not None:
        matrix = Matrix(head, head.dtype)
        output = OutputShard(matrix, None, shards[part], LossOptions(), one_barrier=program.vocabulary == "vocab-2")
    activations = Activations(pool, LateCopies(), torch_device)
    activations.smallest_bytes = 1
    walker = Walker(
        device,
        stages,
        None if embedding is None else EmbeddingShard(Matrix(embedding, embedding.dtype), shards, part, None),
        output,
        transport=Transport(
            {  # type: ignore[arg-type]
                name: Line(exchange, name, members, device)
                for name, members in program.communicators.items()
                if device in members
            },
            range(placement.devices),
            HIDDEN,
            torch.float64,
            torch_device,
        ),
        vocabulary_passes=sharded,
        weight_gradients=queue,
        activations=activations,
        replicas=Replica(program, device, _parts(program, device, stages, {Kind.E: embedding, Kind.S: head})),  # type: ignore[arg-type]
    )
    return Device(walker, pool, embedding, head, output)


def walk_without_values(program: Program, seed: int) -> BlockingCopies:
    """One step on torch's "meta" device, which has no values: whatever reads one fails. Returns the copies between the
    host and the device, all of them by the threads of the devices."""
    exchange, copies = Exchange(program.placement, random.Random(seed)), BlockingCopies()
    devices = [_device(program, device, exchange, META) for device in range(program.devices)]
    batch = _batch(program.microbatches)
    moved = [replace(one, weights=one.weights.to(META)) for one in batch.microbatches]
    batch = replace(batch, microbatches=tuple(moved))

    def counted(walker: Walker) -> None:
        with copies:
            walker.walk(program, batch)

    exchange.run([partial(counted, one.walker) for one in devices])
    return copies


def walk(program: Program, seed: int) -> None:
    """One step. Raises what a device fails with, StandstillError where none can go on, and ResultError where loss or
    gradients are not those of one process, or something is left over."""
    exchange = Exchange(program.placement, random.Random(seed))
    devices = [_device(program, device, exchange, CPU) for device in range(program.devices)]
    batch = _batch(program.microbatches)
    exchange.run([lambda one=one: one.walker.walk(program, batch) for one in devices])  # type: ignore[misc]
    if any(exchange.queues):
        raise ResultError("transfers are under way at the end")
    if any(one.pool.used for one in devices):
        raise ResultError("room on the host is not given back")
    loss, gradients = _expected(program.placement.edges, program.placement.stages, program.microbatches)
    for found in (one.output.loss for one in devices if one.output is not None):
        if found is None or not torch.allclose(found, loss, rtol=EXACT):
            raise ResultError(f"the loss is {found}, not {loss}")
    if program.forward_only:
        return
    modules = _stages(program.placement.stages, CPU)
    sums = [parameter.grad for module in modules for parameter in module.parameters()]
    for name in ("embedding", "head"):
        held = [shard for one in devices if (shard := getattr(one, name)) is not None]
        parts = [torch.zeros_like(shard) if shard.grad is None else shard.grad for shard in held]
        sums.append(torch.cat(parts))
    for number, (one, wanted) in enumerate(zip(sums, gradients, strict=True)):
        if one is None or not bool(torch.linalg.vector_norm(one - wanted) <= EXACT * torch.linalg.vector_norm(wanted)):
            raise ResultError(f"gradient {number} is not that of one process")
