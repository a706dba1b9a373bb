"""The allocations of a stage's passes, found by running them: for any module, and to test the closed forms.

The stage is the one that `evenpipe train` runs, with its queue of weight gradients and its checkpointing, but its
tensors have no memory (`fakes`), and a tracker counts their storages. A few layers stand for all
that are alike (`stretches.window`).

    tracer = StageTracer(description, sequence=4096, compute_dtype=torch.bfloat16)
    tracer.stage(0, 8, is_first=True, is_last=False, sequences=2)         # StageBytes

A run of layers is traced once for all microbatches of two sequences and more (`lines`), and once for those of one: then
some operations make no copies. Rows that travel to experts of other members are rounded, so every size has its own
trace; and so it has in fp64, where experts keep one index more than there are tokens.

Kernels that transformers does not run itself are replaced by functions that save the same tensors (`emulation`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from evenpipe.attention.function import adopt
from evenpipe.errors import InputError
from evenpipe.experts.adopt import Spread, names_of_experts
from evenpipe.experts.adopt import placements as placements_of_experts
from evenpipe.experts.overlap import Layer, choose
from evenpipe.experts.routing import Routing
from evenpipe.layers.checkpointing import check_choices
from evenpipe.memory.bench import Bench, LineTrace, Trace
from evenpipe.memory.bytes import StageBytes
from evenpipe.memory.emulation import emulated
from evenpipe.memory.exchange import ALONE, FirstMember, FirstRank, Sharing
from evenpipe.memory.fakes import give_storage, without_memory
from evenpipe.memory.kernels import PRESETS, Kernels
from evenpipe.memory.lines import prime_for
from evenpipe.memory.piece_bench import PieceBench
from evenpipe.memory.pieces import Piece
from evenpipe.memory.stretches import window
from evenpipe.model import Description
from evenpipe.model.expert_rows import ExpertRows
from evenpipe.model.flops import chosen_experts
from evenpipe.model.modules import ModuleStage, Part
from evenpipe.model.placement import TensorPlacement
from evenpipe.model.shrink import said_of_layers
from evenpipe.model.stage import Stage
from evenpipe.parallel.running import Running
from evenpipe.tensor.layers import ModelCut

_Layer = tuple[int, str, bool]
"""The kind of a layer, its checkpointing, and whether it is moved."""

_Ends = tuple[bool, bool, bool]
"""Whether a stage is the first, the last, and repeats its forward."""

_LEAST_FIRST = ("full", "selective", "none")
"""Checkpointing by what layers keep."""


class StageTracer:
    """Traces the stages of one model.

    Args:
        sequence: tokens of a sequence.
        compute_dtype: of activations and products; parameters and gradients are kept in `parameter_dtype`.
        backwards: whole (B), split (I and W), or some of both.
        recompute: some microbatches have R.
        piece: of every sequence; then `sequence` is not used. None: whole sequences.
        ranks, cut: tensor ranks of a device, and how layers are cut over them: the stage is that of the first one.
        sharing: of the experts of every layer: the stage is that of the member that has most.
    """

    def __init__(
        self,
        description: Description,
        *,
        sequence: int,
        compute_dtype: torch.dtype = torch.float32,
        parameter_dtype: torch.dtype = torch.float32,
        backwards: Literal["whole", "split", "both"] = "whole",
        recompute: bool = False,
        kernels: Kernels = PRESETS["transformers"],
        ranks: int = 1,
        cut: ModelCut | None = None,
        piece: Piece | None = None,
        sharing: Sharing = ALONE,
    ) -> None:
        self._sharing = sharing
        self._ranks, self._cut, self._piece = ranks, cut, piece
        self._description = description
        self._tokens = sequence if piece is None else piece.tokens
        self._prime = prime_for([sequence, self._tokens, *map(math.prod, description.shapes.values())])
        self._compute_dtype, self._parameter_dtype = compute_dtype, parameter_dtype
        self._backwards, self._recompute = backwards, recompute
        self._kernels = kernels
        self._kinds = kinds_of_layers(description)
        self._traces: dict[tuple[Any, ...], LineTrace] = {}
        self._made: dict[tuple[Any, ...], Trace] = {}

    def stage(
        self,
        first: int,
        last: int,
        *,
        is_first: bool,
        is_last: bool,
        sequences: int,
        checkpointing: str | Sequence[str] = "none",
        kept_layers: Collection[int] = (),
    ) -> StageBytes:
        """Return the bytes of layers [first, last) with the ends that the stage owns.

        sequences: of a microbatch.
        checkpointing: of all layers of the model, or one choice for each of them.
        kept_layers: layers that are not copied to the host.

        Raises:
            InputError: the stage cannot be run without values.
        """
        every = (checkpointing,) * self._description.layers if isinstance(checkpointing, str) else tuple(checkpointing)
        check_choices(every)
        choices = every[first:last]
        moves = tuple(layer not in kept_layers for layer in range(first, last))
        repeats = self._cut is not None  # of R, for which tensor ranks keep more
        found = self._stage(first, choices, moves, (is_first, is_last, False), sequences)
        if self._recompute and (repeats or any(choice != "none" for choice in choices)):
            plain = ("none",) * len(choices)
            found = replace(found, recomputed=self._stage(first, plain, moves, (is_first, is_last, repeats), sequences))
        return found

    def layer(self, layer: int, checkpointing: str, sequences: int) -> tuple[int, int, int]:
        """Return the bytes that one layer adds to a stage, without what it shares with others: between its forward and
        its backward, its output among them; between I and W; and at the peak of a backward that begins with it.

        Raises InputError as `stage`.
        """
        alike = ((self._kinds[layer], checkpointing, True),)
        trace, _ = self._trace(layer, alike, (False, False, False), sequences)
        stored = trace.profiles["forward"].layers[0].kept
        split = trace.profiles.get("input")
        queued = 0 if split is None else max(0, stored + split.layers[0].kept)
        peaks = trace.over((0,)).peaks
        return stored, queued, peaks.backward if split is None else peaks.input

    def _stage(
        self, first: int, choices: Sequence[str], moves: Sequence[bool], ends: _Ends, sequences: int
    ) -> StageBytes:
        kinds = self._kinds[first : first + len(choices)]
        if all(moves) and self._can_join(kinds, choices):
            return self._joined(first, choices, ends, sequences)
        trace, places = self._trace(first, tuple(zip(kinds, choices, moves, strict=True)), ends, sequences)
        return trace.over(places)

    def _can_join(self, kinds: Sequence[int], choices: Sequence[str]) -> bool:
        """Return whether equal layers have several choices, and those that keep least come first: what layers share
        then lives as long as with the first choice alone. Tensor ranks gather for one layer during another's W."""
        by_keeping = sorted(choices, key=_LEAST_FIRST.index)
        return self._cut is None and len(set(kinds)) == 1 < len(set(choices)) and list(choices) == by_keeping

    def _joined(self, first: int, choices: Sequence[str], ends: _Ends, sequences: int) -> StageBytes:
        """Return the bytes of such layers, each as in a stage where all have its choice."""
        kind = self._kinds[first]
        made = {
            choice: self._trace(first, ((kind, choice, True),) * len(choices), ends, sequences)
            for choice in set(choices)
        }
        traces, (_, places) = [made[choice][0] for choice in choices], made[choices[0]]
        found = traces[0].over(places, traces)
        if choices[-1] != "none":
            return found
        plain = made["none"][
            0
        ].moved  # its first layer is also the first that saves tables of positions, which it moves
        assert found.moved is not None
        return replace(found, moved=found.moved + plain[0] - plain[1])

    def _trace(self, first: int, alike: Sequence[_Layer], ends: _Ends, sequences: int) -> tuple[Trace, tuple[int, ...]]:
        """Return the trace of a run of a stage's layers, and for each layer the place in it of one like it."""
        start, width, places = window([alike.index(layer) for layer in alike])
        run = tuple(alike[start : start + width])
        if (run, ends, sequences) not in self._made:
            alone = sequences == 1 or self._sharing.members > 1 or self._compute_dtype == torch.float64
            key = run, ends, sequences if alone else self._prime
            if key not in self._traces:
                self._traces[key] = self._run(first + start, *key, lines=not alone)
            self._made[run, ends, sequences] = self._traces[key].at(sequences)
        return self._made[run, ends, sequences], places

    def _run(self, first: int, run: Sequence[_Layer], ends: _Ends, sequences: int, *, lines: bool) -> LineTrace:
        """lines: bytes that the sequences divide grow with them."""
        description, (is_first, is_last, repeats) = self._description, ends
        choices = [choice for _, choice, _ in run]
        indices = range(first, first + len(choices))
        held: dict[str, TensorPlacement | None] = {}
        if self._cut is not None:
            for index in indices:
                held |= self._cut.placements(description, index, FirstRank.rank, self._ranks)
        member = self._first_member(indices, sequences)
        if member is not None:
            for index in indices:
                held |= placements_of_experts(description, index, Spread(member, Routing(Running())), held)
        # From anywhere in the model: unlike a trainable stage it may own an end that it does not reach.
        part = Part(
            first=first,
            last=first + len(choices),
            is_first=is_first,
            is_last=is_last,
            dtype=self._parameter_dtype,
            compute_dtype=self._compute_dtype,
            torch_device="meta",
            held=held,
            tensor_ranks=self._ranks,
        )
        stage = (ModuleStage if description.config is None else Stage)(description, part)
        names = [f"{description.structure.layers_name}.{index}" for index in indices]
        exchange = None
        if self._cut is not None:
            assert isinstance(stage, Stage)
            exchange = FirstRank(self._ranks)
            layers = {index: stage.get_submodule(name) for index, name in zip(indices, names, strict=True)}
            again = [index for index, choice in zip(indices, choices, strict=True) if choice != "none"]
            self._cut.make_local(stage, layers, exchange, again)
        try:
            with without_memory(sequences if lines else None) as tracker, emulated(stage, self._kernels):
                give_storage(stage)
                seen = None
                if self._piece is not None:
                    assert isinstance(stage, Stage)
                    adopt(stage.whole)
                    seen = PieceBench(self._piece, sequences, tracker.measure)
                bench = Bench(
                    stage,
                    names,
                    choices,
                    argument=description.structure.layer_argument,
                    shape=(sequences, self._tokens, description.hidden_size),
                    dtype=self._compute_dtype,
                    tracker=tracker,
                    moves=[moves for *_, moves in run],
                    exchange=exchange,
                    repeats=repeats,
                    piece=seen,
                    experts=self._kernels.experts == "rows" if member is None else member,
                )
                return bench.trace(
                    whole=self._backwards != "split", split=self._backwards != "whole", recompute=self._recompute
                )
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise InputError(
                f"model: {description.architecture} asks for the values of its tensors ({error}), so what its layers"
                " allocate cannot be found without running them"
            ) from error

    def _first_member(self, layers: Iterable[int], sequences: int) -> FirstMember | None:
        """Return what the experts of these layers exchange; None where they have none, or where one has all."""
        description = self._description
        if self._sharing.members == 1:
            return None
        names, rows = names_of_experts(description), {}
        for index in layers:
            prefix = f"{description.structure.layers_name}.{index}."
            choices = chosen_experts(description.layer_config(index))
            for name, count in names.items():
                if name.startswith(prefix):
                    rows[name] = ExpertRows(
                        tokens=sequences * self._tokens,
                        choices=choices,
                        experts=count,
                        members=self._sharing.members,
                        skew=self._sharing.skew,
                    )
        if not rows:
            return None
        name, one = next(iter(rows.items()))
        layer = Layer(
            tokens=one.tokens,
            hidden_size=description.hidden_size,
            width=min(description.skeleton.get_submodule(name).get_parameter("down_proj").shape[1:]),
            experts=one.experts,
            choices=one.choices,
            members=one.members,
        )
        return FirstMember(rows, choose(self._sharing.options, layer).overlap)


# --- layers that are alike -------------------------------------------------------------------------------------------

_INDEX = re.compile(r"(layer_?)?(idx|index|id|number)")


def kinds_of_layers(description: Description) -> tuple[int, ...]:
    """Return a number for each layer of a model; layers with the same number have the same modules, shapes and
    settings.

    Settings are plain attributes of modules, except their own number, and the per-layer settings of the config.
    """
    lists = [] if description.config is None else said_of_layers(description.config, description.layers)
    found: dict[Any, int] = {}
    return tuple(
        found.setdefault((_settings(description.layer(index)), tuple(str(one[index]) for one in lists)), len(found))
        for index in range(description.layers)
    )


def _settings(layer: nn.Module) -> tuple[Any, ...]:
    return tuple((name, type(module), *_own_settings(module)) for name, module in layer.named_modules())


def _own_settings(module: nn.Module) -> tuple[Any, ...]:
    # Floats matter only by whether they are 0: a probability of dropout, a factor.
    plain = tuple(
        (name, bool(value) if isinstance(value, float) else value)
        for name, value in sorted(vars(module).items())
        if (value is None or isinstance(value, (bool, int, float, str))) and not _INDEX.fullmatch(name)
    )
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.requires_grad)
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    )
    return plain, tensors
