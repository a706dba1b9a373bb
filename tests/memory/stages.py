"""The bytes of a stage of a tiny model, found in two ways: by a trace, and by counting real tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from families import tiny_config

from evenpipe.memory.bench import Bench
from evenpipe.memory.bytes import StageBytes
from evenpipe.memory.traced import StageTracer, Tracing
from evenpipe.memory.tracker import Tracker
from evenpipe.model import Description, build_stage, describe, fill_parameters


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str
    layers: tuple[int, int] = (1, 3)
    """First and last + 1, of four."""
    dtype: torch.dtype = torch.float32
    """Of products and activations."""
    batch: int = 2
    sequence: int = 12
    """Longer than the windows of tiny configs."""
    checkpointing: str | tuple[str, ...] = "none"
    """Of all layers of the stage, or of each."""
    model: Callable[[], Description] | None = field(default=None, repr=False)
    """In place of the tiny model of the family."""

    @property
    def description(self) -> Description:
        return described(self.family) if self.model is None else self.model()

    @property
    def stage(self) -> dict:
        """Arguments of `StageTracer.stage`."""
        (first, last), layers, choices = self.layers, self.description.layers, self.checkpointing
        if not isinstance(choices, str):
            choices = ("none",) * first + choices + ("none",) * (layers - last)
        return {
            "first": first,
            "last": last,
            "is_first": first == 0,
            "is_last": last == layers,
            "checkpointing": choices,
        }


@cache
def described(family: str) -> Description:
    return describe(tiny_config(family))


def traced(case: Case) -> StageBytes:
    how = Tracing(sequence=case.sequence, compute_dtype=case.dtype, backwards="both", recompute=True)
    return StageTracer(case.description, how).stage(**case.stage, sequences=case.batch)


def counted(case: Case) -> StageBytes:
    """What a tracker counts of the real stage, all of its layers, with weights and values."""
    description, (first, last) = case.description, case.layers
    ends = {"is_first": first == 0, "is_last": last == description.layers}
    stage = build_stage(description, first, last, **ends, dtype=torch.float32, compute_dtype=case.dtype)
    fill_parameters(stage, description, 0)
    choices = case.checkpointing
    with Tracker() as tracker:
        tracker.add(*stage.parameters(), *stage.buffers())
        bench = Bench(
            stage,
            [f"{description.structure.layers_name}.{index}" for index in range(first, last)],
            [choices] * (last - first) if isinstance(choices, str) else choices,
            argument=description.structure.layer_argument,
            shape=(case.batch, case.sequence, description.hidden_size),
            dtype=case.dtype,
            tracker=tracker,
        )
        return bench.trace(split=True, recompute=True).at(case.batch).over(range(last - first))
