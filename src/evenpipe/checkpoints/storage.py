"""Storage backend of torch's distributed checkpoint: an index that cannot run code, plain errors, and files that name
their save.

torch coordinates a save by sending pickles. Here each process writes its share and describes it in JSON, from which the
first process builds torch's index; nothing else is sent.

The index `.metadata` is a pickle, which torch reads with `pickle.load`. A manifest only proves that a folder has not
changed, and anyone may have written it. So the index is read with an unpickler that accepts only ten names of torch and
its dtypes, and the index is then compared with the manifest. torch reads tensors with `weights_only=True`.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from evenpipe.checkpoints.agreement import describe_os_error
from evenpipe.checkpoints.manifest import MANIFEST, DamagedError, Manifest, TensorEntry
from evenpipe.communication.messages import dtype_name, dtype_of
from evenpipe.errors import InputError, RunError
from evenpipe.model.placement import Held

INDEX = ".metadata"
RUN = "run.json"
"""Everything except tensors."""

_MARK_BYTES = 64
"""Length of the first line of a tensor file, which names the save. torch reads from offsets after it."""

_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks up a layout by its name
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


class Writer(FileSystemWriter):
    """Writes this process's tensors to one file, `__<rank>_0.distcp`, and on the first process the index.

    The folder must exist and be new: no file is ever overwritten. A failure of the disk is raised as its OSError.
    """

    def __init__(self, folder: Path, save_id: str) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
        self.save_id = save_id
        self.fs = _MarkedFiles(save_id)

    def write_part(self, state: Mapping[str, Held[torch.Tensor]], rank: int) -> list[dict[str, Any]]:
        """Write the tensors of this process; return a description of their locations, as JSON, for `write_index`."""
        items, tensors = [], {}
        for key, held in state.items():
            kind = WriteItemType.SHARD if held.placement.cuts else WriteItemType.TENSOR
            properties, shape = TensorProperties.create_from_tensor(held.tensor), torch.Size(held.placement.shape)
            for index, chunk, tensor in _chunks(key, held):
                items.append(WriteItem(index, kind, tensor_data=TensorWriteData(chunk, properties, shape)))
                tensors[index] = tensor
        # torch names the file by the index in the list.
        plan = self.prepare_global_plan([SavePlan([])] * rank + [SavePlan(items)])[rank]
        with _disk_errors(self.path):
            written = self.write_data(plan, _Tensors(tensors)).wait()  # type: ignore[arg-type]  # it resolves data
            results = {result.index: result for result in written}
        return [_piece_to_json(item, results[item.index]) for item in plan.items]

    def write_index(self, descriptions: Sequence[list[dict[str, Any]]]) -> Metadata:
        """Write the index from the descriptions of all processes by rank. Of several copies, the first is read.

        Raises ValueError if pieces overlap, or do not make up whole tensors.
        """
        results: dict[MetadataIndex, WriteResult] = {}
        plans = []
        for description in descriptions:
            pieces = [_piece_from_json(entry) for entry in description]
            for item, result in pieces:
                results.setdefault(item.index, result)
            plans.append(
                SavePlan(
                    [item for item, _ in pieces], planner_data={item.index.fqn: (item.index.fqn,) for item, _ in pieces}
                )
            )
        plans, index = DefaultSavePlanner(dedup_save_to_lowest_rank=True).create_global_plan(plans)
        with _disk_errors(self.path):
            self.finish(
                index, [[replace(results[item.index], index=item.index) for item in plan.items] for plan in plans]
            )
        return index

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # torch would add the path, as a class that differs between Pythons


class _Tensors(DefaultLoadPlanner):
    """Maps indices to the tensors to write or read into, as torch's storage expects of a planner."""

    def __init__(self, tensors: Mapping[MetadataIndex, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._tensors[write_item.index]

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        extents = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._tensors[read_item.dest_index][tuple(slice(first, first + length) for first, length in extents)]


class _MarkedFiles(FileSystem):
    """Writes the id of the save at the start of every tensor file."""

    def __init__(self, save_id: str) -> None:
        self._mark = _mark(save_id)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode == "wb" and Path(path).suffix == ".distcp":
                stream.write(self._mark)  # type: ignore[attr-defined]  # IOBase, says torch
            yield stream


def check_marks(folder: Path, manifest: Manifest) -> None:
    """Compare the id in every tensor file with that of the manifest, if it has one. Raises DamagedError if a file comes
    from another save or has no id, OSError if it cannot be read."""
    if manifest.id is None:
        return
    for name in manifest.files.keys() - {INDEX, RUN}:
        with (folder / name).open("rb") as file:
            if file.read(_MARK_BYTES) != _mark(manifest.id):
                raise _of_another_save(name)


def run_json(metadata: Mapping[str, Any], settings: Mapping[str, Any], save_id: str) -> bytes:
    """Return the text of run.json. Raises InputError for metadata that is not JSON."""
    try:
        content = {"id": save_id, "metadata": dict(metadata), "settings": settings}
        return (json.dumps(content, indent=1) + "\n").encode("ascii")
    except (TypeError, ValueError) as error:
        raise InputError(f"metadata of a checkpoint: {error}; expected JSON values") from error


def read_run(folder: Path, manifest: Manifest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata and the settings in run.json; older checkpoints have no settings. Raises DamagedError if the
    file comes from another save or is not JSON, OSError if it cannot be read."""
    try:
        content = json.loads((folder / RUN).read_bytes())
        metadata = content if manifest.id is None else content["metadata"]
        settings = {} if manifest.id is None else content.get("settings", {})
        if not (isinstance(metadata, dict) and isinstance(settings, dict)):
            raise TypeError("metadata is not an object")
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{RUN} does not contain the metadata of a checkpoint") from error
    if manifest.id is not None and content.get("id") != manifest.id:
        raise _of_another_save(RUN)
    return metadata, settings


def read_state(folder: Path, index: Metadata, state: Mapping[str, Held[torch.Tensor]]) -> None:
    """Fill tensors, by key, from a verified folder with the index of `read_index`, regardless of how they were split
    when saved. No communication. Raises RunError if a file cannot be read."""
    items, tensors = [], {}
    for key, held in state.items():
        chunks = []
        for chunk_index, chunk, tensor in _chunks(key, held):
            chunks.append(chunk)
            tensors[chunk_index] = tensor
        entry = index.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        items += create_read_items_for_chunk_list(key, entry, chunks)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(index, is_coordinator=True)
    try:
        reader.read_data(LoadPlan(items), _Tensors(tensors)).wait()
    except Exception as error:  # raised by torch if a file has changed since it was verified
        reason = describe_os_error(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise RunError(f"the checkpoint {str(folder)!r} cannot be read: {reason}") from error


def _chunks(key: str, held: Held[torch.Tensor]) -> Iterator[tuple[MetadataIndex, ChunkStorageMetadata, torch.Tensor]]:
    """Yield the boxes of a tensor: index, location in the full tensor, and view."""
    for box in held.placement.boxes():
        offsets = torch.Size(box.offsets)
        chunk = ChunkStorageMetadata(offsets, torch.Size(box.sizes))
        yield MetadataIndex(key, offsets), chunk, held.tensor[box.local]


def read_index(folder: Path, manifest: Manifest) -> Metadata:
    """Return the index of a folder, compared with its manifest. Runs no code from the file. Raises DamagedError if it
    names anything but tensors, or does not agree with the manifest; OSError if it cannot be read."""
    content = (folder / INDEX).read_bytes()
    try:
        index: Metadata = _IndexUnpickler(io.BytesIO(content)).load()
        _check_index(index, manifest)
    except DamagedError:
        raise
    except Exception as error:  # an altered pickle may raise anything
        raise DamagedError(f"{INDEX} is not an index of tensors ({type(error).__name__}: {error})") from error
    return index


def tensor_entries(index: Metadata) -> dict[str, TensorEntry]:
    """Return the shape and dtype of every tensor of an index, for the manifest."""
    return {
        key: TensorEntry(tuple(entry.size), dtype_name(entry.properties.dtype))
        for key, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _of_another_save(name: str) -> DamagedError:
    return DamagedError(f"{name} does not carry the id of the save that {MANIFEST} names")


def _mark(save_id: str) -> bytes:
    return f"evenpipe save {save_id}".ljust(_MARK_BYTES - 1).encode("ascii") + b"\n"


def _piece_to_json(item: WriteItem, result: WriteResult) -> dict[str, Any]:
    """Describe a tensor or its local rows, including file and offset."""
    data, location = item.tensor_data, result.storage_data
    assert data is not None, item.index
    return {
        "key": item.index.fqn,
        "type": item.type.name,
        "offsets": list(data.chunk.offsets),
        "sizes": list(data.chunk.sizes),
        "shape": list(data.size),
        "dtype": dtype_name(data.properties.dtype),
        "file": location.relative_path,
        "start": location.offset,
        "bytes": location.length,
    }


def _piece_from_json(entry: dict[str, Any]) -> tuple[WriteItem, WriteResult]:
    offsets, sizes = torch.Size(entry["offsets"]), torch.Size(entry["sizes"])
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype_of(entry["dtype"])), torch.Size(entry["shape"])
    )
    item = WriteItem(MetadataIndex(entry["key"], offsets), WriteItemType[entry["type"]], tensor_data=data)
    return item, WriteResult(item.index, entry["bytes"], _StorageInfo(entry["file"], entry["start"], entry["bytes"]))


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise DamagedError(f"{INDEX} asks for {module}.{name}, which no index of tensors needs; it was not opened")


def _check_index(index: Any, manifest: Manifest) -> None:
    """Check everything that reading relies on: only tensors, complete ones, in files of the manifest."""
    if not all(isinstance(entry, TensorStorageMetadata) for entry in index.state_dict_metadata.values()):
        raise DamagedError(f"{INDEX} contains an entry that is not a tensor")
    if manifest.id is not None and index.storage_meta.save_id != manifest.id:
        raise _of_another_save(INDEX)
    if tensor_entries(index) != manifest.tensors:
        raise DamagedError(f"{INDEX} and the manifest do not name the same tensors")
    for key, entry in index.state_dict_metadata.items():
        for chunk in entry.chunks:
            bounds = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            if not all(0 <= offset <= offset + size <= full_size for offset, size, full_size in bounds):
                raise DamagedError(f"{INDEX} gives {key!r} a piece that lies outside of it")
            if MetadataIndex(key, chunk.offsets) not in index.storage_data:
                raise DamagedError(f"{INDEX} does not say where a piece of {key!r} is")
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise DamagedError(f"{INDEX} does not give the whole of {key!r}")
    for location in index.storage_data.values():
        if location.relative_path not in manifest.files or location.transform_descriptors:
            raise DamagedError(f"{INDEX} points to {location.relative_path!r}, which is not a file of the manifest")


@contextmanager
def _disk_errors(folder: Any) -> Iterator[None]:
    """Raise the OSError that torch's zip writer hides under a message about file positions."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, cause.filename or str(folder)) from error
