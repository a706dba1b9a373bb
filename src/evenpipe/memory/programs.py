"""The program of a run: planned as in the runtime, or given."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from evenpipe.costs.hardware import Hardware, known_gpu
from evenpipe.costs.timed_model import arranging_model
from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.recipe.layout import bounds_of, check_layers_per_stage, layout_of
from evenpipe.recipe.parallelism import for_replicas
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Kind, Program, even_split
from evenpipe.schedule.passes import parts_in
from evenpipe.vocabulary import LossOptions
from evenpipe.words import count

from .framework import Framework
from .replay import Replay


@dataclass(frozen=True)
class Planned:
    """A program and the layers of its stages."""

    program: Program
    layers_per_stage: tuple[int, ...]
    _replays: dict[tuple[int, bool, bool, tuple[int, ...]], Replay] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First layer (inclusive) and last (exclusive) of each stage."""
        return bounds_of(self.layers_per_stage)

    @cached_property
    def kinds(self) -> tuple[frozenset[Kind], ...]:
        """By device: the kinds of its passes."""
        return tuple(frozenset(pass_.kind for pass_ in parts_in(row)) for row in self.program.rows)

    @cached_property
    def transfers(self) -> dict[str, tuple[int, ...]]:
        """Members of the program's communicators, by name."""
        return self.program.communicators

    def replay(
        self, device: int, framework: Framework, *, places_rows: bool = False, slice_tokens: tuple[int, ...] = ()
    ) -> Replay:
        """Return the replay of a device's row, cached for all sizes: a search reuses a program with other sizes."""
        key = device, framework.gradients_exist, places_rows, slice_tokens
        if key not in self._replays:
            self._replays[key] = Replay(
                self.program,
                device,
                gradients_exist=framework.gradients_exist,
                places_rows=places_rows,
                slice_tokens=slice_tokens,
            )
        return self._replays[key]


def planned(
    description: Description,
    recipe: Recipe,
    hardware: Hardware | None = None,
    dtype: str = "bf16",
    loss: LossOptions | None = None,
) -> Planned:
    """Return the program of a recipe that has a sequence length. Only the work for replicas is added to a given
    program, as `layout_of` does. hardware: None if unknown. dtype: dtype of products. loss: None for the default
    options.

    Raises InputError for names and sizes that do not fit together.
    """
    program = recipe.schedule
    if not isinstance(program, Program):
        at_hand = None if hardware is None else known_gpu(hardware.name)
        costs = arranging_model(description, recipe, at_hand, dtype, loss)
        layout = layout_of(recipe, costs, description)
        return Planned(layout.program, layout.layers_per_stage)
    if (program.devices, program.microbatches) != (recipe.devices, recipe.microbatches):
        raise InputError(
            f"schedule: a program of {count(program.devices, 'device')} and"
            f" {count(program.microbatches, 'microbatch')}; expected {recipe.devices} and {recipe.microbatches}"
        )
    stages = program.placement.stages
    split = recipe.layers_per_stage or even_split(description.layers, stages)
    check_layers_per_stage(split, stages, description.layers)
    return Planned(for_replicas(program, recipe.parallelism, tied=description.tied), split)
