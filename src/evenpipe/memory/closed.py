"""The bytes of a stage in closed form: its layers one after the other, and the parts before and after them.

Each layer is a stretch of the pass (`stretches.py`): its peak, and the bytes that it leaves. So are the operations of
the model's own forward before the layers (it runs completely in every stage, on zeros for parts that the stage does not
own) and after them (the last norm).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from torch import nn

from evenpipe.errors import InputError
from evenpipe.memory.bytes import PassPeaks, StageBytes
from evenpipe.memory.cut import Portion, Sizes, sizes_of
from evenpipe.memory.kernels import PRESETS, Kernels
from evenpipe.memory.layers import (
    INPUT,
    SMALLEST_MOVED,
    LayerBytes,
    LayerRun,
    check_has_closed_form,
    given,
    layer_bytes,
)
from evenpipe.memory.stretches import Stretch, joined
from evenpipe.model import Description
from evenpipe.model.shape import LayerShape, layer_shapes

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
        self._start = start_of(description)
        self._layer = lru_cache(maxsize=4096)(layer_bytes)  # most layers of a model are alike

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
    ) -> StageBytes:
        """Return the bytes of layers [first, last) with the ends that the stage owns.

        Args:
            checkpointing: of `layers.REGIONS`, for all layers of the model or one for each of them.
            kept_layers: layers that are not copied to the host.

        Raises:
            InputError: as `layer_bytes`.
        """
        shapes = self.shapes
        choices = [checkpointing] * len(shapes) if isinstance(checkpointing, str) else list(checkpointing)
        if len(choices) != len(shapes):
            raise InputError(f"checkpointing: {len(choices)} choices, expected one for each of {len(shapes)} layers.")

        def layers(choices: Sequence[str]) -> list[LayerBytes]:
            own = zip(shapes[first:last], choices, strict=True)
            return [self._layer(shape, kernels, portion, choice) for shape, choice in own]

        sizes = sizes_of(shapes[0], portion)
        made: dict[str, int] = {}
        for shape in set(shapes):
            made |= given(shape, kernels, sizes)
        norm = _norm_bytes(shapes[0], kernels, sizes, owned=is_last)
        ends = _ends(self._start, sizes, sum(made.values()), norm, is_first=is_first, is_last=is_last)
        moves = [layer not in kept_layers for layer in range(first, last)]
        stage = _Stage(layers(choices[first:last]), ends, moves)
        plain = ["none"] * (last - first)
        again = None if choices[first:last] == plain else _Stage(layers(plain), ends, moves).bytes(None)
        return stage.bytes(again)


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


def _norm_bytes(shape: LayerShape, kernels: Kernels, sizes: Sizes, *, owned: bool) -> _Norm:
    run = LayerRun(shape, kernels, sizes, part=lambda block, hidden: block.norm(hidden, "last norm"))
    run.tape.recording = owned
    run.forward()
    if not owned:
        return _Norm(0, 0, False, run.peak, 0)
    saves_input = any(one.name == INPUT for one in run.saved_storages())
    return _Norm(run.saved, run.moved(()), saves_input, run.peak, run.backward(True, True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """The parts of a stage besides its layers, in bytes."""

    stream: int
    """The hidden states."""
    begins: bool
    """Whether it allocates a tensor for the first layer."""
    holds_first: bool
    """Whether that stays until the end of the forward."""
    lasting: int
    """Live during the model's forward, besides what layers leave; this includes zeros that replace the hidden states of
    other stages."""
    early: int
    """Freed after the first layer."""
    looked_up: int
    """Rows that the first stage's look-up of tokens saves, until the model's forward ends."""
    indices: int
    """Rows that its look-ups save for the backward."""
    norm: _Norm
    is_last: bool


def _ends(start: Start, sizes: Sizes, made: int, norm: _Norm, *, is_first: bool, is_last: bool) -> _Ends:
    """made: tables, masks and positions that the model's forward computes for all its layers."""
    stream, tokens = sizes.stream * sizes.element, sizes.tokens // sizes.batch
    begins = is_first and start != "nothing"
    lasting = made + (0 if is_first and is_last else stream)
    if start == "multiplied" and not is_first:
        lasting += stream
    if start == "positions":  # learned positions of one sequence
        lasting += tokens * sizes.hidden * sizes.element
    indices = 8 * {"positions": tokens, "scaled": sizes.tokens}.get(start, 0) if begins else 0
    return _Ends(
        stream=stream,
        begins=begins,
        holds_first=begins and start != "positions",
        lasting=lasting,
        early=stream if start == "positions" and not is_first else 0,
        looked_up=indices if start == "scaled" else 0,
        indices=indices,
        norm=norm,
        is_last=is_last,
    )


