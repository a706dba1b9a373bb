"""Callbacks: a user's code that a run calls while it trains.

    [training]
    callbacks = ["my_module:MyCallback"]

Every process of the run makes its own callback and calls it at the same points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evenpipe.errors import InputError, RunError
from evenpipe.train.named import find_named, told_with_traceback
from evenpipe.words import show

if TYPE_CHECKING:
    import torch

    from evenpipe.runtime.pipeline import Pipeline
    from evenpipe.runtime.result import StepResult

STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The state of a run for callbacks. Every process has the same values, except `is_first`, `pipeline` and
    `optimizer`."""

    step: int
    """Number of steps done."""
    steps: int
    """Total number of steps; a time box or a callback may reduce it later."""
    epoch: float
    """Passes over the training rows so far, such as 1.24."""
    learning_rate: float
    """Learning rate of the last step; nan before the first step since the run was started or continued."""
    gradient_norm: float
    """Norm of all gradients in the last step, before clipping; nan before the first step of this start."""
    result: StepResult | None
    """Result of `Pipeline.step` in the last step; None before the first step of this start."""
    validation_loss: float | None
    """Loss of the last evaluation since the run was started or continued; None before it."""
    is_first: bool
    """Whether this is the first process of the run, which prints and writes files."""
    pipeline: Pipeline
    """The pipeline; call its collective methods on every process."""
    optimizer: torch.optim.Optimizer | None
    """Optimizer of this process's parameters; None if the process has no trainable parameter."""

    @property
    def loss(self) -> float:
        """Loss of the last step; nan before the first step of this start. Reading it waits for the step, which slows
        down training on a GPU."""
        return float("nan") if self.result is None else self.result.loss


class Callback:
    """Base class of callbacks: derive a class and override the methods that you need.

    Each process of a run makes its own instance and calls its methods at the same points, so they may call collective
    methods of the pipeline. Check `state.is_first` for actions that should happen once. Methods are called between
    steps, when there are no gradients. They may use torch's random generators, because every step seeds them. A
    checkpoint does not contain attributes of callbacks.

    An exception ends the run with the name of the callback and the traceback. If the configuration names a class, it is
    called without arguments. Each process gets a copy of an instance that is passed to `run_training`.
    """

    def on_step_end(self, state: TrainingState) -> Literal["stop"] | None:
        """Called after every step and its update. If any process returns "stop", this is the last step: the run
        evaluates, saves, reports and exports, and repeating the command does not continue it."""
        return None

    def on_evaluate(self, state: TrainingState) -> Literal["stop"] | None:
        """Called after every evaluation, with `state.validation_loss`. "stop" works as in `on_step_end`."""
        return None

    def on_save(self, state: TrainingState, path: Path) -> None:
        """Called after a checkpoint was saved in the folder `path`."""

    def on_end(self, state: TrainingState) -> None:
        """Called once when the run ends without an error: after its last step (`state.step == state.steps`), or earlier
        because of a signal."""


def find_callbacks(names: Sequence[str]) -> list[type[Callback] | Callback]:
    """Return the classes, or instances, that training.callbacks names.

    Raises InputError if there is no such name, or it names something else; with a traceback if a module fails.
    """
    callbacks = []
    for number, name in enumerate(names):
        field = f"training.callbacks[{number}]"
        callback = find_named(field, name)
        if not (isinstance(callback, Callback) or (isinstance(callback, type) and issubclass(callback, Callback))):
            raise InputError(
                f"{field} is {show(name)}; it must name a class derived from evenpipe.Callback, or an instance"
            )
        callbacks.append(callback)
    return callbacks


def make_callbacks(callbacks: Sequence[type[Callback] | Callback]) -> list[Callback]:
    """Return an instance of each. Raises InputError for an object that is not a callback, or a class that cannot be
    called without arguments."""
    made = []
    for entry in callbacks:
        try:
            made.append(entry() if isinstance(entry, type) else entry)
        except Exception as error:
            raise InputError(
                f"callback {_name(entry)} cannot be made without arguments: {told_with_traceback(error, __file__)}"
            ) from error
    for callback in made:
        if not isinstance(callback, Callback):
            raise InputError(f"callbacks has {type(callback).__name__}; each must be an instance of evenpipe.Callback")
    return made


def call(callbacks: Sequence[Callback], method: str, state: TrainingState, *arguments: Any) -> bool:
    """Call a method of each callback; return whether one of them returned "stop".

    Raises RunError, with the traceback, if one fails.
    """
    stop = False
    for callback in callbacks:
        name = _name(type(callback))
        try:
            answer = getattr(callback, method)(state, *arguments)
        except RunError:  # from a collective method: another process, or a disk, failed
            raise
        except Exception as error:
            told = told_with_traceback(error, __file__)
            raise RunError(f"callback {name} failed in {method} at step {state.step}: {told}") from error
        if answer is not None and answer != STOP:
            raise RunError(
                f"callback {name} returned {show(answer)} from {method}; expected None"
                + (f' or "{STOP}"' if method in ("on_step_end", "on_evaluate") else "")
            )
        stop = stop or answer == STOP
    return stop


def _name(callback: Any) -> str:
    return f"{callback.__module__}:{callback.__qualname__}"
