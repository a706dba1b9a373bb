"""Sections of the configuration for what a run does and writes: optimizer, training, checkpoints, output, samples."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from evenpipe.declaration import Declared, NonNegative, NonNegativeInt, Positive, PositiveInt, Share, declare
from evenpipe.train.named import check_name
from evenpipe.words import show, unknown

DEFAULT_STEPS = 1000
Beta = Annotated[float, Ge(0), Lt(1)]
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1},
    "muon": {"betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1},
    "adafactor": {"weight_decay": 0.0},
    "sgd": {"weight_decay": 0.0},
}
"""Optimizers by name, and the fields of each in addition to its options."""


@declare("optimizer")
class OptimizerConfig(Declared):
    """The optimizer, and the learning rate of each step: a linear warm-up, then a schedule over all steps."""

    name: str = "adamw"
    """Optimizer: "adamw"; "muon" (for the matrices of layers; AdamW trains everything else); "adafactor"; "sgd"; or
    your own function, "module:function", from an installed module or one in the folder in which the command is started.
    Each process calls the function with a list of (name, parameter), with `lr` and with the options; it returns a
    `torch.optim.Optimizer`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Table [optimizer.options]: other arguments of the optimizer's class in torch.optim, such as `momentum` of sgd and
    muon, or of your function."""
    learning_rate: Positive = 3e-4
    """Highest learning rate, reached after the warm-up. With muon, AdamW uses it too: by default the updates of both
    are about equally large."""
    schedule: Literal["cosine", "linear", "constant", "warmup-stable-decay"] = "cosine"
    """Learning rate after the warm-up. "cosine" and "linear": it falls until the last step. "constant": it stays.
    "warmup-stable-decay": it stays, then falls along half a cosine."""
    warmup_steps: NonNegativeInt = 100
    """Steps over which the rate grows linearly from 0."""
    minimum_learning_rate_ratio: Share = 0.1
    """Learning rate of the last step divided by the highest one; "constant" ignores it."""
    decay_steps: PositiveInt | None = None
    """Steps at the end over which "warmup-stable-decay" lowers the rate. Default: decay_share of all steps."""
    decay_share: Annotated[float, Gt(0), Le(1)] | None = None
    """decay_steps as a share of all steps, also of those that the time box decides. Default: 0.2."""
    betas: tuple[Beta, Beta] | None = None
    """Decay of AdamW's two moments per step, also of AdamW with muon. Default: 0.9 and 0.95."""
    epsilon: Positive | None = None
    """Added to the square root of AdamW's second moment. Default: 1e-8."""
    weight_decay: NonNegative | None = None
    """Weight decay of parameters with two or more dimensions; norms and biases do not decay. It is decoupled, except
    with sgd. Default: 0.1 with adamw and muon, else 0."""
    clip_norm: Positive | None = 1.0
    """Maximum norm of all gradients together; larger gradients are scaled down to it. none: no clipping."""
    host_share: Share = 0.0
    """Share of adamw's two moments that each device keeps on the host, by elements (0 to 1; whole parameters, the
    largest first). They visit the device for the update, bucket by bucket. On the CPU, a file in offload.directory
    takes the place of host memory."""

    def check(self) -> None:
        self._check_name()
        self._check_decay()

    def _check_name(self) -> None:
        if self.is_own:
            check_name("optimizer.name", self.name)
        elif self.name not in OPTIMIZER_DEFAULTS:
            raise unknown("optimizer.name", self.name, (*OPTIMIZER_DEFAULTS, "module:function"))
        for name in ("betas", "epsilon", "weight_decay"):
            fits = getattr(self, name) is None or name in OPTIMIZER_DEFAULTS.get(self.name, {})
            self.require(name, fits, f"left out with name {show(self.name)}")
        self.require("host_share", not self.host_share or self.name == "adamw", f"0 with name {show(self.name)}")

    def _check_decay(self) -> None:
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