class _Stage:
    """Layers and ends, pass by pass."""

    def __init__(self, layers: Sequence[LayerBytes], ends: _Ends, moves: Sequence[bool]) -> None:
        self._layers, self._ends, self._moves = layers, ends, moves
        shared = {"indices": ends.indices}
        self._goes_with: dict[int, int] = {}
        given: set[str] = set()
        for place, layer in enumerate(layers):
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
        stream = self._ends.stream
        if not self._layers and not self._ends.is_last and not self._ends.begins:
            return StageBytes(input=stream, output=stream, stored=0, queued=0)
        forward, bare = self._forward(bare=False), self._forward(bare=True)
        return StageBytes(
            input=stream,
            output=stream,
            stored=forward.kept - stream,
            moved=self._moved(),
            queued=sum(layer.queued for layer in self._layers),
            peaks=PassPeaks(
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
        ends = self._ends
        moved, sizes, seen = 0, [ends.indices], set[str]()
        for layer, moves in zip(self._layers, self._moves, strict=True):
            if moves:
                moved += layer.moved
                sizes.append(ends.stream if layer.saves_input else 0)
            for name, size in layer.tables.items() if layer.moves_tables else ():
                sizes += [size] if moves and name not in seen else []  # if the first layer keeps it, it stays
                seen.add(name)
        if ends.is_last:
            moved += ends.norm.moved
            sizes.append(ends.stream if ends.norm.saves_input else 0)
        return moved + sum(size for size in sizes if size >= SMALLEST_MOVED)

    def _input_goes(self, place: int) -> int:
        """Return the bytes of a layer's input, which the previous layer owns, unless it is the stage's."""
        return self._ends.stream if place or self._ends.begins else 0

    def _forward(self, *, bare: bool) -> Stretch:
        ends, stream = self._ends, self._ends.stream
        looked_up = 0 if bare else ends.looked_up
        started = ends.lasting + looked_up + ends.early + (stream if ends.begins else 0)
        row = [Stretch(started, started)]
        goes_at_end = ends.lasting + looked_up - (0 if bare else self._shared + self._given)
        for place, layer in enumerate(self._layers):
            goes = self._input_goes(place) if bare or not layer.saves_input else 0
            if not place and ends.holds_first:
                goes_at_end, goes = goes_at_end + goes, 0
            if not place:
                goes += ends.early
            kept = 0 if bare else layer.saved
            row.append(Stretch(layer.peaks.bare_forward if bare else layer.peaks.forward, kept + stream - goes))
        norm = ends.norm
        kept = -goes_at_end
        if ends.is_last:
            kept += stream - (stream if bare or not norm.saves_input else 0) + (0 if bare else norm.saved)
        return joined([*row, Stretch(norm.forward_peak, kept)])

    def _backward(self, *, split: bool = False) -> Stretch:
        ends, stream = self._ends, self._ends.stream
        row = []
        if ends.is_last:
            norm = ends.norm
            row.append(Stretch(norm.backward_peak, stream - norm.saved - (stream if norm.saves_input else 0)))
        for place in reversed(range(len(self._layers))):
            layer = self._layers[place]
            # The stage's received gradient is held by its receiver.
            received = place == len(self._layers) - 1 and not ends.is_last
            kept = stream - layer.saved - (self._input_goes(place) if layer.saves_input else 0)
            kept -= 0 if received and not (split and layer.queues_gradient) else stream
            if split:
                kept += layer.queued - (stream - self._input_goes(place) if layer.queues_input else 0)
            row.append(Stretch(0, -self._goes_with[place]))  # recomputed by now
            holds_input = not place and not ends.begins
            row.append(Stretch(layer.peaks.backward[received, holds_input][split], kept))
        return joined([*row, Stretch(0, -self._shared)])
