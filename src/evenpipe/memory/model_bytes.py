"""What estimates of one model share: its parameters, its stages in closed form, its stages traced."""

from __future__ import annotations

from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.model.shape import LayerShape

from .bytes import StageBytes
from .closed import ClosedForms
from .kernels import Kernels
from .parameters import Parameters
from .states import Dtypes

KEPT_STAGES = 4096


class ModelBytes:
    """Stages are found when they are asked for, and kept."""

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
        self._tracers: dict[tuple[object, ...], object] = {}

    def closed_stage(
        self,
        first: int,
        last: int,
        *,
        is_first: bool,
        is_last: bool,
        microbatch_size: int,
        sequence: int,
        element: int,
        checkpointing: tuple[str, ...],
        kernels: Kernels,
        tp: int,
        sequence_parallel: bool,
        cp: int,
    ) -> StageBytes:
        """In closed form. Raises InputError where there is none."""
        if self._closed is None:
            raise InputError(self._why_not)
        key = (
            *self._like(first, last),
            checkpointing[first:last],
            is_first,
            is_last,
            microbatch_size,
            sequence,
            element,
            kernels,
            tp,
            sequence_parallel,
            cp,
        )
        if key not in self._stages:
            if len(self._stages) >= KEPT_STAGES:
                self._stages.clear()
            self._stages[key] = self._closed.stage(
                first,
                last,
                is_first=is_first,
                is_last=is_last,
                microbatch_size=microbatch_size,
                sequence=sequence,
                element=element,
                checkpointing=checkpointing,
                kernels=kernels,
                tp=tp,
                sequence_parallel=sequence_parallel,
                cp=cp,
            )
        return self._stages[key]

    def _like(self, first: int, last: int) -> tuple[object, ...]:
        """What the bytes of a stage depend on, of the layers that it has."""
        assert self._closed is not None
        shapes = self._closed.shapes[first:last]
        return (len(shapes), shapes[0] if len(set(shapes)) == 1 else shapes)

    def traced_stage(
        self,
        first: int,
        last: int,
        *,
        is_first: bool,
        is_last: bool,
        microbatch_size: int,
        sequence: int,
        dtypes: Dtypes,
        checkpointing: tuple[str, ...],
        kernels: Kernels,
        split: bool,
    ) -> StageBytes:
        """From running it without memory."""
        import torch

        from .traced import StageTracer

        names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        key = (microbatch_size, sequence, dtypes, kernels, split)
        if key not in self._tracers:
            self._tracers[key] = StageTracer(
                self.description,
                microbatch_size=microbatch_size,
                sequence=sequence,
                compute_dtype=names[dtypes.compute],
                parameter_dtype=names[dtypes.masters],
                split=split,
                kernels=kernels,
            )
        tracer = self._tracers[key]
        assert isinstance(tracer, StageTracer)
        return tracer.stage(first, last, is_first=is_first, is_last=is_last, checkpointing=checkpointing)

    @property
    def has_closed_form(self) -> bool:
        """Its layers are known in closed form."""
        return self._closed is not None

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Of layers that are known in closed form; of others nothing."""
        return () if self._closed is None else self._closed.shapes
