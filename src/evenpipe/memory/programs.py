"""The program of a run: planned as in the runtime, or given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.recipe.layout import ModelCosts, build_layout
from evenpipe.schedule import Kind, Pass, Program, Schedule, even_split, parts_of, vocabulary_mode

from .framework import Framework
from .parallelism import Parallelism
from .reserved import communicators_of


@dataclass(frozen=True)
class Planned:
    """A program and the layers of its stages."""

    program: Program
    layers_per_stage: tuple[int, ...]
    mode: str
    """Vocabulary mode, by its canonical name."""

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First layer (inclusive) and last (exclusive) of each stage."""
        found, first = [], 0
        for count in self.layers_per_stage:
            found.append((first, first + count))
            first += count
        return tuple(found)

    @cached_property
    def _splits(self) -> tuple[bool, ...]:
        return tuple(
            any(part.kind is Kind.I for item in row if isinstance(item, Pass) for part in parts_of(item))
            for row in self.program.rows
        )

    def splits(self, device: int) -> bool:
        """Return whether a device has backwards split into I and W."""
        return self._splits[device]

    @cached_property
    def _transfers(self) -> dict[str, tuple[int, ...]]:
        return self.program.communicators

    def communicators(self, device: int, parallelism: Parallelism, framework: Framework) -> int:
        """Return the communicators of one GPU of a device."""
        return communicators_of(device, parallelism, framework, self._transfers)


def planned(
    description: Description,
    schedule: Schedule,
    *,
    sequence: int,
    devices: int,
    microbatches: int | None,
    vocabulary: str,
    layers_per_stage: Sequence[int] | None,
    options: Mapping[str, Any] | None,
    offload: str | float = "scheduled",
) -> Planned:
    """Return the program of a schedule, for sequences of this many tokens. `offload`: as for `plan_order`; a program
    stays unchanged.

    Raises InputError for names and sizes that do not fit together.
    """
    mode = vocabulary_mode(vocabulary)
    split = None if layers_per_stage is None else tuple(layers_per_stage)
    if isinstance(schedule, Program):
        if (schedule.devices, schedule.microbatches) != (devices, microbatches or schedule.microbatches):
            raise InputError(
                f"schedule: a program of {schedule.devices} devices and {schedule.microbatches} microbatches, expected"
                f" {devices} and {microbatches}"
            )
        stages = schedule.placement.stages
        if split is None:
            split = even_split(description.layers, stages)
        if len(split) != stages or sum(split) != description.layers or min(split) < 0:
            raise InputError(
                f"layers_per_stage: {list(split)}, expected {stages} numbers (one per stage) that add up to the model's"
                f" {description.layers} layers"
            )
        return _given(schedule, split, mode)
    count = 4 * devices if microbatches is None else microbatches
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"microbatches is {count!r}, expected a whole number of at least 1")
    named = isinstance(schedule, str)
    return (_remembered if named else _laid_out)(
        schedule,
        devices=devices,
        microbatches=count,
        mode=mode,
        split=split,
        options=tuple(sorted((options or {}).items())),
        offload=offload,
        costs=ModelCosts.of(description, sequence),
        rows=description.vocabulary_size,
    )


KEPT_PROGRAMS = 64
_programs: OrderedDict[tuple[int, tuple[int, ...], str], Planned] = OrderedDict()


def _given(program: Program, split: tuple[int, ...], mode: str) -> Planned:
    """Cache a program by its id, holding it so that the id stays unique: comparing all of its passes takes longer."""
    key = (id(program), split, mode)
    if key not in _programs:
        _programs[key] = Planned(program, split, mode)
        if len(_programs) > KEPT_PROGRAMS:
            _programs.popitem(last=False)
    return _programs[key]


def _laid_out(
    schedule: Schedule,
    *,
    devices: int,
    microbatches: int,
    mode: str,
    split: tuple[int, ...] | None,
    options: tuple[tuple[str, Any], ...],
    offload: str | float,
    costs: ModelCosts,
    rows: int,
) -> Planned:
    layout = build_layout(
        devices=devices,
        microbatches=microbatches,
        schedule=schedule,
        vocabulary=mode,
        model=costs,
        rows=rows,
        layers_per_stage=split,
        schedule_options=dict(options),
        offload=offload,
    )
    return Planned(layout.program, tuple(last - first for first, last in layout.layers), mode)


_remembered = lru_cache(maxsize=64)(_laid_out)
