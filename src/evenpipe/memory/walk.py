"""The allocations that a device holds at every moment of its row, as counts: inputs, stored activations, buffers, ...

A row is walked once, as in `runtime/walker.py`; `replay` later assigns the bytes of each allocation. Rows are
repetitive, so a walk has few distinct moments, and the bytes of all of them are computed at once.

    receive buffer   from the issue of the transfer to F, where it becomes the stage's input
    input            until the end of F, or of R; until B or I if the graph keeps it
    output           for each edge, from F until it has been sent and is known to have arrived, or until the F of a
                     local stage takes it
    gradient         likewise from B or I to the B or I of the previous stage
    stored           from F, or R, to B or I; includes the vocabulary layer if it is part of the stage
    moved            the moved part of input and stored, for units that are copied to the host: not from D to L
    queued           from I to W
    carry            keys and values of a sequence in slices, from the first slice's F to its B or I; their gradients
                     from the last slice's B or I on
    X, statistics, exponentials, dX, rows: as `runtime/vocabulary_passes.py` stores and takes them

For parameters and their gradients see `parts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from evenpipe.memory import allocations
from evenpipe.memory.allocations import Allocation, Moments, Size, Walk
from evenpipe.memory.parts import Parts
from evenpipe.memory.pool import Pool
from evenpipe.schedule import Item, Kind, Pass, Program, Transfer, TransferKind, parts_of
from evenpipe.schedule.collection import collecting_rarely
from evenpipe.schedule.passes import (
    FREEING_KINDS,
    GATHERING_KINDS,
    OFFLOAD_KINDS,
    REDUCING_KINDS,
    StageUnit,
    unit_of,
)
from evenpipe.schedule.releases import releases
from evenpipe.schedule.rules import IN_FLIGHT, KEEPS, Kept, changes

EARLIER_STEPS = 2
"""After this many steps, all further steps are alike."""
SENDS_IN_FLIGHT = 2
"""As in `runtime/values.py`: a third transfer of the same kind to the same device waits for the first."""


@collecting_rarely()
def walk(
    program: Program,
    device: int,
    *,
    gradients_exist: bool,
    buffers_exist: bool,
    places_rows: bool = False,
    slice_tokens: Sequence[int] = (),
) -> Walk:
    """Walk a device's row of a sound training program.

    Args:
        gradients_exist: whether gradients exist when the step begins.
        buffers_exist: whether buffers exist when the step begins, as they do after the first steps.
        places_rows: whether tensor ranks share the rows of the embedding. Then even on a single device the first
            stage's input is not the same tensor as the rows of E, nor its gradient the same as those of G.
        slice_tokens: tokens of each slice of a sequence, for the sizes of buffers; by default equal slices.
    """
    assert not program.forward_only, "a program that evaluates keeps nothing between passes"
    slice_tokens = slice_tokens or (1,) * program.slices
    assert len(slice_tokens) == program.slices, f"{slice_tokens} for {program.slices} slices"
    pool = Pool(slice_tokens)
    for _ in range(EARLIER_STEPS if buffers_exist else 0):
        _pass_buffers(pool, program, device)
    return _Walker(program, device, gradients_exist=gradients_exist, pool=pool, places_rows=places_rows).walk()


def _pass_buffers(pool: Pool, program: Program, device: int) -> None:
    """Run an earlier step: a unit has a buffer from S to T, or with a whole output layer from the last stage's F to its
    B, or W."""
    stage = None if program.vocabulary.sharded else program.placement.last_stage
    of_kind = changes({Kept.PROBABILITIES}) if program.vocabulary.sharded else IN_FLIGHT
    pool.run(program.rows[device], lambda pass_: of_kind.get(pass_.kind, 0) if pass_.stage == stage else 0)


class _Walker:
    """One walk. `pool`: the buffers that S takes and T returns."""

    def __init__(self, program: Program, device: int, *, gradients_exist: bool, pool: Pool, places_rows: bool) -> None:
        self._program, self._device = program, device
        placement = program.placement
        self._first, self._last = placement.first_stage, placement.last_stage
        self._single_device = placement.devices == 1
        self._passes_rows = self._single_device and not places_rows
        self._sharded, self._sliced = program.vocabulary.sharded, program.slices > 1
        self._moments = Moments()
        self._parts = Parts(program, device, self._moments, gradients_exist=gradients_exist)
        self._hold, self._drop, self._moment = self._moments.hold, self._moments.drop, self._moments.moment
        self._sent: dict[Transfer, tuple[Allocation, ...]] = {}
        self._shares: Counter[tuple[TransferKind, int]] = Counter()
        """Number of holders (the transfer, the pass) of a unit's tensor that this device both sends and uses."""
        self._recomputed: set[StageUnit] = set()
        self._offloaded: set[StageUnit] = set()
        self._pool, self._has_room = pool, bool(pool.free)
        self._handlers: dict[Kind, Callable[[Pass], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._weights,
            Kind.R: self._recompute,
            Kind.D: self._free,
            Kind.L: self._keep,
            Kind.E: self._embed,
            Kind.G: self._embedding_gradient,
            Kind.S: self._output,
            Kind.C: self._combine,
            Kind.T: self._output_gradient,
            **dict.fromkeys(GATHERING_KINDS, self._parts.gather),
            **dict.fromkeys(FREEING_KINDS, self._parts.free),
            **dict.fromkeys(REDUCING_KINDS, self._parts.reduce),
        }

    # --- items of the row -------------------------------------------------------------------------------------------

    def walk(self) -> Walk:
        moments = self._moments
        row = self._program.rows[self._device]
        for item in row:
            for pass_ in parts_of(item) if isinstance(item, Pass) else ():
                if pass_.kind is Kind.R:
                    self._recomputed.add(self._key(pass_))
                elif pass_.kind is Kind.O:
                    self._offloaded.add(self._key(pass_))
        self._hold(*map(_buffer_of, self._pool.free))
        if self._pool.free:
            self._hold(allocations.ROOM)
        arrived = releases(self._program, self._device)
        for position, item in enumerate(row):
            if item is None:
                moments.ends_item()
                continue
            moments.slice = item.slice
            if isinstance(item, Transfer):
                moments.item = item
                self._transfer(item)
            else:
                moments.item = parts_of(item)[0]
                self._parts.reach(item, position)
                for pass_ in parts_of(item):
                    moments.item, moments.slice = pass_, pass_.slice
                    handler = self._handlers.get(pass_.kind)
                    if handler is not None:  # O only starts a copy
                        handler(pass_)
                for sent in arrived.get(position, ()):
                    self._arrived(sent)
            moments.ends_item()
        for sent in list(self._sent):
            self._arrived(sent)
        left = [
            allocation
            for allocation in moments.held()
            if allocation.size not in allocations.ROOMS and allocation.term != allocations.GRADIENTS
        ]
        assert not left, f"device {self._device} holds {left} at the end"
        return moments.walk()

    # --- passes of stages ---------------------------------------------------------------------------------------

    def _forward(self, item: Pass) -> None:
        stage = _stage(item)
        bare = self._key(item) in self._recomputed
        placement = self._program.placement
        if stage == self._first:
            if self._sharded and self._passes_rows:
                self._drop(allocations.ROWS_INPUT)
            self._hold(allocations.LOOKED_UP)
            self._peak(allocations.PLACING_PEAK)
        for predecessor in placement.predecessors(stage):
            self._drop(
                allocations.input_buffer(stage)
                if self._is_elsewhere(predecessor)
                else allocations.output_buffer(predecessor)
            )
        self._hold(allocations.input_of(stage))
        self._peak(allocations.BARE_FORWARD_PEAK if bare else allocations.FORWARD_PEAK, stage)
        self._hold(*[allocations.output_buffer(stage)] * max(1, len(placement.successors(stage))))
        if not bare:
            self._drop(allocations.input_of(stage))
        self._keep(item)
        if self._sliced and item.slice == 0:
            self._hold(allocations.carry_of(stage)[0])
        if stage == self._first:  # the caller of the forward keeps rows until its end
            self._drop(allocations.LOOKED_UP)
            if self._sharded and not self._passes_rows:
                self._drop(allocations.ROWS_INPUT if self._single_device else allocations.ROWS_ALL)
        if stage == self._last and not self._sharded:
            self._take_buffer(item)
            self._peak(allocations.OUTPUT_PEAK)
            self._hold(allocations.OUTPUT_STORED, allocations.PRODUCT, allocations.OWN_STATISTICS)
            self._peak(allocations.COMBINE_PEAK)
            self._drop(allocations.OWN_STATISTICS, allocations.output_buffer(stage))
            self._hold(allocations.COMBINED)

    def _is_elsewhere(self, stage: int) -> bool:
        return self._program.placement.device_of(stage) != self._device

    def _peak(self, size: Size, stage: int = allocations.NO_STAGE) -> None:
        """Record a moment with a peak within a pass, above what is held."""
        self._moment(allocations.peak(size, stage))

    def _sized(self, size: Size, item: Pass) -> Size:
        """Return a size of a stage for the microbatch of `item`."""
        return allocations.recomputed(size) if self._key(item) in self._recomputed else size

    def _of_graph(self, item: Pass) -> tuple[Allocation, Allocation]:
        """Return what the graph keeps: the stage's input, and everything else."""
        saved_input, stored = (self._sized(size, item) for size in (allocations.KEPT_INPUT, allocations.STORED))
        return (
            Allocation(saved_input, _stage(item), allocations.ACTIVATIONS),
            Allocation(stored, _stage(item), allocations.ACTIVATIONS),
        )

    def _backward(self, item: Pass) -> None:
        """Walk B, or I."""
        stage, split = _stage(item), KEEPS[item.kind].get(Kept.WEIGHT_INPUTS, 0) > 0
        gradient, placement = allocations.gradient_of(stage), self._program.placement
        if stage != self._last:
            for successor in placement.successors(stage):
                self._drop(
                    allocations.output_buffer(stage)
                    if self._is_elsewhere(successor)
                    else allocations.input_buffer(successor)
                )
            self._hold(gradient)
        else:
            if not self._sharded:
                self._whole_output_gradient(item, split=split)
            self._peak(allocations.COPIED_GRADIENT, stage)
            self._drop(allocations.DX)
            self._hold(gradient)
        added = allocations.gradient_parts(stage)[: 1 if split else 2]
        usual_peak, first_peak = allocations.INPUT_PEAK if split else allocations.BACKWARD_PEAK
        self._peak(self._sized(first_peak if any(map(self._parts.lacks, added)) else usual_peak, item), stage)
        for gradients in added:
            self._parts.make(gradients)
        self._free(item)
        if self._sliced and item.slice == self._program.slices - 1:
            self._hold(allocations.carry_of(stage)[1])
        elif self._sliced and item.slice == 0:
            self._drop(*allocations.carry_of(stage))
        self._hold(*[allocations.input_buffer(stage)] * max(1, len(placement.predecessors(stage))))
        self._keep(item)
        if stage == self._first:
            self._rows_gradient()
        self._drop(gradient)

    def _rows_gradient(self) -> None:
        """At the first stage: the gradient of the input becomes one of rows; that of the output still exists."""
        self._peak(allocations.PICKING_PEAK)
        if not self._sharded:
            self._parts.make(allocations.EMBEDDING_GRADIENTS)
            self._peak(allocations.ROWS_GRADIENT_PEAK)
        elif not self._passes_rows:
            self._hold(allocations.ROWS_GRADIENT)
            self._moment()
        if not (self._sharded and self._passes_rows):
            self._drop(allocations.input_buffer(self._first))

    def _weights(self, item: Pass) -> None:
        stage = _stage(item)
        if stage == self._last and not self._sharded:
            self._parts.make(allocations.OUTPUT_GRADIENTS)
            self._peak(allocations.OUTPUT_WEIGHT_PEAK)
            self._release_output(item)
        weight_gradients = allocations.gradient_parts(stage)[1]
        usual_peak, first_peak = allocations.WEIGHT_PEAK
        self._peak(self._sized(first_peak if self._parts.lacks(weight_gradients) else usual_peak, item), stage)
        self._parts.make(weight_gradients)
        self._free(item)

    def _recompute(self, item: Pass) -> None:
        self._peak(allocations.RECOMPUTE_PEAK, _stage(item))
        self._hold(*self._of_graph(item))
        self._drop(allocations.input_of(_stage(item)))

    def _moves_graph(self, item: Pass) -> bool:
        """Return whether the stored tensors of F go to the host. With R only the stage's input does."""
        return self._key(item) in self._offloaded and self._key(item) not in self._recomputed

    def _keep(self, item: Pass) -> None:
        self._hold(
            *(
                allocation
                for resource, change in KEEPS[item.kind].items()
                if change > 0
                for allocation in self._allocations(resource, item)
            )
        )

    def _free(self, item: Pass) -> None:
        self._drop(
            *(
                allocation
                for resource, change in KEEPS[item.kind].items()
                if change < 0
                for allocation in self._allocations(resource, item)
            )
        )

    def _allocations(self, resource: Kept, item: Pass) -> tuple[Allocation, ...]:
        """Return what a stage's pass keeps or frees on the device, as allocations with bytes."""
        stage, recomputed = _stage(item), self._key(item) in self._recomputed
        if resource is Kept.WEIGHT_INPUTS:
            return (Allocation(self._sized(allocations.QUEUED, item), stage, allocations.ACTIVATIONS),)
        if resource is not Kept.ACTIVATIONS:  # on the host
            return ()
        if item.kind in OFFLOAD_KINDS:
            return (allocations.moved_of(stage)[0] if self._moves_graph(item) else allocations.input_of(stage),)
        if self._moves_graph(item):
            return allocations.moved_of(stage)
        return () if item.kind is Kind.F and recomputed else self._of_graph(item)  # R will store it

    # --- an output layer that is part of the last stage ---------------------------------------------------------

    def _whole_output_gradient(self, item: Pass, *, split: bool) -> None:
        if split:  # the inputs of W stay
            self._peak(allocations.DX_PEAK)
            self._hold(allocations.DX)
            return
        self._parts.make(allocations.OUTPUT_GRADIENTS)
        self._peak(allocations.OUTPUT_BACKWARD_PEAK)
        self._release_output(item)
        self._hold(allocations.DX)

    def _release_output(self, item: Pass) -> None:
        self._drop(allocations.OUTPUT_STORED, allocations.PRODUCT, allocations.COMBINED)
        self._pool.give(self._unit(item))

    def _take_buffer(self, item: Pass) -> None:
        """Provide memory for the exponentials of S: a buffer that a T returned, or a new one."""
        allocated, freed = self._pool.take(self._unit(item))
        if allocated and not self._has_room:
            self._hold(allocations.ROOM)
            self._has_room = True
        self._drop(*map(_buffer_of, freed))
        self._hold(*map(_buffer_of, allocated))

    # --- vocabulary passes --------------------------------------------------------------------------------------

    def _embed(self, item: Pass) -> None:
        self._peak(allocations.ROWS_PEAK)
        self._hold(allocations.ROWS_INPUT)

    def _embedding_gradient(self, item: Pass) -> None:
        self._parts.make(allocations.EMBEDDING_GRADIENTS)
        self._peak(allocations.ROWS_GRADIENT_PEAK)
        if self._passes_rows:
            self._drop(allocations.input_buffer(self._first))
        elif self._single_device:
            self._drop(allocations.ROWS_GRADIENT)
        elif self._device == self._program.placement.first_device:
            self._release_shared(TransferKind.ROW_GRADIENTS, item, allocations.ROWS_GRADIENT)
        else:
            self._drop(allocations.ROWS_RECEIVED)

    def _release_shared(self, kind: TransferKind, item: Item, allocation: Allocation) -> None:
        """Drop a tensor that the device both sends and uses, once it has been used and has arrived."""
        self._shares[kind, self._unit(item)] -= 1
        if self._shares[kind, self._unit(item)] <= 0:
            self._drop(allocation._replace(slice=item.slice))

    def _output(self, item: Pass) -> None:
        self._take_buffer(item)
        self._peak(allocations.OUTPUT_PEAK)
        if self._device == self._program.placement.last_device:
            self._release_shared(TransferKind.X, item, allocations.output_buffer(self._last))
        else:
            self._drop(allocations.X)
        self._hold(allocations.OUTPUT_STORED, allocations.PRODUCT, allocations.OWN_STATISTICS)

    def _open_barrier(self) -> None:
        if not self._single_device:
            self._drop(allocations.OWN_STATISTICS)
        self._peak(allocations.COMBINE_PEAK)
        self._drop(allocations.OWN_STATISTICS if self._single_device else allocations.STATISTICS)
        self._hold(allocations.COMBINED)

    def _combine(self, item: Pass) -> None:
        self._open_barrier()
        self._peak(allocations.DX_PEAK)
        self._drop(allocations.PRODUCT)
        self._hold(allocations.DX)

    def _output_gradient(self, item: Pass) -> None:
        if self._program.vocabulary.combining is Kind.T:
            self._open_barrier()
            self._drop(allocations.PRODUCT)
        self._parts.make(allocations.OUTPUT_GRADIENTS)
        self._peak(allocations.OUTPUT_BACKWARD_PEAK)
        self._drop(allocations.OUTPUT_STORED, allocations.COMBINED)
        self._pool.give(self._unit(item))
        if self._program.vocabulary.combining is Kind.T:
            self._hold(allocations.DX)

    # --- transfers ----------------------------------------------------------------------------------------------

    def _transfer(self, item: Transfer) -> None:
        root = item.root == self._device
        match item.kind:
            case TransferKind.SEND_F:
                self._send(item, allocations.output_buffer(_stage(item)))
            case TransferKind.SEND_B:
                self._send(item, allocations.input_buffer(_stage(item)))
            case TransferKind.RECV_F:
                self._hold(allocations.input_buffer(_stage(item)))
            case TransferKind.RECV_B:
                self._hold(allocations.output_buffer(_stage(item)))
            case TransferKind.X | TransferKind.ROW_GRADIENTS if root:
                self._shares[item.kind, self._unit(item)] = 2
                self._send(item)
            case TransferKind.X:
                self._hold(allocations.X)
            case TransferKind.STATISTICS:
                self._hold(allocations.STATISTICS)
            case TransferKind.DX if not root:
                self._send(item, allocations.DX)
            case TransferKind.ROWS if root:
                self._hold(allocations.ROWS_ALL)
                self._moment()
                self._drop(allocations.ROWS_INPUT)
            case TransferKind.ROWS:
                self._send(item, allocations.ROWS_INPUT)
            case TransferKind.ROW_GRADIENTS:
                self._hold(allocations.ROWS_RECEIVED)

    def _send(self, item: Transfer, *payload: Allocation) -> None:
        """Hold sent data until its arrival is known, or until too many such transfers are in flight."""
        self._sent[item] = self._moments.in_current_slice(*payload)
        similar = [sent for sent in self._sent if sent.kind is item.kind and sent.members == item.members]
        if len(similar) > SENDS_IN_FLIGHT:
            self._moment()
            self._arrived(similar[0])

    def _arrived(self, item: Transfer) -> None:
        held = self._sent.pop(item, None)
        if held is None:
            return
        self._drop(*held)
        if item.kind is TransferKind.ROW_GRADIENTS:
            self._release_shared(item.kind, item, allocations.ROWS_GRADIENT)
        elif item.kind is TransferKind.X:
            self._release_shared(item.kind, item, allocations.output_buffer(self._last))

    def _unit(self, item: Item) -> int:
        return unit_of(item, self._program.slices)

    def _key(self, item: Pass) -> StageUnit:
        return _stage(item), self._unit(item)


def _buffer_of(slice_: int) -> Allocation:
    return allocations.HANDED_ON._replace(slice=slice_)


def _stage(item: Item) -> int:
    assert item.stage is not None
    return item.stage
