"""The manifest of a checkpoint, which describes its files down to the last bit. This module does not import torch.

torch's distributed checkpoint would load a flipped byte as a weight, and unpickles its index before any check. So a
checkpoint is accepted only if its manifest, the file written last, is undamaged and every file that it names has the
given size and hash. Otherwise a DamagedError with one sentence is raised.

The manifest protects itself: it contains the hash of its own content, and its bytes must be exactly those that
writing the content again would give (sorted keys, fixed white space), so a flipped byte is always detected.

Hashes alone would also accept a folder that mixes files of two saves. So every save has an id, which the manifest and
every other file contain (version 1 had no ids).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError

MANIFEST = "manifest.json"
FORMAT = "evenpipe checkpoint"
VERSIONS = (1, 2)
"""Version 1 has no id of the save, version 2 has one."""

_ID = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"\.?[A-Za-z0-9_][A-Za-z0-9_.-]*")


class DamagedError(InputError):
    """A checkpoint that is incomplete, truncated or altered; the message names the file and the damage."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and hash of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Full shape and dtype ("float32") of a tensor; its pieces may be in several files."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint."""

    step: int
    files: dict[str, FileEntry]
    """Every file of the folder except the manifest, by name."""
    tensors: dict[str, TensorEntry]
    """Every tensor, by its key: `parameters.<name>` or `optimizer.<state>.<name>`."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that wrote it, for human readers."""
    id: str | None = None
    """Id of the save, in the content of every file; None in checkpoints of version 1."""

    def to_bytes(self) -> bytes:
        """Return the text of the manifest, including its own hash."""
        content = {"format": FORMAT, "version": VERSIONS[self.id is not None], **asdict(self)}
        if self.id is None:
            del content["id"]
        return _canonical({**content, "sha256": hashlib.sha256(_canonical(content)).hexdigest()})

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """Return the manifest that `to_bytes` wrote. Raises DamagedError if it would write other bytes, or the version
        is unknown."""
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
        try:  # from here on, only a manifest of another program fails
            files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
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
    """Return the manifest of a checkpoint folder after checking its own hash. Raises DamagedError."""
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing: this is not a checkpoint, or an incomplete one") from None
    except OSError as error:
        raise DamagedError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    return Manifest.from_bytes(text)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Compare every file's size with the manifest: quick, and enough to find truncated files. Raises DamagedError."""
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise DamagedError(f"{name} is missing") from None
        if size != entry.bytes:
            raise DamagedError(f"{name} has {size} bytes, but the manifest says {entry.bytes}")


def check_hash(folder: Path, name: str, entry: FileEntry) -> None:
    """Compare one file's content with the manifest; reads the whole file. Raises DamagedError."""
    try:
        actual = hash_file(folder / name)
    except OSError as error:
        raise DamagedError(f"{name} cannot be read: {error.strerror}") from error
    if actual != entry:
        raise DamagedError(f"the content of {name} does not have the hash in the manifest")


def hash_file(path: Path) -> FileEntry:
    """Return size and SHA-256 of a file, read in pieces. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), digest)


def write_synced(path: Path, content: bytes) -> FileEntry:
    """Write a file and wait until it is on the disk; return its size and hash. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(len(content), hashlib.sha256(content).hexdigest())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk (a rename is durable only afterwards). Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, sort_keys=True, indent=1) + "\n").encode("ascii")
