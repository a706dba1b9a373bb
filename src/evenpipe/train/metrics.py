"""Metrics of a run while it trains: metrics.jsonl, TensorBoard files, trackers, and a progress bar.

Only the first process of the run writes them. A line of metrics.jsonl is one JSON object: a logged step
(`StepMetrics`), or an evaluation (step, validation_loss, validation_tokens). Loss fields of a resumed run equal those
of an uninterrupted one; only fields that measure time and memory differ.

"loss" is always the loss of one step, also on the console and in report.json; the smoothed loss is "running mean".
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from evenpipe.errors import InputError
from evenpipe.train.trackers import Tracker, scalars
from evenpipe.words import count

if TYPE_CHECKING:
    from torch import Tensor

WINDOW_STEPS = 50
PLAIN_LINE_SECONDS = 10.0
SHOWN_SHARES = 4
"""Maximum number of devices whose busy shares the console shows individually."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMetrics:
    """How tokens are spread over experts, in one step."""

    expert_load_most: tuple[float, ...]
    """For each layer with experts: the tokens of its busiest expert, relative to the mean."""
    expert_load_least: tuple[float, ...]
    """The same for the least busy expert."""
    experts_without_tokens: int
    """Over all layers."""

    @classmethod
    def of(cls, load: Tensor) -> ExpertMetrics:
        """load: as in `StepResult.expert_load`."""
        mean = load.double().mean(1, keepdim=True)
        shares = load / mean.where(mean > 0, 1)
        return cls(
            expert_load_most=tuple(shares.amax(1).tolist()),
            expert_load_least=tuple(shares.amin(1).tolist()),
            experts_without_tokens=int((load == 0).sum()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One logged step."""

    step: int
    """Number of the step; the first is 1."""
    epoch: float
    """Passes over the training rows, including this step."""
    loss: float
    """Mean over the valid tokens of this step, with the weights before its update."""
    running_mean_loss: float
    """See `RunningMean`. It scatters less than single steps, but lags behind a falling loss."""
    tokens: int
    """Tokens trained on since the beginning of the run, including earlier starts."""
    tokens_per_second: float
    """Speed since the previous line."""
    learning_rate: float
    gradient_norm: float
    """Norm of all gradients, before clipping."""
    busy: tuple[float, ...] | None
    """Share of the time (0 to 1) that each device, or each of its tensor ranks, spent in passes since the previous
    line. None on GPUs, whose time the host does not see; the line then omits it."""
    seconds: float
    """Wall time since the previous line."""
    teraflops_per_second: float
    """Model TFLOP/s of each process since the previous line: `training_flops` per token (forward and backward, without
    recomputation and masked pairs of attention) * tokens per second / processes / 1e12."""
    peak_memory_bytes: tuple[int, ...]
    """Peak memory of each process in steps since the previous line: allocated on a GPU; on the CPU the largest resident
    set of the process so far."""
    model_flops_utilization: float | None = None
    """Model FLOP/s relative to the peak of all GPUs (MFU, 0 to 1); the line omits it if the peak of any GPU is not
    known."""
    entropy: float | None = None
    """`StepResult.entropy` if `[loss] entropy` is set; else the line omits it."""
    experts: ExpertMetrics | None = None
    """For a model with experts; its fields appear next to the others in the line."""


@dataclass(slots=True)
class RunningMean:
    """Mean of the losses so far; after 50 steps, exponential with weight 1/50 for each new one."""

    steps: int = 0
    mean: float = 0.0

    def add(self, loss: float) -> float:
        """Add the loss of the next step and return the new mean."""
        self.steps += 1
        self.mean += (loss - self.mean) / min(self.steps, WINDOW_STEPS)
        return self.mean


class MetricsFile:
    """metrics.jsonl. Every line is appended immediately by a single write, so a killed process loses no line."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """Open the file for a run that continues after `resume_step` (0: from the beginning).

        Lines of later steps and an incomplete last line are removed: the file then equals that of an uninterrupted run.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last_step = 0
        """Last step that an earlier start of the run has logged, including removed lines."""
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            self.last_step = max((step for step, _ in _complete_lines(text)), default=0)
            remaining = kept_lines(text, resume_step)
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_text(remaining, encoding="utf-8")
            temporary.replace(path)
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line. Numbers that are not finite become null, because JSON cannot represent them."""
        finite = {key: _finite(value) for key, value in record.items()}
        self._file.write((json.dumps(finite, allow_nan=False) + "\n").encode())

    def sync(self) -> None:
        """Wait until all lines are on the disk. Call it before a checkpoint is published."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        self._file.close()


def kept_lines(text: str, resume_step: int) -> str:
    """Return the complete lines of metrics.jsonl up to and including `resume_step`."""
    return "".join(line for step, line in _complete_lines(text) if step <= resume_step)


def _complete_lines(text: str) -> Iterator[tuple[int, str]]:
    """Iterate over (step, line) of metrics.jsonl."""
    for line in text.splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if line.endswith("\n"):
            yield step, line


class TensorBoard:
    """The numbers of metrics.jsonl as TensorBoard scalars."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        """Raises `InputError` if TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "output.tensorboard is true, but TensorBoard is not installed: pip install tensorboard"
            ) from None
        # purge_step hides values of later steps from an interrupted run
        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)
        self.close = self._writer.close

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one scalar per number; a list becomes one per device."""
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["step"])


class Progress:
    """A progress bar on a terminal, else a plain line every ten seconds."""

    def __init__(
        self,
        steps: int,
        steps_done: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._stream = stream or sys.stderr
        self._clock = clock
        self._next_line = -math.inf
        self._first: tuple[int, float] | None = None
        """Number and time of the first step shown, which is slower than the others."""
        self._bar: Any = None
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=steps, initial=steps_done, file=self._stream, unit="step", dynamic_ncols=True)

    def set_steps(self, steps: int) -> None:
        """Update the number of steps, which is now known better (time box)."""
        self._steps = steps
        if self._bar is not None:
            self._bar.total = steps
            self._bar.refresh()

    def show(self, metrics: StepMetrics) -> None:
        """Show a logged step."""
        text = progress_text(metrics)
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(metrics.step - self._bar.n)
            return
        now = self._clock()
        if now >= self._next_line or metrics.step >= self._steps:
            self._next_line = now + PLAIN_LINE_SECONDS
            self.say(f"step {metrics.step}/{self._steps}  {text}{self._time_left(metrics.step, now)}")
        self._first = self._first or (metrics.step, now)

    def _time_left(self, step: int, now: float) -> str:
        """Return the time left at the speed since the first step, evaluations and saves included, in words."""
        if self._first is None or step >= self._steps:
            return ""
        first, then = self._first
        return f"  {time_text((self._steps - step) * (now - then) / (step - first))} left"

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()


def progress_text(metrics: StepMetrics) -> str:
    """Return losses, learning rate, gradient norm, speed and busy shares of devices:

    `epoch 1.24  loss 5.123  running mean 5.345  rate 2.9e-04  norm 1.23  1,234 tokens/s  busy 93 91 95 92 %`

    With more devices, only the least and the most busy ones are shown.
    """
    shares = [f"{100 * share:.0f}" for share in metrics.busy or ()]
    busy = " ".join(shares) if len(shares) <= SHOWN_SHARES else f"{min(shares, key=int)} to {max(shares, key=int)}"
    return "  ".join(
        [
            f"epoch {metrics.epoch:.2f}",
            f"loss {metrics.loss:.3f}",
            f"running mean {metrics.running_mean_loss:.3f}",
            f"rate {metrics.learning_rate:.1e}",
            f"norm {metrics.gradient_norm:.3g}",
            f"{metrics.tokens_per_second:,.0f} tokens/s",
            *([f"busy {busy} %"] if shares else ()),
        ]
    )


def time_text(seconds: float) -> str:
    """Return, for example, `45 s`, `12 min`, `3 h 05 min` or `2 d 7 h`."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // (24 * 60)} d {minutes // 60 % 24} h"


