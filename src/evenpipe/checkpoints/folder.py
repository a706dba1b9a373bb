"""Finds the checkpoints of a folder, verifies them, and deletes old ones.

No part of a checkpoint is opened before every file in it has been compared with the manifest (manifest.py). Functions
with a `process_group` are collective over it, as in checkpoint.py. Reading needs no lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evenpipe.checkpoints.agreement import Team, describe_os_error
from evenpipe.checkpoints.lock import claim
from evenpipe.checkpoints.manifest import (
    MANIFEST,
    DamagedError,
    FileEntry,
    Manifest,
    check_hash,
    check_sizes,
    read_manifest,
    write_synced,
)
from evenpipe.checkpoints.storage import INDEX, RUN, check_marks, read_index, read_run
from evenpipe.errors import InputError

_REPLACED, _ABANDONED = ".replaced", ".abandoned"
"""Suffixes of a checkpoint whose step is being saved again, and of one that a run abandoned by going back before it."""
_FOLDER_NAME = re.compile(rf"step-(\d{{8,}})({re.escape(_REPLACED)}|{re.escape(_ABANDONED)})?")
_UNHEALTHY = "unhealthy"
"""Entry of the metadata of an unhealthy checkpoint."""
_MARK = "unhealthy.txt"
"""File in a checkpoint that turned out to be unhealthy after it was saved; the manifest does not name it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A checkpoint that is complete by manifest and sizes; its files have not been compared with their hashes."""

    path: Path
    step: int
    metadata: dict[str, Any]
    """The `metadata` of `save`, from run.json."""

    @property
    def extra(self) -> dict[str, Any]:
        """The `extra` of `Pipeline.save_checkpoint`."""
        extra: dict[str, Any] = self.metadata.get("extra", self.metadata)  # older checkpoints of the trainer
        return extra

    @property
    def unhealthy(self) -> str | None:
        """Why the saved state may be ruined, from `Pipeline.save_checkpoint` or `mark_unhealthy`; None: it is healthy,
        as far as the training loop knows."""
        reason: str | None = self.metadata.get(_UNHEALTHY)
        return reason


@dataclass(frozen=True, slots=True)
class Checkpoint(ListedCheckpoint):
    """A verified checkpoint: every file has the size and hash of the manifest, and the id of the same save."""

    manifest: Manifest
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the optimizer and the scheduler (settings.py), from run.json."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A checkpoint that must not be used, and the reason, worded to follow its name and a colon."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The newest sound checkpoint, if there is one, and the newer damaged ones."""

    checkpoint: Checkpoint | None
    rejected: tuple[Rejected, ...]

    def sound(self) -> Checkpoint | None:
        """Return the checkpoint to continue from; None if the folder has none. Raises InputError if all were rejected,
        because a new run would replace them."""
        if self.checkpoint is None and self.rejected:
            newest = self.rejected[0]
            raise InputError(
                f"{str(newest.path.parent)!r} has no sound checkpoint ({newest.path.name}: {newest.reason}); expected"
                " an undamaged one, or an empty folder for a new run"
            )
        return self.checkpoint


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is itself a checkpoint, sound or not, rather than a folder of checkpoints."""
    return _FOLDER_NAME.fullmatch(path.name) is not None or (path / MANIFEST).exists()


def prepare_folder(
    folder: str | os.PathLike[str], process_group: dist.ProcessGroup | None = None, *, force: bool = False
) -> None:
    """Make the folder for checkpoints, take its lock for this run (lock.py), and remove incomplete folders of
    killed runs. Call it once, before training, with the group that will save.

    force: take the lock even from a run that is still active; its next save then fails.

    Raises:
        InputError: another run writes there, or the folder cannot be made or written to.
    """
    path, team = Path(folder), Team(process_group, "prepare_folder")

    def prepare() -> None:
        try:
            claim(path, force=force)
            probe = path / f"writable-{secrets.token_hex(8)}.tmp"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InputError(f"the folder for checkpoints cannot be written to: {describe_os_error(error)}") from error
        remove_stale(path)

    team.first(prepare)


def remove_stale(folder: Path) -> None:
    """Remove incomplete folders of killed runs. Only for the holder of the folder's lock, before its first save."""
    for stale in folder.glob("step-*.tmp"):
        discard(stale)


