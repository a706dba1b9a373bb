"""Exports a checkpoint to a Hugging Face folder, in one process and without a pipeline.

The checkpoint is verified first. Then whole tensors of any layout are read one by one and written, under their names on
disk, to safetensors files; at most one of these files (`max_shard_size`) is in memory. config.json,
generation_config.json and the tokenizer are written too. A tied head is left out: the embedding contains it.

Entries of run.json for the export, which `Pipeline.save_checkpoint` writes:

    model_config              the `to_dict` of the transformers config
    tied                      whether embedding and head are one matrix; compared with the config
    extra.tokenizer           optional: its folder, relative to the checkpoint's
    extra.generation_config   optional: its `to_dict`; default: the generation config that the model's config implies
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from evenpipe.checkpoints.agreement import describe_os_error
from evenpipe.checkpoints.folder import RUN, Checkpoint, find_latest, is_checkpoint, open_checkpoint
from evenpipe.checkpoints.manifest import sync_folder
from evenpipe.checkpoints.state import PARAMETERS, parameter_names
from evenpipe.checkpoints.storage import read_index, read_state
from evenpipe.communication.messages import dtype_name
from evenpipe.errors import InputError, RunError
from evenpipe.model import Description, describe, disk_tensors, persistent_buffers, save_tensors, write_folder_metadata
from evenpipe.model.placement import Held

MAXIMUM_SHARD_BYTES = 4 * 2**30

DTYPES = ("float32", "bfloat16", "float16", "float64")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)

_OTHER_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int = MAXIMUM_SHARD_BYTES,
) -> Path:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads; return its path.

    Args:
        checkpoint: a checkpoint's folder, or the folder of a run or of its checkpoints, whose newest sound checkpoint
            is exported, with a warning for each newer one.
        output: a new or empty folder, or an earlier export, which is replaced once the new one is complete.
        dtype: dtype of the weights; None: the trained dtype.
        max_shard_size: bytes per safetensors file, and approximate memory; a larger tensor has its own file.

    Raises:
        InputError: there is no sound checkpoint, it does not fit its own config, or the output has other files.
        RunError: the output cannot be written, or the checkpoint cannot be read; an earlier export has not changed.
    """
    output = Path(output)
    _check_output(output)
    wanted = None if dtype is None else _dtype(dtype)
    source = _open(Path(checkpoint))
    description = _describe(source)
    kept = wanted or getattr(torch, source.manifest.tensors[PARAMETERS + description.embedding_name].dtype)
    temporary, replaced = (output.with_name(f"{output.name}.{ending}") for ending in ("tmp", "replaced"))
    try:
        for folder in (temporary, replaced):
            shutil.rmtree(folder, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_tensors(temporary, _tensors(source, description, wanted), max_shard_size)
        write_folder_metadata(description, temporary, kept)
        if "generation_config" in source.extra:
            text = json.dumps(source.extra["generation_config"], indent=2)
            (temporary / "generation_config.json").write_text(text + "\n", encoding="utf-8")
        _copy_tokenizer(source, temporary)
        _sync(temporary)
        if output.exists():
            output.rename(replaced)
        temporary.rename(output)
        sync_folder(output.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise RunError(f"the model was not written to {str(output)!r}: {reason}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output


def _open(path: Path) -> Checkpoint:
    """Open the checkpoint in a folder, or the newest sound one of a run."""
    if is_checkpoint(path):
        return open_checkpoint(path, alone=True)
    for folder in (path / "checkpoints", path):
        found = find_latest(folder, alone=True)
        checkpoint = found.sound()
        if checkpoint is not None:
            for rejected in found.rejected:
                warnings.warn(f"skipped {rejected.path}: {rejected.reason}", stacklevel=3)
            return checkpoint
    raise InputError(f"{str(path)!r} has no checkpoint; expected a checkpoint's folder, or a run's folder")


def _describe(checkpoint: Checkpoint) -> Description:
    """Return the model of the checkpoint's config, after comparing names and shapes with the parameters."""
    where, description = f"the checkpoint {str(checkpoint.path)!r}", describe(_config(checkpoint))
    tensors, shapes = checkpoint.manifest.tensors, description.shapes
    missing = [name for name in shapes if PARAMETERS + name not in tensors]
    if missing:
        raise InputError(f"{where} has no {missing[0]!r}, which the model of its config has")
    unknown = [name for name in parameter_names(checkpoint.manifest) if name not in shapes]
    if unknown:
        raise InputError(f"{where} has {unknown[0]!r}, which the model of its config does not have")
    for name, shape in shapes.items():
        saved = tensors[PARAMETERS + name].shape
        if saved != tuple(shape):
            raise InputError(
                f"{name!r} has shape {saved} in the checkpoint and {tuple(shape)} in the model of its config"
            )
    if checkpoint.metadata.get("tied", description.tied) != description.tied:
        raise InputError(f"{where} says tied: {checkpoint.metadata['tied']}, but the model of its config differs")
    return description


def _config(checkpoint: Checkpoint) -> PreTrainedConfig:
    where, values = f"the checkpoint {str(checkpoint.path)!r}", checkpoint.metadata.get("model_config")
    if not isinstance(values, Mapping):
        raise InputError(f"{where} cannot be exported: its {RUN} has no model_config")
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:  # a model with its own code, which is not run here
        raise InputError(f"{where} cannot be exported: its model_type {kind!r} is not one of transformers' own")
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(dict(values))
    except Exception as error:  # validators of transformers raise several types
        raise InputError(f"{where} has a model_config that transformers refuses: {error}") from error
    return config


def _tensors(
    checkpoint: Checkpoint, description: Description, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (name on disk, whole tensor on the CPU), each read on demand."""
    index = read_index(checkpoint.path, checkpoint.manifest)
    buffers = {name for name, _ in persistent_buffers(description.skeleton)}

    def held() -> Iterator[tuple[str, torch.Tensor]]:
        for name in description.shapes:
            entry = checkpoint.manifest.tensors[PARAMETERS + name]
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            read_state(checkpoint.path, index, {PARAMETERS + name: Held.whole(tensor)})
            yield name, tensor if dtype is None or name in buffers else tensor.to(dtype)

    return disk_tensors(description, held())


def _copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    named = checkpoint.extra.get("tokenizer")
    if not isinstance(named, str):
        return
    source = checkpoint.path / named
    files = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not files:
        warnings.warn(f"{RUN} names the tokenizer {source}, which does not exist: it is not exported", stacklevel=3)
    for file in files:
        shutil.copyfile(file, folder / file.name)


def _check_output(output: Path) -> None:
    """Raise InputError unless the output is new, empty or an earlier export."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise InputError(
            f"the folder to export to, {str(output)!r}, is a file or a link; expected a folder or a new name"
        )
    for path in sorted(output.iterdir()) if output.exists() else []:
        ours = path.name in (*_OTHER_FILES, *TOKENIZER_FILES) or path.match("model*.safetensors")
        if path.is_dir() or not ours:
            raise InputError(
                f"the folder to export to, {str(output)!r}, has {path.name!r}, which no export has written; expected "
                "a new or empty folder, or an earlier export"
            )


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in DTYPES:
        raise InputError(f"dtype is {name!r}, but must be one of {', '.join(DTYPES)}")
    found: torch.dtype = getattr(torch, name)
    return found


def _sync(folder: Path) -> None:
    """Wait until the folder is on the disk, before it replaces another."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
