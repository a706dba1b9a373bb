"""Shared by estimates of one model: its parameters, its stages in closed form, its traced stages."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any, Literal

import torch

from evenpipe.costs.hardware import Hardware
from evenpipe.errors import InputError
from evenpipe.model import Description, RowWork
from evenpipe.model.small_model import SmallModel
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Kind, Program
from evenpipe.tensor.check import copy_to_cut, cut_of_model
from evenpipe.tensor.layers import ModelCut
from evenpipe.vocabulary import LossOptions

from .bytes import StageBytes
from .closed import ClosedForms
from .cut import Portion
from .exchange import Sharing
from .parameters import Parameters
from .pieces import Piece
from .programs import Planned, planned
from .settings import Settings
from .traced import StageTracer

KEPT_STAGES = 4096
KEPT_PROGRAMS = 64
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ModelBytes:
    """Stages are computed on first use, and cached.

    Attributes:
        closed: closed forms of its stages; None if it has none.
    """

    def __init__(self, description: Description) -> None:
        self.description = description
        self.parameters = Parameters(description)
        self.closed: ClosedForms | None = None
        self._why_not = ""
        try:
            self.closed = ClosedForms(description)
        except InputError as error:
            self._why_not = str(error)
        self._programs: dict[tuple[object, ...], tuple[Program, Planned]] = {}
        self._stages: dict[tuple[object, ...], StageBytes] = {}
        self._tracers: dict[tuple[object, ...], StageTracer] = {}
        self._cuts: dict[int, ModelCut | str] = {}

    @cached_property
    def row_work(self) -> RowWork:
        """How the work of its layers grows along a row."""
        return RowWork.of(self.description)

    @cached_property
    def small_copy(self) -> SmallModel:
        """The small copy on which cuts over tensor ranks are found. Raises InputError if there is none."""
        return copy_to_cut(self.description)

    def cut(self, settings: Settings) -> ModelCut | None:
        """Return how layers are cut over tensor ranks; None for one, and in frameworks with other cuts.

        Raises InputError if the model cannot be cut so.
        """
        ranks = settings.parallelism.tp
        if ranks == 1 or not settings.is_ours:
            return None
        if ranks not in self._cuts:
            try:
                self._cuts[ranks] = cut_of_model(self.description, ranks, self.small_copy, check=False)
            except InputError as error:
                self._cuts[ranks] = str(error)
        found = self._cuts[ranks]
        if isinstance(found, str):
            raise InputError(found)
        return found

    def planned(
        self,
        recipe: Recipe,
        hardware: Hardware | None = None,
        dtype: str = "bf16",
        loss: LossOptions | None = None,
    ) -> Planned:
        """Return the program of a recipe, as `programs.planned`; given programs are cached."""
        if not isinstance(recipe.schedule, Program):
            return planned(self.description, recipe, hardware, dtype, loss)
        given, shared = recipe.schedule, recipe.parallelism
        # Held, so that the id stays unique: comparing programs takes long.
        key = (
            id(given),
            recipe.layers_per_stage,
            shared.replicas > 1,
            shared.zero == 3,
            shared.reshard,
            shared.prefetch,
        )
        if key not in self._programs:
            self._programs[key] = given, planned(self.description, recipe)
            if len(self._programs) > KEPT_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        return self._programs[key][1]

    def closed_forms(self) -> ClosedForms:
        """Return its closed forms. Raises InputError if it has none, with the reason."""
        if self.closed is None:
            raise InputError(self._why_not)
        return self.closed

    def closed_stage(
        self, bounds: tuple[int, int], ends: tuple[bool, bool], settings: Settings, piece: Piece | None = None
    ) -> StageBytes:
        """Return a stage in closed form.

        bounds: first layer (inclusive) and last (exclusive). ends: whether it is the first and the last stage. piece:
        of `settings.pieces`. Raises InputError if there is no closed form.
        """
        first, last = bounds
        closed = self.closed_forms()
        shapes: Any = closed.shapes[first:last]
        if len(set(shapes)) == 1:  # quicker to compare
            shapes = len(shapes), shapes[0]
        parallelism = settings.parallelism
        portion = Portion(
            microbatch_size=settings.microbatch_size,
            sequence=settings.sequence,
            element=settings.element,
            tp=parallelism.tp,
            sequence_parallel=parallelism.sequence_parallel,
            cp=parallelism.cp,
            blocks=settings.gathers_blocks,
            keeps_input=settings.framework.holds_transferred,
            piece=piece,
        )
        cut = self.cut(settings)
        kept = settings.recipe.offload.kept_layers(self.description.layers)
        moves = tuple(layer not in kept for layer in range(first, last))
        key = (shapes, settings.checkpointing[first:last], moves, ends, portion, settings.kernels)
        if key not in self._stages:
            if len(self._stages) >= KEPT_STAGES:
                self._stages.clear()
            self._stages[key] = closed.stage(
                first,
                last,
                portion,
                is_first=ends[0],
                is_last=ends[1],
                checkpointing=settings.checkpointing,
                kept_layers=kept,
                kernels=settings.kernels,
                whole_end=cut is not None and cut.end_is_whole,
            )
        return self._stages[key]

    def traced_stage(
        self,
        bounds: tuple[int, int],
        ends: tuple[bool, bool],
        settings: Settings,
        kinds: Collection[Kind],
        piece: Piece | None = None,
    ) -> StageBytes:
        """Return a stage from running it without memory. Arguments as above; kinds: of its device's passes."""
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

    def traced_layer(
        self, layer: int, settings: Settings, *, split: bool, piece: Piece | None = None
    ) -> tuple[int, int, int]:
        """Return the bytes that one layer adds to a stage, as `StageTracer.layer`. split: whether backwards are."""
        tracer = self._tracer(settings, "split" if split else "whole", recompute=False, piece=piece)
        return tracer.layer(layer, settings.checkpointing[layer], settings.microbatch_size)

    def _tracer(
        self, settings: Settings, backwards: Literal["whole", "split", "both"], *, recompute: bool, piece: Piece | None
    ) -> StageTracer:
        ranks = settings.parallelism.tp
        sharing = Sharing(settings.parallelism.ep, settings.skew, settings.parallelism.experts)
        key = (settings.sequence, piece, ranks, sharing, settings.dtypes, settings.kernels, backwards, recompute)
        if key not in self._tracers:
            self._tracers[key] = StageTracer(
                self.description,
                sequence=settings.sequence,
                compute_dtype=TORCH[settings.dtypes.compute],
                parameter_dtype=TORCH[settings.dtypes.masters],
                backwards=backwards,
                recompute=recompute,
                kernels=settings.kernels,
                ranks=ranks,
                cut=self.cut(settings),
                piece=piece,
                sharing=sharing,
            )
        return self._tracers[key]