def newest_checkpoint(
    folder: str | os.PathLike[str], process_group: dist.ProcessGroup | None = None
) -> Checkpoint | None:
    """Return the newest sound checkpoint in a folder, None if the folder has none.

    `Pipeline.load_checkpoint` loads it; its fields `path` and `step` identify it. Every file is read and hashed. Newer
    checkpoints that are damaged are skipped with a warning that names the reason. Collective over `process_group`, by
    default all processes; all get the same result.

    folder: folder of checkpoints, as for `Pipeline.save_checkpoint`.

    Raises:
        InputError: all checkpoints in the folder are damaged, or the folder is itself a checkpoint.
        RunError: a disk or a process failed.
    """
    if is_checkpoint(Path(folder)):
        raise InputError(f"{str(folder)!r} is one checkpoint; expected the folder of all checkpoints")
    result = find_latest(folder, process_group)
    if Team(process_group).rank == 0:
        for rejected in result.rejected:
            _log.warning("skipped checkpoint %s: %s", rejected.path, rejected.reason)
    return result.sound()


def find_latest(
    folder: str | os.PathLike[str], process_group: dist.ProcessGroup | None = None, *, local_only: bool = False
) -> FoundCheckpoint:
    """Return the newest sound checkpoint in a folder and the newer damaged ones. Collective: all get the same result.

    Every file of a candidate is read and hashed (the processes share the work) before it is opened. A folder that does
    not exist has no checkpoint. `local_only`: not collective; this process does all the work.
    """
    folder, team = Path(folder), Team(process_group, "newest_checkpoint", local_only=local_only)
    return _first_sound(team, lambda: [path for _, path in _candidates(folder)], folder)


def find_step(
    folder: str | os.PathLike[str], step: int, process_group: dist.ProcessGroup | None = None
) -> FoundCheckpoint:
    """Return the sound checkpoint of a step, like `find_latest`."""
    folder, team = Path(folder), Team(process_group)
    return _first_sound(team, lambda: [path for number, path in _candidates(folder) if number == step], folder)


def _first_sound(team: Team, candidates: Callable[[], list[Path]], folder: Path) -> FoundCheckpoint:
    """Return the first sound checkpoint among the candidates in a folder, as listed by the first process."""
    rejected: list[Rejected] = []
    for name in team.first(lambda: [path.name for path in candidates()]):
        path = folder / name
        try:
            return FoundCheckpoint(_verify(path, team, named_step=_step_of(path)), tuple(rejected))
        except DamagedError as error:
            rejected.append(Rejected(path, str(error)))
    return FoundCheckpoint(None, tuple(rejected))


