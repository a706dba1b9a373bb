"""The manifest of a checkpoint: what it must consist of, to the last bit. No torch in here.

torch's distributed checkpoint reads a flipped byte as if it were a weight, and unpickles its index before it looks at
anything else. So a checkpoint is believed only when its manifest, the file written last, is itself whole and every file
that it names has the size and the hash it gives. What fails that is a DamagedError with one sentence.

The manifest protects itself: it holds the hash of its own content, and its bytes must be exactly those that writing the
content again would give (sorted keys, one form of white space), so no flipped byte can go unnoticed.

Hashes alone would vouch for files of two saves as well, if both had written into one folder. So every save has an id,
which the manifest names and every file carries in its content (version 1 knew none).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError

MANIFEST = "manifest.json"
FORMAT = "evenpipe checkpoint"
VERSIONS = (1, 2)
"""Without an id of the save, and with one."""

_ID = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"\.?[A-Za-z0-9_][A-Za-z0-9_.-]*")


class DamagedError(InputError):
    """A checkpoint that is incomplete, truncated or altered; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and hash of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Whole shape and dtype ("float32") of one tensor; pieces of it may lie in several files."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    files: dict[str, FileEntry]
    """Every file of the folder but the manifest, by its name in the folder."""
    tensors: dict[str, TensorEntry]
    """Every tensor, by its key: `parameters.<name>` or `optimizer.<state>.<name>`."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the packages that wrote it; for people."""
    id: str | None = None
    """Of the save, in the content of every file; None in checkpoints of version 1."""

    def to_bytes(self) -> bytes:
        """The text of the manifest, its own hash included."""
        content = {
            "format": FORMAT,
            "version": VERSIONS[self.id is not None],
            "step": self.step,
            "files": {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in self.files.items()},
            "tensors": {key: {"shape": list(entry.shape), "dtype": entry.dtype} for key, entry in self.tensors.items()},
            "versions": self.versions,
            **({} if self.id is None else {"id": self.id}),
        }
        return _canonical({**content, "sha256": hashlib.sha256(_canonical(content)).hexdigest()})

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """The manifest that `to_bytes` wrote.

        Raises:
            DamagedError: the text is not, byte for byte, what `to_bytes` writes, or is of an unknown version.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{MANIFEST} is not JSON") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise DamagedError(f'{MANIFEST} does not say "format": "{FORMAT}"')
        if (
            _canonical(content) != text
            or content.pop("sha256", None) != hashlib.sha256(_canonical(content)).hexdigest()
        ):
            raise DamagedError(f"{MANIFEST} does not agree with its own hash")
        version, identity = content.get("version"), content.get("id")
        if version not in VERSIONS:
            raise DamagedError(
                f"{MANIFEST} is of version {version}, and this evenpipe reads {VERSIONS[0]} and {VERSIONS[1]}"
            )
        try:  # only a manifest that someone else has made fails from here on
            files = {name: FileEntry(entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()}
            tensors = {
                key: TensorEntry(tuple(entry["shape"]), entry["dtype"]) for key, entry in content["tensors"].items()
            }
            manifest = cls(content["step"], files, tensors, content["versions"], identity)
            if (version == VERSIONS[0]) != (identity is None) or not _ID.fullmatch(identity or "0" * 32):
                raise ValueError("no id of a save")
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise DamagedError(f"{MANIFEST} does not have the fields of a manifest") from error
        for name in files:
            if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
                raise DamagedError(f"{MANIFEST} names the file {name!r}, which is not one of its folder")
        return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, checked in itself.

    Raises:
        DamagedError: it is missing, cannot be read, or is damaged.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing: this is no checkpoint, or an incomplete one") from None
    except OSError as error:
        raise DamagedError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    return Manifest.from_bytes(text)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Holds every file's size against the manifest: quick, and enough to find what was cut short.

    Raises:
        DamagedError: a file is missing, or has another size.
    """
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise DamagedError(f"{name} is missing") from None
        if size != entry.bytes:
            raise DamagedError(f"{name} has {size} bytes, and the manifest says {entry.bytes}")


def check_hash(folder: Path, name: str, entry: FileEntry) -> None:
    """Holds one file's content against the manifest; reads all of it.

    Raises:
        DamagedError: the content is another one, or cannot be read.
    """
    try:
        found = hash_file(folder / name)
    except OSError as error:
        raise DamagedError(f"{name} cannot be read: {error.strerror}") from error
    if found != entry:
        raise DamagedError(f"{name} does not have the content that the manifest gives the hash of")


def hash_file(path: Path) -> FileEntry:
    """Size and SHA-256 of a file, read in pieces. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), digest)


def write_synced(path: Path, content: bytes) -> FileEntry:
    """Writes a file and waits until the disk has it; gives its size and hash. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(len(content), hashlib.sha256(content).hexdigest())


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the names in a folder (a rename is lasting only after this). Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, sort_keys=True, indent=1) + "\n").encode("ascii")
