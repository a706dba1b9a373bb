"""The configuration of a training run: one dataclass per section of the TOML file, a docstring under every field.

`evenpipe train --help` prints these docstrings. Nothing here imports torch, so a mistake is reported at once.
Paths are relative to the folder that the command is started in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from evenpipe.errors import InputError
from evenpipe.runtime.nccl import MOST_CHANNELS
from evenpipe.train.named import check_name
from evenpipe.train.section import Section, show, unknown

PYTHON_STANDARD_LIBRARY = "python-standard-library"
DEFAULT_TOKENIZER_ENTRIES = 32768
DEFAULT_STEPS = 1000
DEFAULT_VALIDATION_FRACTION = 0.01
MOST_TOKENIZER_ENTRIES = 10_000_000
"""The trainer takes memory for all of them at once, and ends the process where there is not enough."""
DEFAULT_END_OF_TEXT = "<|endoftext|>"
BYTE_VALUES = 256
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1},
    "muon": {"betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1},
    "adafactor": {"weight_decay": 0.0},
    "sgd": {"weight_decay": 0.0},
}
"""Optimizers by name, and the fields that each of them has beside its options."""
LONGEST_TIMEOUT = 1e9
"""Seconds, some thirty years: clocks of the system take no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(Section):
    """Which model is trained: an existing one (`source`), or one described here (`architecture` and `config`)."""

    section: ClassVar[str] = "model"

    source: str | None = None
    """Hub name or local folder of a transformers causal language model; training continues from its weights."""
    fresh_weights: bool = False
    """Take only the shape of `source` and start from random weights drawn from training.seed."""
    architecture: str | None = None
    """Model type of transformers, such as "llama" or "qwen3", for a model with fresh weights described by `config`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Table [model.config]: the fields of that architecture's transformers config; those left out keep its defaults,
    and the size of the vocabulary and the end-of-text id follow the tokenizer."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the matrix products and activations; parameters, gradients and optimizer state are float32. "auto" is
    bfloat16 on a GPU and float32 on CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with `source`."""
    self_check: bool = True
    """Before training, compare the cut model with the whole one on a shrunken copy: about a second, and an architecture
    that would be trained wrongly is refused."""

    def check(self) -> None:
        if (self.source is None) == (self.architecture is None):
            given = "neither is" if self.source is None else "both are"
            raise InputError(f"model needs either source or architecture, but {given} given")
        if self.source is not None:
            self.require("config", not self.config, "left out when model.source is given")
        self.require("fresh_weights", not self.fresh_weights or self.source is not None, "false without model.source")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Section):
    """What is read. Exactly one of `files`, `dataset` and `corpus`."""

    section: ClassVar[str] = "data"

    files: tuple[str, ...] = ()
    """Files or patterns (`corpus/**/*.py`), read in the order of their names. `.jsonl`, `.json` and `.ndjson` hold one
    JSON object per line, `.parquet` a table; any other file is one UTF-8 document, its line ends read as \\n."""
    dataset: str | None = None
    """Data set of the hub, or a local folder: one that `datasets.load_dataset` reads, or that `save_to_disk` wrote. Of
    plain text, every file is one document."""
    dataset_config: str | None = None
    """Configuration of that data set, where it has several."""
    dataset_split: str = "train"
    """Split of that data set; parts such as "train[:1%]" are possible."""
    corpus: str | None = None
    """The name "python-standard-library": the sources of the running Python's own library, without tests and character
    tables; after a colon only some of its modules and packages, as in "python-standard-library:asyncio,json"."""
    text_field: str = "text"
    """Field or column that holds a document, in JSON lines, parquet and data sets."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """What happens to bytes that are not UTF-8: an error that names file and byte, or a replacement character."""
    sequence_length: int = 1024
    """Tokens per training sequence. Documents are joined by the end-of-text token and cut into such rows, so a row may
    hold several documents, and attention looks across their borders; the last incomplete row is dropped."""
    validation_files: tuple[str, ...] = ()
    """Files or patterns of documents to evaluate on, read as `files`. Those among `files` are not trained on."""
    validation_split: str | None = None
    """Split of `dataset` to evaluate on."""
    validation_fraction: float | None = None
    """Share of the rows that is held back for evaluation, evenly spread over the data; 0 holds back none. None: 0.01,
    or 0 with validation_files or validation_split."""
    cache_folder: str | None = None
    """Where tokens are kept, to be used again when sources and tokenizer are unchanged; none: `data` in
    output.folder."""

    def check(self) -> None:
        given = [name for name in ("files", "dataset", "corpus") if getattr(self, name)]
        if len(given) != 1:
            raise InputError(f"data needs exactly one of files, dataset and corpus, but has {_listed(given)}")
        self.require("dataset_config", self.dataset_config is None or self.dataset is not None, "none without dataset")
        self.at_least(2, "sequence_length")
        self._check_validation()
        if self.corpus is not None:
            name, colon, parts = self.corpus.partition(":")
            accepted = f'"{PYTHON_STANDARD_LIBRARY}", or that and a colon and names of its modules'
            self.require("corpus", name == PYTHON_STANDARD_LIBRARY and bool(colon) == bool(parts), accepted)

    def _check_validation(self) -> None:
        split = self.validation_split
        if split is not None:
            self.require("validation_split", self.dataset is not None, "none without dataset")
            self.require("validation_split", split != self.dataset_split, "another split than data.dataset_split")
            self.require("validation_split", not self.validation_files, "none when validation_files are given")
        self.require("validation_fraction", 0 <= self.held_back < 1, "at least 0 and below 1")
        if own := split or self.validation_files:
            field = "validation_split" if split else "validation_files"
            accepted = f"left out or 0 when data.{field} is {show(own)}"
            self.require("validation_fraction", not self.held_back, accepted)

    @property
    def held_back(self) -> float:
        """`validation_fraction`, or its default."""
        if self.validation_fraction is not None:
            return self.validation_fraction
        return 0.0 if self.validation_files or self.validation_split else DEFAULT_VALIDATION_FRACTION

    @property
    def validates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.held_back or self.validation_files or self.validation_split)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig(Section):
    """Which tokenizer is used: an existing one, that of model.source, or one trained on the data."""

    section: ClassVar[str] = "tokenizer"

    source: str | None = None
    """Hub name or local folder of a transformers tokenizer; none: the one of model.source, else one is trained."""
    vocabulary_size: int | None = None
    """Entries of the byte-level BPE tokenizer that is trained on the data (none: 32768). A small corpus may yield
    fewer."""
    end_of_text: str | None = None
    """Token that ends every document; none: the tokenizer's own, "<|endoftext|>" in a trained one."""

    def check(self) -> None:
        smallest = BYTE_VALUES + 1
        self.at_least(smallest, "vocabulary_size")
        fits = (self.vocabulary_size or 0) <= MOST_TOKENIZER_ENTRIES
        self.require("vocabulary_size", fits, f"at most {MOST_TOKENIZER_ENTRIES}")
        if self.source is not None:
            self.require("vocabulary_size", self.vocabulary_size is None, "left out when tokenizer.source is given")
        self.require("end_of_text", self.end_of_text != "", "a token or none")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig(Section):
    """How the model is spread over devices, the batch over replicas and microbatches, and what runs in which order."""

    section: ClassVar[str] = "pipeline"

    processes: int = 1
    """Processes of the run, one per device: devices of a pipeline times `replicas`. Inside torchrun this must be the
    number of processes it starts."""
    replicas: int = 1
    """Pipelines side by side, each with the whole model and its own part of every batch."""
    data_parallel: Literal["replicate", "shard"] = "replicate"
    """What a process of each replica holds: all parameters of its device, or only its rows of them and of the
    optimizer's state, which are gathered for a step (FSDP2)."""
    schedule: str = "1f1b"
    """Order of the passes: a name, as listed by `evenpipe simulate --help`, or a CSV file of evenpipe's or torch's. The
    rows of a file with transfers are executed as they stand, unless vocabulary passes have to be added."""
    stages_per_device: int | None = None
    """Stages of each device, for schedules that leave a choice: interleaved, looped-bfs, gis, gis-h; none: 2 there."""
    group_size: int | None = None
    """Microbatches that a device takes in turn before it changes to its next stage, in interleaved and gis; none: as
    many as there are devices, or as the microbatches allow."""
    memory_limit: tuple[float, ...] | None = None
    """Stage activations that a device may hold at most, for schedules that plan by it: zb-auto, v-budget; one number,
    or one per device; none: as much as 1f1b holds."""
    costs: str | None = None
    """A cost file (`evenpipe profile` writes one) that the schedule is arranged by; none: FLOPs."""
    vocabulary: str = "balanced"
    """Where embedding and output layer live: first-last, redistribute, interlaced, vocab-1, vocab-2; "balanced" is
    vocab-2."""
    microbatches: int | None = None
    """Microbatches per step of each pipeline; none: 4 per device, or as many as the order in a CSV file has."""
    microbatch_size: int = 1
    """Sequences per microbatch. A step trains on replicas * microbatches * microbatch_size sequences."""
    layers_per_stage: tuple[int, ...] | None = None
    """Transformer layers of each stage, first to last: one number per stage, so with several stages per device as many
    numbers as devices times that; none: split evenly, and by cost with "redistribute"."""
    checkpointing: tuple[str, ...] = ("none",)
    """What layers keep for their backward: "none" (all is kept), "full" (only the layer's input; its forward runs a
    second time), "selective" (the results of matrix products and of attention too), or a list with one per layer."""
    compile_layers: bool = False
    """Run every layer through torch.compile; the first steps take longer. Embedding, output layer and loss are not
    compiled."""
    communicators: Literal["per-pair", "per-kind", "one"] = "per-pair"
    """Which transfers share a communicator: those of an ordered pair of devices or of one kind of collective, all hops
    of a direction, or all. Fewer take less memory (with NCCL some 0.5 GB each), and transfers wait for each other."""
    nccl_high_priority: bool = True
    """On GPUs, communication that is ready goes before what compute has queued. No effect on gloo."""
    nccl_channels: int | None = None
    """On GPUs, the most channels that a communicator uses, 1 to 64: each keeps a multiprocessor from compute while it
    communicates; none: NCCL chooses, by the links between the GPUs. No effect on gloo."""
    timeout_seconds: float = 600.0
    """After so many seconds without progress the run ends with an error that names the pass and the peer awaited."""

    def check(self) -> None:
        self.at_least(1, "processes", "replicas", "stages_per_device", "group_size", "microbatches", "microbatch_size")
        self.positive("timeout_seconds")
        self.require("timeout_seconds", self.timeout_seconds <= LONGEST_TIMEOUT, f"at most {LONGEST_TIMEOUT:g}")
        self.require("replicas", self.processes % self.replicas == 0, f"a divisor of the {self.processes} processes")
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
        from evenpipe.schedule.planning import MODES
        from evenpipe.schedule.registry import SCHEDULES, options_of

        if self.from_file:
            self.require("schedule", Path(self.schedule).is_file(), "an existing file, or a name of a schedule")
            options: tuple[str, ...] = ()
        else:
            self.known("schedule", SCHEDULES)
            options = options_of(self.schedule)
        for name in ("group_size", "memory_limit"):  # every schedule may be told how many stages it has
            if name not in options:
                self.require(name, getattr(self, name) is None, f'left out with schedule "{self.schedule}"')
        if self.from_file:
            self.require("stages_per_device", self.stages_per_device is None, "left out with a CSV file")
        self.known("vocabulary", ("balanced", *MODES))

    @property
    def devices(self) -> int:
        """Devices of a pipeline."""
        return self.processes // self.replicas

    @property
    def from_file(self) -> bool:
        """Whether `schedule` is a CSV file."""
        return self.schedule.endswith(".csv")

    @property
    def schedule_options(self) -> dict[str, Any]:
        """What the generator of the schedule is told."""
        limit = self.memory_limit
        options = {
            "stages_per_device": self.stages_per_device,
            "group_size": self.group_size,
            "memory_limit": limit[0] if limit is not None and len(limit) == 1 else limit,
        }
        return {name: value for name, value in options.items() if value is not None}

    @property
    def microbatches_per_step(self) -> int:
        """`microbatches`, or those of the file, or 4 per device."""
        if self.microbatches is not None:
            return self.microbatches
        if self.from_file:
            from evenpipe.schedule.files import read_schedule

            return read_schedule(self.schedule).microbatches
        return 4 * self.devices

    @property
    def sequences_per_step(self) -> int:
        """Sequences in the batch of one step, of all replicas."""
        return self.replicas * self.sequences_per_replica

    @property
    def sequences_per_replica(self) -> int:
        """Sequences in the part of one replica."""
        return self.microbatches_per_step * self.microbatch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig(Section):
    """Which activations go to the host, and what they find there."""

    section: ClassVar[str] = "offload"

    activations: Literal["scheduled", "none", "free", "all"] = "scheduled"
    """"scheduled": what the order says, as those of po-h and po-f do. "none": nothing. "free": all that lowers the
    memory of a device and costs no time, by pipeline.costs. "all": whatever it takes to hold as little as can be."""
    copy_time: tuple[float, ...] = (0.25,)
    """Of what a stage keeps of a microbatch, to the host or back, over its forward and backward together; one number,
    or one per stage. For where pipeline.costs does not say how long copies take; evenpipe plan --offload finds it."""
    layers: tuple[str, ...] = ("offload",)
    """What that means for layers: "offload" moves what a layer keeps for its backward, "keep" leaves it on the device,
    or a list with one of these per layer. With checkpointing "full" only a layer's input is moved."""
    host_memory: str | None = None
    """What one device may take of the host, such as "24GiB", a GPU in powers of two; none: as much as it needs."""
    when_full: Literal["error", "keep"] = "error"
    """When that is taken: end the run, or keep on the device what does not fit."""
    directory: str | None = None
    """On the CPU: where the file is made that activations are written to. It has no name, and is gone with the process;
    none: the system's directory for temporary files."""
    streams: int = 1
    """1: copies to the host and back take turns. 2: each direction has a stream of its own."""

    def check(self) -> None:
        if not self.layers or not set(self.layers) <= {"offload", "keep"}:
            self.require("layers", False, "offload, keep, or a list with one of these per layer")
        self.require("copy_time", bool(self.copy_time) and min(self.copy_time) >= 0, "numbers of at least 0")
        self.require("streams", self.streams in (1, 2), "1 or 2")
        self.require(
            "directory", self.directory is None or Path(self.directory).is_dir(), "an existing directory, or none"
        )
        if self.host_memory is not None:
            self.host_bytes  # noqa: B018  (which refuses what is no size)

    @property
    def host_bytes(self) -> int | None:
        """`host_memory` in bytes."""
        from evenpipe.memory.sizes import parse_size

        return None if self.host_memory is None else parse_size(self.host_memory, "offload.host_memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig(Section):
    """Options of the loss; the fields of `evenpipe.vocabulary.options.LossOptions` that do not come from the model."""

    section: ClassVar[str] = "loss"

    label_smoothing: float = 0.0
    """Probability that is spread evenly over all tokens instead of the label (0 to below 1)."""
    z_loss: float = 0.0
    """Factor of the squared log-sum-exp of the logits, which keeps them from drifting."""
    keep: Literal["probabilities", "nothing"] = "probabilities"
    """What the output layer keeps between its two halves: the probabilities (faster), or nothing (less memory, the
    logits are computed twice)."""
    entropy: bool = False
    """Log the mean entropy of what is predicted, too."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """What works on the logits between matrix products: Triton's kernels, or operations of torch; auto: Triton on a GPU
    where it is installed."""

    def check(self) -> None:
        self.require("label_smoothing", 0 <= self.label_smoothing < 1, "at least 0 and below 1")
        self.at_least(0, "z_loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Section):
    """The optimizer, and the learning rate of each step: a linear warm-up, then a schedule that follows the number of
    steps."""

    section: ClassVar[str] = "optimizer"

    name: str = "adamw"
    """Optimizer of torch: "adamw"; "muon" for the matrices of layers, with AdamW for all else; "adafactor"; "sgd". Or a
    function of yours, "module:function", in the folder that the command is started in or installed: each process calls
    it with its trained parameters, a list of (name, parameter), with `lr` and with the options. It returns a
    `torch.optim.Optimizer`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Table [optimizer.options]: what else that class of torch.optim takes, such as `momentum` of sgd and muon, or what
    your function takes."""
    learning_rate: float = 3e-4
    """Highest learning rate, reached after the warm-up. Muon's matrices and the AdamW beside it share it: by default
    their updates are equally large."""
    schedule: Literal["cosine", "linear", "constant", "warmup-stable-decay"] = "cosine"
    """What the rate does after the warm-up: it falls to the last step, on half a cosine or a line; it stays; or it
    stays and falls at the end, on half a cosine."""
    warmup_steps: int = 100
    """Steps over which the rate grows from 0."""
    minimum_learning_rate_ratio: float = 0.1
    """Learning rate of the last step, as a share of the highest; "constant" does not use it."""
    decay_steps: int | None = None
    """Steps at the end over which "warmup-stable-decay" lowers the rate; none: as decay_share says."""
    decay_share: float | None = None
    """The same as a share of all steps, which follows the time box; none: 0.2, unless there are decay_steps."""
    betas: tuple[float, float] | None = None
    """Decay of the two moments of AdamW per step, also of the AdamW beside muon; none: 0.9 and 0.95."""
    epsilon: float | None = None
    """Added to the root of AdamW's second moment; none: 1e-8."""
    weight_decay: float | None = None
    """Decay of the matrices, decoupled but with sgd; norms and biases have none. None: 0.1 with adamw and muon, else
    0."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this total norm over all devices; none: never."""
    host_share: float = 0.0
    """Share of the two moments of adamw, by elements, that each device has on the host (0 to 1, whole parameters, the
    largest first): they come to the device for the update, bucket by bucket. On the CPU the host's side is a file in
    offload.directory."""

    def check(self) -> None:
        self.positive("learning_rate", "epsilon", "clip_norm")
        self.require("host_share", 0 <= self.host_share <= 1, "between 0 and 1")
        betas = self.betas or ()
        self.require("betas", all(0 <= beta < 1 for beta in betas), "two numbers of at least 0 and below 1")
        self.at_least(0, "weight_decay", "warmup_steps")
        self.require("minimum_learning_rate_ratio", 0 <= self.minimum_learning_rate_ratio <= 1, "between 0 and 1")
        self._check_name()
        self._check_decay()

    def _check_name(self) -> None:
        if self.is_own:
            check_name("optimizer.name", self.name)
        elif self.name not in OPTIMIZER_DEFAULTS:
            raise InputError(unknown("optimizer.name", self.name, (*OPTIMIZER_DEFAULTS, "module:function")))
        for name in ("betas", "epsilon", "weight_decay"):
            fits = getattr(self, name) is None or name in OPTIMIZER_DEFAULTS.get(self.name, {})
            self.require(name, fits, f"left out with name {show(self.name)}")
        self.require("host_share", not self.host_share or self.name == "adamw", f"0 with name {show(self.name)}")

    def _check_decay(self) -> None:
        self.at_least(1, "decay_steps")
        self.require("decay_share", self.decay_share is None or 0 < self.decay_share <= 1, "above 0 and at most 1")
        for name in ("decay_steps", "decay_share"):
            fits = getattr(self, name) is None or self.schedule == "warmup-stable-decay"
            self.require(name, fits, f"left out with schedule {show(self.schedule)}")
        fits = self.decay_share is None or self.decay_steps is None
        self.require("decay_share", fits, "left out when optimizer.decay_steps is given")

    @property
    def is_own(self) -> bool:
        """Whether `name` is a function of the user's."""
        return ":" in self.name

    def given(self, name: str) -> Any:
        """The value of `betas`, `epsilon` or `weight_decay`, or the default of this optimizer."""
        value = getattr(self, name)
        return OPTIMIZER_DEFAULTS[self.name][name] if value is None else value


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig(Section):
    """How long, from which seed, and how often it is evaluated."""

    section: ClassVar[str] = "training"

    steps: int | None = None
    """Optimizer steps; none: as many as `epochs` are, or 1000."""
    epochs: float | None = None
    """In place of `steps`: how often the rows are gone through, each time in another order. The last step is the one
    with which all of them have been, so it may begin the next epoch."""
    minutes: float | None = None
    """Time box: the speed of the first steps decides how many steps fit, never more than `steps` or `epochs`; learning
    rate and end follow that number. A run killed before its first checkpoint decides again. None: all of them, however
    long they take."""
    seed: int = 0
    """Draws fresh weights and the order of the data."""
    evaluate_every_steps: int | None = None
    """Steps between evaluations; none: only at the end."""
    evaluation_batches: int | None = 8
    """Batches of the rows to evaluate on, at most, and always the same ones; none: all. The last may be smaller than
    the others."""
    callbacks: tuple[str, ...] = ()
    """Classes derived from evenpipe.Callback, as "my_module:MyCallback": their methods are called after steps,
    evaluations and checkpoints, on every process. Modules in the folder of the command are found."""

    def check(self) -> None:
        self.at_least(1, "steps", "evaluate_every_steps", "evaluation_batches")
        self.positive("minutes", "epochs")
        self.require("epochs", self.epochs is None or self.steps is None, "left out when training.steps is given")
        for number, name in enumerate(self.callbacks):
            check_name(f"training.callbacks[{number}]", name)
        self.require("seed", 0 <= self.seed < 2**63, "at least 0 and below 2**63")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(Section):
    """When the state is saved. The same command started again goes on from the newest complete checkpoint."""

    section: ClassVar[str] = "checkpoint"

    every_steps: int | None = 100
    """Steps between checkpoints; none: only at the end."""
    keep: int = 2
    """Newest checkpoints that are kept; older ones are deleted."""
    folder: str | None = None
    """Where they are kept; none: `checkpoints` in output.folder."""

    def check(self) -> None:
        self.at_least(1, "every_steps", "keep")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig(Section):
    """Where results go."""

    section: ClassVar[str] = "output"

    folder: str = "runs/default"
    """Folder of this run: metrics.jsonl, TensorBoard files, tokenizer, checkpoints, the trained model, report.json."""
    log_every_steps: int = 1
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = True
    """Write the same figures for TensorBoard."""
    trackers: tuple[Literal["wandb", "trackio"], ...] = ()
    """Send them to Weights & Biases ("wandb"), or keep them in trackio's database, where these packages are installed.
    A run that is started again goes on in the same run there."""
    project: str = "evenpipe"
    """Project of these trackers; the run has the name of its folder."""
    trace_steps: tuple[int, ...] = ()
    """Steps, counted from 1, of which a trace is written: what each device did and waited for, for `evenpipe draw` and
    `evenpipe profile --from`. The first steps are slower than those that follow."""
    trace_folder: str | None = None
    """Where traces go; none: `traces` in output.folder."""
    export: bool = True
    """At the end, write the model as a Hugging Face folder that `from_pretrained` loads."""
    export_folder: str | None = None
    """Where to; none: `model` in output.folder."""

    def check(self) -> None:
        self.require("folder", self.folder != "", "a folder")
        differ = len(set(self.trackers)) == len(self.trackers)
        self.require("trackers", differ, "names that differ")
        self.require("project", self.project != "", "a name")
        self.at_least(1, "log_every_steps")
        self.require("trace_steps", min(self.trace_steps, default=1) >= 1, "numbers of steps, at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig(Section):
    """Text that the exported model writes at the end."""

    section: ClassVar[str] = "sample"

    prompts: tuple[str, ...] = ()
    """Beginnings that the model continues; none given: no text."""
    new_tokens: int = 120
    """Tokens per text, at most."""
    temperature: float = 0.7
    """Below 1 favours likely tokens, 0 always takes the likeliest."""
    top_k: int = 40
    """Draw among so many of the likeliest tokens; 0: among all."""

    def check(self) -> None:
        self.at_least(1, "new_tokens")
        self.at_least(0, "temperature", "top_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run. Read one with `evenpipe.train.config_file.load_config`."""

    model: ModelConfig
    data: DataConfig
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    def __post_init__(self) -> None:
        keeps_weights = self.model.source is not None and not self.model.fresh_weights
        if keeps_weights and self.tokenizer.vocabulary_size is not None:
            raise InputError(
                f"tokenizer.vocabulary_size is {self.tokenizer.vocabulary_size}, but must be left out when training "
                f"continues from the weights of model.source ({show(self.model.source)})"
            )
        if self.training.evaluate_every_steps is not None and not self.data.validates:
            raise InputError(
                f"training.evaluate_every_steps is {self.training.evaluate_every_steps}, but must be none when "
                "data.validation_fraction is 0 and no data.validation_files are given"
            )
        if self.sample.prompts and not self.output.export:
            raise InputError("output.export is false, but must be true when sample.prompts are given")

    @property
    def run_folder(self) -> Path:
        """Folder of this run."""
        return Path(self.output.folder)

    @property
    def cache_folder(self) -> Path:
        """Folder of the prepared tokens."""
        return self.run_folder / "data" if self.data.cache_folder is None else Path(self.data.cache_folder)

    @property
    def checkpoint_folder(self) -> Path:
        """Folder of the checkpoints."""
        return self.run_folder / "checkpoints" if self.checkpoint.folder is None else Path(self.checkpoint.folder)

    @property
    def trace_folder(self) -> Path:
        """Folder of the traces."""
        return self.run_folder / "traces" if self.output.trace_folder is None else Path(self.output.trace_folder)

    @property
    def export_folder(self) -> Path:
        """Folder of the exported model."""
        return self.run_folder / "model" if self.output.export_folder is None else Path(self.output.export_folder)

    @property
    def folders(self) -> dict[str, Path]:
        """Folders that the run writes into, by the field that says where."""
        found = {
            "output.folder": self.run_folder,
            "data.cache_folder": self.cache_folder,
            "checkpoint.folder": self.checkpoint_folder,
        }
        if self.output.trace_steps:
            found["output.trace_folder"] = self.trace_folder
        if self.output.export:
            found["output.export_folder"] = self.export_folder.parent
        return found

    @property
    def trained_tokenizer_entries(self) -> int | None:
        """Size of the tokenizer to train, or None when an existing one is used."""
        if self.tokenizer.source is not None:
            return None
        if self.tokenizer.vocabulary_size is not None:
            return self.tokenizer.vocabulary_size
        return DEFAULT_TOKENIZER_ENTRIES if self.model.source is None else None

    @property
    def tokenizer_source(self) -> str | None:
        """Folder or hub name of the tokenizer, or None when one is trained."""
        return None if self.trained_tokenizer_entries is not None else self.tokenizer.source or self.model.source


def _listed(names: list[str]) -> str:
    return " and ".join(names) if names else "none"