class Metrics:
    """All metrics of a run, for the training loop."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        resume_step: int = 0,
        goes_back: bool = False,
        tensorboard: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        """`folder`: folder of the run; `steps`: planned number; `resume_step`: step of the loaded checkpoint, or 0;
        `goes_back`: later steps are taken again with other results, for new runs of the trackers."""
        self._file = MetricsFile(folder / "metrics.jsonl", resume_step)
        self._tracked_step = 0 if goes_back else self._file.last_step
        self._tensorboard = TensorBoard(folder / "tensorboard", resume_step) if tensorboard else None
        self._trackers: list[Tracker] = []
        self._progress = Progress(steps, resume_step, stream)
        self.say, self.set_steps, self.sync = self._progress.say, self._progress.set_steps, self._file.sync

    def follow(self, trackers: Iterable[Tracker]) -> None:
        """Also send metrics to these trackers, except for steps that they already have, which they cannot replace."""
        self._trackers += trackers

    def log(self, metrics: StepMetrics) -> None:
        """Log a step."""
        values = asdict(metrics)
        values |= values.pop("experts") or {}
        self._write({name: value for name, value in values.items() if value is not None})
        self._progress.show(metrics)

    def log_evaluation(self, step: int, loss: float, tokens: int) -> None:
        """Log the validation loss after `step`, over `tokens` valid tokens."""
        self._write({"step": step, "validation_loss": loss, "validation_tokens": tokens})
        self._progress.say(f"step {step}  validation loss {loss:.3f} over {count(tokens, 'token', ',')}")

    def close(self) -> None:
        """Write out and close everything."""
        self._progress.close()
        for tracker in self._trackers:
            tracker.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(record)
        if self._tensorboard is not None:
            self._tensorboard.write(record)
        if record["step"] > self._tracked_step:
            for tracker in self._trackers:
                tracker.write(record)


def _finite(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
