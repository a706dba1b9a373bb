"""What torch's distributed checkpoint lacks, between it and the disk: an index that cannot run code, and plain errors.

The index `.metadata` is a pickle, which torch reads with `pickle.load`. A manifest only shows that a folder is as its
maker left it, and the maker may be anyone; so the index is read with an unpickler that knows ten names of torch and its
dtypes and nothing else, and is then held against the manifest. Tensors are read by torch with `weights_only=True`.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from evenpipe.train.manifest import DamagedError, Manifest, TensorEntry

INDEX = ".metadata"

_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks a layout up by its name
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

    The folder must be new: nothing is ever written over. A failure of the disk comes out as the OSError that it was.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)

    def write_data(self, plan: Any, planner: Any) -> Any:
        with _disk_errors(self.path):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        with _disk_errors(self.path):
            super().finish(metadata, results)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # torch would add the path, as a class that differs between Pythons


class Reader(FileSystemReader):
    """Reads from a verified folder with an index that `read_index` has given."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self) -> Metadata:
        # Without further arguments: torch would otherwise try an index for this rank too, unpickling it.
        return self._index


def read_index(folder: Path, manifest: Manifest) -> Metadata:
    """The index of a folder that agrees with its manifest. Runs nothing that stands in the file.

    Raises:
        DamagedError: it names something other than tensors, or does not agree with the manifest.
        OSError: it cannot be read.
    """
    content = (folder / INDEX).read_bytes()
    try:
        index: Metadata = _IndexUnpickler(io.BytesIO(content)).load()
        _check_index(index, manifest)
    except DamagedError:
        raise
    except Exception as error:  # an altered pickle may raise anything
        raise DamagedError(f"{INDEX} is not an index of tensors ({type(error).__name__}: {error})") from error
    return index


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32"."""
    return str(dtype).removeprefix("torch.")


def tensor_entries(index: Metadata) -> dict[str, TensorEntry]:
    """Shape and dtype of every tensor of an index, for the manifest."""
    return {
        key: TensorEntry(tuple(entry.size), dtype_name(entry.properties.dtype))
        for key, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise DamagedError(f"{INDEX} asks for {module}.{name}, which no index of tensors needs; it was not opened")


def _check_index(index: Any, manifest: Manifest) -> None:
    """Everything that reading will trust: tensors only, whole, in files that the manifest vouches for."""
    if not all(isinstance(entry, TensorStorageMetadata) for entry in index.state_dict_metadata.values()):
        raise DamagedError(f"{INDEX} holds something that is not a tensor")
    if tensor_entries(index) != manifest.tensors:
        raise DamagedError(f"{INDEX} and the manifest do not name the same tensors")
    for key, entry in index.state_dict_metadata.items():
        for chunk in entry.chunks:
            bounds = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            if not all(0 <= offset <= offset + size <= whole for offset, size, whole in bounds):
                raise DamagedError(f"{INDEX} gives {key!r} a piece that lies outside of it")
            if MetadataIndex(key, chunk.offsets) not in index.storage_data:
                raise DamagedError(f"{INDEX} does not say where a piece of {key!r} is")
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise DamagedError(f"{INDEX} does not give the whole of {key!r}")
    for place in index.storage_data.values():
        if place.relative_path not in manifest.files or place.transform_descriptors:
            raise DamagedError(f"{INDEX} points to {place.relative_path!r}, which is not a file of the manifest")


@contextmanager
def _disk_errors(folder: Any) -> Iterator[None]:
    """torch's zip writer buries the OSError under a message about file positions: brings it back up."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, cause.filename or str(folder)) from error
