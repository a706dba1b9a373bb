"""Weights into stages and vocabulary shards: from a Hugging Face folder, from a live model, or fresh.

A folder is read lazily: only the tensors (and only the rows) that are asked for. Nothing in it is executed, since only
safetensors are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import cached_file

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.model.initialization import initial_rows, initialize
from evenpipe.model.modules import ModuleStage
from evenpipe.model.names import Stored, put_together, stored_tensors
from evenpipe.model.stage import Stage
from evenpipe.model.structure import first_line, persistent_buffers

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def fill_parameters(stage: Stage | ModuleStage, description: Description, seed: int = 0) -> None:
    """Gives a stage its weights: those of the live model or folder it was described from, else fresh ones."""
    if description.model is not None:
        copy_parameters(stage, description)
    elif description.source is not None:
        load_parameters(stage, description, description.source)
    else:
        assert isinstance(stage, Stage)
        initialize(stage, description, seed)


def fill_rows(description: Description, name: str, start: int, stop: int, seed: int = 0) -> torch.Tensor:
    """Rows [start, stop) of a vocabulary matrix or entries of the head's bias, from where `fill_parameters` takes them.

    Returns: [stop - start, hidden_size] (bias: [stop - start]) on the CPU, in the dtype of the source, fp32 when fresh.
    """
    if description.model is not None:
        return description.model.get_parameter(name).detach()[start:stop].cpu().clone()
    if description.source is not None:
        return load_rows(description, description.source, name, start, stop)
    return initial_rows(description, name, start, stop, seed)


def copy_parameters(stage: Stage | ModuleStage, description: Description) -> None:
    """Copies a stage's parameters and persistent buffers from the live model that was described.

    Parameters that are frozen there (`requires_grad` off) are frozen here.
    """
    assert description.model is not None
    with torch.no_grad():
        for name, held in _stored(stage):
            parent, _, attribute = name.rpartition(".")
            given = getattr(description.model.get_submodule(parent), attribute)
            held.copy_(given)
            held.requires_grad_(given.requires_grad)


def load_parameters(stage: Stage | ModuleStage, description: Description, folder: str | Path) -> None:
    """Reads a stage's parameters and persistent buffers from a Hugging Face folder (or hub name), cast to its dtype.

    Raises:
        InputError: no safetensors there, names that are missing, or shapes that differ.
    """
    checkpoint = _Checkpoint(description, folder)
    wanted = dict(_stored(stage))
    checkpoint.require(wanted)
    for name, held in wanted.items():
        checkpoint.require_shape(name, tuple(held.shape))
    with torch.no_grad():
        for name, held in wanted.items():  # one by one, so that old and new never exist together as a whole
            held.copy_(checkpoint.tensor(name))


def load_rows(description: Description, folder: str | Path, name: str, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of a vocabulary matrix from a folder, without reading the others.

    Returns: [stop - start, hidden_size] (the head's bias: [stop - start]) on the CPU, in the dtype of the file.
    """
    checkpoint = _Checkpoint(description, folder)
    if description.tied and name in (description.embedding_name, description.head_name):
        # Usually under the embedding's name; folders written by older programs may have it under the head's only.
        names = (description.embedding_name, description.head_name)
        name = next((known for known in names if known in checkpoint.stored), description.embedding_name)
    checkpoint.require([name])
    is_bias = name == description.head_bias_name
    checkpoint.require_shape(name, description.head_weight_shape[:1] if is_bias else description.head_weight_shape)
    return checkpoint.rows(name, start, stop)


def _stored(stage: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what a checkpoint holds for a stage: parameters and persistent buffers."""
    yield from stage.named_parameters()
    yield from persistent_buffers(stage)


class _Checkpoint:
    """The tensors of a folder under their names in memory."""

    def __init__(self, description: Description, folder: str | Path):
        self._description = description
        self._folder = str(folder)
        self._open_files: dict[str, safe_open] = {}
        self._file_of = self._read_index()
        self.stored: dict[str, Stored] = stored_tensors(description, self._file_of)

    def require(self, names: Iterable[str]) -> None:
        missing = [name for name in names if name not in self.stored]
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise InputError(f"{self._folder} has no tensor for {', '.join(missing[:8])}{more}.")

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = tuple(self._put_together(name, self._without_storage).shape)
        if found != shape:
            raise InputError(f"{self._folder}: {name} has the shape {found}, and the config asks for {shape}.")

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor, read without the others where it is stored as it is held."""
        disk = self.stored[name].disk_name
        rows = self.tensor(name) if disk is None else self._lazy(disk)
        return rows[start:stop].clone()  # a slice would keep the storage of the whole

    def tensor(self, name: str) -> torch.Tensor:
        return self._put_together(name, self._read)

    def _put_together(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        try:
            return put_together(self._description, name, self.stored[name], read)
        except InputError as error:
            raise InputError(f"{self._folder}: {error}") from error

    def _lazy(self, disk: str):
        """A view of a tensor: `[a:b]` reads only those rows."""
        return self._open(self._file_of[disk]).get_slice(disk)

    def _without_storage(self, disk: str) -> torch.Tensor:
        return torch.empty(self._lazy(disk).get_shape(), device="meta")

    def _read(self, disk: str) -> torch.Tensor:
        return self._open(self._file_of[disk]).get_tensor(disk)

    def _read_index(self) -> dict[str, str]:
        """Name on disk -> file."""
        index = self._path(INDEX, required=False)
        if index is not None:
            try:
                return json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError) as error:
                raise InputError(f"{self._folder}: {INDEX} is damaged ({first_line(error)}).") from error
        if self._path(SINGLE, required=False) is None:
            raise InputError(f"{self._folder} holds neither {SINGLE} nor {INDEX}; only safetensors are read.")
        return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def _open(self, file: str) -> safe_open:
        if file not in self._open_files:
            try:
                self._open_files[file] = safe_open(self._path(file, required=True), framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(f"{self._folder}: {file} is damaged ({first_line(error)}).") from error
        return self._open_files[file]

    def _path(self, file: str, required: bool) -> str | None:
        try:
            return cached_file(self._folder, file, _raise_exceptions_for_missing_entries=required)
        except (OSError, ValueError) as error:
            raise InputError(f"{self._folder} gives out no {file} ({first_line(error)}).") from error
