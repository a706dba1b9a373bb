"""Which checkpoint a run continues from, and how a diverged run goes back to a healthy one.

    no resume_from      the newest sound checkpoint; refused if it is unhealthy and steps are left
    resume_from = 80    the checkpoint of step 80. Later ones are abandoned: renamed, never found again, and deleted
                        when training has passed their steps

Checkpoints record the `resume_from` that they descend from. So a command that is repeated after an interruption does
not go back again: it continues from the newest checkpoint that descends from step 80, unless that one is unhealthy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from evenpipe.checkpoints import Checkpoint, ListedCheckpoint, find_latest, find_step, list_checkpoints, mark_unhealthy
from evenpipe.checkpoints.agreement import Team
from evenpipe.checkpoints.folder import FoundCheckpoint
from evenpipe.errors import InputError
from evenpipe.train.config import Config
from evenpipe.train.health import Health
from evenpipe.words import join

RESUMED_FROM = "resumed_from"
"""Entry of a checkpoint's `extra`: the last `checkpoint.resume_from` before it, or None."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run starts."""

    search_result: FoundCheckpoint
    goes_back: bool
    """Whether to abandon later checkpoints."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint to continue from; None: start from the beginning."""
        return self.search_result.checkpoint


def find_start(config: Config, group: dist.ProcessGroup | None) -> Start:
    """Return where the run starts. Collective.

    Raises InputError if the folder has checkpoints but no sound one, or none for the step of `checkpoint.resume_from`;
    the message lists the steps it has.
    """
    folder, step = config.checkpoint_folder, config.checkpoint.resume_from
    if step is None or not Team(group).first(lambda: _must_go_back(list_checkpoints(folder), step, config)):
        result = find_latest(folder, group)
        result.sound()
        return Start(result, goes_back=False)
    result = find_step(folder, step, group)
    if result.checkpoint is None:
        damage = result.rejected[0]
        raise InputError(
            f"checkpoint.resume_from is {step}, but {damage.path.name} in {str(folder)!r} cannot be used:"
            f" {damage.reason}"
        )
    return Start(result, goes_back=True)


def _must_go_back(listed: Sequence[ListedCheckpoint], step: int, config: Config) -> bool:
    """Return whether the run goes back to a step now; False: an earlier start already did. Raises InputError if there
    is no such checkpoint."""
    if step not in [checkpoint.step for checkpoint in listed]:
        folder = str(config.checkpoint_folder)
        exist = f"{folder!r} has {_steps(listed)}" if listed else f"there is no checkpoint in {folder!r}"
        raise InputError(f"checkpoint.resume_from is {step}, but {exist}")
    newest = listed[0]
    return newest.unhealthy is not None or newest.extra.get(RESUMED_FROM) != step


def refuse_unhealthy(checkpoint: Checkpoint, config: Config) -> None:
    """Raise InputError for an unhealthy checkpoint that `checkpoint.resume_from` does not name. Not collective."""
    if checkpoint.unhealthy is None or checkpoint.step == config.checkpoint.resume_from:
        return
    raise InputError(
        f"the newest checkpoint, {checkpoint.path.name} in {str(config.checkpoint_folder)!r}, is marked as unhealthy:"
        f" {checkpoint.unhealthy}; {_way_back(config, checkpoint.step)}; checkpoint.resume_from={checkpoint.step}"
        " continues from the unhealthy one"
    )


def diverged(config: Config, health: Health, step: int, loss: float, norm: float, *, marks: bool) -> str:
    """Return the sentence about the first step whose loss or gradient norm is not finite.

    It names the newest healthy checkpoint. The checkpoint whose weights first gave bad losses is not healthy.

    health: after the step before. marks: whether this process marks the checkpoints that are not healthy.
    """
    description = f"loss {loss} and gradient norm {norm} in step {step}"
    ruined = first_ruined(health, step) if health.is_above(loss) else step
    if marks:
        with suppress(OSError):
            mark_unhealthy(config.checkpoint_folder, ruined, f"it led to {description}")
    return f"{description}: training has diverged; {_way_back(config, ruined)}"


def first_ruined(health: Health, next_step: int) -> int:
    """Return the step count of the weights that gave the first of the consecutive bad losses before `next_step`."""
    return next_step - health.above - 1


def abandoned_message(steps: Sequence[int]) -> str:
    """Return the message about checkpoints that `abandon_later` has renamed."""
    are = "checkpoint of step" if len(steps) == 1 else "checkpoints of steps"
    return (
        f"the later {are} {join(list(map(str, steps)))} end{'s' if len(steps) == 1 else ''} in .abandoned now, and"
        f" {'is' if len(steps) == 1 else 'each is'} deleted when training has passed its step"
    )


def _way_back(config: Config, step: int) -> str:
    """Return how to go back to the newest healthy checkpoint before a step, in words."""
    listed = list_checkpoints(config.checkpoint_folder)
    healthy = next((saved.step for saved in listed if saved.step < step and saved.unhealthy is None), None)
    if healthy is None:
        return "no healthy checkpoint was saved before it: start again in another output.folder, with other settings"
    return (
        f"the newest healthy checkpoint is that of step {healthy}: change what led here, such as"
        f" optimizer.learning_rate, and add checkpoint.resume_from={healthy} to the command"
    )


def _steps(listed: Sequence[ListedCheckpoint]) -> str:
    """Return the steps of checkpoints in words: `steps 40, 80 and 120 (unhealthy)`."""
    marks = [f"{saved.step}" + ("" if saved.unhealthy is None else " (unhealthy)") for saved in reversed(listed)]
    return f"step{'s' if len(marks) > 1 else ''} {join(list(dict.fromkeys(marks)))}"