@declare("training")
class TrainingConfig(Declared):
    """Length of the run, seed, evaluation and callbacks."""

    steps: PositiveInt | None = None
    """Optimizer steps. Default: 1000, unless `epochs` are given."""
    epochs: Positive | None = None
    """Number of passes over the training rows, instead of `steps`; each epoch has its own order. The last step
    completes the last epoch, and may also take rows of the next one."""
    minutes: Positive | None = None
    """Time box: the speed of the first steps decides how many steps fit, but never more than `steps` or `epochs`. The
    learning rate follows that number. A run that is killed before its first checkpoint decides again. Default: no time
    limit."""
    seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    """Seed of fresh weights and of the order of the data."""
    deterministic: bool = False
    """Only algorithms that give the same bits every time. On a GPU the backward of fused attention is not one of them,
    so that a resumed run equals an uninterrupted one to the last bit only with this, at some cost in speed."""
    evaluate_every_steps: PositiveInt | None = None
    """Steps between evaluations. Default: one evaluation at the end."""
    evaluation_batches: PositiveInt | None = 8
    """Maximum number of validation batches per evaluation, always the same ones; none: all. The last batch may be
    smaller."""
    callbacks: tuple[str, ...] = ()
    """Subclasses of evenpipe.Callback, as "my_module:MyCallback", from installed modules or the folder in which the
    command is started. Every process calls their methods after steps, evaluations and checkpoints."""

    def check(self) -> None:
        self.require("epochs", self.epochs is None or self.steps is None, "left out when training.steps is given")
        for number, name in enumerate(self.callbacks):
            check_name(f"training.callbacks[{number}]", name)


@declare("checkpoint")
class CheckpointConfig(Declared):
    """When to save the state. The same command, repeated, continues from the newest complete checkpoint."""

    every_steps: PositiveInt | None = 100
    """Steps between checkpoints; none: one at the end."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep; older ones are deleted, except the newest healthy one."""
    resume_from: PositiveInt | None = None
    """Step of an older checkpoint to go back to, for example after a divergence. Later checkpoints are renamed to
    `step-NNNNNNNN.abandoned`, and each is deleted when training has passed its step. Repeated with the same value, the
    command continues what it has begun. Default: the newest checkpoint."""
    folder: str | None = None
    """Folder of the checkpoints. Default: `checkpoints` in output.folder."""


@declare("output")
class OutputConfig(Declared):
    """Folders and contents of the results."""

    folder: str = "runs/default"
    """Folder of this run: metrics.jsonl, TensorBoard files, tokenizer, checkpoints, the trained model, report.json,
    for models with experts expert_load.svg."""
    log_every_steps: PositiveInt = 1
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = True
    """Write the metrics for TensorBoard too."""
    trackers: tuple[Literal["wandb", "trackio"], ...] = ()
    """Also send the metrics to Weights & Biases ("wandb") or to trackio's database ("trackio"). Install the package
    that you name. A run that starts again continues the same run there."""
    project: str = "evenpipe"
    """Project of the trackers. The run's name there is the name of its folder."""
    trace_steps: tuple[PositiveInt, ...] = ()
    """Steps to write a trace of, counted from 1: the passes and waits of each device, for `evenpipe draw` and
    `evenpipe profile --from`. The first steps are slower than later ones."""
    trace_folder: str | None = None
    """Folder of the traces. Default: `traces` in output.folder."""
    export: bool = True
    """At the end, write the model as a Hugging Face folder that `from_pretrained` loads. What the run has not trained
    (config, generation config, tokenizer, Python code) is as in model.source and tokenizer.source."""
    export_folder: str | None = None
    """Folder of the exported model. Default: `model` in output.folder."""
    dtype: Literal["source", "float32", "bfloat16", "float16"] = "source"
    """Dtype of the exported weights. "source": every tensor has the dtype in which model.source has it; fresh weights
    are float32. With "float32", 16-bit weights keep the precision in which they were trained, at twice the size."""

    def check(self) -> None:
        self.require("folder", self.folder != "", "a folder")
        differ = len(set(self.trackers)) == len(self.trackers)
        self.require("trackers", differ, "different names")
        self.require("project", self.project != "", "a name")


@declare("sample")
class SampleConfig(Declared):
    """Texts that the exported model writes at the end of the run."""

    prompts: tuple[str, ...] = ()
    """Beginnings of texts for the model to continue. Default: no texts."""
    new_tokens: PositiveInt = 120
    """Maximum number of new tokens per text."""
    temperature: NonNegative = 0.7
    """A temperature below 1 favours likely tokens; 0 always takes the likeliest."""
    top_k: NonNegativeInt = 40
    """Number of likeliest tokens to draw from; 0: all."""
