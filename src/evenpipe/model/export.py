"""Writes a folder that `AutoModelForCausalLM.from_pretrained` loads: metadata, and tensors one shard at a time."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig
from transformers.dynamic_module_utils import custom_object_save

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.model.origin import BYTES, CONFIG, GENERATION_CONFIG, Origin, changed_config, generation_text
from evenpipe.model.structure import persistent_buffers, planned_dtypes
from evenpipe.model.weight_files import INDEX, SINGLE

MAXIMUM_SHARD_BYTES = 4 * 2**30


def write_folder_metadata(
    description: Description, folder: str | Path, dtype: torch.dtype | None, origin: Origin | None = None
) -> None:
    """Write config.json and generation_config.json, and the other files of the origin.

    The files of an origin are written byte for byte, except for values of config.json that have changed; without an
    origin, the files are those that transformers' `save_pretrained` writes.

    Args:
        dtype: dtype of the tensors in the folder, recorded in the config; None: the dtype of the origin.

    Raises:
        InputError: a model of plain modules has no config.
    """
    if description.config is None:
        raise InputError("A model of plain modules has no transformers config and cannot be written as a folder.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(description.config)
    config.architectures = [description.architecture]
    files = {} if origin is None else dict(origin.files)
    original_config = files.pop(CONFIG, None)
    text = None if original_config is None else changed_config(original_config, config, dtype)
    if text is None:
        config.dtype = dtype or (origin or Origin()).dtypes.get(description.embedding_name, config.dtype)
        if description.skeleton.is_remote_code():
            custom_object_save(description.skeleton, folder, config=config)
        config.save_pretrained(folder)
    else:
        files[CONFIG] = text
    if original_config is None and GENERATION_CONFIG not in files:
        generation = getattr(description.model or description.skeleton, "generation_config", None)
        files[GENERATION_CONFIG] = generation_text(generation or GenerationConfig())
    for name, content in files.items():
        (folder / name).write_bytes(content.encode(errors=BYTES))


def dtypes_to_write(
    description: Description, origin: Mapping[str, torch.dtype], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor in a folder, by name in memory. Tensors without an entry keep their dtype.

    Args:
        origin: dtypes of the model that was trained, which are kept if `dtype` is None.
        dtype: dtype of parameters, except those that transformers keeps in fp32 in a model of this dtype.
    """
    if dtype is None:
        return dict(origin)
    buffers = {name for name, _ in persistent_buffers(description.skeleton)}
    names = [name for name in description.shapes if name not in buffers]
    buffer_dtypes = {name: origin[name] for name in buffers & origin.keys()}
    return buffer_dtypes | dict.fromkeys(names, dtype) | planned_dtypes(description.skeleton, dtype, names)


def save_tensors(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard_size: int = MAXIMUM_SHARD_BYTES,
) -> list[Path]:
    """Write safetensors files, and an index for several files; only one shard's tensors are in memory at a time.

    Args:
        tensors: (name on disk, tensor), on any device, consumed lazily. The caller omits a tied head.
        max_shard_size: bytes per file; a single larger tensor gets its own file.

    Returns: the files written, including the index.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[tuple[Path, list[str]]] = []
    held: dict[str, torch.Tensor] = {}
    held_bytes = total_bytes = 0

    def write() -> None:
        path = folder / f"model-{len(shards) + 1:05d}.part"
        save_file(held, path, metadata={"format": "pt"})
        shards.append((path, list(held)))
        held.clear()

    for name, tensor in tensors:
        if tensor.dtype == torch.float16 and not tensor.isfinite().all():
            raise InputError(f"{name} has values that float16 cannot hold; expected another dtype.")
        size = tensor.numel() * tensor.element_size()
        if held and held_bytes + size > max_shard_size:
            write()
            held_bytes = 0
        held[name] = _own_storage(tensor)
        held_bytes, total_bytes = held_bytes + size, total_bytes + size
    if held:
        write()
    if not shards:
        raise InputError(f"{folder}: there is no tensor to write.")
    if len(shards) == 1:
        return [shards[0][0].rename(folder / SINGLE)]
    files: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, start=1):
        files.append(path.rename(folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"))
        weight_map |= dict.fromkeys(names, files[-1].name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*files, folder / INDEX]


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU, contiguous, and not a view of a larger one."""
    tensor = tensor.detach().cpu().contiguous()
    owns_storage = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if owns_storage else tensor.clone()
