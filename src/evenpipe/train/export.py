"""Exports a checkpoint to a Hugging Face folder, in one process and without a pipeline.

The checkpoint is verified first. Then each tensor is assembled from any layout and written, under its name on disk, to
a safetensors file; at most one of these files (`max_shard_size`) is in memory. A tied head is left out: the embedding
contains it. Everything that is not trained (config.json, generation_config.json, Python code, the tokenizer) is written
as in the folder that training began with.

Entries of run.json for the export, which `Pipeline.save_checkpoint` writes:

    model_config              the `to_dict` of the transformers config
    tied                      whether embedding and head are one matrix; compared with the config
    origin                    files and dtypes of the model that training began with (model/origin.py); older
                              checkpoints have none
    extra.tokenizer           optional: its folder, relative to the checkpoint's
    extra.generation_config   of older checkpoints: its `to_dict`; default: the one that the model's config implies
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from evenpipe.checkpoints.agreement import describe_os_error
from evenpipe.checkpoints.folder import RUN, Checkpoint, find_latest, is_checkpoint, open_checkpoint
from evenpipe.checkpoints.manifest import sync_folder
from evenpipe.checkpoints.state import PARAMETERS, parameter_names
from evenpipe.checkpoints.storage import read_index, read_state
from evenpipe.communication.messages import dtype_name
from evenpipe.errors import InputError, RunError
from evenpipe.model import (
    STORED_DTYPES,
    Description,
    Origin,
    describe,
    disk_tensors,
    dtypes_to_write,
    save_tensors,
    write_folder_metadata,
)
from evenpipe.model.config import read_config
from evenpipe.model.origin import BYTES, CONFIG, GENERATION_CONFIG, generation_text
from evenpipe.model.placement import Held
from evenpipe.model.weight_files import INDEX
from evenpipe.train.tokenizer import TEMPLATES, TOKENIZER_FILES, kept_files
from evenpipe.words import refused

MAXIMUM_SHARD_BYTES = 4 * 2**30

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES.values()}


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "source",
    max_shard_size: int = MAXIMUM_SHARD_BYTES,
    trust_remote_code: bool = False,
) -> Path:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads; return its path.

    Args:
        checkpoint: a checkpoint's folder, or the folder of a run or of its checkpoints, whose newest sound checkpoint
            is exported, with a warning for each newer one.
        output: a new or empty folder, or an earlier export, which is replaced once the new one is complete.
        dtype: dtype of the weights. "source": each tensor has that of the model that training began with; without one,
            the trained dtype.
        max_shard_size: bytes per safetensors file, and approximate memory; a larger tensor has its own file.
        trust_remote_code: run the Python code that came with the model.

    Raises:
        InputError: there is no sound checkpoint, it does not fit its own config, or the output has other files.
        RunError: the output cannot be written, or the checkpoint cannot be read; an earlier export has not changed.
    """
    output = Path(output)
    _check_place(output)
    requested = _dtype(dtype)
    source = _open(Path(checkpoint))
    description = _describe(source, trust_remote_code)
    origin, tokenizer = _origin(source, description), _tokenizer_files(source)
    _check_contents(output, {*origin.files, *tokenizer})
    dtypes = dtypes_to_write(description, origin.dtypes, requested)
    trained = getattr(torch, source.manifest.tensors[PARAMETERS + description.embedding_name].dtype)
    temporary, replaced = (output.with_name(f"{output.name}.{ending}") for ending in ("tmp", "replaced"))
    try:
        for folder in (temporary, replaced):
            shutil.rmtree(folder, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_tensors(temporary, _tensors(source, description, dtypes), max_shard_size)
        write_folder_metadata(description, temporary, requested or (None if origin.dtypes else trained), origin)
        for name, path in tokenizer.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, temporary / name)
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
        return _warned(open_checkpoint(path, local_only=True))
    for folder in (path / "checkpoints", path):
        latest = find_latest(folder, local_only=True)
        checkpoint = latest.sound()
        if checkpoint is not None:
            for rejected in latest.rejected:
                warnings.warn(f"skipped {rejected.path}: {rejected.reason}", stacklevel=3)
            return _warned(checkpoint)
    raise InputError(f"{str(path)!r} has no checkpoint; expected a checkpoint's folder, or a run's folder")


