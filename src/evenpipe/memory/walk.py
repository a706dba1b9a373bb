"""The things that a device holds at every moment of its row, as counts: inputs, stored activations, buffers, ...

A row is walked once, as in `runtime/walker.py`; the bytes of each thing come later (`replay`). Rows are repetitive, so
a walk has few distinct moments, and the bytes of all of them are computed at once.

    receive buffer   from where the transfer is issued; with F it becomes the stage's input
    input            until the end of F, or of R; until B or I if the graph keeps it
    output           for each edge, from F until it has been sent and is known to have arrived, or until F of a local
                     stage takes it
    gradient         likewise from B or I to the B or I of the stage before
    stored           from F, or R, to B or I; an end's F contains the vocabulary layer that is whole there
    moved            the moved part of input and stored, for units with copies: not from D to L
    queued           from I to W
    carry            keys and values of a sequence in slices, from the first slice's F to its B or I; their gradients
                     from the last slice's B or I on
    X, statistics, exponentials, dX, rows: as `runtime/vocabulary_passes.py` puts and takes them

Parameters and their gradients: as in `parts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from evenpipe.memory import things
from evenpipe.memory.parts import Parts
from evenpipe.memory.pool import Pool
from evenpipe.memory.things import Moments, Size, Thing, Walk
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
"""After so many, steps are alike."""
SENDS_IN_FLIGHT = 2
"""As in `runtime/values.py`: a third transfer of one kind to the same device waits for the first."""


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
        buffers_exist: as after the first steps.
        places_rows: also on a single device, the first stage's input is another tensor than the rows of E, and its
            gradient another than those of G: tensor ranks share the rows.
        slice_tokens: tokens of each slice of a sequence, for the sizes of buffers; by default equally many.
    """
    assert not program.forward_only, "a program that evaluates keeps nothing between passes"
    slice_tokens = slice_tokens or (1,) * program.slices
    assert len(slice_tokens) == program.slices, f"{slice_tokens} for {program.slices} slices"
    pool = Pool(slice_tokens)
    for _ in range(EARLIER_STEPS if buffers_exist else 0):
        _pass_buffers(pool, program, device)
    return _Walker(program, device, gradients_exist=gradients_exist, pool=pool, places_rows=places_rows).walk()


def _pass_buffers(pool: Pool, program: Program, device: int) -> None:
    """Run an earlier step: a unit has a buffer between S and T; for a whole output layer, between the last stage's F
    and its B, or W."""
    stage = None if program.vocabulary.sharded else program.placement.last_stage
    of_kind = changes({Kept.PROBABILITIES}) if program.vocabulary.sharded else IN_FLIGHT
    pool.run(program.rows[device], lambda part: of_kind.get(part.kind, 0) if part.stage == stage else 0)


