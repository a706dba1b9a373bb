"""Executes a device's program, with a small handler for each kind of pass and transfer.

Handlers take their inputs from `Values` and store their results there; transfers move values between devices.
Everything that is known in advance is looked up once (`Row`). The passes of an OVERLAP_F_B run sequentially, in their
given order: the transfers of both are pending before the first one starts, and no library tells which has arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from evenpipe.errors import InputError
from evenpipe.host.offload import Activations, Packed
from evenpipe.layers.checkpointing import Switch
from evenpipe.layers.entrance import StageGraph
from evenpipe.layers.random_state import Draws, RandomState
from evenpipe.layers.weight_gradients import WeightGradients
from evenpipe.model import EdgeTensor
from evenpipe.parallel.running import Running
from evenpipe.runtime.accounting import ByteCounter
from evenpipe.runtime.batch import Batch, Microbatch
from evenpipe.runtime.hops import HasEdges, Hops
from evenpipe.runtime.recording import Recording, StepRecord
from evenpipe.runtime.router_loss import RouterLosses
from evenpipe.runtime.row import Row
from evenpipe.runtime.transport import Transport
from evenpipe.runtime.values import Values
from evenpipe.runtime.vocabulary_layers import EmbeddingShard, OutputShard
from evenpipe.runtime.vocabulary_passes import VocabularyPasses
from evenpipe.schedule import Kind, Pass, Program, Transfer, TransferKind
from evenpipe.schedule.passes import SHARDING_KINDS, StageUnit

if TYPE_CHECKING:
    from evenpipe.runtime.replicas import Replicas


class StageModule(HasEdges, Protocol):
    """The interface of a stage for the walker: any module with such a forward."""

    def __call__(
        self, *inputs: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """inputs: the tensors of `incoming`; for the first stage the raw rows of the embedding, [sequences, tokens,
        hidden_size]. Returns the tensors of `outgoing`; for the last stage, the input of the head."""
        ...


_NOT_SAVING = nullcontext()


@dataclass(slots=True)
class _Forwarded:
    """The data that F keeps for the backward of the same stage and unit."""

    inputs: Sequence[Any] = ()
    """The inputs that R needs, tensors or `Packed`; empty if no R follows."""
    graph: StageGraph | None = None
    """None until R has run."""
    random_state: RandomState | None = None
    """State before F, if R must draw the same numbers again."""


@dataclass(frozen=True, slots=True)
class _Ends:
    """What every pass of a stage needs to know about the stage's edges."""

    received: int
    """Number of tensors on an incoming edge."""
    differentiable: Sequence[int]
    """Positions of the received tensors that have a gradient."""
    gradients: Sequence[EdgeTensor]
    """What the stage sends back along each incoming edge."""
    returned: Sequence[bool]
    """For each tensor that the stage returns, whether it has a gradient."""

    @classmethod
    def of(cls, stage: HasEdges) -> _Ends:
        received = stage.incoming.tensors
        positions = [position for position, form in enumerate(received) if form.has_gradient]
        returned = [bool(form.has_gradient) for form in stage.outgoing.tensors]
        return cls(len(received), positions, stage.incoming.gradients, returned)