def list_checkpoints(folder: Path) -> list[ListedCheckpoint]:
    """Return the checkpoints in a folder that are complete by manifest and sizes, newest first. Not collective, and
    quick: only the manifests and run.json are read."""
    return [listed for _, path in _candidates(folder) if (listed := _listed(path)) is not None]


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint that is complete by manifest and sizes; None if there is none."""
    return next((step for step, path in _candidates(folder) if _looks_complete(path)), None)


def open_checkpoint(
    path: str | os.PathLike[str], process_group: dist.ProcessGroup | None = None, *, local_only: bool = False
) -> Checkpoint:
    """Return the checkpoint in a folder, verified as in `find_latest`. Collective, unless `local_only`. Raises
    InputError if the folder is not a checkpoint, or damaged; the sentence names the file and the damage."""
    try:
        return _verify(Path(path), Team(process_group, local_only=local_only), named_step=None)
    except DamagedError as error:
        raise InputError(f"the checkpoint {str(path)!r} cannot be used: {error}") from error


def _verify(path: Path, team: Team, named_step: int | None) -> Checkpoint:
    """Return the checkpoint. Raises DamagedError on every process if the folder does not agree with its manifest."""

    @_damage_of_disk()
    def check_cheaply() -> str:
        manifest = read_manifest(path)
        if named_step not in (None, manifest.step):
            raise DamagedError(f"{MANIFEST} says step {manifest.step}")
        for name in (INDEX, RUN):
            if name not in manifest.files:
                raise DamagedError(f"{MANIFEST} does not name {name}")
        check_sizes(path, manifest)
        return manifest.to_bytes().decode("ascii")

    @_damage_of_disk()
    def check_share() -> None:
        for name in _share(manifest.files, team):
            check_hash(path, name, manifest.files[name])

    @_damage_of_disk()
    def check_contents() -> tuple[dict[str, Any], dict[str, Any]]:
        check_marks(path, manifest)
        read_index(path, manifest)
        return _read_run(path, manifest)

    manifest = Manifest.from_bytes(team.first(check_cheaply).encode("ascii"))
    team.everywhere(check_share)
    metadata, settings = team.first(check_contents)
    return Checkpoint(path, manifest.step, metadata, manifest, settings)


@contextlib.contextmanager
def _damage_of_disk() -> Iterator[None]:
    """Turn an OSError into a DamagedError."""
    try:
        yield
    except OSError as error:
        raise DamagedError(f"it cannot be read: {describe_os_error(error)}") from error


def _share(files: Mapping[str, FileEntry], team: Team) -> list[str]:
    """Return the files that this process hashes: largest first, each to the process with the fewest bytes so far."""
    load, local_names = [0] * team.size, []
    for name in sorted(files, key=lambda name: (-files[name].bytes, name)):
        rank = load.index(min(load))
        load[rank] += files[name].bytes
        if rank == team.rank:
            local_names.append(name)
    return local_names


def _candidates(folder: Path) -> list[tuple[int, Path]]:
    """Return step and path of all folders named like checkpoints, newest first; a checkpoint precedes the one it
    replaces. Abandoned ones are excluded."""
    try:
        paths = [path for path in folder.iterdir() if _FOLDER_NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths = [path for path in paths if path.suffix != _ABANDONED]
    return sorted(((_step_of(path), path) for path in paths), key=lambda item: (-item[0], len(item[1].name)))


def _step_of(path: Path) -> int:
    match = _FOLDER_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def delete_old(folder: Path, step: int, keep: int | None) -> None:
    """Delete checkpoints up to `step`, and abandoned ones, except the newest `keep` and the newest healthy one.

    Only checkpoints that are complete by manifest and sizes count.
    """
    kept_count, has_healthy = 0, keep is None
    for older, path in _candidates(folder):
        if older > step:
            continue
        if path.suffix == _REPLACED:
            discard(path)
        elif keep is None or kept_count < keep:
            kept_count += _looks_complete(path)
            has_healthy = has_healthy or _is_healthy(path)
        elif not has_healthy and _is_healthy(path):
            has_healthy = True
        else:
            discard(path)
    for path in folder.glob(f"step-*{_ABANDONED}"):
        if _FOLDER_NAME.fullmatch(path.name) and _step_of(path) <= step:
            discard(path)


def mark_unhealthy(folder: Path, step: int, reason: str) -> None:
    """Mark the checkpoints of `step` and later as unhealthy, unless already marked. Only for the holder of the folder's
    lock. Raises OSError."""
    for listed in list_checkpoints(folder):
        if listed.step >= step and listed.unhealthy is None:
            write_synced(listed.path / _MARK, (reason + "\n").encode())


def abandon_later(folder: Path, step: int) -> list[int]:
    """Rename the checkpoints of steps after `step`, because the run continues from there; return their steps.

    They are not found under the new name, and `delete_old` deletes them once the run has passed their steps. Only for
    the holder of the folder's lock. Raises OSError.
    """
    abandoned = set()
    for later, path in reversed(_candidates(folder)):  # if we are killed, the newest one still counts as the newest
        if later > step:
            target = path.with_name(f"step-{later:08d}{_ABANDONED}")
            if target.exists():
                discard(target)
            path.rename(target)
            abandoned.add(later)
    return sorted(abandoned)


def discard(path: Path) -> None:
    """Delete a folder; warn if this fails.

    The folder is renamed first: half deleted, it must not look like a checkpoint, and a run that has just lost its lock
    must not publish it.
    """
    try:
        path.rename(doomed := path.with_name(f"{path.name.partition('.')[0]}.{secrets.token_hex(16)}.tmp"))
        shutil.rmtree(doomed)
    except OSError as error:
        _log.warning("%s cannot be deleted: %s", path, describe_os_error(error))


def _looks_complete(path: Path) -> bool:
    try:
        check_sizes(path, read_manifest(path))
    except DamagedError:
        return False
    return True


def _is_healthy(path: Path) -> bool:
    listed = _listed(path)
    return listed is not None and listed.unhealthy is None


def _listed(path: Path) -> ListedCheckpoint | None:
    """Return the checkpoint in a folder if it is complete by manifest and sizes."""
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
        metadata, _ = _read_run(path, manifest)
    except (DamagedError, OSError):
        return None
    return ListedCheckpoint(path, manifest.step, metadata)


def _read_run(path: Path, manifest: Manifest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata, with what `mark_unhealthy` wrote, and the settings of a checkpoint; raises as `read_run`."""
    metadata, settings = read_run(path, manifest)
    with contextlib.suppress(FileNotFoundError):
        metadata.setdefault(_UNHEALTHY, (path / _MARK).read_text(encoding="utf-8", errors="replace").strip())
    return metadata, settings
