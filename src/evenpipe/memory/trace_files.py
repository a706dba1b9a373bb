"""Traces on disk: a model is traced only once.

Each trace has a file, named by a hash of everything that it depends on: the model, the sources of this package, and the
versions of torch and transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from evenpipe.model import Description

from .bench import LineTrace
from .piece_bench import CarriedBytes
from .stretches import LineProfile, LineStretch


class TraceFiles:
    """The traces of a model."""

    def __init__(self, folder: Path, model: str) -> None:
        """model: key that identifies the model."""
        self._folder, self._model = folder, model

    @classmethod
    def of(cls, description: Description) -> TraceFiles | None:
        """Return None for a model whose code is not in transformers: it could change without changing the hash."""
        known = type(description.skeleton).__module__.startswith("transformers.models.")
        return cls(cache_folder("traces"), model_key(description)) if known else None

    def read(self, *key: Any) -> LineTrace | None:
        """Return the trace with this key; an unreadable file is ignored."""
        try:
            return _trace_of(json.loads(self._path(key).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, trace: LineTrace, *key: Any) -> None:
        """Keep a trace."""
        write_whole(self._path(key), json.dumps(asdict(trace)))

    def _path(self, key: Any) -> Path:
        name = hashlib.sha256(f"{self._model} {key!r}".encode()).hexdigest()
        return self._folder / name[:2] / f"{name[2:32]}.json"


def _trace_of(fields: dict[str, Any]) -> LineTrace:
    """Return the trace from the result of `asdict`, in which JSON has replaced tuples by lists."""
    profiles = {name: _profile_of(**profile) for name, profile in fields.pop("profiles").items()}
    carried = tuple(CarriedBytes(*layer) for layer in fields.pop("carried"))
    moved = tuple(map(tuple, fields.pop("moved")))
    tuples: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return LineTrace(profiles=profiles, carried=carried, moved=moved, **tuples)


def _profile_of(start: list[Any], layers: list[Any], end: Any, *, backwards: bool) -> LineProfile:
    return LineProfile(tuple(map(_stretch_of, start)), tuple(map(_stretch_of, layers)), _stretch_of(end), backwards)


def _stretch_of(fields: dict[str, Any]) -> LineStretch:
    return LineStretch(tuple(fields["above"]), fields["retained"])


# --- files that are kept between commands ----------------------------------------------------------------------------


def cache_folder(name: str) -> Path:
    """Return a subfolder of the user's cache folder: $XDG_CACHE_HOME/evenpipe/NAME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenpipe" / name


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically. On a full or read-only disk nothing is written, and no error is raised, so that the
    caller does not lose its result."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.part")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        return


def model_key(description: Description) -> str:
    """Return a key that identifies a model, for this version of the package and of its dependencies."""
    shapes = sorted((name, *shape) for name, shape in description.shapes.items())
    frozen = sorted(name for name, parameter in description.skeleton.named_parameters() if not parameter.requires_grad)
    config = description.config
    attention = getattr(config, "_attn_implementation", None)
    config_text = "" if config is None else config.to_json_string()
    return f"{_sources()} {description.architecture} {config_text} {attention} {description.changed} {shapes} {frozen}"


@cache
def _sources() -> str:
    """Return a hash of the sources of this package, whose layers are traced, and of the versions of dependencies."""
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for path in sorted(Path(__file__).resolve().parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
