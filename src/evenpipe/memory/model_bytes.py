"""Shared by estimates of one model: its parameters, its stages in closed form, its traced stages."""

from __future__ import annotations

from typing import Any

import torch

from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.model.shape import LayerShape

from .bytes import StageBytes
from .closed import ClosedForms
from .parameters import Parameters
from .run import Run
from .traced import StageTracer

KEPT_STAGES = 4096
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ModelBytes:
    """Stages are computed on first use, and cached."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.parameters = Parameters(description)
        self._closed: ClosedForms | None = None
        self._why_not = ""
        try:
            self._closed = ClosedForms(description)
        except InputError as error:
            self._why_not = str(error)
        self._stages: dict[tuple[object, ...], StageBytes] = {}
        self._tracers: dict[tuple[object, ...], StageTracer] = {}

    def closed_stage(self, bounds: tuple[int, int], ends: tuple[bool, bool], run: Run) -> StageBytes:
        """Return a stage in closed form.

        bounds: first layer (inclusive) and last (exclusive). ends: whether it is the first and the last stage. Raises
        InputError if there is no closed form.
        """
        if self._closed is None:
            raise InputError(self._why_not)
        first, last = bounds
        sizes: dict[str, Any] = {
            "microbatch_size": run.microbatch_size,
            "sequence": run.sequence,
            "element": run.element,
            "kernels": run.kernels,
            "tp": run.parallelism.tp,
            "sequence_parallel": run.parallelism.sequence_parallel,
            "cp": run.parallelism.cp,
        }
        kept = tuple(layer in run.kept_layers for layer in range(first, last))
        key = (*self._like(first, last), run.checkpointing[first:last], kept, ends, *sizes.values())
        if key not in self._stages:
            if len(self._stages) >= KEPT_STAGES:
                self._stages.clear()
            self._stages[key] = self._closed.stage(
                first,
                last,
                is_first=ends[0],
                is_last=ends[1],
                checkpointing=run.checkpointing,
                kept_layers=run.kept_layers,
                **sizes,
            )
        return self._stages[key]

    def _like(self, first: int, last: int) -> tuple[object, ...]:
        """Return everything that the bytes of a stage depend on, for its layers."""
        assert self._closed is not None
        shapes = self._closed.shapes[first:last]
        return (len(shapes), shapes[0] if len(set(shapes)) == 1 else shapes)

    def traced_stage(self, bounds: tuple[int, int], ends: tuple[bool, bool], run: Run, *, split: bool) -> StageBytes:
        """Return a stage from running it without memory. Arguments as above; split: some of its backwards are I and
        W."""
        key = (run.microbatch_size, run.sequence, run.dtypes, run.kernels, split)
        if key not in self._tracers:
            self._tracers[key] = StageTracer(
                self.description,
                microbatch_size=run.microbatch_size,
                sequence=run.sequence,
                compute_dtype=TORCH[run.dtypes.compute],
                parameter_dtype=TORCH[run.dtypes.masters],
                split=split,
                kernels=run.kernels,
            )
        return self._tracers[key].stage(
            *bounds,
            is_first=ends[0],
            is_last=ends[1],
            checkpointing=run.checkpointing,
            kept_layers=run.kept_layers,
        )

    @property
    def has_closed_form(self) -> bool:
        """Whether its layers have a closed form."""
        return self._closed is not None

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of layers with a closed form; empty for others."""
        return () if self._closed is None else self._closed.shapes
