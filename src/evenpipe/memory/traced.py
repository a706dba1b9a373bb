"""Measures what a stage's passes allocate by running them, for any module.

The stage is the one that `evenpipe train` runs, with its queue of weight gradients and its checkpointing, but its
tensors have no memory (`fakes`), and a tracker counts their storages. Of layers that are alike, only a few run
(`stretches.window`).

    tracer = StageTracer(description, Tracing(sequence=4096, compute_dtype=torch.bfloat16))
    tracer.stage(0, 8, is_first=True, is_last=False, sequences=2)         # StageBytes

A run of layers is traced once for all sizes of microbatches (`lines`). Where attention multiplies queries and keys
itself, or sequences are cut into pieces, a single sequence has a separate trace, since some operations then make no
copies. With expert parallelism every size has a separate trace, since the number of rows sent to other members is
rounded; only the bytes of a single layer (`StageTracer.layer`) ignore this. The same holds in fp64, where experts keep
one index more than there are tokens.

Kernels that transformers does not run itself are replaced by functions that save the same tensors (`emulation`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from evenpipe.attention.function import OwnAttention
from evenpipe.errors import InputError
from evenpipe.experts.adopt import Spread, is_experts, names_of_experts
from evenpipe.experts.adopt import placements as placements_of_experts
from evenpipe.experts.overlap import Layer, Overlap, choose
from evenpipe.experts.routing import Routing
from evenpipe.memory.bench import Bench, LineTrace, Trace
from evenpipe.memory.bytes import LayerBytes, StageBytes
from evenpipe.memory.emulation import emulated
from evenpipe.memory.exchange import ALONE, FirstMember, FirstRank, Sharing
from evenpipe.memory.fakes import give_storage, without_memory
from evenpipe.memory.kernels import PRESETS, Kernels
from evenpipe.memory.lines import prime_for
from evenpipe.memory.megatron import MegatronLayout, share
from evenpipe.memory.piece_bench import PieceBench
from evenpipe.memory.pieces import Piece
from evenpipe.memory.stretches import window
from evenpipe.memory.trace_files import TraceFiles
from evenpipe.model import Description
from evenpipe.model.edge import hidden_of_width
from evenpipe.model.expert_rows import ExpertRows
from evenpipe.model.flops import chosen_experts
from evenpipe.model.modules import ModuleStage, Part
from evenpipe.model.placement import TensorPlacement
from evenpipe.model.shrink import said_of_layers
from evenpipe.model.stage import Stage
from evenpipe.parallel.running import Running
from evenpipe.tensor.layers import ModelCut, TensorCut

_Layer = tuple[int, str, bool]
"""The kind of a layer, its checkpointing, and whether it is moved."""

_Ends = tuple[bool, bool, bool]
"""Whether a stage is the first, whether it is the last, and whether it repeats its forward."""

_LEAST_FIRST = ("full", "selective", "none")
"""Choices of checkpointing, from the one that keeps least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """What the bytes of a stage depend on besides its layers and the sequences of a microbatch."""

    sequence: int
    """Tokens of a sequence."""
    piece: Piece | None = None
    """The piece of every sequence, in which case `sequence` is not used; None: whole sequences."""
    ranks: int = 1
    """Tensor ranks of a device; the first one is traced."""
    sharing: Sharing = ALONE
    """How experts are shared; the member with the most rows is traced."""
    layout: MegatronLayout | None = None
    """How Megatron-LM shares layers; None: as this library does."""
    kernels: Kernels = PRESETS["transformers"]
    compute_dtype: torch.dtype = torch.float32
    """Of activations and products."""
    parameter_dtype: torch.dtype = torch.float32
    """Of parameters and gradients."""
    backwards: Literal["whole", "split", "both"] = "whole"
    """"whole": B; "split": I and W; "both": some microbatches of each."""
    recompute: bool = False
    """Some microbatches have R."""
    on_cpu: bool = False
    """Whether operations run on a CPU instead of a GPU."""