def _warned(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint, after a warning if it is unhealthy."""
    if checkpoint.unhealthy is not None:
        warnings.warn(f"{checkpoint.path} is marked as unhealthy: {checkpoint.unhealthy}", stacklevel=4)
    return checkpoint


def _describe(checkpoint: Checkpoint, trust_remote_code: bool) -> Description:
    """Return the model of the checkpoint's config, after comparing names and shapes with the parameters."""
    where = f"the checkpoint {str(checkpoint.path)!r}"
    values = checkpoint.metadata.get("model_config")
    if not isinstance(values, Mapping):
        raise InputError(f"{where} cannot be exported: its {RUN} has no model_config")
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        description = describe(_config(kind, values, where))
    elif trust_remote_code:
        description = _describe_by_code(checkpoint)
    else:
        raise InputError(
            f"{where} cannot be exported here: its model_type {kind!r} is not one of transformers' own, and code that"
            " comes with a model is run only by a configuration with model.trust_remote_code = true, whose run exports"
            " the model at its end"
        )
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


def _config(kind: str, values: Mapping[str, Any], where: str) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(dict(values))
    except Exception as error:  # validators of transformers raise several types
        raise InputError(f"{where} has a model_config that transformers refuses: {error}") from error
    return config


def _describe_by_code(checkpoint: Checkpoint) -> Description:
    """Return the model defined by the config and code saved in the checkpoint."""
    files = _read_origin(checkpoint, ()).files
    if CONFIG not in files:
        raise InputError(f"the checkpoint {str(checkpoint.path)!r} cannot be exported: it has no code of its model")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            Path(folder, name).write_bytes(text.encode(errors=BYTES))
        config = read_config(folder, trust_remote_code=True)
        for name, value in checkpoint.metadata["model_config"].items():
            if name not in ("_name_or_path", "auto_map", "transformers_version"):
                setattr(config, name, value)
        return describe(config, trust_remote_code=True)


def _read_origin(checkpoint: Checkpoint, names: Iterable[str]) -> Origin:
    values = checkpoint.metadata.get("origin")
    try:
        return Origin() if values is None else Origin.from_json(values, names)
    except InputError as error:
        raise InputError(f"the checkpoint {str(checkpoint.path)!r}: {error}") from error


def _origin(checkpoint: Checkpoint, description: Description) -> Origin:
    """Return the origin of the trained model, as far as the checkpoint records it."""
    origin = _read_origin(checkpoint, description.shapes)
    if "generation_config" in checkpoint.extra:
        text = generation_text(GenerationConfig.from_dict(dict(checkpoint.extra["generation_config"])))
        return replace(origin, files={GENERATION_CONFIG: text, **origin.files})
    return origin


def _tensors(
    checkpoint: Checkpoint, description: Description, dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (name on disk, whole tensor on the CPU), each read on demand."""
    index = read_index(checkpoint.path, checkpoint.manifest)

    def held() -> Iterator[tuple[str, torch.Tensor]]:
        for name in description.shapes:
            entry = checkpoint.manifest.tensors[PARAMETERS + name]
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            read_state(checkpoint.path, index, {PARAMETERS + name: Held.whole(tensor)})
            yield name, tensor.to(dtypes.get(name, tensor.dtype)) if tensor.is_floating_point() else tensor

    return disk_tensors(description, held())


def _tokenizer_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """Return the files of the run's tokenizer, by name in a model folder."""
    named = checkpoint.extra.get("tokenizer")
    if not isinstance(named, str):
        return {}
    folder = checkpoint.path / named
    files = kept_files(folder)
    if not files:
        warnings.warn(f"{RUN} names the tokenizer {folder}, which does not exist: it is not exported", stacklevel=3)
    return files


def _check_place(output: Path) -> None:
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise InputError(
            f"the folder to export to, {str(output)!r}, is a file or a link; expected a folder or a new name"
        )


def _check_contents(output: Path, names: set[str]) -> None:
    """Raise InputError unless the output is new, empty or an earlier export.

    names: files of this export, in addition to those of every export.
    """
    known = {CONFIG, GENERATION_CONFIG, INDEX, *TOKENIZER_FILES, *names} | {name.partition("/")[0] for name in names}
    for path in sorted(output.iterdir()) if output.exists() else []:
        ours = path.name in known or path.match("model*.safetensors")
        if not ours or (path.is_dir() and path.name != TEMPLATES):
            raise InputError(
                f"the folder to export to, {str(output)!r}, has {path.name!r}, which no export has written; expected "
                "a new or empty folder, or an earlier export"
            )


def _dtype(dtype: torch.dtype | str) -> torch.dtype | None:
    """Return a dtype by its name; None for "source"."""
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in ("source", *DTYPES):
        raise refused("dtype", name, f"one of source, {', '.join(DTYPES)}")
    return DTYPES.get(name)


def _sync(folder: Path) -> None:
    """Wait until the folder is on the disk, before it replaces another folder."""
    for path in folder.rglob("*"):
        if path.is_dir():
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
