"""Options that have no effect in a run, because what they apply to is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from .offload import OffloadOptions
from .parallelism import Parallelism
from .recipe import Recipe


def unused_options(recipe: Recipe, *, moves: bool) -> Iterator[str]:
    """A sentence for each option that is set, but has no effect.

    moves: whether the order of the run copies activations to the host.
    """
    axes, usual = recipe.parallelism, Parallelism()
    needs = [
        (axes.replicas == 1, "there is one replica", ("data_parallel", "dp_shard", "reshard", "prefetch")),
        (axes.cp == 1, "there is one context rank", ("context_exchange",)),
        (axes.tp == 1, "there is one tensor rank", ("tensor_overlap",)),
        (axes.ep == 1, "no replicas share experts", ("experts",)),
    ]
    for lacks, why, names in needs:
        for name in names if lacks else ():
            if (value := getattr(axes, name)) != getattr(usual, name):
                yield _sentence(name, value, why)
    for option in fields(OffloadOptions) if not moves else ():
        value = getattr(recipe.offload, option.name)
        if option.name != "activations" and value != option.default:
            yield _sentence(f"offload.{option.name}", value, "no activations go to the host")


def _sentence(name: str, value: Any, why: str) -> str:
    shown = f" = {value!r}" if isinstance(value, (bool, int, float, str)) else ""
    return f"{name}{shown} has no effect: {why}"