class StageTracer:
    """Traces the stages of a model.

    Args:
        cut: how layers are cut over several tensor ranks.
        files: stores traces on disk; None: they are not stored.
    """

    def __init__(
        self, description: Description, tracing: Tracing, cut: ModelCut | None = None, files: TraceFiles | None = None
    ) -> None:
        handed_on = description.structure.handed_on
        if handed_on != (hidden_of_width(description.hidden_size),):
            raise InputError(
                f"model: the layers of {description.architecture} hand on {', '.join(map(str, handed_on))}, and memory"
                " is estimated only for hidden states as wide as the embedding"
            )
        self._description, self._tracing, self._cut, self._files = description, tracing, cut, files
        self._tokens = tracing.sequence if tracing.piece is None else tracing.piece.tokens
        if tracing.layout is not None:
            self._tokens //= tracing.layout.cp
        self._prime = prime_for([tracing.sequence, self._tokens, *map(math.prod, description.shapes.values())])
        self._kinds = kinds_of_layers(description)
        self._traces: dict[tuple[Any, ...], LineTrace] = {}
        self._sized_traces: dict[tuple[Any, ...], Trace] = {}

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
        all_choices = (
            (checkpointing,) * self._description.layers if isinstance(checkpointing, str) else tuple(checkpointing)
        )
        choices = all_choices[first:last]
        moves = tuple(layer not in kept_layers for layer in range(first, last))
        # Tensor ranks keep more for R.
        repeats = self._cut is not None and self._tracing.layout is None
        stage_bytes = self._stage(first, choices, moves, (is_first, is_last, False), sequences)
        if self._tracing.recompute and (repeats or any(choice != "none" for choice in choices)):
            plain = ("none",) * len(choices)
            stage_bytes = replace(
                stage_bytes, recomputed=self._stage(first, plain, moves, (is_first, is_last, repeats), sequences)
            )
        return stage_bytes

    def layer(self, layer: int, checkpointing: str, sequences: int) -> LayerBytes:
        """Return the bytes that one layer adds to a stage. Raises InputError as `stage`."""
        run = ((self._kinds[layer], checkpointing, True),)
        trace, _ = self._trace(layer, run, (False, False, False), sequences, from_start=False)

        def retained(name: str) -> int:
            grown = trace.grown.get(name)
            return trace.profiles[name].layers[0].retained - (grown[0] if grown else 0)

        # Its output stays if the next layer, which is of the same kind, saves its input.
        waiting, peaks = retained("forward") - (0 if trace.saves_input else trace.output), trace.over((0,)).peaks
        splits = "input" in trace.profiles
        return LayerBytes(
            waiting=waiting,
            queued=max(0, min(trace.queued, retained("forward") + retained("input"))) if splits else 0,
            passing=max(trace.profiles["forward"].layers[0].above - waiting, peaks.backward, peaks.input, peaks.weight),
            turning=peaks.input if splits else peaks.backward,
            carried=trace.carried[0].keys if trace.carried else 0,
        )

    def _stage(
        self, first: int, choices: Sequence[str], moves: Sequence[bool], ends: _Ends, sequences: int
    ) -> StageBytes:
        kinds = self._kinds[first : first + len(choices)]
        if all(moves) and self._can_join(kinds, choices):
            return self._joined(first, choices, ends, sequences)
        trace, indices = self._trace(first, tuple(zip(kinds, choices, moves, strict=True)), ends, sequences)
        return trace.over(indices)

    def _can_join(self, kinds: Sequence[int], choices: Sequence[str]) -> bool:
        """Return whether equal layers have several choices of checkpointing, those that keep least first: tensors that
        layers share then live as long as with the first choice alone. False for split backwards of tensor ranks, which
        gather for one layer during another's W."""
        by_keeping = sorted(choices, key=_LEAST_FIRST.index)
        independent = self._cut is None or self._tracing.backwards == "whole"
        return independent and len(set(kinds)) == 1 < len(set(choices)) and list(choices) == by_keeping

    def _joined(self, first: int, choices: Sequence[str], ends: _Ends, sequences: int) -> StageBytes:
        """Return the bytes of layers that `_can_join` accepts, each as in a stage where all layers have its choice."""
        kind = self._kinds[first]
        by_choice = {
            choice: self._trace(first, ((kind, choice, True),) * len(choices), ends, sequences)
            for choice in set(choices)
        }
        traces, (_, indices) = [by_choice[choice][0] for choice in choices], by_choice[choices[0]]
        stage_bytes = traces[0].over(indices, traces)
        if choices[-1] != "none":
            return stage_bytes
        # Its first layer is also the first that saves the tables of positions, which it moves.
        moved = by_choice["none"][0].moved
        assert stage_bytes.moved is not None
        return replace(stage_bytes, moved=stage_bytes.moved + moved[0] - moved[1])

    def _trace(
        self, first: int, layers: Sequence[_Layer], ends: _Ends, sequences: int, *, from_start: bool = True
    ) -> tuple[Trace, tuple[int, ...]]:
        """Return the trace of a run of a stage's layers, and for each layer of the stage the index in the run of a
        layer like it. from_start: as for `Bench.trace`."""
        start, width, indices = window([layers.index(layer) for layer in layers])
        run = tuple(layers[start : start + width])
        sized_key = run, ends, sequences, from_start
        if sized_key not in self._sized_traces:
            separate = self._is_alone(sequences, exactly=from_start)
            rows = self._expert_rows(range(first + start, first + start + width), sequences)
            key = run, ends, sequences if separate else self._prime, from_start, self._overlap(rows)
            if key not in self._traces:
                stored = None if self._files is None else self._files.read(self._tracing, *key)
                self._traces[key] = stored or self._run(first + start, *key, lines=not separate)
                if self._files is not None and stored is None:
                    self._files.write(self._traces[key], self._tracing, *key)
            self._sized_traces[sized_key] = self._traces[key].at(sequences)
        return self._sized_traces[sized_key], indices

    def _is_alone(self, sequences: int, *, exactly: bool) -> bool:
        """Return whether microbatches of this size have a separate trace. exactly: whether rows sent to experts are
        counted exactly."""
        tracing = self._tracing
        if tracing.compute_dtype == torch.float64 or (exactly and tracing.sharing.members > 1):
            return True
        copies = tracing.piece is not None or (tracing.layout is not None and tracing.layout.copies_attention)
        return sequences == 1 and (copies or self._multiplies_scores)

    @cached_property
    def _multiplies_scores(self) -> bool:
        """Whether attention multiplies queries and keys outside of a kernel."""
        kind, description = self._tracing.kernels.attention, self._description
        if kind != "sdpa" or description.config is None:
            return kind not in {"fused", "flash"}
        configs = filter(None, (vars(module).get("config") for module in description.skeleton.modules()))
        return any(config._attn_implementation != "sdpa" for config in configs)

    def _run(  # noqa: PLR0917 - the parts of a key
        self,
        first: int,
        run: Sequence[_Layer],
        ends: _Ends,
        sequences: int,
        from_start: bool,
        overlap: Overlap | None,
        *,
        lines: bool,
    ) -> LineTrace:
        """lines: bytes that the sequences divide grow with them."""
        description, (is_first, is_last, repeats) = self._description, ends
        layout = self._tracing.layout
        choices = [choice for _, choice, _ in run]
        indices = range(first, first + len(choices))
        held: dict[str, TensorPlacement | None] = {}
        if self._cut is not None:
            for index in indices:
                held |= self._cut.placements(description, index, FirstRank.rank, self._tracing.ranks)
        member = None
        if overlap is not None:  # for lines, every sequence has the same number of rows
            each, times = (1, sequences) if lines else (sequences, 1)
            member = FirstMember(self._expert_rows(indices, each), overlap, times)
            for index in indices:
                held |= placements_of_experts(description, index, Spread(member, Routing(Running())), held)
        ranks = self._tracing.ranks
        if layout is not None:  # a stage's ends compute on a rank's own rows
            is_end = is_first or (is_last and self._cut is not None and self._cut.end_is_whole)
            ranks = 1 if is_end else layout.rows
        # Unlike a trainable stage, it may own an end of the model that its layers do not reach.
        part = Part(
            first=first,
            last=first + len(choices),
            is_first=is_first,
            is_last=is_last,
            dtype=self._tracing.parameter_dtype,
            compute_dtype=self._tracing.compute_dtype,
            torch_device="meta",
            held=held,
            tensor_ranks=ranks,
        )
        stage = (ModuleStage if description.config is None else Stage)(description, part)
        pairs = self._tracing.kernels.experts == "pairs"
        for experts in filter(is_experts, stage.modules() if pairs and member is not None else ()):
            layer_experts: Any = experts
            # These fewer experts get the same number of pairs.
            layer_experts.num_experts = -(-layer_experts.num_experts // self._tracing.sharing.members)
        names = [f"{description.structure.layers_name}.{index}" for index in indices]
        exchange = shares = positions = None
        tokens = self._tokens
        if layout is not None:
            tokens //= layout.rows
            shares = partial(share, description, stage, names, layout, cut=self._cut)
            if ranks < layout.rows and description.takes("position_ids"):
                positions = self._tokens if not description.structure.first_parameters else None
        elif self._cut is not None:
            assert isinstance(stage, Stage)
            exchange = FirstRank(self._tracing.ranks)
            layers = {index: stage.get_submodule(name) for index, name in zip(indices, names, strict=True)}
            checkpointed = [index for index, choice in zip(indices, choices, strict=True) if choice != "none"]
            TensorCut(self._cut, exchange, checkpointed).apply(stage, layers)
        try:
            emulation = emulated(stage, self._tracing.kernels, layout, on_cpu=self._tracing.on_cpu)
            with without_memory(sequences if lines else None) as tracker, emulation:
                give_storage(stage)
                piece_bench = None
                if self._tracing.piece is not None:
                    OwnAttention().apply(stage, {})
                    piece_bench = PieceBench(self._tracing.piece, sequences, tracker.measure)
                bench = Bench(
                    stage,
                    names,
                    choices,
                    argument=description.structure.layer_argument,
                    shape=(sequences, tokens, description.hidden_size),
                    dtype=self._tracing.compute_dtype,
                    tracker=tracker,
                    moves=[moves for *_, moves in run],
                    exchange=exchange,
                    repeats=repeats,
                    piece_bench=piece_bench,
                    experts=not pairs if pairs or member is None else member,
                    shares=shares,
                    positions=positions,
                    holds_input=layout is not None and layout.holds_input,
                )
                return bench.trace(
                    whole=self._tracing.backwards != "split",
                    split=self._tracing.backwards != "whole",
                    recompute=self._tracing.recompute,
                    # A first microbatch measures the carry that slices leave for each other.
                    from_start=from_start or (piece_bench is not None and piece_bench.piece.carried),
                )
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise InputError(
                f"model: {description.architecture} asks for the values of its tensors ({error}), so what its layers"
                " allocate cannot be found without running them"
            ) from error

    def _expert_rows(self, layers: Iterable[int], sequences: int) -> dict[str, ExpertRows]:
        """Return the rows that these layers' experts exchange, by name; empty if one process has all experts."""
        description, sharing = self._description, self._tracing.sharing
        if sharing.members == 1:
            return {}
        rows = {}
        for index in layers:
            prefix = f"{description.structure.layers_name}.{index}."
            choices = chosen_experts(description.layer_config(index))
            for name, count in names_of_experts(description).items():
                if name.startswith(prefix):
                    rows[name] = ExpertRows(
                        tokens=sequences * self._tokens,
                        choices=choices,
                        experts=count,
                        members=sharing.members,
                        skew=sharing.skew,
                    )
        return rows

    def _overlap(self, rows: Mapping[str, ExpertRows]) -> Overlap | None:
        """Return what overlaps the exchange of these rows; None if there is no exchange."""
        if not rows:
            return None
        name, expert_rows = next(iter(rows.items()))
        layer = Layer(
            tokens=expert_rows.tokens,
            hidden_size=self._description.hidden_size,
            width=min(self._description.skeleton.get_submodule(name).get_parameter("down_proj").shape[1:]),
            experts=expert_rows.experts,
            choices=expert_rows.choices,
            members=expert_rows.members,
        )
        return choose(self._tracing.sharing.options, layer).overlap


# --- layers that are alike -------------------------------------------------------------------------------------------

_INDEX = re.compile(r"(layer_?)?(idx|index|id|number)")


def kinds_of_layers(description: Description) -> tuple[int, ...]:
    """Return a number for each layer of a model; layers with the same number have the same modules, shapes and
    settings.

    Settings are plain attributes of modules, except a layer's index, and the per-layer settings of the config.
    """
    lists = [] if description.config is None else said_of_layers(description.config, description.layers)
    numbers: dict[Any, int] = {}
    return tuple(
        numbers.setdefault(
            (_settings(description.layer(index)), tuple(str(values[index]) for values in lists)), len(numbers)
        )
        for index in range(description.layers)
    )


def _settings(layer: nn.Module) -> tuple[Any, ...]:
    return tuple((name, type(module), *_own_settings(module)) for name, module in layer.named_modules())


def _own_settings(module: nn.Module) -> tuple[Any, ...]:
    # For floats, such as dropout probabilities or factors, only whether they are 0 matters.
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
