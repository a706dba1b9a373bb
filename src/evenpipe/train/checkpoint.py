"""Checkpoints: saved atomically, believed only when every bit is right, loaded at any other number of processes.

A checkpoint is a folder `step-00000020`:

    __0_0.distcp, __1_0.distcp, ...   tensors, one file per process, in torch's distributed checkpoint format
    .metadata                         torch's index of them
    run.json                          all that is not a tensor: data position, scheduler, config, model config
    manifest.json                     size and SHA-256 of all the others, and every tensor's shape and dtype

Tensors stand under the names of Hugging Face, whole: `parameters.model.embed_tokens.weight`,
`optimizer.exp_avg.model.embed_tokens.weight`. A process that holds rows of a parameter contributes them as a DTensor
(Shard(0) on the pipeline axis, on that of the replicas, or on both, made for the moment of saving or loading), so what
was saved in one layout loads in any other. What every replica holds is saved by the first one and loaded by all.

Saving goes: write all into `step-00000020.tmp` -> every process is done -> manifest, last -> wait for the disk ->
rename -> wait for the disk -> only then are old checkpoints deleted. A process killed anywhere in between leaves the
former checkpoint as it was. No state of a random generator is saved: whatever is random in a run draws from a seed and
the step.

Every function here with a `process_group` is collective over it: all processes of a pipeline and of its replicas call
it (None: all processes, or this one alone without torch.distributed), and all return or raise alike.
The group's timeout has to cover the time that one process may take to write and hash its part.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.tensor import DTensor

import evenpipe
from evenpipe.errors import InputError, RunError
from evenpipe.train.agreement import Team, describe_lost_process, describe_os_error
from evenpipe.train.checkpoint_folder import (
    RUN,
    Checkpoint,
    Found,
    Rejected,
    delete_old,
    find_latest,
    open_checkpoint,
    prepare_folder,
)
from evenpipe.train.checkpoint_state import ParameterShard, State, parameter_names, plan_load, tensors_to_save
from evenpipe.train.checkpoint_storage import INDEX, Reader, Writer, read_index, tensor_entries
from evenpipe.train.manifest import (
    MANIFEST,
    DamagedError,
    FileEntry,
    Manifest,
    hash_file,
    sync_folder,
    write_synced,
)

__all__ = [
    "Checkpoint",
    "Found",
    "ParameterShard",
    "Rejected",
    "find_latest",
    "load",
    "open_checkpoint",
    "prepare_folder",
    "read_tensors",
    "save",
]

_BYTES_PER_TENSOR = 4096
"""Generous: what a tensor takes on disk beside its content (its zip archive, its lines in index and manifest)."""


def save(  # noqa: PLR0917
    folder: str | os.PathLike[str],
    step: int,
    shards: Mapping[str, ParameterShard],
    optimizer: torch.optim.Optimizer | None,
    metadata: Mapping[str, Any],
    process_group: dist.ProcessGroup | None = None,
    *,
    keep: int | None = 2,
) -> Path:
    """Saves a checkpoint and gives its folder, `folder/step-NNNNNNNN`. Collective.

    Args:
        folder: of all checkpoints of a run; on a file system that all processes share.
        step: optimizer steps taken. A checkpoint of the same step is replaced, once the new one is whole.
        shards: what this process holds, by Hugging Face name (`Pipeline.parameter_shards()`).
        optimizer: its parameters are among those of `shards`. Its state is saved as it is, and nothing where there is
            none.
        metadata: all else that resuming needs, as JSON. That of the first process counts.
        keep: how many checkpoints remain, this one and the newest whole ones before it; None keeps all. Those of later
            steps (left over when a run was resumed at an earlier one) stay.

    Raises:
        InputError: something in `metadata` is not JSON, or the optimizer has state that is no tensor.
        RunError: the disk is full, or any other failure of disk or process; what was written is removed, and the
            checkpoints before it are as they were.
    """
    if keep is not None and keep < 1:
        raise InputError(f"keep is {keep}, expected at least 1 checkpoint, or None for all")
    folder, team = Path(folder), Team(process_group)
    published = folder / f"step-{step:08d}"
    temporary = folder / f"{published.name}.tmp"
    state: State = {}

    def collect() -> tuple[int, bytes]:
        state.update(tensors_to_save(shards, optimizer, team))
        size = sum(
            tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes for tensor in state.values()
        )
        return size + _BYTES_PER_TENSOR * (len(state) + 1), _json(metadata) if team.rank == 0 else b""

    def make_room() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if temporary.exists():
            shutil.rmtree(temporary)
        space = os.statvfs(folder)
        free = space.f_bavail * space.f_frsize
        if space.f_blocks and free < needed:
            raise RunError(f"{_in_words(needed)} are needed and the disk of {str(folder)!r} has {_in_words(free)} left")
        temporary.mkdir()

    def own_files() -> dict[str, FileEntry]:
        paths = list(temporary.glob(f"__{team.rank}_*.distcp")) + ([temporary / INDEX] if team.rank == 0 else [])
        files = {path.name: hash_file(path) for path in paths}
        if team.rank == 0:
            files[RUN] = write_synced(temporary / RUN, run_json)
        return files

    def publish() -> None:
        versions = {"evenpipe": evenpipe.__version__, "torch": torch.__version__}
        manifest = Manifest(step, files, tensor_entries(index), versions)
        write_synced(temporary / MANIFEST, manifest.to_bytes())
        sync_folder(temporary)
        if published.exists():
            replaced = folder / f"{published.name}.replaced"
            if replaced.exists():
                shutil.rmtree(replaced)
            published.rename(replaced)  # find_latest knows this name too, should we be killed before the next line
        temporary.rename(published)
        sync_folder(folder)

    try:
        collected = team.everywhere(collect)
        needed, run_json = sum(size for size, _ in collected), collected[0][1]
        team.first(make_room)
        index = _write_tensors(temporary, state, team)
        files = {name: entry for part in team.everywhere(own_files) for name, entry in part.items()}
        team.first(publish)
    except RunError as error:
        if team.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"the checkpoint of step {step} was not saved: {error}; the checkpoints before it are as they were"
        ) from error
    if team.rank == 0:
        delete_old(folder, step, keep)
    return published


def load(
    checkpoint: Checkpoint,
    shards: Mapping[str, ParameterShard],
    optimizer: torch.optim.Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Loads parameters and optimizer state into what this process holds; gives the checkpoint's metadata. Collective.

    The number of processes and the way in which the vocabulary is spread over them need not be those of saving. All is
    read into fresh tensors first, moments also into memory of the host that a `HostAdamW` has not used yet: when
    anything fails, on any process, parameters and optimizer are as before. Then the parameters are overwritten in
    place, and the optimizer's state is replaced: created where it has never stepped, removed where the checkpoint has
    none.

    Args:
        checkpoint: from find_latest or open_checkpoint.
        shards, optimizer: as for `save`. Without an optimizer its state is left unread.

    Raises:
        InputError: names, shapes or dtypes are not those of the checkpoint.
        RunError: a file cannot be read, or a process died.
    """
    team = Team(process_group)
    plan = _value(team, lambda: plan_load(checkpoint.manifest, shards, optimizer, team))
    known = {name for names in team.gather(set(shards)) for name in names}
    unknown = sorted(set(parameter_names(checkpoint.manifest)) - known)
    if unknown:
        raise InputError(
            f"the checkpoint {str(checkpoint.path)!r} holds {unknown[0]!r} and {len(unknown) - 1} more parameters that "
            "the model does not have"
        )

    def read() -> None:
        try:
            read_tensors(checkpoint, read_index(checkpoint.path, checkpoint.manifest), plan.state)
        except DamagedError as error:
            raise InputError(f"the checkpoint {str(checkpoint.path)!r} cannot be used: {error}") from error

    team.everywhere(read)
    plan.put_in_place()
    return checkpoint.metadata


