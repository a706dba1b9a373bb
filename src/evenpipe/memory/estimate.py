"""Memory of every device of a training run, from a model, a layout, and a GPU.

    result = estimate(describe("Qwen/Qwen3-8B"), Recipe.of(dp=2, tp=2, pp=2, sequence_length=8192), memory=80 * 2**30)
    result.verdict, result.devices[0].peak_allocated, result.devices[0].binding_event

Stages are traced: their modules run on tensors without memory (`traced`). The program is the one that `evenpipe train`
would run, and each of its rows is replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from evenpipe.costs.hardware import Hardware
from evenpipe.experts.refusals import check_experts
from evenpipe.model import Description
from evenpipe.model.flops import usual_length
from evenpipe.recipe.parallelism import AXES
from evenpipe.recipe.recipe import Recipe
from evenpipe.vocabulary import LossOptions

from .bytes import DeviceMemory
from .device import DeviceBytes
from .framework import Framework, kernels_and_framework
from .kernels import PRESETS, Kernels
from .model_bytes import ModelBytes
from .programs import Planned
from .reserved import ProcessMemory, Verdict, communicators_of, overheads_of, process_memory, verdict_of
from .settings import Settings
from .states import MIXED, SINGLE, Dtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEstimate:
    """One device of a pipeline, in bytes. All of its GPUs (tensor ranks, context ranks, replicas) hold the same, except
    that the first tensor rank may have a few more vectors and rows; the estimate is for that rank."""

    device: int
    stages: tuple[int, ...]
    layers: int
    memory: DeviceMemory
    process: ProcessMemory
    verdict: Verdict | None
    """None if no GPU memory is given."""
    host: int = 0
    """Peak bytes of activations in host memory."""
    gathered: int = 0
    """Bytes of the keys and values of all context ranks that one layer gathers: a part of the transient bytes."""

    @property
    def binding_event(self) -> str:
        """The moment of the peak."""
        return self.memory.binding_event

    @property
    def terms(self) -> Mapping[str, int]:
        """Bytes by `TERMS` at that moment; they add up to the bytes of all tensors."""
        return self.memory.terms

    @property
    def peak_allocated(self) -> int:
        """`torch.cuda.max_memory_allocated`."""
        return self.process.allocated

    @property
    def peak_reserved(self) -> int:
        """The likely value of `torch.cuda.max_memory_reserved`."""
        return self.process.reserved

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        process = self.process.process
        return {
            "device": self.device,
            "stages": list(self.stages),
            "layers": self.layers,
            **self.terms,
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "process": {"least": round(process.low), "likely": round(process.likely), "most": round(process.high)},
            "communicators": self.process.communicators,
            "host": self.host,
            "gathered_keys": self.gathered,
            "binding_event": self.binding_event,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """All devices of a pipeline."""

    devices: tuple[DeviceEstimate, ...]
    schedule: str
    """Its name; "given" for an order or a program."""
    layers_per_stage: tuple[int, ...]
    settings: Settings
    """The recipe, precisions, kernels."""
    memory: int | None
    """Bytes of a GPU."""

    @property
    def recipe(self) -> Recipe:
        """How the model is distributed."""
        return self.settings.recipe

    @property
    def verdict(self) -> Verdict | None:
        """Verdict for the worst device; None if no GPU memory is given."""
        verdicts = [device.verdict for device in self.devices if device.verdict is not None]
        return max(verdicts, key=get_args(Verdict).index, default=None)

    @property
    def fits(self) -> bool | None:
        """Whether it fits even with the largest calibrated overheads; None if no GPU memory is given."""
        return None if self.verdict is None else self.verdict == "fits"

    @property
    def fullest(self) -> DeviceEstimate:
        """The device with the highest peak."""
        return max(self.devices, key=lambda device: device.process.process.high)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        parallelism = self.recipe.parallelism
        return {
            "parallelism": {name: getattr(parallelism, name) for name in (*AXES, "zero", "gpus")},
            "schedule": self.schedule,
            "vocabulary": self.recipe.vocabulary,
            "microbatches": self.recipe.microbatches,
            "microbatch_size": self.settings.microbatch_size,
            "sequence": self.settings.sequence,
            "slices": self.settings.slices,
            "dtypes": asdict(self.settings.dtypes),
            "layers_per_stage": list(self.layers_per_stage),
            "devices": [device.to_dict() for device in self.devices],
            "gpu_memory": self.memory,
            "verdict": self.verdict,
            "fits": self.fits,
        }


def estimate(
    model: Description | ModelBytes,
    recipe: Recipe | None = None,
    *,
    kernels: Kernels | str = "transformers",
    dtypes: Dtypes | None = None,
    hardware: Hardware | None = None,
    memory: int | None = None,
    optimizer: str = "adamw",
    offloaded: float = 0.0,
    foreach: bool = False,
    skew: float = 1.0,
    loss: LossOptions | None = None,
) -> Estimate:
    """Estimate the memory of every device.

    Args:
        model: its description; to estimate many recipes, its `ModelBytes`, which caches traces.
        recipe: the run; if its schedule is a program, the program is used unchanged.
        kernels: the implementations, or the name of a preset.
        dtypes: the precisions; None: bf16 with fp32 masters and gradients, or fp32 throughout on a CPU.
        hardware: the GPU, or a CPU; None: some NVIDIA GPU.
        memory: bytes of a GPU; None: those of the hardware. Without either there is no verdict.
        optimizer: one of `optimizers.Optimizer`; "sgd" has momentum.
        offloaded: share of the optimizer state in host memory.
        foreach: whether the optimizer processes all tensors at once (a fused one does not).
        skew: with ep > 1, the load of the fullest of the members that share experts, relative to the mean: 1 if the
            router chooses evenly, about 2 early in training.
        loss: options of the loss, without the model's own changes to its logits; None: the default options.

    Raises InputError for sizes that do not divide, for unknown names, and for a model that cannot be traced.
    """
    source = model if isinstance(model, ModelBytes) else ModelBytes(model)
    description = source.description
    if memory is None and hardware is not None:
        memory = hardware.memory_bytes
    settings = settings_of(
        description,
        recipe or Recipe(),
        kernels=kernels,
        dtypes=dtypes,
        hardware=hardware,
        optimizer=optimizer,
        offloaded=offloaded,
        foreach=foreach,
        skew=skew,
        loss=loss,
    )
    recipe = settings.recipe
    check_experts(description, recipe.parallelism.ep)
    plan = source.planned(recipe, hardware, settings.dtypes.compute, settings.loss)
    source.parameters.check(recipe.parallelism.tp)
    return Estimate(
        devices=tuple(
            device_estimate(source, plan, settings, device, memory) for device in range(plan.program.devices)
        ),
        schedule=recipe.schedule if isinstance(recipe.schedule, str) else "given",
        layers_per_stage=plan.layers_per_stage,
        settings=settings,
        memory=memory,
    )


def settings_of(
    description: Description,
    recipe: Recipe,
    *,
    kernels: Kernels | str,
    dtypes: Dtypes | None,
    hardware: Hardware | None,
    optimizer: str = "adamw",
    offloaded: float = 0.0,
    foreach: bool = False,
    skew: float = 1.0,
    loss: LossOptions | None = None,
) -> Settings:
    """Return the settings with which `estimate` computes a recipe. Arguments and errors are the same."""
    if recipe.batch.sequence_length is None:
        recipe = replace(recipe, batch=replace(recipe.batch, sequence_length=usual_length(description)))
    chosen, framework = _kernels(kernels)
    on_cpu = hardware is not None and hardware.torch_device == "cpu"
    return Settings(
        recipe=recipe,
        checkpointing=recipe.checkpointing_of(description.layers),
        kernels=chosen,
        dtypes=dtypes or (SINGLE if on_cpu else MIXED),
        framework=framework,
        on_cpu=on_cpu,
        overheads=overheads_of(hardware),
        optimizer=optimizer,
        offloaded=offloaded,
        foreach=foreach,
        skew=skew,
        loss=loss or LossOptions(),
    )


def device_estimate(
    source: ModelBytes, plan: Planned, settings: Settings, device: int, memory: int | None
) -> DeviceEstimate:
    """Return one device of an estimate. memory: bytes of a GPU; None: no verdict. Errors as in `estimate`."""
    device_bytes = DeviceBytes.of(source, plan, settings, device)
    device_memory = device_bytes.memory(plan, settings, device)
    process = process_memory(
        device_memory.peak,
        settings.overheads,
        communicators=communicators_of(
            settings.parallelism,
            settings.framework,
            sum(device in members for members in plan.transfers.values()),
            vocabulary=plan.program.vocabulary.sharded,
        ),
        context_parallel=settings.parallelism.cp > 1,
    )
    placement = plan.program.placement
    stages = placement.stages_of(device)
    return DeviceEstimate(
        device=device,
        stages=tuple(stages),
        layers=sum(plan.layers_per_stage[stage] for stage in stages),
        memory=device_memory,
        process=process,
        verdict=None if memory is None else verdict_of(process, memory),
        host=device_bytes.host(plan.program.rows[device]),
        gathered=device_bytes.gathered,
    )


# --- arguments -----------------------------------------------------------------------------------------------------


def _kernels(kernels: Kernels | str) -> tuple[Kernels, Framework]:
    """Return kernels, and the framework that runs them: ours, if they are not a preset."""
    if isinstance(kernels, str):
        return kernels_and_framework(kernels)
    name = next((name for name, preset in PRESETS.items() if preset == kernels), "transformers")
    changes = (f"{key}={value}" for key, value in asdict(kernels).items())
    return kernels_and_framework(",".join((name, *changes)))
