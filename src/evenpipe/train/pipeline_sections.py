"""Sections of the configuration for how a run is spread and ordered: pipeline, offload and experts, and the loss."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from evenpipe.communication.nccl import MOST_CHANNELS, NcclOptions
from evenpipe.errors import InputError
from evenpipe.train.section import Section
from evenpipe.words import count

if TYPE_CHECKING:
    from evenpipe.experts.overlap import ExpertOptions
    from evenpipe.recipe.batch_shape import Documents
    from evenpipe.recipe.offload import OffloadOptions
    from evenpipe.recipe.recipe import Recipe

LONGEST_TIMEOUT = 1e9
"""Seconds, about thirty years: system clocks accept no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig(Section):
    """The layout: how the model is spread over devices and the batch over replicas and microbatches, and the order of
    the passes."""

    section: ClassVar[str] = "pipeline"

    processes: int = 1
    """Processes of the run: the devices of a pipeline times `replicas`, `context_parallel` and `tensor_parallel`. Under
    torchrun, the number of processes that it starts."""
    replicas: int = 1
    """Number of pipelines side by side. Each has the whole model and its own part of every batch."""
    expert_parallel: int = 1
    """Neighbouring replicas that share the experts of every layer, a divisor of `replicas`: each has some of them, and
    tokens travel to the experts that they have chosen."""
    context_parallel: int = 1
    """Processes that share every sequence, each with the same parameters and its part of the tokens."""
    context_exchange: Literal["auto", "keys", "heads"] = "auto"
    """With context_parallel: every attention layer gathers the keys and values of all tokens ("keys"), or exchanges
    heads for tokens ("heads"), which moves less with many processes. "auto": "heads" if that moves less and the
    processes can share the heads, else "keys"."""
    tensor_parallel: int = 1
    """Processes of a device, which share every layer by heads and columns, and both vocabulary layers by rows. They
    exchange hidden states in every layer, so they should be GPUs of one machine."""
    tensor_overlap: Literal["auto", "none", "ring", "fused"] = "auto"
    """With `tensor_parallel`: how processes of a device exchange hidden states beside products, in forwards and for
    input gradients. "ring": piece by piece, each multiplied while the next one is under way. "fused": torch's
    operations on symmetric memory, on GPUs that can read each other's memory. "none": before and after products.
    "auto": "fused" where possible, else "none"."""
    data_parallel: Literal["replicate", "shard"] = "replicate"
    """"replicate": every replica keeps all parameters. "shard": replicas share the rows of parameters, gradients and
    optimizer state, and gather parameters during a step (FSDP2)."""
    reshard: bool = False
    """With data_parallel "shard": free parameters between passes and gather them again, instead of once a step. Takes
    less memory and more communication."""
    prefetch: int | None = None
    """With data_parallel "shard": how many stages ahead of their use parameters are gathered (embedding and output
    layer count as stages). Default: all at the start of the step, or one with `reshard`."""
    schedule: str = "1f1b"
    """Order of the passes: a name (`evenpipe simulate --help` lists them), or a CSV file of evenpipe or torch. A file
    with transfers is executed without changes, unless vocabulary passes must be added."""
    stages_per_device: int | None = None
    """Stages of each device, for schedules that leave a choice: interleaved, looped-bfs, gis, gis-h. Default: 2."""
    group_size: int | None = None
    """For interleaved and gis: number of microbatches that a device takes before it changes to its next stage. Default:
    the number of devices; interleaved may take more, for groups of nearly equal size."""
    memory_limit: tuple[float, ...] | None = None
    """For zb-auto and v-budget: maximum number of stage activations on a device, each of one stage and one microbatch;
    one number, or one per device. Default: the memory of 1f1b."""
    costs: str | None = None
    """Cost file with measured times for arranging the schedule (`evenpipe profile` writes one)."""
    arrange: str = "measured"
    """What arranges a named schedule without `costs`: the pass times of the model on a known GPU (a name, as for
    `evenpipe plan --hardware`) or on the hardware of a file of `evenpipe profile --hardware`; "flops"; "auto": the GPU
    of the run if it is known, else FLOPs; or "measured": so at the start, and anew by the passes of steps 3 to 6,
    between two steps, if a step is predicted to become more than 1 % shorter without more activations on a device, and
    again when passes drift. Orders of models with tied vocabulary matrices stay, since results depend on them."""
    vocabulary: str = "balanced"
    """Placement of embedding and output layer: first-last, redistribute, interlaced, vocab-1, vocab-2; "balanced" is
    vocab-2."""
    microbatches: int | None = None
    """Microbatches per step in each pipeline. Default: 4 per device, or the number in the CSV file."""
    slices: int | Literal["auto"] = 1
    """Slices of every sequence, which follow one after the other: activations of fewer sequences are in flight, and
    devices wait less. "auto": the fewest whose predicted step is at most 1 % longer than the shortest; a line at the
    start says why."""
    microbatch_size: int = 1
    """Sequences per microbatch. A step trains on replicas * microbatches * microbatch_size sequences."""
    layers_per_stage: tuple[int, ...] | None = None
    """Transformer layers of each stage, first to last: one number per stage of the whole pipeline. Default: split
    evenly; with vocabulary "redistribute" by time, or on a known GPU by memory too, if the split by time does not fit
    by the estimate and another one does."""
    checkpointing: tuple[str, ...] = ("none",)
    """Tensors that a layer keeps for its backward: "none" keeps all; "full" keeps only the input and repeats the
    forward; "selective" also keeps the results of matrix products and of attention. One choice, or a list with one per
    layer."""
    compile_layers: bool = False
    """Run every layer through torch.compile; the first steps take longer. Embedding, output layer and loss are not
    compiled."""
    communicators: Literal["per-pair", "per-kind", "one"] = "per-pair"
    """Transfers that share a communicator. "per-pair": all from one device to another, and each kind of collective.
    "per-kind": all forward hops, all backward hops, and each kind of collective. "one": all. Fewer communicators take
    less memory (with NCCL about 0.5 GB each), but their transfers wait for each other."""
    nccl_high_priority: bool = True
    """On GPUs, run communication before queued compute. No effect on gloo."""
    nccl_channels: int | None = None
    """On GPUs, maximum number of channels of a communicator, 1 to 64. Each channel occupies a multiprocessor during
    communication. Default: NCCL chooses by the links between the GPUs. No effect on gloo."""
    timeout_seconds: float = 600.0
    """Maximum seconds without progress. The run then ends with an error that names the pass and the peer."""

    def recipe(
        self, offload: OffloadConfig, experts: ExpertsConfig, sequence_length: int, documents: Documents
    ) -> Recipe:
        """Return the recipe of these sections, for sequences of this length."""
        from evenpipe.recipe.recipe import Recipe, RecipeOptions
        from evenpipe.schedule.files import read_costs

        alike = {name: getattr(self, name) for name in RecipeOptions.__annotations__ if hasattr(self, name)}
        converted = {
            "checkpointing": _one_or_all(self.checkpointing),
            "costs": None if self.costs is None else read_costs(self.costs),
            "arrange": "auto" if self.arrange == "measured" else self.arrange,
            "nccl": NcclOptions(high_priority=self.nccl_high_priority, channels=self.nccl_channels),
        }
        return Recipe.of(
            dp=self.replicas,
            pp=self.devices,
            ep=self.expert_parallel,
            cp=self.context_parallel,
            tp=self.tensor_parallel,
            sequence_length=sequence_length,
            documents=documents,
            offload=offload.options(),
            experts=experts.options(),
            **{**alike, **converted},
        )

    def check(self) -> None:
        self.at_least(1, "processes", "replicas", "expert_parallel", "context_parallel", "tensor_parallel")
        self.require("slices", self.slices == "auto" or self.slices >= 1, 'at least 1, or "auto"')
        self.at_least(1, "stages_per_device", "group_size", "microbatches", "microbatch_size")
        self.positive("timeout_seconds")
        self.require("timeout_seconds", self.timeout_seconds <= LONGEST_TIMEOUT, f"at most {LONGEST_TIMEOUT:g}")
        self.require(
            "replicas", self.processes % self.replicas == 0, f"a divisor of the {count(self.processes, 'process')}"
        )
        fits = self.replicas % self.expert_parallel == 0
        self.require("expert_parallel", fits, f"a divisor of the {count(self.replicas, 'replica')}")
        left = self.processes // self.replicas
        whose = f"the {count(left, 'process')}" + (" of a replica" if self.replicas > 1 else "")
        self.require("context_parallel", left % self.context_parallel == 0, f"a divisor of {whose}")
        if self.context_parallel > 1:
            left //= self.context_parallel
            whose = f"the {count(left, 'process')} of a piece"
        self.require("tensor_parallel", left % self.tensor_parallel == 0, f"a divisor of {whose}")
        if self.layers_per_stage is not None:
            accepted = "numbers of at least 0, one per stage, and not all 0"
            split = self.layers_per_stage
            self.require("layers_per_stage", min(split, default=0) >= 0 and sum(split) > 0, accepted)
        if self.memory_limit is not None:
            accepted = f"one number above 0, or {self.devices}, one per device"
            fits = len(self.memory_limit) in (1, self.devices) and min(self.memory_limit) > 0
            self.require("memory_limit", fits, accepted)
        if not self.checkpointing or not set(self.checkpointing) <= {"none", "full", "selective"}:
            self.require("checkpointing", False, "none, full, selective, or a list with one of these per layer")
        channels = self.nccl_channels
        fits = channels is None or 1 <= channels <= MOST_CHANNELS
        self.require("nccl_channels", fits, f"from 1 to {MOST_CHANNELS}, or none")
        self.require("costs", self.costs is None or Path(self.costs).is_file(), "an existing file, or none")
        self._check_names()

    def _check_names(self) -> None:
        from evenpipe.costs.hardware import find_hardware
        from evenpipe.recipe.recipe import ARRANGE
        from evenpipe.schedule.generators import SCHEDULES
        from evenpipe.schedule.registry import options_of
        from evenpipe.schedule.vocabulary_mode import MODES

        options: tuple[str, ...] = ()
        if self.schedule.endswith(".csv"):
            self.require("schedule", Path(self.schedule).is_file(), "an existing file, or a name of a schedule")
            self.require("stages_per_device", self.stages_per_device is None, "left out with a CSV file")
        else:
            self.known("schedule", SCHEDULES)
            options = options_of(self.schedule)
        for name in ("group_size", "memory_limit"):  # every schedule may be told how many stages it has
            if name not in options:
                self.require(name, getattr(self, name) is None, f'left out with schedule "{self.schedule}"')
        self.known("vocabulary", ("balanced", *MODES))
        if self.arrange not in (*ARRANGE, "measured"):
            try:
                find_hardware(self.arrange)
            except InputError as error:
                raise InputError(f"pipeline.arrange: {error}") from None

    @property
    def devices(self) -> int:
        """Devices of a pipeline."""
        return self.processes // (self.replicas * self.context_parallel * self.tensor_parallel)

    @property
    def schedule_options(self) -> dict[str, Any]:
        """Options for the generator of the schedule."""
        limit = self.memory_limit
        options = {
            "stages_per_device": self.stages_per_device,
            "group_size": self.group_size,
            "memory_limit": limit[0] if limit is not None and len(limit) == 1 else limit,
        }
        return {name: value for name, value in options.items() if value is not None}

    @property
    def microbatches_per_step(self) -> int:
        """`microbatches`, or the number in the file, or 4 per device."""
        from evenpipe.recipe.given_schedule import read_schedule

        return read_schedule(self.schedule, self.devices, self.microbatches)[1]

    @property
    def sequences_per_step(self) -> int:
        """Sequences in the batch of one step, over all replicas."""
        return self.replicas * self.microbatches_per_step * self.microbatch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig(Section):
    """Which activations go to the host, and the memory that they use there."""

    section: ClassVar[str] = "offload"

    activations: Literal["scheduled", "none", "free", "all"] = "scheduled"
    """"scheduled": the activations that the order moves, as in po-h and po-f. "none": no activations. "free": all that
    lower the peak of a device without costing time, by pipeline.costs. "all": enough to reach the lowest possible
    peak."""
    copy_time: tuple[float, ...] = (0.25,)
    """Time of one copy, to the host or back, of the activations of a stage and microbatch, relative to its forward and
    backward together; one number, or one per stage. Used if pipeline.costs does not give the time of copies.
    `evenpipe plan --offload` computes it."""
    layers: tuple[str, ...] = ("offload",)
    """"offload" moves the activations that a layer keeps for its backward, "keep" leaves them on the device. One
    choice, or a list with one per layer. With checkpointing "full", only a layer's input is moved."""
    host_memory: str | None = None
    """Maximum host memory per device, such as "24GiB". A GPU allocates it in powers of two. Default: no limit."""
    when_full: Literal["error", "keep"] = "error"
    """If host memory is full: end the run, or keep the rest on the device."""
    directory: str | None = None
    """On the CPU: directory of the file for activations, which has no name and disappears with the process. Default:
    the system's directory for temporary files."""
    streams: int = 1
    """1: copies to the host and back take turns. 2: each direction has its own stream."""

    def check(self) -> None:
        if not self.layers or not set(self.layers) <= {"offload", "keep"}:
            self.require("layers", False, "offload, keep, or a list with one of these per layer")
        self.require("copy_time", bool(self.copy_time), "one number or one per stage")
        self.require(
            "directory", self.directory is None or Path(self.directory).is_dir(), "an existing directory, or none"
        )
        self.options()

    def options(self) -> OffloadOptions:
        """Return the options of a recipe. Raises InputError for a value that they do not accept."""
        from evenpipe.memory.sizes import parse_size
        from evenpipe.recipe.offload import OffloadOptions

        size = self.host_memory
        converted = {
            "copy_time": _one_or_all(self.copy_time),
            "layers": _one_or_all(self.layers),
            "host_memory": None if size is None else parse_size(size, "offload.host_memory"),
        }
        return OffloadOptions(**{**asdict(self), **converted})


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig(Section):
    """Mixtures of experts: how rows travel to experts of other replicas, and how experts are kept equally busy."""

    section: ClassVar[str] = "experts"

    columns: int | Literal["auto"] = "auto"
    """With pipeline.expert_parallel: blocks of columns in which results leave, each while the next one is computed.
    "auto": by costs, 4 if they are unknown."""
    arrivals: int | Literal["auto"] = "auto"
    """With pipeline.expert_parallel: products of rows that arrive, 1: of all at once; 2: of own rows while others
    arrive; or as many as expert_parallel: of each replica's rows by themselves. "auto": by costs, 2 if they are
    unknown."""
    router_bias_rate: float = 0.0
    """After every update, move the biases by which routers choose experts so far towards experts with few tokens
    (arXiv 2408.15664), in models that have such biases, as DeepSeek-V3: 0.001 there. 0: they stay."""

    def check(self) -> None:
        self.at_least(0, "router_bias_rate")
        self.options()

    def options(self) -> ExpertOptions:
        """Return the options of a recipe. Raises InputError for a value that they do not accept."""
        from evenpipe.experts.overlap import ExpertOptions

        return ExpertOptions(columns=self.columns, arrivals=self.arrivals)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig(Section):
    """Options of the loss that do not come from the model."""

    section: ClassVar[str] = "loss"

    label_smoothing: float = 0.0
    """Probability that is spread evenly over all tokens instead of the label (0 to below 1)."""
    z_loss: float = 0.0
    """Factor of the squared log-sum-exp of the logits, which keeps the logits from drifting."""
    keep: Literal["probabilities", "nothing"] = "probabilities"
    """Tensors that the output layer keeps between its two halves: the probabilities (faster), or nothing (less memory,
    but the logits are computed twice)."""
    entropy: bool = False
    """Also log the mean entropy of the predicted distributions."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Operations on the logits between matrix products: operations of torch, or Triton kernels. "auto": Triton on a GPU
    if it is installed, else torch."""

    def check(self) -> None:
        self.require("label_smoothing", 0 <= self.label_smoothing < 1, "at least 0 and below 1")
        self.at_least(0, "z_loss")


Choice = TypeVar("Choice", str, float)


def _one_or_all(choices: tuple[Choice, ...]) -> Choice | tuple[Choice, ...]:
    """Return the only choice, which applies to all, or one choice for each."""
    return choices[0] if len(choices) == 1 else choices
