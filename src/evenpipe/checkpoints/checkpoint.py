"""Checkpoints: saved atomically, verified bit by bit, and loadable with any number of processes.

A checkpoint is a folder `step-00000020`:

    __0_0.distcp, __1_0.distcp, ...   tensors, one file per process, in torch's distributed checkpoint format
    .metadata                         torch's index of them
    run.json                          everything except tensors: learning rates and other settings of the optimizer and
                                      the scheduler (settings.py), the model config, values from the caller
    manifest.json                     size and SHA-256 of all other files, every tensor's shape and dtype, and the id of
                                      the save, which all other files also contain

Tensors have Hugging Face names and are whole: `parameters.model.embed_tokens.weight`,
`optimizer.exp_avg.model.embed_tokens.weight`. A process contributes the boxes given by its placement of a tensor, so a
checkpoint of one layout loads in any other. If a tensor has several copies, the first is saved and all are loaded.

Steps of saving: take or check the folder's lock (lock.py) -> write all files into `step-00000020.ID.tmp` -> wait
for every process -> write the manifest -> wait for the disk -> check the lock -> rename -> wait for the disk -> verify
that the published save is this one -> delete old checkpoints. A process killed at any point leaves the previous
checkpoint unchanged. Tensors that belong to a process, not to a parameter (states of its random generators), are named
`process.3.random_state`. They are restored if the number of processes is the same; otherwise only on the first process.

Processes exchange only JSON.

Every function here with a `process_group` is collective over it: all processes of a pipeline and of its replicas call
it (None: all processes, or only this one without torch.distributed), and all return or raise together. The
group's timeout must exceed the time that a process takes to write and hash its share.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import evenpipe
from evenpipe.checkpoints.agreement import Team
from evenpipe.checkpoints.folder import Checkpoint, delete_old, discard, remove_stale
from evenpipe.checkpoints.lock import check, hold
from evenpipe.checkpoints.manifest import (
    MANIFEST,
    DamagedError,
    FileEntry,
    Manifest,
    hash_file,
    read_manifest,
    sync_folder,
    write_synced,
)
from evenpipe.checkpoints.settings import describe_settings, merge_settings, plan_settings
from evenpipe.checkpoints.state import (
    OPTIMIZER,
    Parameters,
    State,
    StatePlan,
    parameter_names,
    plan_state,
    process_state,
    saved_process_state,
    tensors_to_save,
)
from evenpipe.checkpoints.storage import (
    INDEX,
    RUN,
    Writer,
    check_marks,
    read_index,
    read_state,
    run_json,
    tensor_entries,
)
from evenpipe.errors import InputError, RunError
from evenpipe.words import count, refused

SHOWN_NAMES = 4
"""Maximum number of parameter names in a warning."""

_log = logging.getLogger(__name__)

_BYTES_PER_TENSOR = 4096
"""Upper bound on a tensor's overhead on disk: its zip archive, its lines in the index and the manifest."""


