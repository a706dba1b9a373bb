"""The quantities that determine the memory of a training run, read from its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from evenpipe.costs.hardware import Hardware
from evenpipe.memory.estimate import Estimate
from evenpipe.memory.kernels import COMPILED
from evenpipe.memory.states import MIXED, SINGLE, Dtypes
from evenpipe.model import Description
from evenpipe.plan.problem import EVENPIPE
from evenpipe.recipe.layout import ModelCosts
from evenpipe.recipe.recipe import Recipe
from evenpipe.recipe.slice_choice import with_slices
from evenpipe.sizes import gib_text
from evenpipe.train.config import Config
from evenpipe.train.planned_config import configured_model
from evenpipe.train.run_sections import OPTIMIZER_DEFAULTS
from evenpipe.vocabulary import LossOptions
from evenpipe.words import refused, show


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedRun:
    """A run, as `evenpipe.memory.estimate.estimate` takes it."""

    description: Description
    recipe: Recipe
    schedule: str
    """As the user names it."""
    dtypes: Dtypes
    optimizer: str
    offloaded: float
    """Share of the optimizer's state on the host."""
    kernels: str = EVENPIPE
    loss: LossOptions = field(default_factory=LossOptions)
    remarks: tuple[str, ...] = ()
    """Sentences about options whose bytes are not known."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `estimate`, besides the recipe."""
        names = ("kernels", "dtypes", "optimizer", "offloaded", "loss")
        return {name: getattr(self, name) for name in names}


def estimated_run(config: Config, hardware: Hardware | None) -> EstimatedRun:
    """The run of a configuration, on some hardware (None: some GPU).

    Raises InputError as `Config.recipe` and `describe`, and for the user's own optimizer, whose state is not known.
    """
    description = configured_model(config)
    on_cpu = hardware is not None and hardware.torch_device == "cpu"
    dtype = config.model.compute_dtype
    narrow = dtype == "bfloat16" or (dtype == "auto" and not on_cpu)
    dtypes, loss, recipe = MIXED if narrow else SINGLE, config.loss.options(), config.recipe()
    costs = ModelCosts.of(description, recipe.batch.sequence_length)
    recipe, _ = with_slices(recipe, costs, "cpu" if on_cpu else "cuda")
    return EstimatedRun(
        description=description,
        recipe=recipe,
        schedule=config.pipeline.schedule,
        dtypes=dtypes,
        optimizer=_optimizer(config),
        offloaded=config.optimizer.host_share,
        kernels=COMPILED if recipe.compile_layers else EVENPIPE,
        loss=loss,
        remarks=tuple(_remarks(config, on_cpu=on_cpu)),
    )


def _remarks(config: Config, *, on_cpu: bool) -> Iterator[str]:
    if config.pipeline.tensor_overlap not in ("auto", "none"):
        overlap = show(config.pipeline.tensor_overlap)
        yield f"pipeline.tensor_overlap is {overlap}: its buffers are not in the estimate"
    if config.loss.kernels == "torch" and not on_cpu:
        yield 'loss.kernels is "torch": the estimate is of Triton kernels, which need less'


def host_remark(result: Estimate) -> str:
    """Return a sentence about activations that do not fit on the host; empty if all of them fit."""
    offload, fullest = result.recipe.offload, max(result.devices, key=lambda device: device.host)
    if offload.host_memory is None or fullest.host <= offload.host_memory:
        return ""
    ends = "the rest stays on the device" if offload.when_full == "keep" else "the run ends with an error"
    return (
        f"offload.host_memory is {gib_text(offload.host_memory)}, but device {fullest.device} moves"
        f" {gib_text(fullest.host)} to the host: {ends}"
    )


def _optimizer(config: Config) -> str:
    """Return the kind of optimizer, which determines the state it keeps."""
    name, options = config.optimizer.name, config.optimizer.options
    if config.optimizer.is_own:
        known = ", ".join(OPTIMIZER_DEFAULTS)
        raise refused("optimizer.name", name, f"one of {known} for an estimate: what your own keeps is not known")
    if name == "sgd" and not options.get("momentum"):
        return "plain-sgd"
    return "amsgrad" if name == "adamw" and options.get("amsgrad") else name
