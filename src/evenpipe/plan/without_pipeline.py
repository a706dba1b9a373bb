"""The best layouts without a pipeline, one per ZeRO level, to show whether a pipeline is needed at all."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Literal

from evenpipe.errors import InputError

from .configuration_search import PlanSearchResult, Progress, search_configurations
from .evaluation import Evaluation
from .evaluation_cache import EvaluationCache
from .ranking import Rejection, by_shortfall

KINDS: dict[Literal[0, 1, 2, 3], str] = {0: "whole replicas", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
"""By ZeRO level."""


@dataclass(frozen=True, slots=True)
class WithoutPipeline:
    """The best layout of a kind; without a plan, the configuration that comes nearest."""

    kind: str
    plan: Evaluation | None
    nearest: Rejection | None = None


def without_pipeline(
    result: PlanSearchResult,
    *,
    workers: int | None = None,
    cache: EvaluationCache | None = None,
    progress: Progress | None = None,
    seconds: float = math.inf,
) -> tuple[WithoutPipeline, ...]:
    """Return the best layout of each kind, for the problem of a search and within its space; empty for a space of only
    pipelines, or without a possible layout that has none. seconds: time limit for all of them together."""
    started, space = time.monotonic(), result.space
    if result.problem.gpus == 1 or (space.pp is not None and 1 not in space.pp):
        return ()
    best = []
    for level, kind in KINDS.items():
        left = seconds - (time.monotonic() - started)
        if left <= 0:
            break
        subspace = replace(space, pp=(1,), zero=(level,))
        try:
            attempt = search_configurations(
                result.problem, subspace, count=1, workers=workers, cache=cache, progress=progress, seconds=left
            )
        except InputError:  # nothing divides
            return ()
        rejections = [] if attempt.best else by_shortfall(attempt)
        if attempt.best is not None or rejections:
            best.append(WithoutPipeline(kind, attempt.best, rejections[0] if rejections else None))
    return tuple(best)
