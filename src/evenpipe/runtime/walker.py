"""Executes a device's program: one small handler per kind of pass and of transfer.

Handlers take their inputs out of `Values` and put their results there; transfers carry them to other devices.
Everything that is known in advance is looked up once (`Row`). Passes that run as one (OVERLAP_F_B) run one after the
other, in their order: the transfers of both are pending before the first begins, and no library tells which of them has
arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from evenpipe.communication.communicators import Communicators
from evenpipe.host.offload import Activations, Entrance, Packed
from evenpipe.layers.checkpointing import Switch
from evenpipe.layers.random_state import RandomState
from evenpipe.layers.weight_gradients import WeightGradients
from evenpipe.runtime.accounting import ByteCounter
from evenpipe.runtime.batch import Batch, Microbatch
from evenpipe.runtime.recording import Recording, StepRecord
from evenpipe.runtime.router_loss import ALONG, RouterLosses
from evenpipe.runtime.row import Row
from evenpipe.runtime.values import Key, Values
from evenpipe.runtime.vocabulary_layers import EmbeddingShard, OutputShard
from evenpipe.runtime.vocabulary_passes import VocabularyPasses
from evenpipe.schedule import Kind, Pass, Program, Transfer, TransferKind

if TYPE_CHECKING:
    from evenpipe.runtime.replicas import Replicas


class StageModule(Protocol):
    """The interface of a stage for the walker: any module with such a forward."""

    def __call__(
        self, hidden: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """hidden: [sequences, tokens, hidden_size], the raw rows of the embedding for the first stage. Returns the same
        shape; for the last stage, the input of the head."""
        ...


@dataclass(slots=True)
class _Forwarded:
    """The data that F leaves for the backward of the same stage and microbatch."""

    input: Tensor | Packed | None = None
    """None if only the graph keeps it; then `gradients` gets its gradient."""
    output: GradientEdge | None = None
    """None until R has run."""
    random_state: RandomState | None = None
    """State before F, if R must draw the same numbers again."""
    gradients: list[Tensor] = field(default_factory=list)


class Walker:
    """Executes programs on one device.

    Args:
        device: its row of the program is executed.
        stages: the local stages by number.
        embedding: this device's rows of the embedding; None if it neither holds nor routes any.
        output: its rows of the output layer; None if it has none.
        vocabulary_passes: True if the programs have E, G, S, T (and C) as separate passes; False if the first stage's F
            and B contain the embedding and the last stage's contain the output layer.
        communicators: None for one device.
        ranks: global rank of each device's process.
        hidden_dtype: of the hidden states between stages.
        weight_gradients: the queue of the stages' layers, for split backwards.
        checkpointing: the switch of the stages' layers: microbatches with R keep all of the graph that R makes.
        replicas: work for other pipelines with the same parameters; None: there are none.
        router_losses: of a model with a router loss; None for others.
        activations: moves activations to the host, for orders with O, D and L; None: there are none.
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
        activations: Activations | None = None,
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
        self._weight_gradients = WeightGradients() if weight_gradients is None else weight_gradients
        self._checkpointing = Switch() if checkpointing is None else checkpointing
        self._replicas = replicas
        self._router_losses = router_losses
        self._activations = activations
        self._anchor = torch.empty(0, dtype=hidden_dtype, device=torch_device, requires_grad=True)
        self.record_passes = False
        self.counter: ByteCounter | None = None

        self._rows: dict[int, Row] = {}
        self._microbatches: tuple[Microbatch, ...] = ()
        self._shapes: list[tuple[int, int, int]] = []
        self._values = Values()
        self._forwarded: dict[tuple[int, int], _Forwarded] = {}
        self._vocabulary = VocabularyPasses(
            self._values,
            embedding,
            output,
            device=device,
            communicators=communicators,
            ranks=ranks,
            hidden_size=hidden_size,
            hidden_dtype=hidden_dtype,
            torch_device=torch_device,
        )
        self._pass_handlers: dict[Kind, Callable[[Pass], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_gradient,
            Kind.W: self._weight_gradient,
            Kind.R: self._recompute,
            Kind.O: self._offload,
            Kind.D: self._give_back,
            Kind.L: self._load,
            Kind.OVERLAP_F_B: self._joint,
            Kind.UNSHARD: self._nothing,
            Kind.RESHARD: self._nothing,
            Kind.REDUCE_GRAD: self._nothing,
            **self._vocabulary.passes,
        }
        self._transfer_handlers: dict[TransferKind, Callable[[Transfer], None]] = {
            TransferKind.SEND_F: self._send_forward,
            TransferKind.RECV_F: self._receive_forward,
            TransferKind.SEND_B: self._send_backward,
            TransferKind.RECV_B: self._receive_backward,
            **self._vocabulary.transfers,
        }

    # --- the loop ------------------------------------------------------------------------------------------------

    def walk(self, program: Program, batch: Batch) -> StepRecord:
        """Run this device's row of the program over the batch. Sizes may differ from batch to batch, and also from
        microbatch to microbatch."""
        row = self._rows.get(id(program))  # a row keeps its program alive, so the program's id stays unique
        if row is None:
            row = Row(program, self._device, self._pass_handlers, self._transfer_handlers)
            self._rows[id(program)] = row
        self._begin(row, batch)
        values, counter = self._values, self.counter
        recording = values.recording = Recording(self._torch_device) if self.record_passes else None
        if self._activations is not None:
            self._activations.recorded = None if recording is None else recording.copies
        record = StepRecord(start=time.perf_counter())
        before, after = ({}, {}) if self._replicas is None else self._replicas.begin(program)
        with torch.set_grad_enabled(self._gradients):
            for step in row.steps:
                item = step.item
                if counter is not None:
                    counter.at(item)
                if isinstance(item, Transfer):
                    issued = None if recording is None else recording.stamp()
                    step.run(item)
                    if recording is not None:
                        recording.transfers.append((item, issued, recording.stamp()))
                    continue
                if before:
                    for action in before.get(item, ()):
                        action()
                values.begin(step.text)
                step.run(item)
                values.finish(item)
                for sent in step.arrived:
                    values.arrived(sent)
                if after:
                    for action in after.get(item, ()):
                        action()
        if counter is not None:
            counter.at(None)
        values.all_arrived()
        if self._replicas is not None:
            self._replicas.finish()
        record.busy, record.end = values.busy, time.perf_counter()
        if recording is not None:
            recording.finish(record)
        moved = () if self._activations is None else self._activations.left
        unfinished = () if self._output is None else self._output.left
        left = (*values.left, *self._forwarded, *moved, *unfinished)
        assert not left and not len(self._weight_gradients), f"values of the step are left over: {left}"
        self._end()
        return record

    def _begin(self, row: Row, batch: Batch) -> None:
        """Start a step; forget the remains of a failed one."""
        self._row = row
        self._gradients, self._last_stage = row.gradients, row.last_stage
        self._microbatches = batch.microbatches
        self._shapes = [(*microbatch.token_ids.shape, self._hidden_size) for microbatch in batch.microbatches]
        self._values.clear()
        self._forwarded.clear()
        self._weight_gradients.clear()
        self._checkpointing.off = False
        if self._activations is not None:
            self._activations.clear()
        self._vocabulary.begin(row, batch)
        if self._embedding is not None:
            self._embedding.begin(batch)
        if self._output is not None:
            self._output.clear()
        if self._router_losses is not None:
            self._router_losses.begin(row.program, self._values.put, self._values.take)

    def _end(self) -> None:
        """End a step: nothing of the batch is kept."""
        self._microbatches = ()
        self._values.recording = None
        self._vocabulary.end()
        if self._embedding is not None:
            self._embedding.end()

    # --- passes of stages ------------------------------------------------------------------------------------

    def _forward(self, item: Pass) -> None:
        stage, index = item.stage, item.microbatch
        assert stage is not None and index is not None
        taken: Tensor | None = None
        if stage:
            taken = self._values.take(("F", stage, index))
        elif self._vocabulary_passes:
            taken = self._values.take(("ROWS", -1, index))
        if self._router_losses is not None:
            self._router_losses.before_forward(stage, index)
        self._values.ready()
        if not stage:
            assert self._embedding is not None
            rows = self._embedding.rows(index) if taken is None else taken
            taken = self._embedding.place(rows, index).view(self._shapes[index])
        assert taken is not None
        key = (stage, index)
        if not self._gradients:
            output = self._call(stage, index, taken)
        elif key in self._row.recomputed:
            forwarded = self._forwarded[key] = _Forwarded(taken, random_state=RandomState.of(self._torch_device))
            with torch.no_grad():
                output = self._call(stage, index, taken)
            if key in self._row.offloaded:
                forwarded.input = self._saved(key, taken)
        else:
            output = self._forward_with_graph(_Forwarded(), stage, index, taken)
        result = output.detach()
        if stage < self._last_stage:
            self._values.put(("F", stage + 1, index), result.contiguous())
        elif self._vocabulary_passes:
            self._values.put(("X", -1, index), result.reshape(-1, self._hidden_size).contiguous())
        else:
            self._whole_output(result.reshape(-1, self._hidden_size), index)

    def _whole_output(self, hidden: Tensor, index: int) -> None:
        """Run the whole output layer and the loss, as part of the last stage's F."""
        assert self._output is not None
        microbatch = self._microbatches[index]
        statistics = self._output.forward(hidden, microbatch, index, gradients=self._gradients)
        self._output.combine(statistics.unsqueeze(0), microbatch, index, gradients=self._gradients)

    def _forward_with_graph(self, forwarded: _Forwarded, stage: int, index: int, hidden: Tensor) -> Tensor:
        """Run the stage on its input, which was received, placed or detached for this pass alone; keep its graph for
        the backward. Return the output."""
        key = (stage, index)
        saving: AbstractContextManager[None] = nullcontext()
        if self._row.moves_graph(key):
            assert self._activations is not None
            saving = self._activations.saving(key, self._staying(stage, index))
            hidden = Entrance.apply(self._anchor, hidden, forwarded.gradients)
            forwarded.input = None
        else:
            forwarded.input = hidden.requires_grad_()
        self._weight_gradients.under_way = key if key in self._row.split else None
        self._checkpointing.off = key in self._row.recomputed
        with saving:
            output = self._call(stage, index, hidden)
        self._checkpointing.off = False
        self._weight_gradients.under_way = None
        # Keep the edge, not the output: the graph stays, but the output itself is freed as soon as it is sent.
        forwarded.output = get_gradient_edge(output)
        self._forwarded[key] = forwarded
        return output

    def _call(self, stage: int, index: int, hidden: Tensor) -> Tensor:
        module, microbatch = self._stages[stage], self._microbatches[index]
        if self._router_losses is not None:
            return self._router_losses.call(module, stage, index, hidden, microbatch)
        return module(hidden, microbatch.position_ids, microbatch.attention_mask)

    def _recompute(self, item: Pass) -> None:
        """R: rebuild the graph that F did not keep, from the stage's input and with the same random numbers."""
        stage, index = item.stage, item.microbatch
        assert stage is not None and index is not None
        if (stage, index) in self._row.offloaded:
            self._come_back(stage, index)
        self._values.ready()
        forwarded = self._forwarded[stage, index]
        hidden, random_state = forwarded.input, forwarded.random_state
        assert hidden is not None and random_state is not None
        if isinstance(hidden, Packed):
            assert self._activations is not None
            hidden = self._activations.unpack(hidden)
        forwarded.random_state = None
        with random_state.restored():
            self._forward_with_graph(forwarded, stage, index, hidden)

    def _backward(self, item: Pass) -> None:
        self._gradients_of_stage(item, split=False)

    def _input_gradient(self, item: Pass) -> None:
        self._gradients_of_stage(item, split=True)

    def _gradients_of_stage(self, item: Pass, *, split: bool) -> None:
        """B, or I, which leaves the weight gradients of linear layers and of a whole output layer to W."""
        stage, index = item.stage, item.microbatch
        assert stage is not None and index is not None
        gradient: Tensor | None = None
        if stage < self._last_stage:
            gradient = self._values.take(("B", stage, index))
        elif self._vocabulary_passes:
            gradient = self._values.take(("DX", -1, index))
        if self._router_losses is not None:
            self._router_losses.before_backward(stage, index)
        if self._row.moves_graph((stage, index)):
            self._come_back(stage, index)
        self._values.ready()
        if gradient is None:
            assert self._output is not None
            gradient = self._output.hidden_gradient(index) if split else self._output.backward(index)
            assert gradient is not None
        if stage == self._last_stage:
            gradient = gradient.to(self._hidden_dtype).view(self._shapes[index])
        forwarded = self._forwarded.pop((stage, index))
        assert forwarded.output is not None
        if split:
            self._weight_gradients.begin((stage, index))
        torch.autograd.backward((forwarded.output,), (gradient,))
        self._weight_gradients.under_way = None
        if forwarded.input is None:
            (input_gradient,) = forwarded.gradients
        else:
            assert isinstance(forwarded.input, Tensor) and forwarded.input.grad is not None
            input_gradient = forwarded.input.grad
            forwarded.input.grad = None
        if stage:
            self._values.put(("B", stage - 1, index), input_gradient.contiguous())
            return
        assert self._embedding is not None
        rows_gradient = self._embedding.pick(input_gradient.view(-1, self._hidden_size), index)
        if self._vocabulary_passes:
            self._values.put(("ROW_GRADIENTS", -1, index), rows_gradient)
        else:
            self._embedding.add_gradient(rows_gradient, index)

    def _weight_gradient(self, item: Pass) -> None:
        stage, index = item.stage, item.microbatch
        assert stage is not None and index is not None
        self._values.ready()
        if stage == self._last_stage and not self._vocabulary_passes:
            assert self._output is not None
            self._output.backward(index)
        self._weight_gradients.compute((stage, index))

    # --- activations on the host -----------------------------------------------------------------------------

    def _saved(self, key: tuple[int, int], hidden: Tensor) -> Packed | Tensor:
        """Return a stage's input that waits for R, and goes to the host meanwhile."""
        assert self._activations is not None
        with self._activations.saving(key, ()):
            return self._activations.pack(hidden)

    def _staying(self, stage: int, index: int) -> Iterator[Tensor]:
        """Return tensors that F reads but does not own."""
        module, microbatch = self._stages[stage], self._microbatches[index]
        if isinstance(module, nn.Module):
            yield from module.parameters()
            yield from module.buffers()
        for tensor in (microbatch.position_ids, microbatch.attention_mask):
            if tensor is not None:
                yield tensor

    def _offload(self, item: Pass) -> None:
        assert self._activations is not None and item.stage is not None and item.microbatch is not None
        self._activations.offload((item.stage, item.microbatch))
        self._values.ready()

    def _give_back(self, item: Pass) -> None:
        activations, stage, index = self._activations, item.stage, item.microbatch
        assert activations is not None and stage is not None and index is not None
        self._values.wait_for_copy(f"{stage}O{index}", lambda: activations.give_back((stage, index)))
        self._values.ready()

    def _load(self, item: Pass) -> None:
        assert self._activations is not None and item.stage is not None and item.microbatch is not None
        self._activations.load((item.stage, item.microbatch))
        self._values.ready()

    def _come_back(self, stage: int, index: int) -> None:
        activations = self._activations
        assert activations is not None
        self._values.wait_for_copy(f"{stage}L{index}", lambda: activations.ready((stage, index)))

    # --- others ----------------------------------------------------------------------------------------------

    def _joint(self, item: Pass) -> None:
        for part in item.parts:
            self._pass_handlers[part.kind](part)

    def _nothing(self, item: Pass) -> None:
        """Gathering, freeing and reducing are passes of torch in some orders; `replicas` does this work at its own
        positions."""
        assert item.stage in self._stages
        self._values.ready()

    # --- hops ------------------------------------------------------------------------------------------------

    def _send_forward(self, item: Transfer) -> None:
        assert item.stage is not None
        self._send(item, ("F", item.stage + 1, item.microbatch))

    def _send_backward(self, item: Transfer) -> None:
        assert item.stage is not None
        self._send(item, ("B", item.stage - 1, item.microbatch))

    def _send(self, item: Transfer, key: Key) -> None:
        assert self._communicators is not None
        communicator, peer = self._communicators[item.communicator], self._ranks[item.members[1]]
        what, stage, index = key
        for one in (what,) if self._router_losses is None else (what, ALONG[what]):
            tensor = self._values.give((one, stage, index))
            self._values.sent(item, communicator.send(tensor, peer, str(item)))

    def _receive_forward(self, item: Transfer) -> None:
        self._receive(item, "F")

    def _receive_backward(self, item: Transfer) -> None:
        self._receive(item, "B")

    def _receive(self, item: Transfer, what: str) -> None:
        assert item.stage is not None and self._communicators is not None
        communicator, peer = self._communicators[item.communicator], self._ranks[item.members[0]]
        shape = self._shapes[item.microbatch]
        buffers = {what: torch.empty(shape, dtype=self._hidden_dtype, device=self._torch_device)}
        if self._router_losses is not None:
            buffers[ALONG[what]] = self._router_losses.buffer(what)
        for one, buffer in buffers.items():
            handle = communicator.receive(buffer, peer, str(item))
            self._values.arriving((one, item.stage, item.microbatch), buffer, handle)