class Walker:
    """Executes programs on one device.

    Args:
        device: the device whose row of the program is executed.
        stages: the local stages by number.
        embedding: this device's rows of the embedding; None if it neither holds nor routes any.
        output: its rows of the output layer; None if it has none.
        vocabulary_passes: True if the programs have E, G, S, T (and C) as separate passes; False if the first stage's F
            and B contain the embedding and the last stage's contain the output layer.
        weight_gradients: the queue of the stages' layers, for split backwards.
        checkpointing: the switch of the stages' layers: microbatches with R keep all of the graph that R makes.
        replicas: the work for replicas of these parameters; None without any.
        router_losses: for a model with a router loss; None for other models.
        activations: moves activations to the host, for orders with O, D and L; None for other orders.
        running: the current pass, for exchanges between the processes that share it.
        draws: seeds the random numbers of stages; None if they draw none.
    """

    def __init__(
        self,
        device: int,
        stages: Mapping[int, StageModule],
        embedding: EmbeddingShard | None,
        output: OutputShard | None,
        *,
        transport: Transport,
        vocabulary_passes: bool,
        weight_gradients: WeightGradients | None = None,
        checkpointing: Switch | None = None,
        replicas: Replicas | None = None,
        router_losses: RouterLosses | None = None,
        activations: Activations | None = None,
        running: Running | None = None,
        draws: Draws | None = None,
    ) -> None:
        self._device = device
        self._stages = stages
        self._embedding = embedding
        self._output = output
        self._vocabulary_passes = vocabulary_passes
        self._hidden_size, self._hidden_dtype = transport.hidden_size, transport.hidden_dtype
        self._torch_device = transport.torch_device
        self._ends = {stage: _Ends.of(module) for stage, module in stages.items()}
        self._weight_gradients = WeightGradients() if weight_gradients is None else weight_gradients
        self._checkpointing = Switch() if checkpointing is None else checkpointing
        self._replicas = replicas
        self._router_losses = router_losses
        self._activations = activations
        self._running = Running() if running is None else running
        self._draws = draws
        self._anchor = torch.empty(0, device=self._torch_device, requires_grad=True)
        self.record_passes = False
        self.counter: ByteCounter | None = None

        self._rows: dict[int, Row] = {}
        self._microbatches: tuple[Microbatch, ...] = ()
        self._values = Values()
        self._forwarded: dict[StageUnit, _Forwarded] = {}
        self._changes_input: dict[int, bool] = {}
        """For each stage whose F is recomputed, whether its layers have changed their input in place."""
        self._hops = Hops(stages, self._values, transport, router_losses)
        self._vocabulary = VocabularyPasses(self._values, embedding, output, transport, device=device)
        self._pass_handlers: dict[Kind, Callable[[Pass], None]] = {
            Kind.F: self._forward,
            Kind.B: partial(self._backward, split=False),
            Kind.I: partial(self._backward, split=True),
            Kind.W: self._weight_gradient,
            Kind.R: self._recompute,
            Kind.O: self._offload,
            Kind.D: self._give_back,
            Kind.L: self._load,
            Kind.OVERLAP_F_B: self._joint,
            **dict.fromkeys(SHARDING_KINDS, self._share),
            **self._vocabulary.passes,
        }
        self._transfer_handlers: dict[TransferKind, Callable[[Transfer], None]] = {
            **self._hops.transfers,
            **self._vocabulary.transfers,
        }

    # --- the loop ------------------------------------------------------------------------------------------------

    def walk(self, program: Program, batch: Batch) -> StepRecord:
        """Run this device's row of the program on the batch. Sizes may differ between batches, and between microbatches
        of a batch."""
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
        in_flight = 0
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
                if step.awaits and self._replicas is not None:
                    for gathered in step.awaits:
                        self._replicas.ready(gathered)
                values.begin(step.text)
                self._running.text = step.text
                step.run(item)
                values.finish(item)
                in_flight += step.adds
                assert values.taken == step.takes and values.made == step.makes, step.text
                assert len(self._forwarded) + len(self._weight_gradients) == in_flight, step.text
                for sent in step.arrived:
                    values.arrived(sent)
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
        routed = () if self._router_losses is None else self._router_losses.left
        carried = [
            microbatch.slice
            for microbatch in batch.microbatches
            if microbatch.carries and row.gradients and not microbatch.carries.empty
        ]
        left = (*values.left, *self._forwarded, *moved, *unfinished, *routed, *carried)
        assert not left and not len(self._weight_gradients), f"values of the step are left over: {left}"
        self._end()
        return record

    def _begin(self, row: Row, batch: Batch) -> None:
        """Start a step; discard what a failed step has left."""
        self._row = row
        self._gradients = row.gradients
        self._microbatches = batch.microbatches
        self._values.clear()
        self._forwarded.clear()
        self._weight_gradients.clear()
        self._checkpointing.off = False
        self._running.step += 1
        self._running.stage_unit, self._running.repeats = None, False
        if self._activations is not None:
            self._activations.clear()
        self._hops.begin(row, batch)
        self._vocabulary.begin(row, batch)
        if self._embedding is not None:
            self._embedding.begin(batch)
        if self._output is not None:
            self._output.clear()
        if self._router_losses is not None:
            self._router_losses.begin(row.program)
        if self._replicas is not None:
            self._replicas.begin(gradients=row.gradients)

    def _end(self) -> None:
        """End a step: release everything that belongs to the batch."""
        self._microbatches = ()
        self._values.recording = None
        self._vocabulary.end()
        if self._embedding is not None:
            self._embedding.end()

    # --- passes of stages ------------------------------------------------------------------------------------

    def _forward(self, item: Pass) -> None:
        stage, unit = self._row.stage_unit(item)
        inputs: list[Tensor] = []
        totals: list[Tensor] = []
        for edge in self._row.edges_in[stage]:
            inputs += self._values.take((edge, unit))
            if self._router_losses is not None:
                totals.append(inputs.pop())
        if stage == self._row.first_stage and self._vocabulary_passes:
            inputs += self._values.take((TransferKind.ROWS, unit))
        if self._router_losses is not None:
            self._router_losses.before_forward(*totals)
        self._values.ready()
        if stage == self._row.first_stage:
            assert self._embedding is not None
            rows = inputs.pop() if self._vocabulary_passes else self._embedding.rows(unit)
            sequences, _ = self._hops.sizes[unit]
            inputs.append(self._embedding.place(rows, unit).view(sequences, -1, self._hidden_size))
        key = (stage, unit)
        if not self._gradients:
            outputs = self._call(stage, unit, inputs)
        elif key in self._row.recomputed:
            forwarded = self._forwarded[key] = _Forwarded(inputs, random_state=RandomState.of(self._torch_device))
            outputs = self._forward_to_repeat(stage, unit, inputs)
            if key in self._row.offloaded:
                forwarded.inputs = self._saved(key, inputs)
        else:
            outputs = self._forward_with_graph(_Forwarded(), stage, unit, inputs)
        router_totals = () if self._router_losses is None else self._router_losses.after_forward(stage, unit)
        for edge in self._row.edges_out[stage]:
            self._values.put((edge, unit), *(output.detach().contiguous() for output in outputs), *router_totals)
        if stage == self._row.last_stage:
            hidden = outputs[0].detach().reshape(-1, self._hidden_size)
            if self._vocabulary_passes:
                self._values.put((TransferKind.X, unit), hidden.contiguous())
            else:
                self._whole_output(hidden, unit)

    def _whole_output(self, hidden: Tensor, unit: int) -> None:
        """Run the unsharded output layer and the loss, as part of the last stage's F."""
        assert self._output is not None
        microbatch = self._microbatches[unit]
        statistics = self._output.forward(hidden, microbatch, unit, gradients=self._gradients)
        self._output.combine(statistics.unsqueeze(0), microbatch, unit, gradients=self._gradients)

    def _forward_to_repeat(self, stage: int, unit: int, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """Run F of a unit with R, which needs the inputs unchanged. Return the outputs.

        Layers that change their inputs in place get copies. The first F of a stage shows whether they do.
        """
        copies = self._changes_input.get(stage, True)
        stage_inputs = [tensor.clone() for tensor in inputs] if copies else inputs
        versions = [tensor._version for tensor in stage_inputs]
        with torch.no_grad():
            outputs = self._call(stage, unit, stage_inputs)
        changed = versions != [tensor._version for tensor in stage_inputs]
        if changed and not copies:
            raise InputError(
                f"schedule: {self._running.text} changes its input in place, which R needs again, and the first F of"
                f" stage {stage} did not; expected an order without R, or layers that always do or never do"
            )
        self._changes_input[stage] = changed or self._changes_input.get(stage, False)
        # A local successor may change its input in place.
        if any(target in self._stages for _, target in self._row.edges_out[stage]):
            input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
            return tuple(
                output.clone() if output.untyped_storage()._cdata in input_storages else output for output in outputs
            )
        return outputs

    def _forward_with_graph(
        self, forwarded: _Forwarded, stage: int, unit: int, inputs: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Run the stage on its inputs and keep its graph for the backward; the graph keeps the inputs that it needs.
        Return the outputs."""
        key = (stage, unit)
        saving: AbstractContextManager[None] = _NOT_SAVING
        if self._row.moves_graph(key):
            assert self._activations is not None
            saving = self._activations.saving(key, self._staying(stage, unit))
        forwarded.inputs = ()
        ends = self._ends[stage]
        self._weight_gradients.under_way = key if key in self._row.split else None
        self._checkpointing.off = key in self._row.recomputed
        self._running.repeats = key in self._row.recomputed
        graph = forwarded.graph = StageGraph(self._anchor)
        with saving:
            positions = ends.differentiable
            if len(inputs) > ends.received:  # from several stages
                positions = [
                    first + position for first in range(0, len(inputs), ends.received) for position in positions
                ]
            outputs = self._call(stage, unit, graph.enter(inputs, positions))
        self._checkpointing.off = False
        self._running.repeats = False
        self._weight_gradients.under_way = None
        graph.leave(compress(outputs, ends.returned))
        self._forwarded[key] = forwarded
        return outputs

    def _call(self, stage: int, unit: int, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        module, microbatch = self._stages[stage], self._microbatches[unit]
        self._running.stage_unit = (stage, unit) if self._gradients else None
        if self._draws is not None:
            self._draws.begin(unit)
        if self._router_losses is not None:
            return self._router_losses.call(stage, module, inputs, microbatch)
        return microbatch.through(stage, module, inputs)

    def _recompute(self, item: Pass) -> None:
        """R: rebuild the graph that F discarded, from the stage's inputs and with the same random numbers."""
        stage, unit = self._row.stage_unit(item)
        if (stage, unit) in self._row.offloaded:
            self._await_activations(item)
        self._values.ready()
        forwarded = self._forwarded[stage, unit]
        random_state, activations = forwarded.random_state, self._activations
        assert random_state is not None
        inputs = [tensor if activations is None else activations.unpack(tensor) for tensor in forwarded.inputs]
        forwarded.random_state = None
        with random_state.restored():
            self._forward_with_graph(forwarded, stage, unit, inputs)

    def _backward(self, item: Pass, *, split: bool) -> None:
        """B; or I, which leaves the weight gradients of linear layers and of an unsharded output layer to W."""
        stage, unit = self._row.stage_unit(item)
        ends, microbatch = self._ends[stage], self._microbatches[unit]
        gradients: Sequence[Tensor] = ()
        router_gradients: list[Tensor] = []
        for edge in self._row.edges_out[stage]:
            received: Sequence[Tensor] = self._values.take((edge[::-1], unit))
            if self._router_losses is not None:
                *received, probabilities = received
                router_gradients.append(probabilities)
            gradients = [*map(torch.add, gradients, received)] if gradients else received
        if stage == self._row.last_stage and self._vocabulary_passes:
            gradients = self._values.take((TransferKind.DX, unit))
        if self._router_losses is not None:
            router_gradients = [self._router_losses.before_backward(unit, *router_gradients)]
        if self._row.moves_graph((stage, unit)):
            self._await_activations(item)
        self._values.ready()
        if stage == self._row.last_stage:
            (hidden_gradient,) = gradients or (self._whole_output_gradient(unit, split),)
            gradients = (hidden_gradient.to(self._hidden_dtype).view(*self._hops.sizes[unit], self._hidden_size),)
            del hidden_gradient
        graph = self._forwarded.pop((stage, unit)).graph
        assert graph is not None
        if split:
            self._weight_gradients.begin((stage, unit))
        self._running.stage_unit = (stage, unit)
        input_gradients = iter(graph.backward(gradients))
        self._weight_gradients.under_way = None
        if microbatch.carries is not None:
            microbatch.carries.end_backward(stage, microbatch.slice)
        for edge in self._row.edges_in[stage]:
            sent = []
            for form in ends.gradients:
                gradient = next(input_gradients)
                if gradient is None:  # the previous stage expects one nevertheless
                    gradient = self._hops.buffer(form, unit, torch.zeros)
                sent.append(gradient.contiguous())
            self._values.put((edge[::-1], unit), *sent, *router_gradients)
        if stage == self._row.first_stage:
            self._gradient_of_rows(next(input_gradients), unit)

    def _whole_output_gradient(self, unit: int, split: bool) -> Tensor:
        """Run the backward of the unsharded output layer, as part of the last stage's B or I."""
        assert self._output is not None
        gradient = self._output.hidden_gradient(unit) if split else self._output.backward(unit)
        assert gradient is not None
        return gradient

    def _gradient_of_rows(self, gradient: Tensor | None, unit: int) -> None:
        """Pass on the gradient of the first stage's input, [sequences, tokens, hidden_size]; None if it has none."""
        assert self._embedding is not None
        if gradient is None:
            if not self._vocabulary_passes:
                return
            shape = (self._microbatches[unit].tokens, self._hidden_size)
            gradient = torch.zeros(shape, dtype=self._hidden_dtype, device=self._torch_device)
        rows_gradient = self._embedding.pick(gradient.reshape(-1, self._hidden_size), unit)
        if self._vocabulary_passes:
            self._values.put((TransferKind.ROW_GRADIENTS, unit), rows_gradient)
        else:
            self._embedding.add_gradient(rows_gradient, unit)

    def _weight_gradient(self, item: Pass) -> None:
        stage, unit = self._row.stage_unit(item)
        self._values.ready()
        if stage == self._row.last_stage and not self._vocabulary_passes:
            assert self._output is not None
            self._output.backward(unit)
        self._weight_gradients.compute((stage, unit))

    # --- activations on the host -----------------------------------------------------------------------------

    def _saved(self, key: StageUnit, inputs: list[Tensor]) -> list[Packed | Tensor]:
        """Return a stage's inputs in the form that is kept for R; meanwhile they move to the host."""
        assert self._activations is not None
        with self._activations.saving(key, ()):
            return [self._activations.pack(tensor) for tensor in inputs]

    def _staying(self, stage: int, unit: int) -> Iterator[Tensor]:
        """Return tensors that F reads but does not own, which stay on the device."""
        module, microbatch = self._stages[stage], self._microbatches[unit]
        if isinstance(module, nn.Module):
            yield from module.parameters()
            yield from module.buffers()
        for tensor in (microbatch.position_ids, microbatch.attention_mask):
            if tensor is not None:
                yield tensor

    def _offload(self, item: Pass) -> None:
        assert self._activations is not None
        self._activations.offload(self._row.stage_unit(item), str(item))
        self._values.ready()

    def _give_back(self, item: Pass) -> None:
        activations, key = self._activations, self._row.stage_unit(item)
        assert activations is not None
        self._values.wait_for_copy(self._copy(Kind.O, item), lambda: activations.give_back(key))
        self._values.ready()

    def _load(self, item: Pass) -> None:
        assert self._activations is not None
        self._activations.load(self._row.stage_unit(item), str(item))
        self._values.ready()

    def _await_activations(self, item: Pass) -> None:
        activations, key = self._activations, self._row.stage_unit(item)
        assert activations is not None
        self._values.wait_for_copy(self._copy(Kind.L, item), lambda: activations.ready(key))

    @staticmethod
    def _copy(kind: Kind, item: Pass) -> str:
        """Return the text of the pass of this kind that copies the same activations."""
        return str(Pass(kind, item.stage, item.microbatch, item.slice))

    # --- others ----------------------------------------------------------------------------------------------

    def _joint(self, item: Pass) -> None:
        for component in item.parts:
            self._pass_handlers[component.kind](component)

    def _share(self, item: Pass) -> None:
        """Gather or free parameters, or sum gradients over replicas. Without replicas, do nothing."""
        assert item.stage is None or item.stage in self._stages
        self._values.ready()
        if self._replicas is not None:
            self._replicas.run(item)
