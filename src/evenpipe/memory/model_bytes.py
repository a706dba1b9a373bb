"""Data shared by estimates of a model: its parameters, its programs, its traced stages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Literal

from evenpipe.costs.hardware import Hardware
from evenpipe.errors import InputError
from evenpipe.experts.overlap import ExpertOptions
from evenpipe.model import Description, RowWork
from evenpipe.model.small_copy import SmallCopies
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Kind, Program
from evenpipe.tensor.check import cut_of_model
from evenpipe.tensor.layers import ModelCut
from evenpipe.vocabulary import LossOptions

from .bytes import LayerBytes, StageBytes
from .exchange import Sharing
from .megatron import MegatronLayout
from .parameters import Parameters
from .pieces import Piece
from .programs import Planned, planned
from .settings import Settings
from .states import TORCH_DTYPES
from .trace_files import TraceFiles
from .traced import StageTracer, Tracing

KEPT_PROGRAMS = 64


class ModelBytes:
    """Stages are traced on first use, and cached."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.parameters = Parameters(description)
        self.small_copies = SmallCopies.of(description)
        """Reused by the checks of many layouts."""
        self._programs: dict[tuple[object, ...], tuple[Program, Planned]] = {}
        self._tracers: dict[Tracing, StageTracer] = {}
        self._cuts: dict[int, ModelCut | str] = {}
        self._files: TraceFiles | None = None

    def keep_traces(self) -> None:
        """For stages not traced yet, read existing traces from disk, and write new ones to it."""
        self._files = TraceFiles.of(self.description)

    @cached_property
    def row_work(self) -> RowWork:
        """How the work of the model's layers grows along a row."""
        return RowWork.of(self.description)

    def cut(self, settings: Settings) -> ModelCut | None:
        """Return how layers are cut over tensor ranks; None for a single rank, and for frameworks with other cuts.

        Raises InputError if the model cannot be cut over this many ranks.
        """
        return self._layer_cut(settings.parallelism.tp) if settings.is_ours else None

    def _layer_cut(self, ranks: int) -> ModelCut | None:
        """Return how layers are cut over tensor ranks. Errors as for `cut`."""
        if ranks == 1:
            return None
        if ranks not in self._cuts:
            try:
                self._cuts[ranks] = cut_of_model(self.description, ranks, check=False)
            except InputError as error:
                self._cuts[ranks] = str(error)
        cut = self._cuts[ranks]
        if isinstance(cut, str):
            raise InputError(cut)
        return cut

    def planned(
        self,
        recipe: Recipe,
        hardware: Hardware | None = None,
        dtype: str = "bf16",
        loss: LossOptions | None = None,
    ) -> Planned:
        """Return the program of a recipe, as `programs.planned` does; results for given programs are cached."""
        if not isinstance(recipe.schedule, Program):
            return planned(self.description, recipe, hardware, dtype, loss)
        program, parallelism = recipe.schedule, recipe.parallelism
        # Held, so that the id stays unique: comparing programs takes long.
        key = (
            id(program),
            recipe.layers_per_stage,
            parallelism.replicas > 1,
            parallelism.zero == 3,
            parallelism.reshard,
            parallelism.prefetch,
        )
        if key not in self._programs:
            self._programs[key] = program, planned(self.description, recipe)
            if len(self._programs) > KEPT_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        return self._programs[key][1]

    def stage(
        self,
        bounds: tuple[int, int],
        ends: tuple[bool, bool],
        settings: Settings,
        kinds: Collection[Kind],
        piece: Piece | None = None,
    ) -> StageBytes:
        """Return the bytes of a stage, measured by running it without memory.

        bounds: first layer (inclusive) and last (exclusive). ends: whether it is the first, and whether it is the last
        stage. kinds: kinds of its device's passes. piece: one of `settings.pieces`. Raises InputError if the stage
        cannot be run without values.
        """
        backwards: Literal["whole", "split", "both"] = "whole"
        if Kind.I in kinds:
            backwards = "both" if Kind.B in kinds else "split"
        return self._tracer(settings, backwards, recompute=Kind.R in kinds, piece=piece).stage(
            *bounds,
            is_first=ends[0],
            is_last=ends[1],
            sequences=settings.microbatch_size,
            checkpointing=settings.checkpointing,
            kept_layers=settings.recipe.offload.kept_layers(self.description.layers),
        )

    def layer(self, layer: int, settings: Settings, *, split: bool, piece: Piece | None = None) -> LayerBytes:
        """Return the bytes that one layer adds to a stage, with the default overlap of experts, and exact to about one
        of the rows that experts exchange. split: whether backwards are I and W. Raises InputError as `stage` does."""
        # The overlap of an exchange of experts changes only peaks.
        parallelism = replace(settings.parallelism, experts=ExpertOptions())
        usual = replace(settings, recipe=replace(settings.recipe, parallelism=parallelism))
        tracer = self._tracer(usual, "split" if split else "whole", recompute=False, piece=piece)
        return tracer.layer(layer, settings.checkpointing[layer], settings.microbatch_size)

    def _tracer(
        self, settings: Settings, backwards: Literal["whole", "split", "both"], *, recompute: bool, piece: Piece | None
    ) -> StageTracer:
        parallelism, dtypes = settings.parallelism, settings.dtypes
        tracing = Tracing(
            sequence=settings.sequence,
            piece=piece,
            ranks=parallelism.tp,
            sharing=Sharing(parallelism.ep, settings.skew, parallelism.experts),
            layout=_megatron_layout(settings),
            kernels=settings.kernels,
            compute_dtype=TORCH_DTYPES[dtypes.compute],
            parameter_dtype=TORCH_DTYPES[dtypes.masters],
            backwards=backwards,
            recompute=recompute,
            on_cpu=settings.on_cpu,
        )
        if tracing not in self._tracers:
            self._tracers[tracing] = StageTracer(
                self.description, tracing, self._layer_cut(parallelism.tp), self._files
            )
        return self._tracers[tracing]


def _megatron_layout(settings: Settings) -> MegatronLayout | None:
    """Return how layers are shared in another framework, or without sequence parallelism; None: as in this library."""
    parallelism, framework = settings.parallelism, settings.framework
    if settings.is_ours and (parallelism.tp == 1 or parallelism.sequence_parallel):
        return None
    return MegatronLayout(
        tp=parallelism.tp,
        sequence_parallel=parallelism.sequence_parallel,
        fuses_gradients=settings.kernels.weight_gradient == "fused",
        casts=settings.casts != "none",
        cp=1 if settings.is_ours else parallelism.cp,
        exchanges_heads=parallelism.cp > 1 and parallelism.context_exchange == "heads",
        copies_attention=framework.attention_copies,
        holds_input=framework.holds_transferred,
    )
