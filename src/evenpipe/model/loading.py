"""Weights into stages and vocabulary shards: from a Hugging Face folder, from a live model, or fresh.

A folder is read lazily: only the tensors (and only the rows) that are asked for. Nothing in it is executed: safetensors only.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.utils import cached_file

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.model.initialization import initial_rows, initialize
from evenpipe.model.names import memory_names
from evenpipe.model.stage import Stage

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def fill_parameters(stage: Stage, description: Description, seed: int = 0) -> None:
    """Gives a stage its weights: those of the live model or folder it was described from, else fresh ones."""
    if description.model is not None:
        copy_parameters(stage, description)
    elif description.source is not None:
        load_parameters(stage, description, description.source)
    else:
        initialize(stage, description, seed)


def fill_rows(description: Description, name: str, start: int, stop: int, seed: int = 0) -> torch.Tensor:
    """Rows [start, stop) of a vocabulary matrix (or entries of the head's bias), from where `fill_parameters` takes its weights.

    Returns: [stop - start, hidden_size] (bias: [stop - start]) on the CPU, in the dtype of the source, fp32 when fresh.
    """
    if description.model is not None:
        whole = description.model.get_parameter(name)
        return whole.detach()[start:stop].cpu().clone()
    if description.source is not None:
        return load_rows(description, description.source, name, start, stop)
    return initial_rows(description, name, start, stop, seed)


def copy_parameters(stage: Stage, description: Description) -> None:
    """Copies a stage's parameters and persistent buffers from the live model that was described."""
    assert description.model is not None
    with torch.no_grad():
        for name, held in _stored(stage):
            held.copy_(_attribute(description.model, name))


def load_parameters(stage: Stage, description: Description, folder: str | Path) -> None:
    """Reads a stage's parameters and persistent buffers from a Hugging Face folder (or hub name), cast to the stage's dtype.

    Raises:
        InputError: no safetensors there, names that are missing, or shapes that differ.
    """
    checkpoint = _Checkpoint(description, folder)
    wanted = dict(_stored(stage))
    checkpoint.require(wanted)
    with torch.no_grad():
        for name, held in wanted.items():  # tensor by tensor, so that old and new never exist together as a whole
            value = checkpoint.slice(name)
            if tuple(value.get_shape()) != tuple(held.shape):
                raise InputError(
                    f"{folder}: {name} has the shape {tuple(value.get_shape())}, and the config asks for {tuple(held.shape)}."
                )
            held.copy_(value[:] if held.ndim else checkpoint.whole(name))


def load_rows(description: Description, folder: str | Path, name: str, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of a vocabulary matrix from a folder, without reading the others.

    Returns: [stop - start, hidden_size] (the head's bias: [stop - start]) on the CPU, in the dtype of the file.
    """
    checkpoint = _Checkpoint(description, folder)
    if description.tied and name == description.head_name:
        name = description.embedding_name
    if description.tied and name == description.embedding_name and name not in checkpoint.disk_name:
        name = description.head_name  # a tied matrix stored under the other of its names
    checkpoint.require([name])
    rows = checkpoint.slice(name)
    expected = (description.vocabulary_size,) if name == description.head_bias_name else description.head_weight_shape
    if tuple(rows.get_shape()) != expected:
        raise InputError(
            f"{folder}: {name} has the shape {tuple(rows.get_shape())}, and the config asks for {expected}."
        )
    return rows[start:stop].clone()  # a slice would keep the storage of the whole matrix


def _stored(stage: Stage):
    """(name, tensor) of what a checkpoint holds for a stage: parameters and persistent buffers."""
    yield from stage.named_parameters()
    persistent = stage.state_dict().keys()
    for name, buffer in stage.named_buffers():
        if name in persistent:
            yield name, buffer


def _attribute(model: torch.nn.Module, name: str) -> torch.Tensor:
    parent, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(parent), attribute)


class _Checkpoint:
    """The tensors of a folder under their names in memory."""

    def __init__(self, description: Description, folder: str | Path):
        self._folder, self._files = str(folder), {}
        where = self._index()
        self.disk_name: dict[str, str] = {}
        for disk, name in memory_names(description, where).items():
            self.disk_name.setdefault(name, disk)
        self._where = where

    def _file(self, name: str, required: bool) -> str | None:
        try:
            return cached_file(self._folder, name, _raise_exceptions_for_missing_entries=required)
        except (OSError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(f"{self._folder} gives out no {name} ({reason}).") from error

    def _index(self) -> dict[str, str]:
        """Name on disk -> file."""
        index = self._file(INDEX, required=False)
        if index is not None:
            return json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        if self._file(SINGLE, required=False) is None:
            raise InputError(
                f"{self._folder} holds neither {SINGLE} nor {INDEX}: weights are read from safetensors only."
            )
        return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def _open(self, file: str):
        if file not in self._files:
            path = self._file(file, required=True)
            try:
                self._files[file] = safe_open(path, framework="pt")
            except Exception as error:
                raise InputError(f"{self._folder}: {file} is damaged ({error}).") from error
        return self._files[file]

    def require(self, names) -> None:
        missing = [name for name in names if name not in self.disk_name]
        if missing:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise InputError(f"{self._folder} has no tensor for {shown}.")

    def slice(self, name: str):
        disk = self.disk_name[name]
        return self._open(self._where[disk]).get_slice(disk)

    def whole(self, name: str) -> torch.Tensor:
        disk = self.disk_name[name]
        return self._open(self._where[disk]).get_tensor(disk)
