"""What a run reports while it trains: metrics.jsonl, TensorBoard files, trackers, and a progress bar.

The first process of the run owns these. A line of metrics.jsonl is one JSON object: a logged step (`StepMetrics`), or
an evaluation (step, validation_loss, validation_tokens). Loss fields of a resumed run equal an uninterrupted one's; the
fields that measure time are measured anew.

Everywhere, on the console and in report.json too, "loss" is that of one step, and what is smoothed is called "running
mean".
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
from typing import Any, TextIO

from evenpipe.errors import InputError
from evenpipe.train.trackers import Tracker, scalars

WINDOW_STEPS = 50
PLAIN_LINE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One logged step."""

    step: int
    """Steps done, this one included: 1 is the first."""
    epoch: float
    """How often the rows have been gone through, this step included."""
    loss: float
    """Mean over the valid tokens of this step, with the weights before its update."""
    running_mean_loss: float
    """See `RunningMean`: single steps scatter; but while the loss falls, the mean lags behind it."""
    tokens: int
    """Tokens trained on since the beginning of the run, resumed parts included."""
    tokens_per_second: float
    """Since the line before."""
    learning_rate: float
    gradient_norm: float
    """Total norm over all devices, before clipping."""
    busy: tuple[float, ...]
    """Share of the time (0 to 1) that each device spent in passes, since the line before."""
    seconds: float
    """Wall time since the line before."""
    entropy: float | None = None
    """With `[loss] entropy`, as `StepResult.entropy`; else there is no such figure."""


@dataclass(slots=True)
class RunningMean:
    """Mean of the losses so far; from 50 steps on, exponential with a weight of 1/50 for each new one.

    `state` and `RunningMean(**state)` carry it through a checkpoint without losing a bit.
    """

    steps: int = 0
    mean: float = 0.0

    def add(self, loss: float) -> float:
        """Take in the loss of one more step and return the new mean."""
        self.steps += 1
        self.mean += (loss - self.mean) / min(self.steps, WINDOW_STEPS)
        return self.mean

    def state(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"steps": self.steps, "mean": self.mean}


class MetricsFile:
    """metrics.jsonl, to which every line is appended at once by a single write, so a killed process loses none."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """Open the file for a run that goes on behind `resume_step` (0: from the beginning).

        Lines of later steps, and a last line that was cut off, are removed: the file then reads as if the run had
        never been interrupted.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last_step = 0
        """The last one that was logged by an earlier start of the run, removed lines included."""
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            self.last_step = max((step for step, _ in _complete_lines(text)), default=0)
            kept = kept_lines(text, resume_step)
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_text(kept, encoding="utf-8")
            temporary.replace(path)
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line. Numbers that are not finite become null: JSON has no word for them."""
        finite = {key: _finite(value) for key, value in record.items()}
        self._file.write((json.dumps(finite, allow_nan=False) + "\n").encode())

    def sync(self) -> None:
        """Return when all lines are on the disk; to be called before a checkpoint is published."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        self._file.close()


def kept_lines(text: str, resume_step: int) -> str:
    """The complete lines of metrics.jsonl up to and with `resume_step`."""
    return "".join(line for step, line in _complete_lines(text) if step <= resume_step)


def _complete_lines(text: str) -> Iterator[tuple[int, str]]:
    """(step, line) of metrics.jsonl."""
    for line in text.splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if line.endswith("\n"):
            yield step, line


class TensorBoard:
    """The figures of metrics.jsonl as TensorBoard scalars."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        """Raises `InputError` when TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "output.tensorboard is true, but must be false until TensorBoard is installed: pip install tensorboard"
            ) from None
        # purge_step hides what an interrupted run wrote for later steps
        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)

    def write(self, record: Mapping[str, Any]) -> None:
        """One scalar per figure; a list becomes one per device."""
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Write what is left and close."""
        self._writer.close()


class Progress:
    """A progress bar on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(
        self,
        steps: int,
        done: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._stream = stream or sys.stderr
        self._clock = clock
        self._next_line = -math.inf
        self._bar: Any = None
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=steps, initial=done, file=self._stream, unit="step", dynamic_ncols=True)

    def set_steps(self, steps: int) -> None:
        """The number of steps is now known better (time box)."""
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
        elif self._clock() >= self._next_line or metrics.step >= self._steps:
            self._next_line = self._clock() + PLAIN_LINE_SECONDS
            self.say(f"step {metrics.step}/{self._steps}  {text}")

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()


def progress_text(metrics: StepMetrics) -> str:
    """Losses, speed, how busy devices are:

    `epoch 1.24  loss 5.123  running mean 5.345  1,234 tokens/s  busy 93 91 95 92 %`
    """
    busy = " ".join(f"{100 * share:.0f}" for share in metrics.busy)
    loss = f"loss {metrics.loss:.3f}  running mean {metrics.running_mean_loss:.3f}"
    return f"epoch {metrics.epoch:.2f}  {loss}  {metrics.tokens_per_second:,.0f} tokens/s  busy {busy} %"


class Metrics:
    """All of them together: what the training loop talks to."""

    def __init__(
        self, folder: Path, *, steps: int, resume_step: int = 0, tensorboard: bool = True, stream: TextIO | None = None
    ) -> None:
        """`folder`: the run's; `steps`: the planned number; `resume_step`: steps that a checkpoint has already done."""
        self._file = MetricsFile(folder / "metrics.jsonl", resume_step)
        self._tensorboard = TensorBoard(folder / "tensorboard", resume_step) if tensorboard else None
        self._trackers: list[Tracker] = []
        self._progress = Progress(steps, resume_step, stream)

    def follow(self, trackers: Iterable[Tracker]) -> None:
        """From now on they get what is logged, but for steps that they had before: few of them can take these back."""
        self._trackers += trackers

    def log(self, metrics: StepMetrics) -> None:
        """A step to be logged."""
        self._write({name: value for name, value in asdict(metrics).items() if value is not None})
        self._progress.show(metrics)

    def log_evaluation(self, step: int, loss: float, tokens: int) -> None:
        """The loss on held-back rows after `step`, over so many valid tokens."""
        self._write({"step": step, "validation_loss": loss, "validation_tokens": tokens})
        self._progress.say(f"step {step}  validation loss {loss:.3f} over {tokens:,} tokens")

    def set_steps(self, steps: int) -> None:
        """The number of steps is now known better (time box)."""
        self._progress.set_steps(steps)

    def say(self, text: str) -> None:
        """A line for the terminal that does not disturb the progress bar."""
        self._progress.say(text)

    def sync(self) -> None:
        """To be called before a checkpoint is published."""
        self._file.sync()

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
        if record["step"] > self._file.last_step:
            for tracker in self._trackers:
                tracker.write(record)


def _finite(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