def read_tensors(checkpoint: Checkpoint, index: Metadata, state: State) -> None:
    """Reads tensors of a checkpoint, by key, into the plain or DTensors given. This process alone, no communication.

    Raises:
        RunError: a file cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_state_dict(state, storage_reader=Reader(checkpoint.path, index), no_dist=True)
    except CheckpointException as exception:
        _, text = _first_failure(exception)
        raise RunError(f"the checkpoint {str(checkpoint.path)!r} cannot be read: {text}") from exception


def _write_tensors(temporary: Path, state: State, team: Team) -> Metadata:
    """Each process writes its part, the first one the index, which all get. Collective over the pipeline."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            index: Metadata = save_state_dict(
                state, storage_writer=Writer(temporary), process_group=team.group, no_dist=not team.distributed
            )
            return index
    except CheckpointException as exception:  # the same on every process
        rank, text = _first_failure(exception)
        raise RunError(f"process {rank}: {text}") from exception
    except RuntimeError as error:
        raise RunError(describe_lost_process(error)) from error


def _first_failure(exception: CheckpointException) -> tuple[int, str]:
    """Process and text. torch's exception is none that `except Exception` catches, and hides a Ctrl-C among others."""
    rank, (error, _) = min(exception.failures.items(), key=lambda item: item[0])
    if isinstance(error, KeyboardInterrupt):
        raise error from exception
    return rank, describe_os_error(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _value(team: Team, work: Callable[[], Any]) -> Any:
    """Result of the work on this process, once it has succeeded on all; it does not travel."""
    results = []
    team.everywhere(lambda: results.append(work()))
    return results[0]


def _json(metadata: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(dict(metadata), indent=1) + "\n").encode("ascii")
    except (TypeError, ValueError) as error:
        raise InputError(f"metadata of a checkpoint: {error}; expected what JSON can hold") from error


def _in_words(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