def save(  # noqa: PLR0917
    folder: str | os.PathLike[str],
    step: int,
    shards: Parameters,
    optimizer: torch.optim.Optimizer | None,
    metadata: Mapping[str, Any],
    process_group: dist.ProcessGroup | None = None,
    *,
    scheduler: Any = None,
    of_process: Mapping[str, torch.Tensor] | None = None,
    keep: int | None = 2,
) -> Path:
    """Save a checkpoint, as `Pipeline.save_checkpoint` explains; return its folder. Collective.

    Args:
        shards: shards of this process by Hugging Face name (`Pipeline.parameter_shards()`).
        of_process: further tensors of this process by name.
        metadata: further JSON values needed to resume. Only those of the first process are saved.
        keep: checkpoints of later steps (left over if a run was resumed at an earlier step) are also kept, unless
            `abandon_later` has renamed them.

    Raises:
        InputError: a value in `metadata`, or a setting of the optimizer or scheduler, is not JSON, state of the
            optimizer is not a tensor, or another run has locked the folder.
        RunError: the disk is full, another run has taken the folder from this one, or a disk or process failed; written
            files are removed, and earlier checkpoints have not changed.
    """
    if keep is not None and keep < 1:
        raise refused("keep", keep, "at least 1, or None to keep all checkpoints")
    folder, team = Path(folder), Team(process_group)
    state: State = {}

    def collect() -> dict[str, Any]:
        state.update(tensors_to_save(shards, optimizer))
        state.update(process_state(of_process or {}, team.rank))
        local_settings = describe_settings(optimizer, scheduler, _names(shards))
        if team.rank == 0:
            run_json(metadata, {}, "")
        size = sum(held.tensor.nbytes for held in state.values())
        return {
            "bytes": size + _BYTES_PER_TENSOR * (len(state) + 1),
            "id": secrets.token_hex(16),
            "settings": local_settings,
        }

    try:
        collected = team.everywhere(collect)
        new_folder = _NewFolder(folder, step, collected[0]["id"])
        settings = merge_settings([each["settings"] for each in collected])
        try:
            team.first(lambda: new_folder.make(sum(each["bytes"] for each in collected)))
            reports = team.everywhere(lambda: new_folder.write(state, team.rank))
            team.first(lambda: new_folder.publish(reports, metadata, settings))
        except RunError:
            if team.rank == 0:
                shutil.rmtree(new_folder.temporary, ignore_errors=True)
            raise
    except RunError as error:
        raise RunError(
            f"the checkpoint of step {step} was not saved: {error}; the checkpoints before it are as they were"
        ) from error
    if team.rank == 0:
        delete_old(folder, step, keep)
    return new_folder.published


