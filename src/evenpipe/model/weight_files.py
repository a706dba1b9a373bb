"""Reads the safetensors files of a Hugging Face folder or hub name lazily: only the requested tensors and rows.

The files are chosen as in transformers: `model.safetensors`, or else the files in the index. An index may come from
anywhere, so it is checked before use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.model.names import Stored, put_together, stored_tensors
from evenpipe.model.placement import TensorPlacement
from evenpipe.model.structure import first_line

BLOCK_ELEMENTS = 2**22
"""Number of elements that `same` compares at a time."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """The tensors of a folder by their names in memory."""

    def __init__(self, description: Description, folder: str | Path):
        """Raises `InputError` if there are no safetensors, or their index is damaged."""
        self._description = description
        self._folder = str(folder)
        self._open_files: dict[str, safe_open] = {}
        self._file_of = self._read_names()
        self.stored: dict[str, Stored] = stored_tensors(description, self._file_of)
        """Name in memory -> how that tensor is stored; includes names that the model does not have."""

    def require(self, names: Iterable[str]) -> None:
        """Raise `InputError` with the missing names, if any."""
        missing = [name for name in names if name not in self.stored]
        if missing:
            raise InputError(f"{self._folder} has no tensor for {listed(missing)}.")

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `InputError` if a tensor has another shape."""
        actual = tuple(self._put_together(name, self.stored[name], self._without_storage).shape)
        if actual != shape:
            raise InputError(f"{self._folder}: {name} has the shape {actual}, and the config asks for {shape}.")

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows of a tensor, without reading the other rows if it is stored unchanged."""
        disk = self.stored[name].disk_name
        rows = self.tensor(name) if disk is None else self._lazy(disk)
        return rows[start:stop].clone()  # a slice would keep the whole storage

    def tensor(self, name: str) -> torch.Tensor:
        """Return a full tensor in the model's form."""
        return self._put_together(name, self.stored[name], lambda disk: self._from_file(disk, safe_open.get_tensor))

    def part(self, name: str, placement: TensorPlacement) -> torch.Tensor:
        """Return a shard of a tensor in the model's form. Only the shard's entries of the first dimension (such as the
        experts of a layer) are read if they are stored separately."""
        if not placement.cuts:
            return self.tensor(name)
        if 0 in placement.local_shape:
            return torch.empty(placement.local_shape)
        entries, *further = placement.ranges(0)
        readable = None if further else self.stored[name].of_entries(entries, placement.shape[0])
        if readable is None:
            return placement.of(self.tensor(name))
        stored, rows = readable
        own_entries = self._put_together(name, stored, lambda disk: self._lazy(disk)[rows])
        assert own_entries.shape == (len(entries), *placement.shape[1:]), f"{name} is not stored by entries"
        return placement.of_entries(len(entries)).of(own_entries)

    def kinds(self, name: str) -> set[str]:
        """Return the dtypes in which a tensor is stored, such as "BF16"; empty if it is not. Reads headers only."""
        stored = self.stored.get(name)
        return set() if stored is None else {self._lazy(disk).get_dtype() for disk, _ in stored.parts}

    def same(self, name: str, other_name: str) -> bool:
        """Return whether two matrices are equal, or only one is stored. Reads blocks up to the first difference."""
        if not {name, other_name} <= self.stored.keys():
            return True
        rows, width = self._put_together(name, self.stored[name], self._without_storage).shape
        self.require_shape(other_name, (rows, width))
        block = max(1, BLOCK_ELEMENTS // max(1, width))
        return all(
            torch.equal(*(self.rows(each, start, start + block).double() for each in (name, other_name)))
            for start in range(0, rows, block)
        )

    def surplus(self) -> list[str]:
        """Return the names on disk of tensors that the model does not have, except names that transformers ignores."""
        skeleton = self._description.skeleton
        held = skeleton.state_dict()
        used = {disk for name, stored in self.stored.items() if name in held for disk, _ in stored.parts}
        name_of = {disk: name for name, stored in self.stored.items() for disk, _ in stored.parts}
        unused = {disk: name_of.get(disk, disk) for disk in self._file_of if disk not in used}
        report = SimpleNamespace(missing_keys=set(), unexpected_keys=set(unused.values()))
        skeleton._adjust_missing_and_unexpected_keys(report)
        return [disk for disk, name in unused.items() if name in report.unexpected_keys]

    def _put_together(self, name: str, stored: Stored, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        parts = {disk: read(disk) for disk, _ in stored.parts}
        try:
            return put_together(self._description, name, stored, parts.__getitem__)
        except InputError as error:
            raise InputError(f"{self._folder}: {error}") from error

    def _without_storage(self, disk: str) -> torch.Tensor:
        return torch.empty(self._lazy(disk).get_shape(), device="meta")

    def _lazy(self, disk: str) -> Any:
        """Return a view of a tensor: `[a:b]` reads only these rows."""
        return self._from_file(disk, safe_open.get_slice)

    def _from_file(self, disk: str, get: Callable[[safe_open, str], Any]) -> Any:
        file = self._file_of[disk]
        try:
            return get(self._open(file), disk)
        except SafetensorError as error:
            raise InputError(
                f"{self._folder}: {disk} should be in {file}, which does not give it out ({first_line(error)})."
            ) from error

    def _read_names(self) -> dict[str, str]:
        """Return name on disk -> file."""
        index = self._path(INDEX, required=False)
        file_of = {} if index is None else self._read_index(index)
        if self._path(SINGLE, required=False) is not None:  # has priority over the index
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        if index is None:
            raise InputError(f"{self._folder} holds neither {SINGLE} nor {INDEX}; only safetensors are read.")
        return file_of

    def _read_index(self, index: str) -> dict[str, str]:
        try:
            file_of = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(
                f"{self._folder}: {INDEX} is damaged ({first_line(error)}); expected a table with a weight_map."
            ) from error
        if not isinstance(file_of, dict):
            raise InputError(
                f"{self._folder}: weight_map in {INDEX} is {type(file_of).__name__}; it must be a table from names to"
                " files."
            )
        for disk, file in file_of.items():
            if not _is_inside(file):
                raise InputError(
                    f"{self._folder}: {INDEX} says that {disk} is in {file!r}; it must name a .safetensors file inside"
                    " the folder, without '..'."
                )
        return file_of

    def _open(self, file: str) -> safe_open:
        if file not in self._open_files:
            path = self._path(file, required=True)
            try:
                self._open_files[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(f"{self._folder}: {file} is damaged ({first_line(error)}).") from error
        return self._open_files[file]

    def _path(self, file: str, required: bool) -> str | None:
        if Path(self._folder).is_dir():
            path = Path(self._folder, file)  # may be a link: the hub's cache consists of links to files elsewhere
            if path.is_file():
                return str(path)
            if required:
                raise InputError(f"{self._folder} has no file {file}, which its {INDEX} names.")
            return None
        try:
            return cached_file(self._folder, file, _raise_exceptions_for_missing_entries=required)
        except (OSError, ValueError) as error:
            raise InputError(f"{self._folder} gives out no {file} ({first_line(error)}).") from error


def listed(names: list[str]) -> str:
    """Return the first eight names, and the number of remaining names."""
    suffix = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + suffix


def _is_inside(file: Any) -> bool:
    """Return whether an index may name this file: a relative path on every system, without "..". Links are allowed."""
    if not isinstance(file, str) or not file.endswith(".safetensors") or "\0" in file:
        return False
    windows = PureWindowsPath(file)
    return not (PurePosixPath(file).is_absolute() or windows.anchor or ".." in windows.parts)
