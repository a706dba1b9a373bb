"""Code of the user's that is called while a run trains: what it may be, how it is found, and what its faults look like.

    [training]
    callbacks = ["my_module:MyCallback"]

Every process of the run makes a callback of its own and calls it at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evenpipe.errors import InputError, RunError
from evenpipe.train.named import find_named, told_with_traceback
from evenpipe.train.section import show

if TYPE_CHECKING:
    import torch

    from evenpipe.runtime import Pipeline, StepResult

STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Where a run is, as a callback sees it: the same on every process, but for `is_first`, `pipeline` and
    `optimizer`."""

    step: int
    """Steps done."""
    steps: int
    """Steps in all, as far as is known: a time box may make them fewer."""
    epoch: float
    """How often the rows have been gone through, such as 1.24."""
    learning_rate: float
    """Of the last step, as the two below; nan before the first step of a start."""
    gradient_norm: float
    """Over all devices, before clipping."""
    result: StepResult | None
    """Of the last step: its loss and what else `Pipeline.step` gives; None before the first step of a start."""
    validation_loss: float | None
    """Of the last evaluation of this start."""
    is_first: bool
    """Whether this is the first process of the run, the one that prints and writes files."""
    pipeline: Pipeline
    """Its collective methods must be called on every process."""
    optimizer: torch.optim.Optimizer | None
    """Of this process's parameters; None where it holds none that is trained."""

    @property
    def loss(self) -> float:
        """Of the last step; nan before the first step of a start. Reading it waits for it, which on a GPU every step
        would notice."""
        return float("nan") if self.result is None else self.result.loss


class Callback:
    """What else a run does: derive a class and override the methods that you need.

    Each process of a run makes its own instance, without arguments where a configuration names the class, and calls
    its methods at the same places: so they may call the pipeline's collective methods, and what should happen once
    asks `state.is_first`. They are called between steps, where nothing is under way and no gradients are there. What
    they draw from torch's random generators changes no step: every step seeds them. What a callback keeps is not part
    of a checkpoint.

    An exception ends the run, with the name of the callback and the traceback. An instance that was handed to
    `run_training` is copied to the processes: they change their copies.
    """

    def on_step_end(self, state: TrainingState) -> Literal["stop"] | None:
        """After every step, its update included. "stop", from any process, makes it the last step: the run evaluates,
        saves, reports and exports as at its end, and the same command repeated does not go on."""
        return None

    def on_evaluate(self, state: TrainingState) -> Literal["stop"] | None:
        """After every evaluation, with its `validation_loss`. "stop" as for `on_step_end`."""
        return None

    def on_save(self, state: TrainingState, path: Path) -> None:
        """After a checkpoint was saved in the folder `path`."""

    def on_end(self, state: TrainingState) -> None:
        """Once, when this start of the run has ended without an error: at its last step (`state.step ==
        state.steps`), or before, asked by a signal."""


def find_callbacks(names: Sequence[str]) -> list[type[Callback] | Callback]:
    """Return the classes, or instances, that training.callbacks names.

    Raises InputError if there is no such name, or it names something else; with a traceback if a module fails.
    """
    return [_find(f"training.callbacks[{number}]", name) for number, name in enumerate(names)]


def _find(field: str, name: str) -> type[Callback] | Callback:
    found = find_named(field, name)
    if isinstance(found, Callback) or (isinstance(found, type) and issubclass(found, Callback)):
        return found
    raise InputError(f"{field} is {show(name)}, but must name a class derived from evenpipe.Callback, or an instance")


class Callbacks:
    """All callbacks of a run on one process.

    Raises InputError, when made, for something that is no callback, or for a class that cannot be called without
    arguments.
    """

    def __init__(self, callbacks: Sequence[type[Callback] | Callback]) -> None:
        self._callbacks = [_made(one) if isinstance(one, type) else one for one in callbacks]
        for one in self._callbacks:
            if not isinstance(one, Callback):
                raise InputError(f"callbacks: {type(one).__name__}, expected instances of evenpipe.Callback")

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def call(self, method: str, state: TrainingState, *arguments: Any) -> bool:
        """Calls that method of each; gives whether one of them wants the run to stop.

        Raises RunError, with the traceback, where one fails.
        """
        stop = False
        for callback in self._callbacks:
            try:
                answer = getattr(callback, method)(state, *arguments)
            except RunError:  # of a collective method: another process, or a disk, failed
                raise
            except Exception as error:
                told = told_with_traceback(error, __file__)
                raise RunError(
                    f"callback {_name(type(callback))} failed in {method} at step {state.step}: {told}"
                ) from error
            if answer is not None and answer != STOP:
                raise RunError(
                    f"callback {_name(type(callback))} returned {show(answer)} from {method}, expected None"
                    + (f' or "{STOP}"' if method in ("on_step_end", "on_evaluate") else "")
                )
            stop = stop or answer == STOP
        return stop


def _made(callback: type[Callback]) -> Callback:
    try:
        return callback()
    except Exception as error:
        raise InputError(
            f"callback {_name(callback)} cannot be made without arguments: {told_with_traceback(error, __file__)}"
        ) from error


def _name(callback: type) -> str:
    return f"{callback.__module__}:{callback.__qualname__}"
