"""The problem of a search: a model, a machine and a batch, and the times of its passes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from evenpipe.costs.analytic import Implementation
from evenpipe.costs.hardware import ELEMENT_BYTES, Hardware
from evenpipe.costs.timed_model import TimedModel, Value, known_times
from evenpipe.costs.work import FUSIBLE, layers_of
from evenpipe.errors import InputError
from evenpipe.memory.framework import Framework, kernels_and_framework
from evenpipe.memory.kernels import COMPILED, Kernels
from evenpipe.memory.model_bytes import ModelBytes
from evenpipe.memory.states import MIXED, SINGLE, Dtypes
from evenpipe.model.description import Description
from evenpipe.model.expert_rows import check_skew
from evenpipe.recipe.layout import ModelCosts
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Program
from evenpipe.schedule.registry import check_count
from evenpipe.vocabulary import LossOptions
from evenpipe.words import refused, unknown

from .programs import Programs

EVENPIPE = "transformers"
"""Kernels that evenpipe itself runs: transformers' own."""

ArrangedBy = Literal["times", "roughly", "flops"]
"""What orders are arranged by: times of passes on this hardware, as in a run; the same, but roughly (`Programs.of`); or
FLOPs, as on unknown hardware."""

CACHE_SIZE = 4096
"""Number of results that `Problem.cached` keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(TimedModel):
    """The model, the machine and the batch."""

    gpus: int
    memory_bytes: int
    """Memory of a GPU."""
    sequences_per_step: int
    kernels_name: str = EVENPIPE
    dtypes: Dtypes = MIXED
    """Dtypes of products, gradients, masters and moments."""
    arranged_by: ArrangedBy = "times"

    @property
    def arranging(self) -> ModelCosts:
        """The times of passes on this hardware, by which orders are arranged."""
        return known_times(self)

    def cached(self, key: Any, make: Callable[[], Value]) -> Value:
        """Return the same as `once`, for many keys: the least recently used results are dropped and recomputed."""
        recent: OrderedDict[Any, Any] = self.once(OrderedDict, OrderedDict)
        if key in recent:
            recent.move_to_end(key)
        else:
            recent[key] = make()
            if len(recent) > CACHE_SIZE:
                recent.popitem(last=False)
        result: Value = recent[key]
        return result

    @property
    def programs(self) -> Programs:
        by_flops = self.arranged_by == "flops"
        return self.once((Programs, by_flops), lambda: Programs(self.model_costs if by_flops else self.arranging))

    def arranged(self, recipe: Recipe, microbatches: int) -> Program:
        """Return the program of a recipe that names a schedule, for a step of `microbatches`. Raises as
        `Programs.of`."""
        return self.programs.of(recipe, microbatches, roughly=self.arranged_by == "roughly")[1]

    @property
    def bytes(self) -> ModelBytes:
        return self.once(ModelBytes, lambda: ModelBytes(self.description))

    @property
    def kernels(self) -> Kernels:
        return kernels_and_framework(self.kernels_name)[0]

    @property
    def gradient_element(self) -> int:
        """Bytes per element of accumulated gradients."""
        return ELEMENT_BYTES[self.dtypes.gradients]

    @property
    def framework(self) -> Framework:
        """The framework that runs these kernels."""
        return kernels_and_framework(self.kernels_name)[1]

    @property
    def is_ours(self) -> bool:
        """Whether evenpipe, and not another framework, runs these kernels."""
        return self.framework.is_evenpipe

    @property
    def compiles(self) -> bool:
        """Whether layers run through torch.compile."""
        return self.kernels_name.partition(",")[0] == COMPILED

    @property
    def implementation(self) -> Implementation:
        kernels, framework = self.kernels, self.framework
        return Implementation(
            fused=frozenset(name for name in FUSIBLE if getattr(kernels, name) == "fused"),
            attention=kernels.attention,
            waits_for_transfers=kernels.transfers == "between",
            halves_selective=kernels.selective == "half",
            adds_weight_gradients=kernels.weight_gradient == "fused",
            products=kernels.products,
            saves_casts=framework.saves_casts,
            loss=kernels.loss,
            stops_early=framework.stops_early,
            overlaps_tensor_ranks=framework.overlaps_tensor_ranks,
            exchanges=framework.exchanges,
            ours=self.is_ours,
        )


def problem_of(
    description: Description,
    hardware: Hardware,
    *,
    gpus: int,
    sequence: int,
    sequences_per_step: int,
    memory_bytes: int | None = None,
    dtype: str = "bf16",
    kernels: str = "transformers",
    dtypes: Dtypes | None = None,
    skew: float = 1.0,
    loss: LossOptions | None = None,
) -> Problem:
    """Return the problem for values given by a user. dtypes: None for those that evenpipe trains with. Raises
    InputError for impossible numbers."""
    for name, value in (("gpus", gpus), ("sequence", sequence), ("sequences per step", sequences_per_step)):
        check_count(name, value)
    if memory_bytes is not None and memory_bytes < 1:
        raise InputError(f"gpu memory is {memory_bytes} bytes; it must be more than 0")
    kernels_and_framework(kernels)
    longest = description.maximum_length
    if longest is not None and sequence > longest and description.position_rows is not None:
        raise refused("sequence", sequence, f"at most {longest}, the longest that the model supports")
    if dtype not in ELEMENT_BYTES:
        raise unknown("dtype", dtype, ELEMENT_BYTES)
    hardware.peak(dtype)
    check_skew(skew)
    return Problem(
        description=description,
        works=layers_of(description),
        model_costs=ModelCosts.of(description, sequence),
        hardware=hardware,
        gpus=gpus,
        memory_bytes=hardware.memory_bytes if memory_bytes is None else memory_bytes,
        sequence=sequence,
        sequences_per_step=sequences_per_step,
        dtype=dtype,
        kernels_name=kernels,
        dtypes=dtypes or (SINGLE if dtype == "fp32" else MIXED),
        skew=skew,
        loss=loss or LossOptions(),
    )


def problem_of_run(description: Description, hardware: Hardware, recipe: Recipe, **arguments: Any) -> Problem:
    """Return the problem that a run with this recipe solves. arguments: for `problem_of`. Raises as
    `problem_of`."""
    batch, replicas = recipe.batch, recipe.parallelism.dp
    assert batch.sequence_length is not None
    return problem_of(
        description,
        hardware,
        gpus=recipe.parallelism.gpus,
        sequence=batch.sequence_length,
        sequences_per_step=replicas * recipe.microbatches * batch.microbatch_size,
        **arguments,
    )
