"""Cache of evaluations on disk, so that repeating a search costs nothing.

There is one file per problem, named by a hash of everything that an evaluation depends on: model, hardware, batch, and
the sources of this package, so that results of another version are never used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from evenpipe.memory.trace_files import cache_folder, model_key, write_whole
from evenpipe.recipe.offload import OffloadOptions

from .configuration import Configuration
from .device_memory import DeviceUse
from .evaluation import Evaluation
from .problem import ArrangedBy, Problem

_FIELDS = ("seconds", "pipeline_seconds", "end_seconds", "busy", "recomputation", "fault", "late")
_CHOSEN = ("open", "copy_seconds", "host_share")
"""Fields of the configuration that an evaluation decides, besides its recipe."""


class EvaluationCache:
    """Evaluations of a problem, by configuration; without a path, nothing is written to disk."""

    def __init__(self, path: Path | None = None, entries: dict[str, Any] | None = None) -> None:
        self._path, self._entries = path, entries or {}
        self.hits = 0

    @classmethod
    def of(cls, problem: Problem, folder: Path | None = None) -> EvaluationCache:
        """Return the cache of a problem; an unreadable file is ignored."""
        folder = cache_folder("plan") if folder is None else folder
        path = folder / f"{_key(problem)}.json"
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            entries = {}
        return cls(path, entries if isinstance(entries, dict) else {})

    def evaluated(
        self,
        batch: Sequence[Configuration],
        limits: Sequence[float],
        evaluate_all: Callable[[Sequence[Configuration], Sequence[float], ArrangedBy], Iterable[Evaluation]],
        by: ArrangedBy,
    ) -> Iterator[Evaluation]:
        """Yield the evaluations of `batch` in its order, computing the unknown ones together. An abandoned evaluation
        counts as known if it also exceeds the present limit."""
        keys = {configuration: f"{by} {configuration!r}" for configuration in batch}
        unknown = {
            configuration: limit
            for configuration, limit in zip(batch, limits, strict=True)
            if not self._knows(keys[configuration], limit)
        }
        evaluations = iter(evaluate_all(list(unknown), list(unknown.values()), by) if unknown else ())
        self.hits += len(batch) - len(unknown)
        for configuration in batch:
            if configuration in unknown:
                del unknown[configuration]
                self._entries[keys[configuration]] = _to_entry(next(evaluations))
            yield _from_entry(configuration, self._entries[keys[configuration]])

    def whole(self, plan: Evaluation, time: Callable[[Evaluation], Evaluation]) -> Evaluation:
        """Return a plan with the time of its whole step, which `time` computes only once."""
        key = f"whole {plan.configuration!r}"
        if key not in self._entries:
            self._entries[key] = _to_entry(time(plan))
        return _from_entry(plan.configuration, self._entries[key])

    def _knows(self, key: str, limit: float) -> bool:
        entry = self._entries.get(key)
        return entry is not None and not (entry["late"] and entry["seconds"] < limit)

    def save(self) -> None:
        """Write the file."""
        if self._path is not None:
            write_whole(self._path, json.dumps(self._entries))


def _to_entry(evaluation: Evaluation) -> dict[str, Any]:
    configuration = evaluation.configuration
    entry = {name: getattr(evaluation, name) for name in _FIELDS}
    entry["configuration"] = {name: getattr(configuration, name) for name in _CHOSEN}
    offload = configuration.recipe.offload
    entry["offload"] = {"activations": offload.activations, "copy_time": offload.copy_time}
    entry["checkpointing"] = configuration.recipe.activation_checkpointing
    for name in ("devices", "without_recomputation"):
        entry[name] = [asdict(device) for device in getattr(evaluation, name)]
    if not evaluation.busy:
        del entry["seconds"]  # infinite
    return entry


def _from_entry(requested: Configuration, entry: dict[str, Any]) -> Evaluation:
    fields = _tuples(entry)
    recipe = replace(
        requested.recipe,
        activation_checkpointing=fields.pop("checkpointing"),
        offload=OffloadOptions(**_tuples(fields.pop("offload"))),
    )
    configuration = replace(requested, recipe=recipe, **_tuples(fields.pop("configuration")))
    fields |= {
        name: tuple(DeviceUse(**device) for device in fields[name]) for name in ("devices", "without_recomputation")
    }
    return Evaluation(configuration=configuration, **fields)


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with tuples in place of JSON's lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def _key(problem: Problem) -> str:
    parts = [
        model_key(problem.description),
        str(problem.hardware.to_dict()),
        str((problem.gpus, problem.memory_bytes, problem.sequence, problem.sequences_per_step)),
        str((problem.dtype, problem.dtypes, problem.kernels_name, problem.skew, problem.loss)),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
