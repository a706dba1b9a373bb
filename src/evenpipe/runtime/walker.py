"""Walks a device's program: one small handler per kind of pass and of transfer.

    results of passes ---> _local ---> transfers out ---> other devices
                                       transfers in  ---> _arriving ---> waited for by the first pass that uses them

Values are found by (what, stage, microbatch). A value is taken out by its only user, so that memory falls as the
program says; nothing is left over at the end of a step, which is asserted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from evenpipe.runtime.accounting import ByteCounter
from evenpipe.runtime.batch import Batch, Microbatch
from evenpipe.runtime.checkpointing import Switch
from evenpipe.runtime.communication import Communicator, Communicators, Handle
from evenpipe.runtime.random_state import RandomState
from evenpipe.runtime.recording import Recording, StepRecord
from evenpipe.runtime.router_loss import ALONG, RouterLosses
from evenpipe.runtime.vocabulary_layers import EmbeddingShard, OutputShard
from evenpipe.runtime.weight_gradients import WeightGradients
from evenpipe.schedule import Kind, Pass, Program, Transfer, TransferKind, parts_of

if TYPE_CHECKING:
    from evenpipe.runtime.replicas import Replicas

SENDS_IN_FLIGHT = 2
"""Sends per communicator that may be unfinished before the oldest is waited for: bounds the outputs kept alive. Waiting
for an earlier transfer at a later point of the program cannot deadlock, since all programs are cut from one order."""

Key = tuple[str, int, int]
"""What it is, of which stage (-1: of none), of which microbatch."""


class StageModule(Protocol):
    """What the walker needs of a stage; any module with such a forward will do."""

    def __call__(
        self, hidden: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """hidden: [sequences, tokens, hidden_size], the raw rows of the embedding for the first stage. Returns the
        same shape; of the last stage, what the head receives."""
        ...


@dataclass(slots=True)
class _Forwarded:
    """What F leaves for the backward of the same stage and microbatch."""

    input: Tensor
    output: GradientEdge | None
    """None until R has run."""
    random_state: RandomState | None = None
    """Before F, where R is to draw the same numbers again."""


class _Row:
    """What the row of a device says of its microbatches beforehand."""

    def __init__(self, program: Program, device: int) -> None:
        kinds: dict[Kind, set[tuple[int | None, int | None]]] = {Kind.I: set(), Kind.R: set()}
        for item in program.rows[device]:
            if isinstance(item, Pass):
                for part in parts_of(item):
                    if part.kind in kinds:
                        kinds[part.kind].add((part.stage, part.microbatch))
        self.program = program
        self.split = kinds[Kind.I]
        """Stage and microbatch of those whose backward is I and W."""
        self.recomputed = kinds[Kind.R]
        """Of those that have R."""


class Walker:
    """Executes programs on one device.

    Args:
        device: which row of a program is walked.
        stages: the local stages by number.
        embedding: this device's rows of the embedding; None where it holds none and routes none.
        output: its rows of the output layer; None where it holds none.
        vocabulary_passes: True when the programs hold E, G, S, T (and C) as passes of their own; False when the first
            stage's F and B contain the embedding and the last stage's contain the output layer.
        communicators: None for one device.
        ranks: global rank of each device's process.
        hidden_dtype: of the hidden states between stages.
        weight_gradients: the queue of the stages' layers, for split backwards.
        checkpointing: the switch of the stages' layers: microbatches with R keep all of the graph that R makes.
        replicas: what to do for other pipelines that hold the same parameters; None: there are none.
        router_losses: of a model whose routers have a loss of their own; None: of others.
    """

    def __init__(
        self,
        device: int,
        stages: Mapping[int, StageModule],
        embedding: EmbeddingShard | None,
        output: OutputShard | None,
        *,
        communicators: Communicators | None,
        ranks: Sequence[int],
        vocabulary_passes: bool,
        hidden_size: int,
        hidden_dtype: torch.dtype,
        torch_device: torch.device,
        weight_gradients: WeightGradients | None = None,
        checkpointing: Switch | None = None,
        replicas: Replicas | None = None,
        router_losses: RouterLosses | None = None,
    ) -> None:
        self._device = device
        self._stages = stages
        self._embedding = embedding
        self._output = output
        self._communicators = communicators
        self._ranks = ranks
        self._vocabulary_passes = vocabulary_passes
        self._hidden_size = hidden_size
        self._hidden_dtype = hidden_dtype
        self._torch_device = torch_device
        self.record_passes = False
        self.counter: ByteCounter | None = None
        self._recording: Recording | None = None
        self._started: Any = None

        self._local: dict[Key, Tensor] = {}
        self._batch: Batch | None = None
        self._arriving: dict[Key, tuple[Tensor, Handle]] = {}
        self._forwarded: dict[tuple[int, int], _Forwarded] = {}
        self._sends: dict[str, deque[Handle]] = {}
        self._weight_gradients = WeightGradients() if weight_gradients is None else weight_gradients
        self._replicas = replicas
        self._router_losses = router_losses
        # Each hop has a second, small message then.
        self._sends_in_flight = SENDS_IN_FLIGHT if router_losses is None else 2 * SENDS_IN_FLIGHT
        self._checkpointing = Switch() if checkpointing is None else checkpointing
        self._row: _Row | None = None
        self._pass_handlers: dict[Kind, Callable[[Pass], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_gradient,
            Kind.W: self._weight_gradient,
            Kind.R: self._recompute,
            Kind.OVERLAP_F_B: self._joint,
            Kind.UNSHARD: self._nothing,
            Kind.RESHARD: self._nothing,
            Kind.REDUCE_GRAD: self._nothing,
            Kind.E: self._embed,
            Kind.G: self._embedding_gradient,
            Kind.S: self._output_forward,
            Kind.C: self._combine,
            Kind.T: self._output_backward,
        }
        self._transfer_handlers: dict[TransferKind, Callable[[Transfer], None]] = {
            TransferKind.SEND_F: self._send_forward,
            TransferKind.RECV_F: self._receive_forward,
            TransferKind.SEND_B: self._send_backward,
            TransferKind.RECV_B: self._receive_backward,
            TransferKind.X: self._broadcast_hidden,
            TransferKind.STATISTICS: self._gather_statistics,
            TransferKind.DX: self._reduce_gradient,
            TransferKind.ROWS: self._exchange_rows,
            TransferKind.ROW_GRADIENTS: self._exchange_row_gradients,
        }

    # --- walking ---------------------------------------------------------------------------------------------

    def walk(self, program: Program, batch: Batch) -> StepRecord:
        """Runs this device's row of the program over the batch."""
        self._batch = batch
        self._program = program
        if self._row is None or self._row.program is not program:
            self._row = _Row(program, self._device)
        self._gradients = not program.forward_only
        self._last_stage = program.placement.stages - 1
        if self._embedding is not None:
            self._embedding.begin(batch)
        if self._output is not None:
            self._output.clear()
        self._clear()
        if self._router_losses is not None:
            self._router_losses.begin(program, self._local, self._take)

        recording = self._recording = Recording(self._torch_device) if self.record_passes else None
        record = StepRecord(start=time.perf_counter())
        counter = self.counter
        before, after = ({}, {}) if self._replicas is None else self._replicas.begin(program)
        grad_mode = torch.enable_grad if self._gradients else torch.no_grad
        with grad_mode():
            for item in program.rows[self._device]:
                if counter is not None:
                    counter.at(item)
                if isinstance(item, Transfer):
                    issued = None if recording is None else recording.stamp()
                    self._transfer_handlers[item.kind](item)
                    if recording is not None:
                        recording.transfers.append((item, issued, recording.stamp()))
                elif item is not None:
                    self._pass_text = str(item)
                    if before:
                        for action in before.get(item, ()):
                            action()
                    self._pass_handlers[item.kind](item)
                    self._finish_pass(item, record)
                    if after:
                        for action in after.get(item, ()):
                            action()
        if counter is not None:
            counter.at(None)
        for name in self._sends:
            self._wait_for_sends(name, 0)
        if self._replicas is not None:
            self._replicas.finish()
        record.end = time.perf_counter()
        if recording is not None:
            recording.finish(record)
        leftovers = (*self._local, *self._arriving, *self._forwarded)
        assert not leftovers and not len(self._weight_gradients), f"values of the step are left over: {leftovers}"
        self._batch = None
        if self._embedding is not None:
            self._embedding.end()
        return record

    def _clear(self) -> None:
        """Forgets what a step that failed may have left."""
        self._local.clear()
        self._arriving.clear()
        self._forwarded.clear()
        self._sends.clear()
        self._weight_gradients.clear()
        self._checkpointing.off = False
        self._started = None

    def _begin(self) -> None:
        """Called by each handler once its inputs are there: from here on the pass computes. Of several that run as
        one the first counts."""
        if self._started is None:
            self._started = 0.0 if self._recording is None else self._recording.stamp()
            self._started_processor = time.thread_time()

    def _finish_pass(self, item: Pass, record: StepRecord) -> None:
        processor = time.thread_time() - self._started_processor
        record.busy += processor
        if self._recording is not None:
            self._recording.passes.append((item, self._started, self._recording.stamp(), processor))
        self._started = None

    def _wait(self, handle: Handle, needed_by: str = "") -> None:
        if self._recording is None:
            handle.wait(needed_by)
            return
        started = self._recording.stamp()
        handle.wait(needed_by)
        self._recording.waits.append((handle.what, needed_by, started, self._recording.stamp()))

    # --- values ----------------------------------------------------------------------------------------------

    def _take(self, key: Key) -> Tensor:
        """A value made here or received; waits until it is there."""
        if key in self._local:
            return self._local.pop(key)
        tensor, handle = self._arriving.pop(key)
        self._wait(handle, self._pass_text)
        return tensor

    def _keep_send(self, item: Transfer, handle: Handle) -> None:
        self._sends.setdefault(item.communicator, deque()).append(handle)
        self._wait_for_sends(item.communicator, self._sends_in_flight)

    def _wait_for_sends(self, communicator: str, at_most: int) -> None:
        sends = self._sends[communicator]
        while len(sends) > at_most:
            self._wait(sends.popleft())

    def _microbatch(self, item: Pass | Transfer) -> tuple[int, Microbatch]:
        assert item.microbatch is not None
        assert self._batch is not None
        return item.microbatch, self._batch.microbatches[item.microbatch]

    def _hidden_buffer(self, index: int) -> Tensor:
        assert self._batch is not None
        sequences, tokens = self._batch.microbatches[index].token_ids.shape
        return torch.empty((sequences, tokens, self._hidden_size), dtype=self._hidden_dtype, device=self._torch_device)

    def _communicator(self, item: Transfer) -> Communicator:
        assert self._communicators is not None
        return self._communicators[item.communicator]

    def _root(self, item: Transfer) -> int:
        """Global rank of a transfer's root."""
        assert item.root is not None
        return self._ranks[item.root]

    # --- transformer passes ----------------------------------------------------------------------------------

    def _forward(self, item: Pass) -> None:
        assert item.stage is not None
        stage = item.stage
        index, microbatch = self._microbatch(item)
        shape = (*microbatch.token_ids.shape, self._hidden_size)
        taken: Tensor | None = None
        if stage > 0:
            taken = self._take(("F", stage, index))
        elif self._vocabulary_passes:
            taken = self._take(("ROWS", -1, index))
        if self._router_losses is not None:
            self._router_losses.before_forward(stage, index)
        self._begin()
        if stage > 0:
            assert taken is not None
            hidden = taken
        else:
            assert self._embedding is not None
            rows = self._embedding.rows(index) if taken is None else taken
            hidden = self._embedding.place(rows, index).view(shape)
        hidden = hidden.detach()
        key = (stage, index)
        assert self._row is not None
        if not self._gradients:
            output = self._call(stage, index, hidden, microbatch)
        elif key in self._row.recomputed:
            self._forwarded[key] = _Forwarded(hidden, None, RandomState.of(self._torch_device))
            with torch.no_grad():
                output = self._call(stage, index, hidden, microbatch)
        else:
            output = self._forward_with_graph(_Forwarded(hidden, None), stage, index, microbatch)
        result = output.detach()
        if stage < self._last_stage:
            self._local["F", stage + 1, index] = result.contiguous()
        elif self._vocabulary_passes:
            self._local["X", -1, index] = result.reshape(-1, self._hidden_size).contiguous()
        else:
            self._whole_output(result.reshape(-1, self._hidden_size), microbatch, index)

    def _whole_output(self, hidden: Tensor, microbatch: Microbatch, index: int) -> None:
        """The whole output layer and the loss, as part of the last stage's F."""
        assert self._output is not None
        statistics = self._output.forward(hidden, microbatch, index, gradients=self._gradients)
        self._output.combine(statistics.unsqueeze(0), microbatch, index, gradients=self._gradients)

    def _forward_with_graph(self, forwarded: _Forwarded, stage: int, index: int, microbatch: Microbatch) -> Tensor:
        """The stage on `forwarded.input`, and its graph kept for the backward. Returns the output."""
        assert self._row is not None
        key = (stage, index)
        forwarded.input.requires_grad_()
        self._weight_gradients.under_way = key if key in self._row.split else None
        self._checkpointing.off = key in self._row.recomputed
        output = self._call(stage, index, forwarded.input, microbatch)
        self._checkpointing.off = False
        self._weight_gradients.under_way = None
        # The edge, not the output: the graph stays, the output itself goes as soon as it is sent.
        forwarded.output = get_gradient_edge(output)
        self._forwarded[key] = forwarded
        return output

    def _call(self, stage: int, index: int, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        module = self._stages[stage]
        if self._router_losses is not None:
            return self._router_losses.call(module, stage, index, hidden, microbatch)
        return module(hidden, microbatch.position_ids, microbatch.attention_mask)

    def _recompute(self, item: Pass) -> None:
        """R: the graph that F did not keep, from the stage's input and with the same random numbers."""
        assert item.stage is not None
        index, microbatch = self._microbatch(item)
        self._begin()
        forwarded = self._forwarded[item.stage, index]
        assert forwarded.random_state is not None
        with forwarded.random_state.restored():
            self._forward_with_graph(forwarded, item.stage, index, microbatch)
        forwarded.random_state = None

    def _backward(self, item: Pass) -> None:
        self._gradients_of_stage(item, split=False)

    def _input_gradient(self, item: Pass) -> None:
        self._gradients_of_stage(item, split=True)

    def _gradients_of_stage(self, item: Pass, *, split: bool) -> None:
        """B, or I, which leaves the weight gradients of linear layers and of a whole output layer to W."""
        assert item.stage is not None
        stage = item.stage
        index, microbatch = self._microbatch(item)
        gradient: Tensor | None = None
        if stage < self._last_stage:
            gradient = self._take(("B", stage, index))
        elif self._vocabulary_passes:
            gradient = self._take(("DX", -1, index))
        if self._router_losses is not None:
            self._router_losses.before_backward(stage, index)
        self._begin()
        if gradient is None:
            assert self._output is not None
            gradient = self._output.hidden_gradient(index) if split else self._output.backward(index)
            assert gradient is not None
        forwarded = self._forwarded.pop((stage, index))
        assert forwarded.output is not None
        shape = (*microbatch.token_ids.shape, self._hidden_size)
        if split:
            self._weight_gradients.begin((stage, index))
        torch.autograd.backward((forwarded.output,), (gradient.to(self._hidden_dtype).view(shape),))
        self._weight_gradients.under_way = None
        input_gradient = forwarded.input.grad
        assert input_gradient is not None
        forwarded.input.grad = None
        if stage > 0:
            self._local["B", stage - 1, index] = input_gradient.contiguous()
            return
        assert self._embedding is not None
        input_gradient = input_gradient.view(-1, self._hidden_size)
        rows_gradient = self._embedding.pick(input_gradient, index)
        if self._vocabulary_passes:
            self._local["ROW_GRADIENTS", -1, index] = rows_gradient
        else:
            self._embedding.add_gradient(rows_gradient, index)

    def _weight_gradient(self, item: Pass) -> None:
        assert item.stage is not None
        index, _ = self._microbatch(item)
        self._begin()
        if item.stage == self._last_stage and not self._vocabulary_passes:
            assert self._output is not None
            self._output.backward(index)
        self._weight_gradients.compute((item.stage, index))

    def _joint(self, item: Pass) -> None:
        """Passes run as one, here one after the other: each waits for its own inputs only."""
        for part in item.parts:
            self._pass_handlers[part.kind](part)

    def _nothing(self, item: Pass) -> None:
        """Gathering and freeing of sharded parameters: nothing is sharded here."""
        self._begin()

    # --- hops ------------------------------------------------------------------------------------------------

    def _send_forward(self, item: Transfer) -> None:
        assert item.stage is not None
        self._send(item, ("F", item.stage + 1, item.microbatch))

    def _send_backward(self, item: Transfer) -> None:
        assert item.stage is not None
        self._send(item, ("B", item.stage - 1, item.microbatch))

    def _send(self, item: Transfer, key: Key) -> None:
        keys = [key]
        if self._router_losses is not None:
            what, stage, index = key
            keys.append((ALONG[what], stage, index))
        for one in keys:
            tensor = self._local.pop(one)
            self._keep_send(item, self._communicator(item).send(tensor, self._ranks[item.members[1]], str(item)))

    def _receive_forward(self, item: Transfer) -> None:
        self._receive(item, "F")

    def _receive_backward(self, item: Transfer) -> None:
        self._receive(item, "B")

    def _receive(self, item: Transfer, what: str) -> None:
        assert item.stage is not None
        buffers = {what: self._hidden_buffer(item.microbatch)}
        if self._router_losses is not None:
            buffers[ALONG[what]] = self._router_losses.buffer(what)
        for one, buffer in buffers.items():
            handle = self._communicator(item).receive(buffer, self._ranks[item.members[0]], str(item))
            self._arriving[one, item.stage, item.microbatch] = (buffer, handle)

    # --- embedding -------------------------------------------------------------------------------------------

    def _embed(self, item: Pass) -> None:
        assert self._embedding is not None
        index, _ = self._microbatch(item)
        self._begin()
        self._local["ROWS", -1, index] = self._embedding.rows(index)

    def _exchange_rows(self, item: Transfer) -> None:
        """Every device sends the rows that it owns to the first stage's; empty messages are sent by nobody."""
        assert self._embedding is not None
        key = ("ROWS", -1, item.microbatch)
        counts = self._embedding.counts(item.microbatch)
        communicator = self._communicator(item)
        rows = self._local.pop(key)
        if self._device == item.root:
            own, rows = rows, self._row_buffer(sum(counts))
            rows[communicator.own_rows(counts)] = own
            self._arriving[key] = (rows, communicator.gather_rows(rows, counts, self._root(item), str(item)))
        else:
            self._keep_send(item, communicator.gather_rows(rows, counts, self._root(item), str(item)))

    def _exchange_row_gradients(self, item: Transfer) -> None:
        """The first stage's device sends each owner the gradients of its rows."""
        assert self._embedding is not None
        key = ("ROW_GRADIENTS", -1, item.microbatch)
        counts = self._embedding.counts(item.microbatch)
        communicator = self._communicator(item)
        if self._device == item.root:
            rows = self._local.pop(key)
            self._local[key] = rows[communicator.own_rows(counts)]
            self._keep_send(item, communicator.scatter_rows(rows, counts, self._root(item), str(item)))
        else:
            buffer = self._row_buffer(counts[self._device])
            self._arriving[key] = (buffer, communicator.scatter_rows(buffer, counts, self._root(item), str(item)))

    def _row_buffer(self, count: int) -> Tensor:
        return torch.empty((count, self._hidden_size), dtype=self._hidden_dtype, device=self._torch_device)

    def _embedding_gradient(self, item: Pass) -> None:
        assert self._embedding is not None
        index, _ = self._microbatch(item)
        gradient = self._take(("ROW_GRADIENTS", -1, index))
        self._begin()
        self._embedding.add_gradient(gradient, index)

    # --- output layer ----------------------------------------------------------------------------------------

    def _broadcast_hidden(self, item: Transfer) -> None:
        key = ("X", -1, item.microbatch)
        if self._device == item.root:
            hidden = self._local.pop(key)
        else:
            hidden = self._hidden_buffer(item.microbatch).view(-1, self._hidden_size)
        handle = self._communicator(item).broadcast(hidden, self._root(item), str(item))
        self._arriving[key] = (hidden, handle)

    def _output_forward(self, item: Pass) -> None:
        assert self._output is not None
        index, microbatch = self._microbatch(item)
        hidden = self._take(("X", -1, index))
        self._begin()
        statistics = self._output.forward(hidden, microbatch, index, gradients=self._gradients)
        self._local["STATISTICS", -1, index] = statistics

    def _gather_statistics(self, item: Transfer) -> None:
        key = ("STATISTICS", -1, item.microbatch)
        own = self._local.pop(key)
        table = own.new_empty((len(item.members), *own.shape))
        self._arriving[key] = (table, self._communicator(item).all_gather(table, own, str(item)))

    def _open_barrier(self, index: int, microbatch: Microbatch) -> None:
        """Waits for the statistics of all shards and finishes the loss."""
        assert self._output is not None
        table = self._take(("STATISTICS", -1, index))
        if self._program.placement.devices == 1:
            table = table.unsqueeze(0)
        self._begin()
        self._output.combine(table, microbatch, index, gradients=self._gradients)

    def _combine(self, item: Pass) -> None:
        assert self._output is not None
        index, microbatch = self._microbatch(item)
        self._open_barrier(index, microbatch)
        if self._gradients:
            self._local["DX", -1, index] = self._output.hidden_gradient(index)

    def _output_backward(self, item: Pass) -> None:
        assert self._output is not None
        index, microbatch = self._microbatch(item)
        if self._program.barriers == 2:
            self._open_barrier(index, microbatch)
        else:
            self._begin()
        part = self._output.backward(index)
        if part is not None:
            self._local["DX", -1, index] = part

    def _reduce_gradient(self, item: Transfer) -> None:
        """Adds the parts of all shards on the last stage's device. The part is scratch: reduce may destroy it."""
        key = ("DX", -1, item.microbatch)
        part = self._local.pop(key)
        handle = self._communicator(item).reduce(part, self._root(item), str(item))
        if self._device == item.root:
            self._arriving[key] = (part, handle)
        else:
            self._keep_send(item, handle)