class _NewFolder:
    """The folder of a checkpoint that is being saved, as seen by one process."""

    def __init__(self, folder: Path, step: int, save_id: str) -> None:
        self._folder, self._step, self._id = folder, step, save_id
        self.published = folder / f"step-{step:08d}"
        self.temporary = folder / f"{self.published.name}.{save_id}.tmp"
        self._writer = Writer(self.temporary, save_id)

    def make(self, needed: int) -> None:
        """On the first process: take the lock, and make the folder if the disk has room for `needed` bytes."""
        folder = self._folder
        if hold(folder):
            remove_stale(folder)
        space = os.statvfs(folder)
        free = space.f_bavail * space.f_frsize
        if space.f_blocks and free < needed:
            raise RunError(f"{_in_words(needed)} are needed and the disk of {str(folder)!r} has {_in_words(free)} left")
        self.temporary.mkdir()

    def write(self, state: State, rank: int) -> dict[str, Any]:
        """Write this process's file; return the description of it that the index needs."""
        pieces = self._writer.write_part(state, rank)
        files = {path.name: asdict(hash_file(path)) for path in self.temporary.glob(f"__{rank}_*.distcp")}
        return {"pieces": pieces, "files": files}

    def publish(self, reports: list[dict[str, Any]], metadata: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """On the first process, after all have written: complete the folder and give it its name."""
        temporary, published = self.temporary, self.published
        try:
            index = self._writer.write_index([report["pieces"] for report in reports])
        except ValueError as error:
            raise RunError(f"the parts of all processes do not make up whole tensors: {error}") from error
        files = {name: FileEntry(**entry) for report in reports for name, entry in report["files"].items()}
        files[INDEX] = hash_file(temporary / INDEX)
        files[RUN] = write_synced(temporary / RUN, run_json(metadata, settings, self._id))
        versions = {"evenpipe": evenpipe.__version__, "torch": torch.__version__}
        manifest = Manifest(self._step, files, tensor_entries(index), versions, self._id)
        check_marks(temporary, manifest)
        write_synced(temporary / MANIFEST, manifest.to_bytes())
        sync_folder(temporary)
        check(self._folder)
        _put_in_place(temporary, published)
        sync_folder(self._folder)
        try:
            published_id = read_manifest(published).id
        except DamagedError:
            published_id = None
        if published_id != self._id:
            raise RunError(f"{str(published)!r} has been replaced by another run")


def load(
    checkpoint: Checkpoint,
    shards: Parameters,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    *,
    scheduler: Any = None,
    of_process: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into parameters, optimizer and scheduler, as `Pipeline.load_checkpoint` explains; return its
    metadata. Collective.

    of_process: tensors of this process by name, overwritten by the saved ones: on all processes if the checkpoint was
        saved by the same number of processes, else on the first one. They are undefined if the load fails.

    All tensors are first read into new memory, or into host memory that a `HostAdamW` has not used yet: if anything
    fails on any process, parameters and optimizer have not changed. Then the parameters are overwritten in place, and
    the optimizer's state is replaced: created if it has never stepped, removed if the checkpoint has none. A warning
    names parameters that start with new state although state of others was saved, such as newly trained ones. Every
    parameter gets the options that it was saved with, even if processes had different groups.

    Raises:
        InputError: names, shapes, dtypes, the kind of optimizer or scheduler, or their groups differ from the
            checkpoint's.
        RunError: a file cannot be read, or a process died.
    """
    team = Team(process_group)
    where = f"the checkpoint {str(checkpoint.path)!r}"

    plans: list[tuple[StatePlan, Callable[[], None]]] = []

    def prepare() -> tuple[list[str], list[str]]:
        plan = plan_state(checkpoint.manifest, shards, optimizer)
        plan.state |= saved_process_state(checkpoint.manifest, of_process or {}, team.rank, team.size)
        plans.append((plan, plan_settings(checkpoint.settings, optimizer, scheduler, _names(shards), where=where)))
        return list(shards), plan.without_state

    prepared = team.everywhere(prepare)
    known = {name for names, _ in prepared for name in names}
    unknown = sorted(set(parameter_names(checkpoint.manifest)) - known)
    if unknown:
        suffix = f" and {count(len(unknown) - 1, 'more parameter')}" if unknown[1:] else ""
        raise InputError(f"{where} has {unknown[0]!r}{suffix} that the model does not have")

    ((plan, put_settings_in_place),) = plans

    def read() -> None:
        try:
            read_state(checkpoint.path, read_index(checkpoint.path, checkpoint.manifest), plan.state)
        except DamagedError as error:
            raise InputError(f"{where} cannot be used: {error}") from error

    team.everywhere(read)
    plan.put_in_place()
    put_settings_in_place()
    restarted = sorted({name for _, without_state in prepared for name in without_state})
    if restarted and team.rank == 0 and _has_states(checkpoint):
        _log.warning(
            "%s has no optimizer state of %s, which %s trained now: %s begins anew",
            where,
            _names_in_words(restarted),
            "is" if len(restarted) == 1 else "are",
            "its state" if len(restarted) == 1 else "theirs",
        )
    return checkpoint.metadata


def _has_states(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has optimizer state, or was saved without an optimizer; neither is true before the
    first step, or for an optimizer that keeps no state."""
    if any(key.startswith(OPTIMIZER) for key in checkpoint.manifest.tensors):
        return True
    return checkpoint.manifest.step > 0 and "optimizer" not in checkpoint.settings


def _names_in_words(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are, in words."""
    shown, omitted = [repr(name) for name in names[:SHOWN_NAMES]], len(names) - SHOWN_NAMES
    if omitted > 0:
        return f"{', '.join(shown)} and {omitted} more parameter{'' if omitted == 1 else 's'}"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _names(shards: Parameters) -> dict[nn.Parameter, str]:
    return {shard.tensor: name for name, shard in shards.items()}


def _put_in_place(temporary: Path, published: Path) -> None:
    """Publish a folder, even if the step has been saved before.

    A run that takes the lock renames unpublished folders of the previous run, so that run's final rename fails.
    """
    replaced = published.with_name(f"{published.name}.replaced")
    existed = published.exists()
    if existed:
        if replaced.exists():
            discard(replaced)
        published.rename(replaced)  # find_latest also finds this name if we are killed before the next line
    try:
        temporary.rename(published)
    except OSError:
        if existed:
            replaced.rename(published)
        check(published.parent)  # raises the better explanation
        raise


def _in_words(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