class _Walker:
    """One walk. `pool`: the buffers that S takes and T returns."""

    def __init__(self, program: Program, device: int, *, gradients_exist: bool, pool: Pool, places_rows: bool) -> None:
        self._program, self._device = program, device
        placement = program.placement
        self._first, self._last = placement.first_stage, placement.last_stage
        self._alone = placement.devices == 1
        self._passes_rows = self._alone and not places_rows
        self._spread, self._sliced = program.vocabulary.sharded, program.slices > 1
        self._moments = Moments()
        self._parts = Parts(program, device, self._moments, gradients_exist=gradients_exist)
        self._hold, self._drop, self._moment = self._moments.hold, self._moments.drop, self._moments.moment
        self._sent: dict[Transfer, tuple[Thing, ...]] = {}
        self._shares: Counter[tuple[TransferKind, int]] = Counter()
        """Holders of the one tensor of a unit that this device sends and uses itself: the transfer, and the pass."""
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
            for part in parts_of(item) if isinstance(item, Pass) else ():
                if part.kind is Kind.R:
                    self._recomputed.add(self._key(part))
                elif part.kind is Kind.O:
                    self._offloaded.add(self._key(part))
        self._hold(*map(_buffer_of, self._pool.free))
        if self._pool.free:
            self._hold(things.ROOM)
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
                for part in parts_of(item):
                    moments.item, moments.slice = part, part.slice
                    handler = self._handlers.get(part.kind)
                    if handler is not None:  # O only starts a copy
                        handler(part)
                for sent in arrived.get(position, ()):
                    self._arrived(sent)
            moments.ends_item()
        for sent in list(self._sent):
            self._arrived(sent)
        left = [thing for thing in moments.held() if thing.size not in things.ROOMS and thing.term != things.GRADIENTS]
        assert not left, f"device {self._device} holds {left} at the end"
        return moments.walk()

    # --- passes of stages ---------------------------------------------------------------------------------------

    def _forward(self, item: Pass) -> None:
        stage = _stage(item)
        bare = self._key(item) in self._recomputed
        placement = self._program.placement
        if stage == self._first:
            if self._spread and self._passes_rows:
                self._drop(things.ROWS_INPUT)
            self._hold(things.LOOKED_UP)
            self._peak(things.PLACING_PEAK)
        for before in placement.predecessors(stage):
            self._drop(things.input_buffer(stage) if self._is_elsewhere(before) else things.output_buffer(before))
        self._hold(things.input_of(stage))
        self._peak(things.BARE_FORWARD_PEAK if bare else things.FORWARD_PEAK, stage)
        self._hold(*[things.output_buffer(stage)] * max(1, len(placement.successors(stage))))
        if not bare:
            self._drop(things.input_of(stage))
        self._keep(item)
        if self._sliced and item.slice == 0:
            self._hold(things.carry_of(stage)[0])
        if stage == self._first:  # the caller of the forward keeps rows until its end
            self._drop(things.LOOKED_UP)
            if self._spread and not self._passes_rows:
                self._drop(things.ROWS_INPUT if self._alone else things.ROWS_ALL)
        if stage == self._last and not self._spread:
            self._take_buffer(item)
            self._peak(things.OUTPUT_PEAK)
            self._hold(things.OUTPUT_STORED, things.PRODUCT, things.OWN_STATISTICS)
            self._peak(things.COMBINE_PEAK)
            self._drop(things.OWN_STATISTICS, things.output_buffer(stage))
            self._hold(things.COMBINED)

    def _is_elsewhere(self, stage: int) -> bool:
        return self._program.placement.device_of(stage) != self._device

    def _peak(self, size: Size, stage: int = things.NO_STAGE) -> None:
        """Record a moment with a peak within a pass, above what is held."""
        self._moment(things.peak(size, stage))

    def _sized(self, size: Size, item: Pass) -> Size:
        """Return a size of a stage for the microbatch of `item`."""
        return things.recomputed(size) if self._key(item) in self._recomputed else size

    def _of_graph(self, item: Pass) -> tuple[Thing, Thing]:
        """Return what the graph keeps: the stage's input, and all else."""
        kept, stored = (self._sized(size, item) for size in (things.KEPT_INPUT, things.STORED))
        return Thing(kept, _stage(item), things.ACTIVATIONS), Thing(stored, _stage(item), things.ACTIVATIONS)

    def _backward(self, item: Pass) -> None:
        """Walk B, or I."""
        stage, split = _stage(item), KEEPS[item.kind].get(Kept.WEIGHT_INPUTS, 0) > 0
        gradient, placement = things.gradient_of(stage), self._program.placement
        if stage != self._last:
            for behind in placement.successors(stage):
                self._drop(things.output_buffer(stage) if self._is_elsewhere(behind) else things.input_buffer(behind))
            self._hold(gradient)
        else:
            if not self._spread:
                self._whole_output_gradient(item, split=split)
            self._peak(things.COPIED_GRADIENT, stage)
            self._drop(things.DX)
            self._hold(gradient)
        added = things.gradient_parts(stage)[: 1 if split else 2]
        there, first = things.INPUT_PEAK if split else things.BACKWARD_PEAK
        self._peak(self._sized(first if any(map(self._parts.lacks, added)) else there, item), stage)
        for part in added:
            self._parts.make(part)
        self._free(item)
        if self._sliced and item.slice == self._program.slices - 1:
            self._hold(things.carry_of(stage)[1])
        elif self._sliced and item.slice == 0:
            self._drop(*things.carry_of(stage))
        self._hold(*[things.input_buffer(stage)] * max(1, len(placement.predecessors(stage))))
        self._keep(item)
        if stage == self._first:
            self._rows_gradient()
        self._drop(gradient)

    def _rows_gradient(self) -> None:
        """At the first stage: the gradient of the input becomes one of rows; that of the output still exists."""
        self._peak(things.PICKING_PEAK)
        if not self._spread:
            self._parts.make(things.EMBEDDING_GRADIENTS)
            self._peak(things.ROWS_GRADIENT_PEAK)
        elif not self._passes_rows:
            self._hold(things.ROWS_GRADIENT)
            self._moment()
        if not (self._spread and self._passes_rows):
            self._drop(things.input_buffer(self._first))

    def _weights(self, item: Pass) -> None:
        stage = _stage(item)
        if stage == self._last and not self._spread:
            self._parts.make(things.OUTPUT_GRADIENTS)
            self._peak(things.OUTPUT_WEIGHT_PEAK)
            self._release_output(item)
        rest = things.gradient_parts(stage)[1]
        there, first = things.WEIGHT_PEAK
        self._peak(self._sized(first if self._parts.lacks(rest) else there, item), stage)
        self._parts.make(rest)
        self._free(item)

    def _recompute(self, item: Pass) -> None:
        self._peak(things.RECOMPUTE_PEAK, _stage(item))
        self._hold(*self._of_graph(item))
        self._drop(things.input_of(_stage(item)))

    def _moves_graph(self, item: Pass) -> bool:
        """Return whether the stored tensors of F go to the host. With R only the stage's input does."""
        return self._key(item) in self._offloaded and self._key(item) not in self._recomputed

    def _keep(self, item: Pass) -> None:
        self._hold(*(thing for held, by in KEEPS[item.kind].items() if by > 0 for thing in self._things(held, item)))

    def _free(self, item: Pass) -> None:
        self._drop(*(thing for held, by in KEEPS[item.kind].items() if by < 0 for thing in self._things(held, item)))

    def _things(self, held: Kept, item: Pass) -> tuple[Thing, ...]:
        """Return what a stage's pass keeps or frees on the device, as things with bytes."""
        stage, recomputed = _stage(item), self._key(item) in self._recomputed
        if held is Kept.WEIGHT_INPUTS:
            return (Thing(self._sized(things.QUEUED, item), stage, things.ACTIVATIONS),)
        if held is not Kept.ACTIVATIONS:  # on the host
            return ()
        if item.kind in OFFLOAD_KINDS:
            return (things.moved_of(stage)[0] if self._moves_graph(item) else things.input_of(stage),)
        if self._moves_graph(item):
            return things.moved_of(stage)
        return () if item.kind is Kind.F and recomputed else self._of_graph(item)  # R will store it

    # --- an output layer that is part of the last stage ---------------------------------------------------------

    def _whole_output_gradient(self, item: Pass, *, split: bool) -> None:
        if split:  # the inputs of W stay
            self._peak(things.DX_PEAK)
            self._hold(things.DX)
            return
        self._parts.make(things.OUTPUT_GRADIENTS)
        self._peak(things.OUTPUT_BACKWARD_PEAK)
        self._release_output(item)
        self._hold(things.DX)

    def _release_output(self, item: Pass) -> None:
        self._drop(things.OUTPUT_STORED, things.PRODUCT, things.COMBINED)
        self._pool.give(self._unit(item))

    def _take_buffer(self, item: Pass) -> None:
        """Provide memory for the exponentials of S: memory returned by a T, or new memory."""
        made, gone = self._pool.take(self._unit(item))
        if made and not self._has_room:
            self._hold(things.ROOM)
            self._has_room = True
        self._drop(*map(_buffer_of, gone))
        self._hold(*map(_buffer_of, made))

    # --- vocabulary passes --------------------------------------------------------------------------------------

    def _embed(self, item: Pass) -> None:
        self._peak(things.ROWS_PEAK)
        self._hold(things.ROWS_INPUT)

    def _embedding_gradient(self, item: Pass) -> None:
        self._parts.make(things.EMBEDDING_GRADIENTS)
        self._peak(things.ROWS_GRADIENT_PEAK)
        if self._passes_rows:
            self._drop(things.input_buffer(self._first))
        elif self._alone:
            self._drop(things.ROWS_GRADIENT)
        elif self._device == self._program.placement.first_device:
            self._let_go(TransferKind.ROW_GRADIENTS, item, things.ROWS_GRADIENT)
        else:
            self._drop(things.ROWS_RECEIVED)

    def _let_go(self, kind: TransferKind, item: Item, thing: Thing) -> None:
        """Drop what the device sends and uses itself, if it was used or has arrived already."""
        self._shares[kind, self._unit(item)] -= 1
        if self._shares[kind, self._unit(item)] <= 0:
            self._drop(thing._replace(slice=item.slice))

    def _output(self, item: Pass) -> None:
        self._take_buffer(item)
        self._peak(things.OUTPUT_PEAK)
        if self._device == self._program.placement.last_device:
            self._let_go(TransferKind.X, item, things.output_buffer(self._last))
        else:
            self._drop(things.X)
        self._hold(things.OUTPUT_STORED, things.PRODUCT, things.OWN_STATISTICS)

    def _open_barrier(self) -> None:
        if not self._alone:
            self._drop(things.OWN_STATISTICS)
        self._peak(things.COMBINE_PEAK)
        self._drop(things.OWN_STATISTICS if self._alone else things.STATISTICS)
        self._hold(things.COMBINED)

    def _combine(self, item: Pass) -> None:
        self._open_barrier()
        self._peak(things.DX_PEAK)
        self._drop(things.PRODUCT)
        self._hold(things.DX)

    def _output_gradient(self, item: Pass) -> None:
        if self._program.vocabulary.combining is Kind.T:
            self._open_barrier()
            self._drop(things.PRODUCT)
        self._parts.make(things.OUTPUT_GRADIENTS)
        self._peak(things.OUTPUT_BACKWARD_PEAK)
        self._drop(things.OUTPUT_STORED, things.COMBINED)
        self._pool.give(self._unit(item))
        if self._program.vocabulary.combining is Kind.T:
            self._hold(things.DX)

    # --- transfers ----------------------------------------------------------------------------------------------

    def _transfer(self, item: Transfer) -> None:
        root = item.root == self._device
        match item.kind:
            case TransferKind.SEND_F:
                self._send(item, things.output_buffer(_stage(item)))
            case TransferKind.SEND_B:
                self._send(item, things.input_buffer(_stage(item)))
            case TransferKind.RECV_F:
                self._hold(things.input_buffer(_stage(item)))
            case TransferKind.RECV_B:
                self._hold(things.output_buffer(_stage(item)))
            case TransferKind.X | TransferKind.ROW_GRADIENTS if root:
                self._shares[item.kind, self._unit(item)] = 2
                self._send(item)
            case TransferKind.X:
                self._hold(things.X)
            case TransferKind.STATISTICS:
                self._hold(things.STATISTICS)
            case TransferKind.DX if not root:
                self._send(item, things.DX)
            case TransferKind.ROWS if root:
                self._hold(things.ROWS_ALL)
                self._moment()
                self._drop(things.ROWS_INPUT)
            case TransferKind.ROWS:
                self._send(item, things.ROWS_INPUT)
            case TransferKind.ROW_GRADIENTS:
                self._hold(things.ROWS_RECEIVED)

    def _send(self, item: Transfer, *things: Thing) -> None:
        """Hold sent data until its arrival is known, or until too many such transfers are in progress."""
        self._sent[item] = self._moments.here(*things)
        alike = [other for other in self._sent if other.kind is item.kind and other.members == item.members]
        if len(alike) > SENDS_IN_FLIGHT:
            self._moment()
            self._arrived(alike[0])

    def _arrived(self, item: Transfer) -> None:
        held = self._sent.pop(item, None)
        if held is None:
            return
        self._drop(*held)
        if item.kind is TransferKind.ROW_GRADIENTS:
            self._let_go(item.kind, item, things.ROWS_GRADIENT)
        elif item.kind is TransferKind.X:
            self._let_go(item.kind, item, things.output_buffer(self._last))

    def _unit(self, item: Item) -> int:
        return unit_of(item, self._program.slices)

    def _key(self, item: Pass) -> StageUnit:
        return _stage(item), self._unit(item)


def _buffer_of(slice_: int) -> Thing:
    return things.HANDED_ON._replace(slice=slice_)


def _stage(item: Item) -> int:
    assert item.stage is not None
    return item.stage
