"""One way of running a model on a number of GPUs, as the search compares them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from evenpipe.costs.timed_model import pass_costs
from evenpipe.recipe.parallelism import AXES, Parallelism
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Costs, Placement

from .problem import Problem
from .programs import Shape, short_steps

LEAST = "least"
"""In place of a checkpointing policy: every device recomputes only as much as its memory requires. In place of a choice
for copies to the host: "free" if not everything fits on the devices, otherwise "scheduled"."""

POLICIES = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A recipe that names a schedule, and everything else that an evaluation decides."""

    recipe: Recipe
    shape: Shape = field(compare=False, repr=False)
    """Shape of its schedule on its devices."""
    open: tuple[str, ...] = ()
    """Fields of the recipe that are left to the evaluation (`LEAST`): "activation_checkpointing" or "offload". Empty in
    an evaluated plan, whose recipe has one checkpointing policy per layer."""
    copy_seconds: tuple[float, ...] = ()
    """Time of a copy to the host, by stage, in an evaluated plan with copies; its recipe has the relative times, in
    `offload.copy_time`."""
    host_share: float | None = 0.0
    """Share of the optimizer's moments on the host; None: open (not in an evaluated plan)."""

    @classmethod
    def of(cls, problem: Problem, recipe: Recipe, **fields: Any) -> Configuration:
        """Return the configuration of a recipe whose schedule has an order for its number of devices."""
        assert isinstance(recipe.schedule, str)
        shape = problem.programs.shape(recipe.schedule, recipe.schedule_options, recipe.devices)
        assert shape is not None, f"{recipe.schedule} has no order"
        return cls(recipe=recipe, shape=shape, **fields)

    def decided(self, **chosen: Any) -> Configuration:
        """Return the configuration with these fields of its recipe set, which are then no longer open."""
        still_open = tuple(name for name in self.open if name not in chosen)
        return replace(self, recipe=replace(self.recipe, **chosen), open=still_open)

    def with_offload(self, activations: str, **options: Any) -> Configuration:
        """Return the configuration with this choice for activations, and with these options of their copies."""
        return self.decided(offload=replace(self.recipe.offload, activations=activations, **options))

    @property
    def placement(self) -> Placement:
        return self.shape.placement

    @property
    def schedule(self) -> str:
        name = self.recipe.schedule
        assert isinstance(name, str)
        return name

    @property
    def checkpointing(self) -> tuple[str, ...]:
        """Return `LEAST` or one policy for all layers, as a single element, or one policy per layer."""
        if "activation_checkpointing" in self.open:
            return (LEAST,)
        policies = self.recipe.activation_checkpointing
        return policies if isinstance(policies, tuple) else (policies,)

    @property
    def offload(self) -> str:
        """Return the choice for activations, or `LEAST`."""
        return LEAST if "offload" in self.open else str(self.recipe.offload.activations)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        split = self.recipe.layers_per_stage
        assert split is not None
        return split

    @property
    def copy_time(self) -> tuple[float, ...]:
        """Return the relative times of copies, by stage; empty before an evaluation."""
        times = self.recipe.offload.copy_time
        return times if isinstance(times, tuple) else ()

    @property
    def name(self) -> str:
        """Return the configuration in one line."""
        parallelism, batch = self.recipe.parallelism, self.recipe.batch
        parts = [name_of_axes(parallelism)]
        if parallelism.cp > 1 and parallelism.context_exchange == "heads":
            parts.append("heads")
        if parallelism.zero:
            parts.append(name_of_zero(parallelism))
        parts.append(self.schedule_name)
        if parallelism.pp > 1:
            parts.append(self.recipe.vocabulary)
        if self.offload not in ("scheduled", "none"):
            parts.append(f"offload {self.offload}")
        if self.host_share:
            parts.append(f"host share {self.host_share:g}")
        parts.append(f"{batch.microbatch_size} x {batch.microbatches}")
        if self.recipe.slices > 1:
            parts.append(f"slices {self.recipe.slices}")
        return " ".join(parts)

    @property
    def moves(self) -> bool:
        """Return whether activations are, or may be, moved to the host."""
        return self.shape.moves if self.offload == "scheduled" else self.offload != "none"

    @property
    def schedule_name(self) -> str:
        """Return the name of the schedule, with the stages per device if they can be chosen."""
        stages = self.recipe.options.get("stages_per_device")
        return self.schedule if stages is None else f"{self.schedule}/{stages}"

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the numbers of microbatches to simulate; see `short_steps`."""
        planned = self.recipe.mode.sharded or self.moves
        slices = self.recipe.slices
        return short_steps(self.recipe.devices, self.recipe.microbatches, planned=planned, slices=slices)


def name_of_axes(parallelism: Parallelism) -> str:
    """Return the sizes of the axes in short form."""
    axes = [f"{axis}{size}" for axis in AXES if (size := getattr(parallelism, axis)) > 1]
    return "·".join(axes) or "one GPU"


def name_of_zero(parallelism: Parallelism) -> str:
    """Return the ZeRO level in short form, with the number of replicas that share the shards if not all do."""
    shard = parallelism.dp_shard
    return f"zero-{parallelism.zero}{'' if shard is None else f'/{shard}'}"


def costs_of(problem: Problem, configuration: Configuration) -> Costs:
    """Return the seconds of passes, transfers and copies; recomputation that is still open takes no time."""
    costs, copies = pass_costs(problem, configuration.recipe, configuration.placement), configuration.copy_seconds
    return replace(costs, O=copies, L=copies) if copies else costs
