"""The bytes of a stage in closed form: its layers one after the other, and the parts before and after them.

Each layer is a stretch of the pass (`stretches.py`): its peak, and the bytes that it leaves. So are the operations of
the model's own forward before the layers (it runs completely in every stage, on zeros for parts that the stage does not
own) and after them (the last norm).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from torch import nn

from evenpipe.errors import InputError
from evenpipe.memory.blocks import Block
from evenpipe.memory.bytes import PassPeaks, StageBytes
from evenpipe.memory.cut import Portion, Sizes, sizes_of
from evenpipe.memory.kernels import PRESETS, Kernels
from evenpipe.memory.layers import (
    INPUT,
    SMALLEST_MOVED,
    LayerBytes,
    LayerRun,
    carried_of,
    check_has_closed_form,
    gathered_bytes,
    given,
    layer_bytes,
)
from evenpipe.memory.own_attention import Carried
from evenpipe.memory.sketch import Sketch
from evenpipe.memory.stretches import Stretch, joined
from evenpipe.model import Description
from evenpipe.model.shape import LayerShape, layer_shapes
from evenpipe.words import count

Start = Literal["nothing", "scaled", "multiplied", "positions"]
"""Scaled by the embedding's own module; multiplied in the model's forward, which every stage runs (on zeros, if it is
not the first); learned positions added, also in every stage."""


class ClosedForms:
    """The stages of one model; `traced.StageTracer` finds the same by running them.

    Raises:
        InputError: the model has no closed form, because of its type or its dropout.
    """

    def __init__(self, description: Description) -> None:
        self.shapes = layer_shapes(description)
        for shape in set(self.shapes):
            check_has_closed_form(shape)
        self._has_experts = any(shape.mlp.experts is not None for shape in self.shapes)
        self._start = start_of(description)
        self._layer = lru_cache(maxsize=4096)(layer_bytes)  # most layers of a model are alike

    def describe(self, kernels: Kernels, tensor_ranks: int, members: int = 1) -> bool:
        """Return whether there is one: for experts only as this library runs them, on a single tensor rank that has all
        of them."""
        return not self._has_experts or (kernels.experts == "rows" and tensor_ranks == members == 1)

    def stage(
        self,
        first: int,
        last: int,
        portion: Portion,
        *,
        is_first: bool,
        is_last: bool,
        checkpointing: str | Sequence[str] = "none",
        kept_layers: Collection[int] = (),
        kernels: Kernels = PRESETS["transformers"],
        whole_end: bool = False,
    ) -> StageBytes:
        """Return the bytes of layers [first, last) with the ends that the stage owns.

        Args:
            checkpointing: of `layers.REGIONS`, for all layers of the model or one for each of them.
            kept_layers: layers that are not copied to the host.
            whole_end: with tensor parallelism in blocks, what follows the layers needs all tokens.

        Raises:
            InputError: as `layer_bytes`, or it does not `describe` the model so.
        """
        if not self.describe(kernels, portion.tp):
            raise InputError(
                f"model: its experts have no closed form with tp = {portion.tp} and kernels that run experts as"
                f" {kernels.experts!r}, expected tp = 1 and 'rows'"
            )
        shapes = self.shapes
        choices = [checkpointing] * len(shapes) if isinstance(checkpointing, str) else list(checkpointing)
        if len(choices) != len(shapes):
            raise InputError(
                f"checkpointing has {count(len(choices), 'choice')}; it must have one for each of"
                f" {count(len(shapes), 'layer')}."
            )

        sizes = sizes_of(shapes[0], portion)
        made: dict[str, int] = {}
        for shape in set(shapes):
            made |= given(shape, kernels, sizes)
        norm = _norm_bytes(shapes[0], kernels, sizes, owned=is_last, gathers=whole_end and sizes.blocks)
        gathered = max((gathered_bytes(shape, sizes) for shape in shapes[first:last]), default=0)
        moves = [layer not in kept_layers for layer in range(first, last)]

        def stage(choices: Sequence[str], portion: Portion = portion) -> _Stage:
            sizes = sizes_of(shapes[0], portion)
            own = zip(shapes[first:last], choices, strict=True)
            layers = [self._layer(shape, kernels, portion, choice) for shape, choice in own]
            ends: dict[str, Any] = {"start": self._start, "norm": norm, "is_first": is_first, "is_last": is_last}
            carries = [carried_of(shape, sizes) for shape in shapes[first:last]]
            return _Stage(
                layers,
                moves,
                sizes,
                carries,
                made=sum(made.values()),
                gathered=gathered,
                keeps_input=portion.keeps_input,
                **ends,
            )

        plain = ["none"] * (last - first)
        differs = sizes.blocks or sizes.carried
        is_same = choices[first:last] == plain and not differs
        again = None if is_same else stage(plain, replace(portion, repeats=differs)).bytes(None)
        return stage(choices[first:last]).bytes(again)


def start_of(description: Description) -> Start:
    """Return how the model changes embedded tokens before the first layer."""
    structure, config = description.structure, description.config.get_text_config()
    embedding = description.skeleton.get_submodule(structure.embedding_module)
    if structure.first_parameters:
        return "positions"
    if type(embedding).forward is not nn.Embedding.forward:
        return "scaled"
    return "multiplied" if hasattr(config, "embedding_multiplier") else "nothing"


class _Norm(NamedTuple):
    """The norm after the layers, or its operations on zeros if the stage does not own it."""

    saved: int
    moved: int
    saves_input: bool
    forward_peak: int
    backward_peak: int


def _norm_bytes(shape: LayerShape, kernels: Kernels, sizes: Sizes, *, owned: bool, gathers: bool) -> _Norm:
    """gathers: every tensor rank computes it for all tokens."""
    stream = sizes.stream
    if sizes.blocks and (gathers or not owned):  # what a stage does not own runs on zeros, for all tokens
        sizes = replace(sizes, stream_tokens=sizes.tokens)

    def part(block: Block, hidden: Sketch) -> Sketch:
        if not (owned and gathers):
            return block.norm(hidden, "last norm")
        with block.operations.block(hidden, sizes.whole, keeps=False) as whole:
            return block.operations.own_rows(block.norm(whole, "last norm"), stream)

    run = LayerRun(shape, kernels, sizes, part=part, elements=stream if owned else sizes.stream)
    run.tape.recording = owned
    run.forward()
    if not owned:
        return _Norm(0, 0, False, run.peak, 0)
    saves_input = any(one.name == INPUT for one in run.saved_storages())
    return _Norm(run.saved, run.moved(()), saves_input, run.peak, run.backward(True, True))


class _Stage:
    """Layers and ends, pass by pass.

    Args:
        moves: of each layer, whether its saved tensors go to the host.
        carries: of each layer, if sequences are cut into slices.
        made: bytes of tables, masks and positions that the model's forward computes for all its layers.
        gathered: bytes of the keys and values that one layer gathers.
        keeps_input: the stage's input stays until the end of the backward.
    """

    def __init__(
        self,
        layers: Sequence[LayerBytes],
        moves: Sequence[bool],
        sizes: Sizes,
        carries: Sequence[Carried | None],
        *,
        start: Start,
        made: int,
        gathered: int,
        keeps_input: bool,
        norm: _Norm,
        is_first: bool,
        is_last: bool,
    ) -> None:
        self._layers, self._moves, self._norm, self._is_last = layers, moves, norm, is_last
        given_positions = sizes.piece is not None  # of every sequence
        tokens = sizes.tokens if given_positions else sizes.tokens // sizes.batch
        self._sizes, self._carries = sizes, [(0, 0) if one is None else (one.made, one.summed) for one in carries]
        """Of each layer, bytes of the keys and values of whole sequences, and of their gradients."""
        self._stream = sizes.stream * sizes.element
        """Bytes of the hidden states."""
        self._whole = whole = sizes.whole * sizes.element
        """Bytes of the hidden states of all tensor ranks, if blocks gather them; else `stream`."""
        self._takes_rows = is_first and sizes.blocks
        """Whether its input has all tokens, of which each tensor rank takes its own before the first layer."""
        self._begins = is_first and start != "nothing"
        """Whether it allocates a tensor before the first layer."""
        self._holds_first = self._begins and start != "positions"
        """Whether that stays until the end of the forward."""
        indices = (
            8 * {"positions": 0 if given_positions else tokens, "scaled": sizes.tokens}.get(start, 0)
            if self._begins
            else 0
        )
        self._looked_up = indices if start == "scaled" else 0
        """Rows that the first stage's look-up of tokens saves, until the model's forward ends."""
        self._early = whole if start == "positions" and not is_first else 0
        """Bytes that are freed after the first layer."""
        self._lasting = made + (0 if is_first and is_last else whole)
        """Bytes that are live during the model's forward, besides those left by layers; they include zeros that replace
        the hidden states of other stages."""
        if start == "multiplied" and not is_first:
            self._lasting += whole
        if start == "positions":  # learned positions of one sequence
            self._lasting += tokens * sizes.hidden * sizes.element
        self._keeps_input, self._gathered, self._indices = keeps_input, gathered, indices
        """Rows that its look-ups save for the backward."""
        shared = {"indices": indices}
        self._lasts_here: list[dict[str, int]] = []
        """Tables that the backward of a layer is the last to need."""
        self._goes_with: dict[int, int] = {}
        given: set[str] = set()
        for place, layer in enumerate(layers):
            self._lasts_here.append({name: size for name, size in layer.tables.items() if name not in shared})
            shared |= layer.tables
            new = {name: size for name, size in layer.given.items() if name not in given}
            given |= new.keys()
            self._goes_with[place] = sum(new.values())
        self._shared = sum(shared.values())
        """Bytes that stay for all layers."""
        self._given = sum(self._goes_with.values())
        """Bytes that stay until the first layer that needs them is recomputed."""

    def bytes(self, recomputed: StageBytes | None) -> StageBytes:
        """recomputed: for microbatches that have R, if that differs."""
        stream = self._stream
        if not self._layers and not self._is_last and not self._begins and not self._takes_rows:
            return StageBytes(input=stream, output=stream, stored=0, queued=0, saves_input=self._keeps_input)
        count = len(self._layers)
        forward, bare = self._forward(bare=False), self._forward(bare=True)
        return StageBytes(
            input=self._whole if self._takes_rows else stream,
            output=stream,
            stored=forward.kept - stream - sum(self._carried_on(place, forward=True) for place in range(count)),
            shared=self._shared + self._given,
            saves_input=self._saves_input(),
            moved=self._moved(),
            queued=sum(layer.queued for layer in self._layers),
            carried=sum(keys for keys, _ in self._carries),
            carried_gradients=sum(gradients for _, gradients in self._carries),
            peaks=PassPeaks(
                gathered=self._gathered,
                forward=forward.above,
                backward=self._backward().above,
                input=self._backward(split=True).above,
                weight=joined(Stretch(one.peaks.weight, -one.queued) for one in reversed(self._layers)).above,
                recompute=forward.above if recomputed is None else recomputed.peaks.forward,
                bare_forward=bare.above,
            ),
            recomputed=recomputed,
        )

    def _moved(self) -> int:
        """Return the bytes of copies to the host."""
        moved, sizes, seen = 0, [self._indices], set[str]()
        for layer, moves in zip(self._layers, self._moves, strict=True):
            if moves:
                moved += layer.moved
                sizes.append(self._stream if layer.saves_input else 0)
            for name, size in layer.tables.items() if layer.moves_tables else ():
                sizes += [size] if moves and name not in seen else []  # if the first layer keeps it, it stays
                seen.add(name)
        if self._is_last:
            moved += self._norm.moved
            sizes.append(self._stream if self._norm.saves_input else 0)
        return moved + sum(size for size in sizes if size >= SMALLEST_MOVED)

    def _saves_input(self) -> bool:
        """Return whether the stage's input stays for its backward, because its first operation saves it or anyway."""
        if self._keeps_input:
            return True
        if self._takes_rows or self._begins:
            return False
        return self._layers[0].saves_input if self._layers else self._norm.saves_input

    def _input_goes(self, place: int) -> int:
        """Return the bytes of a layer's input, which the previous layer owns, unless it is the stage's."""
        return self._stream if place or self._begins or self._takes_rows else 0

    def _carried_on(self, place: int, *, forward: bool) -> int:
        """Return the bytes by which a layer's pass makes the carry larger: the first slice's F begins it, the last
        one's backward adds the gradients, and the first one's ends it."""
        piece, (keys, gradients) = self._sizes.piece, self._carries[place]
        if forward:
            return keys if self._sizes.begins_carry else 0
        if piece is None or not (piece.is_first or piece.is_last):
            return 0
        return gradients if piece.is_last else -keys - gradients

    def _forward(self, *, bare: bool) -> Stretch:
        stream = self._stream
        looked_up = 0 if bare else self._looked_up
        began = self._whole if self._begins else 0
        started = self._lasting + looked_up + self._early + began
        row = [Stretch(started, started)]
        if self._takes_rows:
            row.append(Stretch(stream, stream))
        goes_at_end = self._lasting + looked_up - (0 if bare else self._shared + self._given)
        for place, layer in enumerate(self._layers):
            goes = self._input_goes(place) if bare or not layer.saves_input else 0
            if not place and self._takes_rows:
                goes, goes_at_end = (goes, goes_at_end + began) if self._holds_first else (goes + began, goes_at_end)
            elif not place and self._holds_first:
                goes_at_end, goes = goes_at_end + goes, 0
            if not place:
                goes += self._early
            kept = 0 if bare else layer.saved
            kept += self._carried_on(place, forward=True)
            row.append(Stretch(layer.peaks.bare_forward if bare else layer.peaks.forward, kept + stream - goes))
        norm = self._norm
        kept = -goes_at_end
        if self._is_last:
            kept += stream - (stream if bare or not norm.saves_input else 0) + (0 if bare else norm.saved)
        return joined([*row, Stretch(norm.forward_peak, kept)])

    def _backward(self, *, split: bool = False) -> Stretch:
        stream = self._stream
        row = []
        if self._is_last:
            norm = self._norm
            row.append(Stretch(norm.backward_peak, stream - norm.saved - (stream if norm.saves_input else 0)))
        for place in reversed(range(len(self._layers))):
            layer = self._layers[place]
            # The stage's received gradient is held by its receiver.
            received = place == len(self._layers) - 1 and not self._is_last
            kept = stream - layer.saved - (self._input_goes(place) if layer.saves_input else 0)
            kept -= 0 if received and not (split and layer.queues_gradient) else stream
            kept += self._carried_on(place, forward=False)
            if split:
                kept += layer.queued - (stream - self._input_goes(place) if layer.queues_input else 0)
            given = Stretch(0, -self._goes_with[place])
            if not layer.holds_given:
                row.append(given)  # recomputed by now
            holds_input = self._keeps_input and not place and not self._begins and not self._takes_rows
            tables = self._lasts_here[place]
            holds_tables = not holds_input and tables.keys() != layer.tables.keys()
            row.append(
                Stretch(layer.peaks.backward[received, holds_input, holds_tables, split], kept - sum(tables.values()))
            )
            if layer.holds_given:
                row.append(given)
        if self._takes_rows:
            row.append(Stretch(self._whole, self._whole - stream))
        return joined([*row, Stretch(0, -self._indices)])
