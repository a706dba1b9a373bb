"""Evaluations that are kept on disk: the same question again costs nothing.

One file per problem, named by a hash of all that an evaluation depends on: model, hardware, batch, and the sources of
this package, so that figures of another version are never taken.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from .configurations import Configuration, Problem
from .device_memory import DeviceUse
from .evaluation import Evaluation

ROOMS = ("costs", "memory", "model", "plan", "schedule", "simulate", "vocabulary")
"""Whose sources decide what an evaluation says."""

_FIELDS = ("seconds", "pipeline_seconds", "end_seconds", "busy", "again", "fault", "late")
_CHOSEN = ("checkpointing", "offload", "copy_time", "copy_seconds", "host_share")
"""Of the configuration, what an evaluation decides."""


class EvaluationCache:
    """Evaluations of one problem by configuration."""

    def __init__(self, path: Path | None, entries: dict[str, Any]) -> None:
        self._path, self._entries = path, entries
        self.hits = 0

    @classmethod
    def none(cls) -> EvaluationCache:
        """Keeps nothing on disk."""
        return cls(None, {})

    @classmethod
    def of(cls, problem: Problem, folder: Path | None = None) -> EvaluationCache:
        """That of a problem; an unreadable file is as good as none."""
        folder = default_folder() if folder is None else folder
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
        evaluate_all: Callable[[Sequence[Configuration], Sequence[float]], Iterable[Evaluation]],
    ) -> Iterator[Evaluation]:
        """Evaluations of `batch` in its order; what is not known is evaluated, all together. One that was given up
        counts as known where it is beyond today's limit, too."""
        unknown = [(one, limit) for one, limit in zip(batch, limits, strict=True) if not self._knows(repr(one), limit)]
        if unknown:
            todo, their_limits = zip(*unknown, strict=True)
            for one, evaluation in zip(todo, evaluate_all(todo, their_limits), strict=True):
                self._entries[repr(one)] = _to_entry(evaluation)
        self.hits += len(batch) - len(unknown)
        for one in batch:
            yield _from_entry(one, self._entries[repr(one)])

    def _knows(self, key: str, limit: float) -> bool:
        entry = self._entries.get(key)
        return entry is not None and not (entry["late"] and entry["seconds"] < limit)

    def save(self) -> None:
        """Write the file, whole or not at all. A disk that is full or read-only is no reason to lose a result."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps(self._entries), encoding="utf-8")
            part.replace(self._path)
        except OSError:
            return


def default_folder() -> Path:
    """Of the user: $XDG_CACHE_HOME/evenpipe/plan."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenpipe" / "plan"


def _to_entry(evaluation: Evaluation) -> dict[str, Any]:
    entry = {name: getattr(evaluation, name) for name in _FIELDS}
    entry |= {name: getattr(evaluation.configuration, name) for name in _CHOSEN}
    for name in ("devices", "kept"):
        entry[name] = [asdict(device) for device in getattr(evaluation, name)]
    if not evaluation.busy:
        del entry["seconds"]  # infinite
    return entry


def _from_entry(one: Configuration, entry: dict[str, Any]) -> Evaluation:
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    configuration = replace(one, **{name: given.pop(name) for name in _CHOSEN})
    given |= {name: tuple(DeviceUse(**device) for device in given[name]) for name in ("devices", "kept")}
    return Evaluation(configuration=configuration, **given)


def _key(problem: Problem) -> str:
    description = problem.description
    shapes = sorted((name, *shape) for name, shape in description.shapes.items())
    config = None if description.config is None else description.config.to_json_string()
    parts = [
        _sources(),
        description.architecture,
        str(config),
        str(shapes),
        str(problem.hardware.to_dict()),
        str((problem.gpus, problem.memory_bytes, problem.sequence, problem.sequences_per_step)),
        str((problem.dtype, problem.kernels_name)),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _sources() -> str:
    """A hash of the sources of `ROOMS`."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
