"""What a device holds at every moment of its row, as counts: how many inputs, stored activations, buffers, ...

A row is walked once, as `runtime/walker.py` walks it; how many bytes each thing has comes later (`replay`). Rows repeat
themselves, so a walk has few different moments, and bytes are had for all of them at once.

    receive buffer   from where the transfer is issued; with F it becomes the stage's input, which lives until B or I
    output           from F until it has been sent and is known to have arrived, or until a local stage's F takes it
    gradient         likewise from B or I to the B or I of the stage before
    stored           from F, or R, to B or I; an end's F contains the vocabulary layer that is whole there
    queued           from I to W
    X, statistics, exponentials, dX, rows: as `runtime/vocabulary_passes.py` puts and takes them

Gradients of parameters are there, or are made by the first pass that adds to them, since `zero_grad` drops them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from evenpipe.schedule import Item, Kind, Pass, Program, Transfer, TransferKind, parts_of
from evenpipe.schedule.releases import releases

SENDS_IN_FLIGHT = 2
"""What `runtime/values.py` allows: a third transfer of one kind to the same device waits for the first."""

NO_STAGE = -1
"""In place of a stage."""

Key = tuple[int, int, int]
"""Stage, microbatch and slice."""


class Thing(NamedTuple):
    """What can be held, and which bytes it has: an entry of `replay.SIZES`."""

    size: str
    stage: int
    term: str


class Moment(NamedTuple):
    """How many of each thing are held, and what a pass holds on top for a moment."""

    counts: tuple[int, ...]
    above: int
    """Number of a thing, or -1."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The different moments of a device's step."""

    things: tuple[Thing, ...]
    moments: tuple[Moment, ...]
    labels: tuple[str, ...]
    """Where in the row each moment is first."""
    after: tuple[int, ...]
    """For each item of the row, the moment after it."""
    rooms: tuple[int, ...]
    """Counts of what is held between steps, gradients aside: buffers that one microbatch hands on to the next."""


def walk(program: Program, device: int, *, gradients_exist: bool, buffers_exist: bool) -> Walk:
    """Walks a device's row of a training program that is sound.

    Args:
        gradients_exist: when the step begins; they do where nothing drops them.
        buffers_exist: as after the first step.
    """
    assert not program.forward_only, "a program that evaluates holds nothing but what its passes are working on"
    buffers = _most_in_use(program, device) if buffers_exist else 0
    walker = _Walker(program, device, gradients_exist=gradients_exist, buffers=buffers)
    walker.walk()
    return walker.result()


def _most_in_use(program: Program, device: int) -> int:
    """Microbatches between S and T at most; of a whole output layer, between the last stage's F and its B, or W."""
    last = program.placement.stages - 1
    if program.barriers:
        changes = {(Kind.S, None): 1, (Kind.T, None): -1}
    else:
        changes = {(Kind.F, last): 1, (Kind.B, last): -1, (Kind.W, last): -1}
    now = most = 0
    for item in program.rows[device]:
        for part in parts_of(item) if isinstance(item, Pass) else ():
            now += changes.get((part.kind, part.stage), 0)
            most = max(most, now)
    return most


