"""The configuration of a training run: one dataclass per section of the TOML file, a docstring under every field.

`evenpipe train --help` prints these docstrings. This module does not import torch, so mistakes are reported at once.
Paths are relative to the folder in which the command is started.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from evenpipe.communication.nccl import MOST_CHANNELS
from evenpipe.errors import InputError
from evenpipe.train.named import check_name
from evenpipe.train.section import Section, show, unknown

PYTHON_STANDARD_LIBRARY = "python-standard-library"
DEFAULT_TOKENIZER_ENTRIES = 32768
DEFAULT_STEPS = 1000
DEFAULT_VALIDATION_FRACTION = 0.01
MOST_TOKENIZER_ENTRIES = 10_000_000
"""The trainer allocates memory for all entries at once, and kills the process if there is not enough."""
DEFAULT_END_OF_TEXT = "<|endoftext|>"
BYTE_VALUES = 256
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1},
    "muon": {"betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1},
    "adafactor": {"weight_decay": 0.0},
    "sgd": {"weight_decay": 0.0},
}
"""Optimizers by name, and the fields of each in addition to its options."""
LONGEST_TIMEOUT = 1e9
"""Seconds, about thirty years: system clocks accept no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(Section):
    """The model to train: an existing one (`source`), or a new one (`architecture` and `config`)."""

    section: ClassVar[str] = "model"

    source: str | None = None
    """Hub name or local folder of a transformers causal language model; training continues from its weights."""
    fresh_weights: bool = False
    """Use only the shape of `source`, with random weights drawn from training.seed."""
    architecture: str | None = None
    """Model type of transformers, such as "llama" or "qwen3", for a model with fresh weights described by `config`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Table [model.config]: fields of the transformers config of `architecture`. Other fields keep their defaults; the
    tokenizer decides the vocabulary size and the end-of-text id."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations and matrix products; parameters, gradients and optimizer state are always float32. "auto":
    bfloat16 on a GPU, float32 on the CPU."""
    trust_remote_code: bool = False
    """Run the Python code that comes with `source`."""
    self_check: bool = True
    """Before training, compare a small copy of the model, cut into stages, with the uncut copy. This takes about a
    second, and refuses an architecture that evenpipe would train wrongly."""

    def check(self) -> None:
        if (self.source is None) == (self.architecture is None):
            given = "neither is" if self.source is None else "both are"
            raise InputError(f"model needs either source or architecture, but {given} given")
        if self.source is not None:
            self.require("config", not self.config, "left out when model.source is given")
        self.require("fresh_weights", not self.fresh_weights or self.source is not None, "false without model.source")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Section):
    """The training data: exactly one of `files`, `dataset` and `corpus`."""

    section: ClassVar[str] = "data"

    files: tuple[str, ...] = ()
    """Files or patterns (`corpus/**/*.py`), read in the order of their names. `.jsonl`, `.json` and `.ndjson` contain
    one JSON object per line, `.parquet` a table. Any other file is one UTF-8 document; line ends are read as \\n."""
    dataset: str | None = None
    """Dataset of the hub, or a local folder that `datasets.load_dataset` reads or `save_to_disk` wrote. In a folder of
    plain text, every file is one document."""
    dataset_config: str | None = None
    """Configuration of `dataset`, if it has several."""
    dataset_split: str = "train"
    """Split of `dataset`, or a part of one, such as "train[:1%]"."""
    corpus: str | None = None
    """"python-standard-library": the sources of the running Python's library, without tests and character tables. Names
    after a colon select modules and packages: "python-standard-library:asyncio,json"."""
    text_field: str = "text"
    """Field or column of the document in JSON lines, parquet and datasets."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """For bytes that are not UTF-8: "strict" ends with an error that names file and byte, "replace" reads a replacement
    character."""
    sequence_length: int = 1024
    """Tokens per row. Documents are joined by the end-of-text token and cut into rows of this length, so a row may
    contain several documents, and attention crosses their borders. The last incomplete row is dropped."""
    validation_files: tuple[str, ...] = ()
    """Files or patterns of documents to evaluate on, read like `files`. Documents that `files` matches too are not
    trained on."""
    validation_split: str | None = None
    """Split of `dataset` to evaluate on."""
    validation_fraction: float | None = None
    """Share of the rows that becomes validation rows, evenly spread over the data; the run does not train on them.
    Default: 0.01, or 0 with validation_files or validation_split."""
    cache_folder: str | None = None
    """Folder of the prepared tokens; a run with the same sources and tokenizer uses them again. Default: `data` in
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
            accepted = f'"{PYTHON_STANDARD_LIBRARY}", or that with a colon and names of its modules'
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
        """Whether there is validation data."""
        return bool(self.held_back or self.validation_files or self.validation_split)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig(Section):
    """The tokenizer: an existing one, the one of model.source, or one trained on the data."""

    section: ClassVar[str] = "tokenizer"

    source: str | None = None
    """Hub name or local folder of a transformers tokenizer. Default: the tokenizer of model.source; without
    model.source, the run trains one."""
    vocabulary_size: int | None = None
    """Entries of the byte-level BPE tokenizer that the run trains on the data. Default: 32768; a small corpus may yield
    fewer."""
    end_of_text: str | None = None
    """Token that ends every document. Default: the tokenizer's own; "<|endoftext|>" in one that the run trains."""

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
    """The layout: how the model is spread over devices and the batch over replicas and microbatches, and the order of
    the passes."""

    section: ClassVar[str] = "pipeline"

    processes: int = 1
    """Processes of the run, one per device: the devices of a pipeline times `replicas`. Under torchrun, the number of
    processes that it starts."""
    replicas: int = 1
    """Number of pipelines side by side. Each has the whole model and its own part of every batch."""
    data_parallel: Literal["replicate", "shard"] = "replicate"
    """"replicate": every replica keeps all parameters. "shard": replicas share the rows of parameters, gradients and
    optimizer state, and gather parameters during a step (FSDP2)."""
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
    """Cost file with measured times for arranging the schedule (`evenpipe profile` writes one). Default: FLOPs."""
    vocabulary: str = "balanced"
    """Placement of embedding and output layer: first-last, redistribute, interlaced, vocab-1, vocab-2; "balanced" is
    vocab-2."""
    microbatches: int | None = None
    """Microbatches per step in each pipeline. Default: 4 per device, or the number in the CSV file."""
    microbatch_size: int = 1
    """Sequences per microbatch. A step trains on replicas * microbatches * microbatch_size sequences."""
    layers_per_stage: tuple[int, ...] | None = None
    """Transformer layers of each stage, first to last: one number per stage of the whole pipeline. Default: split
    evenly, or by cost with vocabulary "redistribute"."""
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
        if self.microbatches is not None:
            return self.microbatches
        if self.from_file:
            from evenpipe.schedule.files import read_schedule

            return read_schedule(self.schedule).microbatches
        return 4 * self.devices

    @property
    def sequences_per_step(self) -> int:
        """Sequences in the batch of one step, over all replicas."""
        return self.replicas * self.sequences_per_replica

    @property
    def sequences_per_replica(self) -> int:
        """Sequences of one replica in one step."""
        return self.microbatches_per_step * self.microbatch_size


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
        self.require("copy_time", bool(self.copy_time) and min(self.copy_time) >= 0, "numbers of at least 0")
        self.require("streams", self.streams in (1, 2), "1 or 2")
        self.require(
            "directory", self.directory is None or Path(self.directory).is_dir(), "an existing directory, or none"
        )
        if self.host_memory is not None:
            self.host_bytes  # noqa: B018  (raises InputError unless it is a size)

    @property
    def host_bytes(self) -> int | None:
        """`host_memory` in bytes."""
        from evenpipe.memory.sizes import parse_size

        return None if self.host_memory is None else parse_size(self.host_memory, "offload.host_memory")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Section):
    """The optimizer, and the learning rate of each step: a linear warm-up, then a schedule over all steps."""

    section: ClassVar[str] = "optimizer"

    name: str = "adamw"
    """Optimizer: "adamw"; "muon" (for the matrices of layers; AdamW trains everything else); "adafactor"; "sgd"; or
    your own function, "module:function", from an installed module or one in the folder in which the command is started.
    Each process calls the function with a list of (name, parameter), with `lr` and with the options; it returns a
    `torch.optim.Optimizer`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Table [optimizer.options]: other arguments of the optimizer's class in torch.optim, such as `momentum` of sgd and
    muon, or of your function."""
    learning_rate: float = 3e-4
    """Highest learning rate, reached after the warm-up. With muon, AdamW uses it too: by default the updates of both
    are about equally large."""
    schedule: Literal["cosine", "linear", "constant", "warmup-stable-decay"] = "cosine"
    """Learning rate after the warm-up. "cosine" and "linear": it falls until the last step. "constant": it stays.
    "warmup-stable-decay": it stays, then falls along half a cosine."""
    warmup_steps: int = 100
    """Steps over which the rate grows linearly from 0."""
    minimum_learning_rate_ratio: float = 0.1
    """Learning rate of the last step divided by the highest one; "constant" ignores it."""
    decay_steps: int | None = None
    """Steps at the end over which "warmup-stable-decay" lowers the rate. Default: decay_share of all steps."""
    decay_share: float | None = None
    """decay_steps as a share of all steps, also of those that the time box decides. Default: 0.2."""
    betas: tuple[float, float] | None = None
    """Decay of AdamW's two moments per step, also of AdamW with muon. Default: 0.9 and 0.95."""
    epsilon: float | None = None
    """Added to the square root of AdamW's second moment. Default: 1e-8."""
    weight_decay: float | None = None
    """Weight decay of parameters with two or more dimensions; norms and biases do not decay. It is decoupled, except
    with sgd. Default: 0.1 with adamw and muon, else 0."""
    clip_norm: float | None = 1.0
    """Maximum norm of all gradients together; larger gradients are scaled down to it. none: no clipping."""
    host_share: float = 0.0
    """Share of adamw's two moments that each device keeps on the host, by elements (0 to 1; whole parameters, the
    largest first). They visit the device for the update, bucket by bucket. On the CPU, a file in offload.directory
    takes the place of host memory."""

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
        """Whether `name` is a user's function."""
        return ":" in self.name

    def given(self, name: str) -> Any:
        """Return the value of `betas`, `epsilon` or `weight_decay`, or the default of this optimizer."""
        value = getattr(self, name)
        return OPTIMIZER_DEFAULTS[self.name][name] if value is None else value


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig(Section):
    """Length of the run, seed, evaluation and callbacks."""

    section: ClassVar[str] = "training"

    steps: int | None = None
    """Optimizer steps. Default: 1000, unless `epochs` are given."""
    epochs: float | None = None
    """Number of passes over the training rows, instead of `steps`; each epoch has its own order. The last step
    completes the last epoch, and may also take rows of the next one."""
    minutes: float | None = None
    """Time box: the speed of the first steps decides how many steps fit, but never more than `steps` or `epochs`. The
    learning rate follows that number. A run that is killed before its first checkpoint decides again. Default: no time
    limit."""
    seed: int = 0
    """Seed of fresh weights and of the order of the data."""
    evaluate_every_steps: int | None = None
    """Steps between evaluations. Default: one evaluation at the end."""
    evaluation_batches: int | None = 8
    """Maximum number of validation batches per evaluation, always the same ones; none: all. The last batch may be
    smaller."""
    callbacks: tuple[str, ...] = ()
    """Subclasses of evenpipe.Callback, as "my_module:MyCallback", from installed modules or the folder in which the
    command is started. Every process calls their methods after steps, evaluations and checkpoints."""

    def check(self) -> None:
        self.at_least(1, "steps", "evaluate_every_steps", "evaluation_batches")
        self.positive("minutes", "epochs")
        self.require("epochs", self.epochs is None or self.steps is None, "left out when training.steps is given")
        for number, name in enumerate(self.callbacks):
            check_name(f"training.callbacks[{number}]", name)
        self.require("seed", 0 <= self.seed < 2**63, "at least 0 and below 2**63")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(Section):
    """When to save the state. The same command, repeated, continues from the newest complete checkpoint."""

    section: ClassVar[str] = "checkpoint"

    every_steps: int | None = 100
    """Steps between checkpoints; none: one at the end."""
    keep: int = 2
    """Number of newest checkpoints to keep; older ones are deleted."""
    folder: str | None = None
    """Folder of the checkpoints. Default: `checkpoints` in output.folder."""

    def check(self) -> None:
        self.at_least(1, "every_steps", "keep")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig(Section):
    """Folders and contents of the results."""

    section: ClassVar[str] = "output"

    folder: str = "runs/default"
    """Folder of this run: metrics.jsonl, TensorBoard files, tokenizer, checkpoints, the trained model, report.json."""
    log_every_steps: int = 1
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = True
    """Write the metrics for TensorBoard too."""
    trackers: tuple[Literal["wandb", "trackio"], ...] = ()
    """Also send the metrics to Weights & Biases ("wandb") or to trackio's database ("trackio"). Install the package
    that you name. A run that starts again continues the same run there."""
    project: str = "evenpipe"
    """Project of the trackers. The run's name there is the name of its folder."""
    trace_steps: tuple[int, ...] = ()
    """Steps to write a trace of, counted from 1: the passes and waits of each device, for `evenpipe draw` and
    `evenpipe profile --from`. The first steps are slower than later ones."""
    trace_folder: str | None = None
    """Folder of the traces. Default: `traces` in output.folder."""
    export: bool = True
    """At the end, write the model as a Hugging Face folder that `from_pretrained` loads."""
    export_folder: str | None = None
    """Folder of the exported model. Default: `model` in output.folder."""

    def check(self) -> None:
        self.require("folder", self.folder != "", "a folder")
        differ = len(set(self.trackers)) == len(self.trackers)
        self.require("trackers", differ, "different names")
        self.require("project", self.project != "", "a name")
        self.at_least(1, "log_every_steps")
        self.require("trace_steps", min(self.trace_steps, default=1) >= 1, "numbers of steps, at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig(Section):
    """Texts that the exported model writes at the end of the run."""

    section: ClassVar[str] = "sample"

    prompts: tuple[str, ...] = ()
    """Beginnings of texts for the model to continue. Default: no texts."""
    new_tokens: int = 120
    """Maximum number of new tokens per text."""
    temperature: float = 0.7
    """A temperature below 1 favours likely tokens; 0 always takes the likeliest."""
    top_k: int = 40
    """Number of likeliest tokens to draw from; 0: all."""

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
        """Folders that the run writes into, by the field that names them."""
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
