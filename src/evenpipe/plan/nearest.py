"""If nothing fits: the configuration that comes nearest, and the changes that would make one fit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from evenpipe.sizes import gib_text
from evenpipe.words import count, seconds_text

from .configuration import LEAST
from .configuration_search import PlanSearchResult, Progress, search_configurations
from .evaluation import Evaluation
from .evaluation_cache import EvaluationCache
from .problem import Problem
from .ranking import Rejection, by_shortfall
from .space import Space

MORE = (2, 4, 8, 16)
"""Multiples of the number of GPUs to try, the smallest first."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes a plan fit."""

    change: str
    plan: Evaluation

    def text(self) -> str:
        worst = self.plan.devices[self.plan.worst]
        name = self.plan.configuration.name
        return f"{self.change}: {name}, {seconds_text(self.plan.seconds)} per step, {gib_text(worst.peak_bytes)}"

    def to_dict(self) -> dict[str, Any]:
        return {"change": self.change, "plan": self.plan.configuration.name, "seconds": self.plan.seconds}


@dataclass(frozen=True, slots=True)
class Nearest:
    """The configuration that lacks the least memory, and the changes that would help; empty if none of those tried
    does."""

    rejection: Rejection | None
    remedies: tuple[Remedy, ...]
    finished: bool = True
    """Whether the search for every remedy was completed."""

    def text(self) -> str:
        lines = [] if self.rejection is None else [f"nearest: {self.rejection.text()}"]
        if self.remedies:
            lines += ["would fit:", *(f"  {remedy.text()}" for remedy in self.remedies)]
        elif not self.finished:
            lines.append("what would fit was not found in this time")
        else:
            lines.append(f"would not fit either: moments and activations on the host, {MORE[-1]} times the GPUs")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "nearest": None if self.rejection is None else self.rejection.to_dict(),
            "would_fit": [remedy.to_dict() for remedy in self.remedies],
            "would_fit_finished": self.finished,
        }


def nearest(
    result: PlanSearchResult,
    *,
    workers: int | None = None,
    cache: EvaluationCache | None = None,
    progress: Progress | None = None,
    seconds: float = math.inf,
) -> Nearest:
    """Return the configuration that came nearest in a search that found no plan, and the best plan after each of these
    changes: recomputation, if it was excluded; the optimizer's moments, or also activations, on the host; the smallest
    of `MORE` that suffices.

    seconds: time limit for all of these searches together.
    """
    started, finished = time.monotonic(), True

    def searched(problem: Problem, space: Space) -> Evaluation | None:
        nonlocal finished
        left = seconds - (time.monotonic() - started)
        if left <= 0:
            finished = False
            return None
        attempt = search_configurations(
            problem, space, count=1, workers=workers, cache=cache, progress=progress, seconds=left
        )
        finished = finished and not attempt.ended
        return attempt.best

    remedies = []
    for changes in (_recomputed(result.space), _on_the_host(result.space)):
        for change, space in changes:
            plan = searched(result.problem, space)
            if plan is not None:
                remedies.append(Remedy(change, plan))
                break
    for times in MORE:  # what is known about the model holds for any number of GPUs
        problem, gpus = result.problem, times * result.problem.gpus
        sequences = max(problem.sequences_per_step, gpus)
        plan = searched(replace(problem, gpus=gpus, sequences_per_step=sequences), result.space)
        if plan is not None:
            remedies.append(Remedy(count(gpus, "GPU"), plan))
            break
    rejections = by_shortfall(result)
    return Nearest(rejections[0] if rejections else None, tuple(remedies), finished)


def _recomputed(space: Space) -> Iterator[tuple[str, Space]]:
    if LEAST not in space.checkpointing:
        yield f"--checkpointing {LEAST}", replace(space, checkpointing=(LEAST,))


def _on_the_host(space: Space) -> Iterator[tuple[str, Space]]:
    if None not in space.host_shares and 1.0 not in space.host_shares:
        yield "--host-share 1", replace(space, host_shares=(1.0,))
    if not {"all", LEAST} & set(space.offload):
        yield "--host-share 1 --offload least", replace(space, host_shares=(1.0,), offload=(LEAST,))
