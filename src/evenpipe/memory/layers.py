"""Closed forms: the bytes that one transformer layer saves and needs, from its shape and the kernels alone.

A layer is the list of operations in `blocks.py`. Each names the tensors that it saves; the layer saves the sum of the
distinct ones, and its peak follows from their lifetimes. For Llama with fused kernels, in units of H = sequence *
microbatch size * hidden / (tp * cp), this is the known 12 + 4r + 6q (r: heads of keys and values per head of queries,
q: size of the MLP over hidden size) and 12 + 4r + 8q with the activated gate kept: arXiv 2205.05198, section 4,
extended to gated MLPs and grouped heads.

    layer_bytes(shape, PRESETS["fused"], Portion(microbatch_size=1, sequence=4096, element=2)).saved

This file does not use torch and runs no model; tests compare it with `traced.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from evenpipe.errors import InputError
from evenpipe.memory.blocks import Block
from evenpipe.memory.cut import Portion, Sizes, sizes_of
from evenpipe.memory.kernels import Kernels
from evenpipe.memory.operations import WIDE
from evenpipe.memory.own_attention import Carried
from evenpipe.memory.sketch import Sketch, Source, Storage, Tape, Waiting, held
from evenpipe.model.shape import LayerShape
from evenpipe.words import unknown

INPUT, GRADIENT = "input", "gradient of the output"
"""Names of these storages."""

SMALLEST_MOVED = 4096
"""Smaller tensors, in bytes, are not copied to the host (`runtime/offload.py`)."""

REGIONS = {
    "none": frozenset[str](),
    "full": frozenset[str](),
    "selective": frozenset[str](),
    "core attention": frozenset({"core attention"}),
    "norms": frozenset({"norms"}),
    "activation": frozenset({"activation"}),
    "mlp": frozenset({"mlp"}),
    "attention": frozenset({"attention"}),
}
"""Checkpointing of a layer. The first three are those of `evenpipe train` (`runtime/checkpointing.py`); the others are
Megatron-LM's selective choices: a part is recomputed (core attention; MLP with its norm; attention with its norm), or
the results of norms or of the activation are recomputed from tensors that are saved anyway."""


class Backwards(dict[tuple[bool, bool, bool, bool], int]):
    """(another owner holds the gradient of the layer's output, its input, its tables; is I) -> peak within B or I.

    Of the sixteen a stage needs few: each is computed when it is first asked for.
    """

    def __init__(self, shape: LayerShape, kernels: Kernels, sizes: Sizes, checkpointing: str) -> None:
        super().__init__()
        self._layer = shape, kernels, sizes, checkpointing

    def __missing__(self, key: tuple[bool, bool, bool, bool]) -> int:
        *holds, split = key
        run = LayerRun(*self._layer, split=split)
        run.forward()
        return self.setdefault(key, run.backward(*holds))


@dataclass(frozen=True, slots=True)
class LayerPeaks:
    """Peaks within the passes of one layer, above the live bytes at the start of the pass."""

    forward: int
    """Within F; the layer's output was not live."""
    bare_forward: int
    """Within an F without a graph."""
    backward: Backwards
    """Within B and within I; the gradients of parameters exist."""
    weight: int
    """Within W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer, one microbatch and one GPU."""

    input: int
    """The layer's input; its output is as large."""
    saved: int
    """Bytes left by F for the backward under the layer's checkpointing, besides input and output."""
    saves_input: bool
    """Whether F keeps the input for the backward. Otherwise it can be freed after the layer."""
    tensors: Mapping[str, int]
    """Tensors that the layer saves, by name, including the input if it is saved. Tensors of one name are summed."""
    tables: Mapping[str, int]
    """Tables of positions, which the layers of a stage share and which stay until the backward."""
    moved: int
    """The part of `saved` that copies to the host carry: saved tensors that are large enough."""
    checkpointing: str
    """Of `REGIONS`."""
    given: Mapping[str, int]
    """Other tensors that layers share and keep until they are recomputed: positions, masks."""
    peaks: LayerPeaks
    queued: int
    """Live between I and W: inputs and output gradients of linear layers, even if others hold them too."""
    queues_input: bool
    """Whether the layer's input is part of it."""
    queues_gradient: bool
    """Whether the gradient of its output is part of it."""

    @property
    def moves_tables(self) -> bool:
        """Whether copies to the host carry tables, if those are large enough."""
        return self.checkpointing not in ("full", "selective")

    @property
    def holds_given(self) -> bool:
        """Whether `given` tensors stay until the end of its backward, beyond the recomputation: torch's own
        checkpointing keeps what a layer got until the last of its nodes is gone."""
        return self.checkpointing == "selective"


def check_has_closed_form(shape: LayerShape) -> None:
    """Raise InputError for a layer that can only be traced: one with dropout."""
    if shape.dropout:
        raise InputError("dropout: it is not 0 in this model's config, and its masks have no closed form.")


def layer_bytes(shape: LayerShape, kernels: Kernels, portion: Portion, checkpointing: str = "none") -> LayerBytes:
    """Return the bytes of one layer: run it for its saved tensors, and for its queue of weight gradients.

    With context parallelism the keys and values of all other GPUs are counted during attention, and their gradients in
    its backward (for ring and all-gather alike).

    Raises:
        InputError: dropout, an unknown choice of `REGIONS`, or sizes that cannot be cut evenly.
    """
    if checkpointing not in REGIONS:
        raise unknown("checkpointing", checkpointing, REGIONS)
    check_has_closed_form(shape)
    sizes = sizes_of(shape, portion)
    bare, kept = (LayerRun(shape, kernels, sizes, checkpointing) for _ in range(2))
    split = LayerRun(shape, kernels, sizes, checkpointing, split=True)
    bare.tape.recording = False
    for run in (bare, kept, split):
        run.forward()
    split.backward(True, True)
    assert split.tape.queue is not None
    queued = {id(one): one for entry in split.tape.queue for one in entry.storages}
    names = {one.name for one in queued.values()}
    total = sum(one.bytes for one in queued.values())
    del queued
    everything, names_of_tables = given(shape, kernels, sizes), _table_names(shape)
    again = checkpointing in ("full", "selective")
    return LayerBytes(
        input=sizes.stream * sizes.element,
        saved=kept.saved,
        tensors=kept.tensors(),
        tables={name: size for name, size in everything.items() if name in names_of_tables},
        moved=kept.moved(everything if again else ()),
        checkpointing=checkpointing,
        given={name: size for name, size in everything.items() if again and name not in names_of_tables},
        peaks=LayerPeaks(
            kept.peak,
            bare.peak,
            Backwards(shape, kernels, sizes, checkpointing),
            _weight_peak(split.tape, split.tape.queue),
        ),
        queued=total,
        saves_input=kept.holds_input(),
        queues_input=INPUT in names,
        queues_gradient=GRADIENT in names,
    )


class LayerRun:
    """One layer, or a part of it, on its own tape."""

    def __init__(
        self,
        shape: LayerShape,
        kernels: Kernels,
        sizes: Sizes,
        checkpointing: str = "none",
        *,
        split: bool = False,
        part: Callable[[Block, Sketch], Sketch] = Block.__call__,
        elements: int | None = None,
    ) -> None:
        """elements: of the input; None: of the residual stream."""
        self.tape = tape = Tape()
        tape.queue = [] if split else None
        self._checkpointing = checkpointing
        self.hidden: Sketch | None = tape.new(sizes.stream if elements is None else elements, sizes.element, INPUT)
        self.hidden.node = tape.leaf()
        names = _table_names(shape)
        self._tables = tuple(tape.new(*_table(shape, sizes), name) for name in names)
        masked = _masked(shape, kernels, sizes)
        again = REGIONS[checkpointing]
        block = Block(tape, shape, kernels, sizes, again=again, tables=self._tables, masked=masked)
        self._carried = block.carried = carried_of(shape, sizes)
        self._begins_carry = sizes.begins_carry
        self._ends_sequence = sizes.piece is None or sizes.piece.is_last
        if self._carried is not None and not self._begins_carry:
            self._carried.hold_keys(tape.meter)
        self._part, self._block, self._needs_tables = part, block, True
        self._output: Sketch | None = None
        self.peak = self.saved = 0

    def forward(self) -> None:
        """Run the forward; set `peak` and `saved`."""
        tape, meter = self.tape, self.tape.meter
        live = meter.live
        meter.reset()
        assert self.hidden is not None
        if self._runs_again and tape.recording:
            keeps_products = self._checkpointing == "selective"
            self._output = tape.checkpointed(self._run, self.hidden, keeps_products=keeps_products)
        else:
            self._output = self._run(self.hidden)
        self.peak = meter.peak - live
        made = 0 if self._carried is None or not self._begins_carry else sum(one.bytes for one in self._carried.keys)
        self.saved = meter.live - live - self._output.bytes - made

    @property
    def _runs_again(self) -> bool:
        return self._checkpointing in ("full", "selective")

    def _run(self, hidden: Sketch) -> Sketch:
        try:
            return self._part(self._block, hidden)
        finally:
            if not self._needs_tables:
                self._block.release_tables()

    def backward(self, holds_gradient: bool, holds_input: bool, holds_tables: bool = True) -> int:
        """Return the peak, above the live bytes before. Gradient, input and tables may be held by another owner until
        the end."""
        tape, meter = self.tape, self.tape.meter
        assert self._output is not None and self._output.node is not None
        if self._carried is not None and not self._ends_sequence:
            self._carried.hold_gradients(meter)
        given = [tape.new(self._output.elements, self._output.element, GRADIENT)]
        root, self._output = self._output.node, None
        held_by_others = [*given] if holds_gradient else []
        if holds_input and self.hidden is not None:
            held_by_others.append(self.hidden)
        self.hidden = None
        # torch's own checkpointing, "selective", keeps inputs until the last of its nodes is gone, and parts of a layer
        # that run again may need them.
        self._needs_tables = holds_tables or self._checkpointing not in ("none", "full")
        if not self._needs_tables:
            self._tables = ()
            if not self._runs_again:
                self._block.release_tables()
        live = meter.live
        meter.reset()
        gradients = tape.backward(root, given)
        del gradients, held_by_others
        return meter.peak - live

    def saved_storages(self) -> list[Storage]:
        """Return the storages of the graph, except tables that layers share."""
        assert self._output is not None and self._output.node is not None
        shared = {id(table.storage) for table in self._tables}
        return [one for one in held(self._output.node) if id(one) not in shared]

    def tensors(self) -> Counter[str]:
        """Return the bytes of these storages by name."""
        found: Counter[str] = Counter()
        for one in self.saved_storages():
            found[one.name] += one.bytes
        return found

    def moved(self, stays: Collection[str]) -> int:
        """Return the bytes that copies to the host carry, besides the input and the storages called `stays`."""
        names = {INPUT, *stays}
        return sum(one.bytes for one in self.saved_storages() if one.name not in names and one.bytes >= SMALLEST_MOVED)

    def holds_input(self) -> bool:
        """Return whether the layer's graph keeps its input; otherwise release it."""
        live = self.tape.meter.live
        self.hidden = None
        return self.tape.meter.live == live


def _weight_peak(tape: Tape, queue: list[Waiting]) -> int:
    """W as in `layers/weight_gradients.py`: an entry is freed when the next one is taken, and the last added gradient
    when the next one is computed; a gathered input is under way during the products before those that need it."""
    meter = tape.meter
    live = meter.live
    meter.reset()
    last: Storage | None = None
    sources = list(dict.fromkeys(entry.source for entry in queue if entry.source is not None))
    under_way = _start_next(sources)
    while queue:
        entry = queue.pop(0)
        if entry.source is not None and entry.source is under_way:
            under_way = _start_next(sources)
        made = entry.compute()
        last = made[-1] if made else None
        del made
    del last
    return meter.peak - live


def _start_next(sources: list[Source]) -> Source | None:
    source = sources.pop(0) if sources else None
    if source is not None:
        source.start()
    return source


def carried_of(shape: LayerShape, sizes: Sizes) -> Carried | None:
    """Return the carry of a layer, still without bytes; None if sequences are not cut into slices."""
    piece = sizes.piece
    if piece is None or not piece.carried:
        return None
    heads = sizes.key_value_heads
    if piece.trades_heads:
        heads = max(1, heads // piece.ranks)
    elements = sizes.batch * heads * shape.attention.head_size * piece.length
    return Carried((elements, elements), sizes.element)


def gathered_bytes(shape: LayerShape, sizes: Sizes) -> int:
    """Return the bytes of the keys and values of all context ranks that a layer gathers, in F and in its backward."""
    piece = sizes.piece
    if piece is None or not piece.gathers:
        return 0
    return 2 * sizes.batch * piece.whole * sizes.key_value_heads * shape.attention.head_size * sizes.element


# --- tensors that layers share
# -----------------------------------------------------------------------------------------


def _table_names(shape: LayerShape) -> tuple[str, ...]:
    return tuple(f"{name} of {shape.rotary.table}" for name in ("cosines", "sines")) if shape.rotary.size else ()


def _table(shape: LayerShape, sizes: Sizes) -> tuple[int, int]:
    """Return elements, and bytes of each. A piece is given its positions, for every sequence."""
    tokens = sizes.tokens // (sizes.batch if sizes.piece is None else 1)
    return tokens * shape.rotary.size, WIDE if shape.rotary.wide_table else sizes.element


def _masked(shape: LayerShape, kernels: Kernels, sizes: Sizes) -> bool:
    """torch's own attention needs a mask: for a window that is not longer than the sequence."""
    window = shape.attention.window
    if sizes.piece is not None:
        return False
    return kernels.attention == "sdpa" and window is not None and sizes.context >= window


def _mask_bytes(shape: LayerShape, kernels: Kernels, sizes: Sizes) -> int:
    """Return the bytes of a layer's mask: booleans or, for eager attention, numbers for every sequence."""
    if sizes.piece is not None:
        return 0
    if kernels.is_eager(shape):
        return sizes.batch * sizes.context**2 * sizes.element
    return sizes.context**2 if _masked(shape, kernels, sizes) else 0


def given(shape: LayerShape, kernels: Kernels, sizes: Sizes) -> dict[str, int]:
    """Return bytes that the model's forward computes once for all layers of this kind: tables, a mask, positions."""
    elements, element = _table(shape, sizes)
    found = dict.fromkeys(_table_names(shape), elements * element)
    found[f"mask of {shape.attention.window or 'all'}"] = _mask_bytes(shape, kernels, sizes)
    found["positions"] = 0 if sizes.piece is not None else 8 * (sizes.tokens // sizes.batch)
    return {name: size for name, size in found.items() if size}
