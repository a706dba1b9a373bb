"""Sections of the configuration for how a run is spread and ordered: pipeline, offload and experts, and the loss."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from evenpipe.communication.nccl import MAX_CHANNELS, NcclOptions
from evenpipe.declaration import Declared, Names, NonNegative, NonNegativeInt, Positive, PositiveInt, declare
from evenpipe.errors import InputError
from evenpipe.experts.overlap import ExpertOptions
from evenpipe.recipe.batch_shape import BatchShape, Documents
from evenpipe.recipe.given_schedule import read_schedule
from evenpipe.recipe.offload import OffloadOptions
from evenpipe.recipe.parallelism import ContextExchange, Parallelism, TensorOverlap
from evenpipe.recipe.recipe import ARRANGE, Communicators, Recipe, RecipeOptions
from evenpipe.schedule import MODES, SCHEDULES
from evenpipe.schedule.files import read_costs
from evenpipe.schedule.registry import options_of
from evenpipe.words import count

if TYPE_CHECKING:
    from evenpipe.vocabulary import LossOptions

Checkpointing = Literal["none", "full", "selective"]

LONGEST_TIMEOUT = 1e9
"""Seconds, about thirty years: system clocks accept no more."""


@declare("pipeline")
class PipelineConfig(Declared):
    """The layout: how the model is spread over devices and the batch over replicas and microbatches, and the order of
    the passes."""

    documented_by: ClassVar[tuple[type, ...]] = (Parallelism, BatchShape, Recipe)
    """Fields without a docstring are those of the recipe."""

    processes: PositiveInt = 1
    """Processes of the run: the devices of a pipeline times `dp`, `cp` and `tp`. Under
    torchrun, the number of processes that it starts."""
    dp: PositiveInt = 1
    """Number of pipelines side by side. Each has the whole model and a part of every batch."""
    ep: PositiveInt = 1
    """Neighbouring replicas that share the experts of every layer, a divisor of `dp`: each has some of them, and
    tokens are sent to the replicas of their experts."""
    cp: PositiveInt = 1
    """Processes that share every sequence, each with the same parameters and its part of the tokens."""
    context_exchange: ContextExchange = "auto"
    tp: PositiveInt = 1
    """Processes of a device, which share every layer by heads and columns, and both vocabulary layers by rows. They
    exchange hidden states in every layer, so they should be GPUs of one machine."""
    tensor_overlap: TensorOverlap = "auto"
    data_parallel: Literal["replicate", "shard"] = "replicate"
    """"replicate": every replica keeps all parameters. "shard": replicas share the rows of parameters, gradients and
    optimizer state, and gather parameters during a step (FSDP2)."""
    reshard: bool = False
    prefetch: NonNegativeInt | None = None
    schedule: str = "1f1b"
    """Order of the passes: a name (`evenpipe simulate --help` lists them), or a CSV file of evenpipe or torch. A file
    with transfers is executed without changes, unless vocabulary passes must be added."""
    stages_per_device: PositiveInt | None = None
    """Stages of each device, for schedules that leave a choice: interleaved, looped-bfs, gis, gis-h. Default: 2."""
    group_size: PositiveInt | None = None
    """For interleaved and gis: number of microbatches that a device takes before it changes to its next stage. Default:
    the number of devices; interleaved may take more, for groups of nearly equal size."""
    max_in_flight: Positive | tuple[Positive, ...] | None = None
    """For zb-auto and v-budget: maximum number of stage activations on a device, each of one stage and one microbatch;
    one number, or one per device. Default: the memory of 1f1b."""
    costs: str | None = None
    """Cost file with measured times for arranging the schedule (`evenpipe profile` writes one)."""
    arrange: str = "measured"
    """What arranges a named schedule without `costs`: the pass times of the model on a known GPU (a name, as for
    `evenpipe plan --hardware`) or on the hardware of a file of `evenpipe profile --hardware`; "flops"; "auto": the GPU
    of the run if it is known, else FLOPs; or "measured": start as "auto", and arrange again from the passes of steps 3
    to 6, and whenever pass times drift, if a step is predicted to become more than 1 % shorter without more activations
    on a device. Orders of models with tied vocabulary matrices do not change, since results depend on them."""
    vocabulary: Annotated[str, Names(("balanced", *MODES))] = "balanced"
    microbatches: PositiveInt | None = None
    slices: PositiveInt | Literal["auto"] = 1
    microbatch_size: PositiveInt = 1
    layers_per_stage: tuple[NonNegativeInt, ...] | None = None
    activation_checkpointing: Checkpointing | tuple[Checkpointing, ...] = "none"
    """Tensors that a layer keeps for its backward: "none" keeps all; "full" keeps only the input and repeats the
    forward; "selective" also keeps the results of matrix products and of attention. One choice, or a list with one per
    layer."""
    compile_layers: bool = False
    communicators: Communicators | None = None
    nccl_high_priority: bool = True
    """On GPUs, run communication before queued compute. No effect on gloo."""
    nccl_channels: Annotated[int, Ge(1), Le(MAX_CHANNELS)] | None = None
    """On GPUs, maximum number of channels of a communicator, 1 to 64. Each channel occupies a multiprocessor during
    communication. Default: 1 to 8 for transfers of the pipeline; for others NCCL chooses by the links between the GPUs.
    No effect on gloo."""
    timeout_seconds: Annotated[float, Gt(0), Le(LONGEST_TIMEOUT)] = 600.0
    """Maximum seconds without progress. The run then ends with an error that names the pass and the peer."""

    def recipe(
        self, offload: OffloadOptions, experts: ExpertsConfig, sequence_length: int, documents: Documents
    ) -> Recipe:
        """The recipe of these sections, for sequences of this length."""
        alike = {name: getattr(self, name) for name in RecipeOptions.__annotations__ if hasattr(self, name)}
        return Recipe.of(
            **{
                **alike,
                "dp": self.dp,
                "pp": self.devices,
                "sequence_length": sequence_length,
                "documents": documents,
                "offload": offload,
                "experts": ExpertOptions(columns=experts.columns, arrivals=experts.arrivals),
                "costs": None if self.costs is None else read_costs(self.costs),
                "arrange": "auto" if self.arrange == "measured" else self.arrange,
                "nccl": NcclOptions(high_priority=self.nccl_high_priority, channels=self.nccl_channels),
            }
        )

    def check(self) -> None:
        self.require("dp", self.processes % self.dp == 0, f"a divisor of the {count(self.processes, 'process')}")
        fits = self.dp % self.ep == 0
        self.require("ep", fits, f"a divisor of the {count(self.dp, 'replica')}")
        left = self.processes // self.dp
        whose = f"the {count(left, 'process')}" + (" of a replica" if self.dp > 1 else "")
        self.require("cp", left % self.cp == 0, f"a divisor of {whose}")
        if self.cp > 1:
            left //= self.cp
            whose = f"the {count(left, 'process')} of a piece"
        self.require("tp", left % self.tp == 0, f"a divisor of {whose}")
        split = self.layers_per_stage
        self.require("layers_per_stage", split is None or sum(split) > 0, "numbers of at least 0, and not all 0")
        fits = not isinstance(self.max_in_flight, tuple) or len(self.max_in_flight) == self.devices
        self.require("max_in_flight", fits, f"one number or {self.devices}, one per device")
        self.require("costs", self.costs is None or Path(self.costs).is_file(), "an existing file or none")
        self._check_names()

    def _check_names(self) -> None:
        from evenpipe.costs.hardware import find_hardware

        options: tuple[str, ...] = ()
        if self.schedule.endswith(".csv"):
            self.require("schedule", Path(self.schedule).is_file(), "an existing file, or a name of a schedule")
            self.require("stages_per_device", self.stages_per_device is None, "left out with a CSV file")
        else:
            self.known("schedule", SCHEDULES)
            options = options_of(self.schedule)
        for name in ("group_size", "max_in_flight"):  # every schedule may be told how many stages it has
            if name not in options:
                self.require(name, getattr(self, name) is None, f'left out with schedule "{self.schedule}"')
        if self.arrange not in (*ARRANGE, "measured"):
            try:
                find_hardware(self.arrange)
            except InputError as error:
                raise InputError(f"pipeline.arrange: {error}") from None

    @property
    def devices(self) -> int:
        """Devices of a pipeline."""
        return self.processes // (self.dp * self.cp * self.tp)

    @property
    def schedule_options(self) -> dict[str, Any]:
        """Options for the generator of the schedule."""
        names = ("stages_per_device", "group_size", "max_in_flight")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def microbatches_per_step(self) -> int:
        """`microbatches`, or the number in the file, or 4 per device."""
        return read_schedule(self.schedule, self.devices, self.microbatches)[1]

    @property
    def sequences_per_step(self) -> int:
        """Sequences in the batch of one step, over all replicas."""
        return self.dp * self.microbatches_per_step * self.microbatch_size


@declare("experts")
class ExpertsConfig(ExpertOptions):
    """Mixtures of experts: how rows are exchanged with experts of other replicas, and how experts are balanced."""

    router_bias_rate: NonNegative = 0.0
    """Step by which the selection biases of routers move after every update, towards experts with few tokens
    (arXiv 2408.15664), in models that have such biases; DeepSeek-V3 uses 0.001. 0: they do not change."""


@declare("loss")
class LossConfig:
    """Options of the loss that do not come from the model."""

    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Probability that is spread evenly over all tokens instead of the label (0 to below 1)."""
    z_loss: NonNegative = 0.0
    """Factor of the squared log-sum-exp of the logits, which keeps the logits from drifting."""
    keep: Literal["probabilities", "nothing"] = "probabilities"
    """Tensors that the output layer keeps between its two halves: the probabilities (faster), or nothing (less memory,
    but the logits are computed twice)."""
    entropy: bool = False
    """Also log the mean entropy of the predicted distributions."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Operations on the logits between matrix products: operations of torch, or Triton kernels. "auto": Triton on a GPU
    if it is installed, else torch."""

    def options(self) -> LossOptions:
        """The same for `Pipeline`."""
        from evenpipe.vocabulary import LossOptions

        return LossOptions(**asdict(self))