class _Walker:
    """One walk. `buffers`: of those that S takes and T gives back, how many there are from the step before."""

    def __init__(self, program: Program, device: int, *, gradients_exist: bool, buffers: int) -> None:
        self._program, self._device = program, device
        placement = program.placement
        self._last = placement.stages - 1
        self._alone = placement.devices == 1
        self._spread = program.barriers > 0
        self._gradients_exist = gradients_exist
        self._number: dict[Thing, int] = {}
        self._counts: list[int] = []
        self._found: dict[tuple[tuple[int, ...], int], int] = {}
        self._labels: list[str] = []
        self._label = ""
        self._after: list[int] = []
        self._sent: dict[Transfer, tuple[Thing, ...]] = {}
        self._shares: Counter[int] = Counter()
        """Holders of the one tensor of row gradients of a microbatch: who sends it, and who uses its own part."""
        self._split: set[Key] = set()
        self._recomputed: set[Key] = set()
        self._made: set[Thing] = set()
        self._buffers = self._free_buffers = buffers
        self._handlers: dict[Kind, Callable[[Pass], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._weights,
            Kind.R: self._recompute,
            Kind.O: self._offload,
            Kind.L: self._load,
            Kind.E: self._embed,
            Kind.G: self._embedding_gradient,
            Kind.S: self._output,
            Kind.C: self._combine,
            Kind.T: self._output_gradient,
        }

    # --- counting -----------------------------------------------------------------------------------------------

    def _of(self, thing: Thing) -> int:
        number = self._number.get(thing)
        if number is None:
            number = self._number[thing] = len(self._counts)
            self._counts.append(0)
        return number

    def _hold(self, *things: Thing) -> None:
        for thing in things:
            self._counts[self._of(thing)] += 1

    def _drop(self, *things: Thing) -> None:
        for thing in things:
            number = self._of(thing)
            assert self._counts[number] > 0, f"{self._label}: {thing} is dropped and was not held"
            self._counts[number] -= 1

    def _moment(self, above: Thing | None = None) -> int:
        """A moment of the pass under way, with something on top."""
        number = -1 if above is None else self._of(above)
        key = (tuple(self._counts), number)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = len(self._labels)
            self._labels.append(self._label)
        return found

    def result(self) -> Walk:
        """What was found. Things that came up late count 0 in earlier moments."""
        width = len(self._counts)
        moments = tuple(Moment((*counts, *(0,) * (width - len(counts))), above) for counts, above in self._found)
        rooms = tuple(
            count if thing.size in _ROOMS else 0 for thing, count in zip(self._number, self._counts, strict=True)
        )
        return Walk(tuple(self._number), moments, tuple(self._labels), tuple(self._after), rooms)

    # --- walking ------------------------------------------------------------------------------------------------

    def walk(self) -> None:
        row = self._program.rows[self._device]
        for item in row:
            for part in parts_of(item) if isinstance(item, Pass) else ():
                if part.kind is Kind.I:
                    self._split.add(_key(part))
                elif part.kind is Kind.R:
                    self._recomputed.add(_key(part))
        self._hold(*[HANDED_ON] * self._buffers)
        if self._buffers:
            self._hold(ROOM)
        arrived = releases(self._program, self._device)
        for position, item in enumerate(row):
            if item is None:
                self._after.append(self._moment())
                continue
            if isinstance(item, Transfer):
                self._label = _name(item)
                self._transfer(item)
            else:
                for part in parts_of(item):
                    self._label = _name(part)
                    handler = self._handlers.get(part.kind)
                    if handler is not None:  # what gathers and frees parameters holds nothing here
                        handler(part)
                for sent in arrived.get(position, ()):
                    self._arrived(sent)
            self._after.append(self._moment())
        for sent in list(self._sent):
            self._arrived(sent)
        left = [
            thing
            for thing, number in self._number.items()
            if self._counts[number] and thing.size not in _ROOMS and thing.term != "gradients"
        ]
        assert not left, f"device {self._device} holds {left} at the end"

    # --- passes of stages ---------------------------------------------------------------------------------------

    def _forward(self, item: Pass) -> None:
        stage = _stage(item)
        bare = _key(item) in self._recomputed
        if stage == 0:
            if self._spread and self._alone:
                self._drop(ROWS_INPUT)
        elif self._comes_from_elsewhere(stage - 1):
            self._drop(_received(stage, "input"))
        else:
            self._drop(_output(stage - 1))
        self._hold(_input(stage))
        self._moment(Thing("bare_forward_peak" if bare else "forward_peak", stage, TRANSIENT))
        self._hold(_output(stage))
        if not bare:
            self._hold(self._stored(item))
        if stage == 0 and self._spread and not self._alone:
            self._drop(ROWS_ALL)  # the caller of the forward keeps them until it is over
        if stage == self._last and not self._spread:
            self._take_buffer()
            self._moment(OUTPUT_PEAK)
            self._hold(OUTPUT_STORED, PRODUCT, OWN_STATISTICS)
            self._moment(COMBINE_PEAK)
            self._drop(OWN_STATISTICS, _output(stage))
            self._hold(COMBINED)

    def _comes_from_elsewhere(self, stage: int) -> bool:
        return self._program.placement.device_of(stage) != self._device

    def _stored(self, item: Pass) -> Thing:
        recomputed = _key(item) in self._recomputed
        return Thing("recomputed_stored" if recomputed else "stored", _stage(item), ACTIVATIONS)

    def _backward(self, item: Pass) -> None:
        """B, or I."""
        stage, split = _stage(item), item.kind is Kind.I
        gradient = _gradient(stage)
        if stage < self._last:
            if self._comes_from_elsewhere(stage + 1):
                self._drop(_received(stage, "output"))
            else:
                self._drop(_input_gradient(stage + 1))
            self._hold(gradient)
        else:
            if not self._spread:
                self._whole_output_gradient(split=split)
            self._moment(Thing("copied_gradient", stage, TRANSIENT))
            self._drop(DX)
            self._hold(gradient)
        recomputed = "recomputed_" if _key(item) in self._recomputed else ""
        first = "first_" if self._makes_gradients(stage, split=split) else ""
        self._moment(Thing(f"{recomputed}{first}{'input' if split else 'backward'}_peak", stage, TRANSIENT))
        self._hold_gradients(stage, split=split)
        self._drop(self._stored(item))
        self._hold(_input_gradient(stage))
        if split:
            self._hold(Thing(f"{recomputed}queued", stage, ACTIVATIONS))
        if stage == 0:
            self._rows_gradient()
        self._drop(_input(stage), gradient)

    def _rows_gradient(self) -> None:
        """At the first stage: the gradient of the input becomes one of rows; what B works on is still there."""
        if not self._spread:
            self._make(EMBEDDING_GRADIENTS)
            self._moment(EMBEDDING_BACKWARD_PEAK)
        elif not self._alone:
            self._hold(ROWS_GRADIENT)
            self._moment()
        if not (self._spread and self._alone):
            self._drop(_input_gradient(0))

    def _makes_gradients(self, stage: int, *, split: bool) -> bool:
        if self._gradients_exist:
            return False
        parts = _gradient_parts(stage)
        return parts[0] not in self._made or (not split and parts[1] not in self._made)

    def _hold_gradients(self, stage: int, *, split: bool) -> None:
        for part in _gradient_parts(stage)[: 1 if split else 2]:
            self._make(part)

    def _make(self, gradients: Thing) -> None:
        """Gradients of parameters that nobody has made in this step are made."""
        if not self._gradients_exist and gradients not in self._made:
            self._made.add(gradients)
            self._hold(gradients)

    def _weights(self, item: Pass) -> None:
        stage = _stage(item)
        if stage == self._last and not self._spread:
            self._make(OUTPUT_GRADIENTS)
            self._moment(OUTPUT_WEIGHT_PEAK)
            self._release_output()
        recomputed = "recomputed_" if _key(item) in self._recomputed else ""
        rest = _gradient_parts(stage)[1]
        first = "first_" if not self._gradients_exist and rest not in self._made else ""
        self._moment(Thing(f"{recomputed}{first}weight_peak", stage, TRANSIENT))
        self._make(rest)
        self._drop(Thing(f"{recomputed}queued", stage, ACTIVATIONS))

    def _recompute(self, item: Pass) -> None:
        self._moment(Thing("recompute_peak", _stage(item), TRANSIENT))
        self._hold(self._stored(item))

    def _offload(self, item: Pass) -> None:
        self._drop(self._stored(item))

    def _load(self, item: Pass) -> None:
        self._hold(self._stored(item))

    # --- an output layer that is part of the last stage ---------------------------------------------------------

    def _whole_output_gradient(self, *, split: bool) -> None:
        if split:  # what W needs stays
            self._moment(OUTPUT_GRADIENT_PEAK)
            self._hold(DX)
            return
        self._make(OUTPUT_GRADIENTS)
        self._moment(OUTPUT_BACKWARD_PEAK)
        self._release_output()
        self._hold(DX)

    def _release_output(self) -> None:
        self._drop(OUTPUT_STORED, PRODUCT, COMBINED)
        self._free_buffers += 1

    def _take_buffer(self) -> None:
        """S needs room for exponentials: what a T has given back, or new memory."""
        if self._free_buffers:
            self._free_buffers -= 1
            return
        if not self._buffers:
            self._hold(ROOM)
        self._buffers += 1
        self._hold(HANDED_ON)

    # --- vocabulary passes --------------------------------------------------------------------------------------

    def _embed(self, item: Pass) -> None:
        self._moment(EMBEDDING_PEAK)
        self._hold(ROWS_INPUT)

    def _embedding_gradient(self, item: Pass) -> None:
        self._make(EMBEDDING_GRADIENTS)
        self._moment(EMBEDDING_BACKWARD_PEAK)
        if self._alone:
            self._drop(_input_gradient(0))
        elif self._device == self._program.placement.first_device:
            self._let_go_of_rows(_microbatch(item))
        else:
            self._drop(ROWS_RECEIVED)

    def _let_go_of_rows(self, microbatch: int) -> None:
        self._shares[microbatch] -= 1
        if not self._shares[microbatch]:
            self._drop(ROWS_GRADIENT)

    def _output(self, item: Pass) -> None:
        self._take_buffer()
        self._moment(OUTPUT_PEAK)
        root = self._device == self._program.placement.last_device
        self._drop(_output(self._last) if root else X)
        self._hold(OUTPUT_STORED, PRODUCT, OWN_STATISTICS)

    def _open_barrier(self) -> None:
        if not self._alone:
            self._drop(OWN_STATISTICS)
        self._moment(COMBINE_PEAK)
        self._drop(OWN_STATISTICS if self._alone else STATISTICS)
        self._hold(COMBINED)

    def _combine(self, item: Pass) -> None:
        self._open_barrier()
        self._moment(OUTPUT_GRADIENT_PEAK)
        self._drop(PRODUCT)
        self._hold(DX)

    def _output_gradient(self, item: Pass) -> None:
        if self._program.barriers == 2:
            self._open_barrier()
            self._drop(PRODUCT)
        self._make(OUTPUT_GRADIENTS)
        self._moment(OUTPUT_BACKWARD_PEAK)
        self._drop(OUTPUT_STORED, COMBINED)
        self._free_buffers += 1
        if self._program.barriers == 2:
            self._hold(DX)

    # --- transfers ----------------------------------------------------------------------------------------------

    def _transfer(self, item: Transfer) -> None:
        root = item.root == self._device
        match item.kind:
            case TransferKind.SEND_F:
                self._send(item, _output(_stage(item)))
            case TransferKind.SEND_B:
                self._send(item, _input_gradient(_stage(item)))
            case TransferKind.RECV_F:
                self._hold(_received(_stage(item), "input"))
            case TransferKind.RECV_B:
                self._hold(_received(_stage(item), "output"))
            case TransferKind.X if not root:
                self._hold(X)
            case TransferKind.STATISTICS:
                self._hold(STATISTICS)
            case TransferKind.DX if not root:
                self._send(item, DX)
            case TransferKind.ROWS if root:
                self._hold(ROWS_ALL)
                self._moment()
                self._drop(ROWS_INPUT)
            case TransferKind.ROWS:
                self._send(item, ROWS_INPUT)
            case TransferKind.ROW_GRADIENTS if root:
                self._shares[item.microbatch] = 2
                self._send(item)
            case TransferKind.ROW_GRADIENTS:
                self._hold(ROWS_RECEIVED)

    def _send(self, item: Transfer, *things: Thing) -> None:
        """Given away, and held until it is known to have arrived, or until too many like it are under way."""
        self._sent[item] = things
        alike = [other for other in self._sent if other.kind is item.kind and other.members == item.members]
        if len(alike) > SENDS_IN_FLIGHT:
            self._moment()
            self._arrived(alike[0])

    def _arrived(self, item: Transfer) -> None:
        things = self._sent.pop(item, None)
        if things is None:
            return
        self._drop(*things)
        if item.kind is TransferKind.ROW_GRADIENTS:
            self._let_go_of_rows(item.microbatch)


# --- things ---------------------------------------------------------------------------------------------------------

ACTIVATIONS, VOCABULARY, BUFFERS, GRADIENTS, TRANSIENT = TERMS = (
    "activations",
    "vocabulary",
    "buffers",
    "gradients",
    "transient",
)


def _input(stage: int) -> Thing:
    return Thing("input", stage, ACTIVATIONS)


def _output(stage: int) -> Thing:
    return Thing("output", stage, BUFFERS)


def _gradient(stage: int) -> Thing:
    """What B works on: the gradient of the stage's output."""
    return Thing("output", stage, ACTIVATIONS)


def _input_gradient(stage: int) -> Thing:
    return Thing("input", stage, BUFFERS)


def _received(stage: int, size: str) -> Thing:
    return Thing(size, stage, BUFFERS)


def _gradient_parts(stage: int) -> tuple[Thing, Thing]:
    """Of the stage's parameters: what I makes, and the rest."""
    return Thing("input_gradients", stage, GRADIENTS), Thing("weight_gradients", stage, GRADIENTS)


def _of_vocabulary(size: str, term: str = VOCABULARY) -> Thing:
    return Thing(size, NO_STAGE, term)


EMBEDDING_PEAK = _of_vocabulary("embedding_peak", TRANSIENT)
EMBEDDING_BACKWARD_PEAK = _of_vocabulary("embedding_backward_peak", TRANSIENT)
OUTPUT_PEAK = _of_vocabulary("output_peak", TRANSIENT)
COMBINE_PEAK = _of_vocabulary("combine_peak", TRANSIENT)
OUTPUT_GRADIENT_PEAK = _of_vocabulary("gradient_peak", TRANSIENT)
OUTPUT_BACKWARD_PEAK = _of_vocabulary("backward_peak", TRANSIENT)
OUTPUT_WEIGHT_PEAK = _of_vocabulary("weight_peak", TRANSIENT)
ROWS_INPUT = _of_vocabulary("rows_input")
ROWS_RECEIVED = _of_vocabulary("rows_input", BUFFERS)
ROWS_ALL = _of_vocabulary("rows_all")
ROWS_GRADIENT = _of_vocabulary("rows_all", BUFFERS)
X = _of_vocabulary("hidden")
OUTPUT_STORED = _of_vocabulary("stored")
PRODUCT = _of_vocabulary("product")
COMBINED = _of_vocabulary("combined")
OWN_STATISTICS = _of_vocabulary("own_statistics")
STATISTICS = _of_vocabulary("statistics")
DX = _of_vocabulary("gradient")
HANDED_ON = _of_vocabulary("handed_on")
ROOM = _of_vocabulary("room")
OUTPUT_GRADIENTS = _of_vocabulary("output_gradients", GRADIENTS)
EMBEDDING_GRADIENTS = _of_vocabulary("embedding_gradients", GRADIENTS)

_ROOMS = ("handed_on", "room")


def _key(item: Pass) -> Key:
    return _stage(item), _microbatch(item), item.slice


def _stage(item: Item) -> int:
    assert item.stage is not None
    return item.stage


def _microbatch(item: Pass) -> int:
    assert item.microbatch is not None
    return item.microbatch


def _name(item: Item) -> str:
    where = (
        f"microbatch {item.microbatch}" if item.stage is None else f"stage {item.stage}, microbatch {item.microbatch}"
    )
    return f"{item.kind.value} of {where}"
