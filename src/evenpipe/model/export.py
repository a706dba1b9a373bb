"""Writes a folder that `AutoModelForCausalLM.from_pretrained` loads: metadata, and tensors one shard at a time."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.model.weight_files import INDEX, SINGLE

MAXIMUM_SHARD_BYTES = 4 * 2**30


def write_folder_metadata(description: Description, folder: str | Path, dtype: torch.dtype) -> None:
    """Write config.json and generation_config.json.

    Args:
        dtype: dtype of the tensors in the folder, recorded in the config.

    Raises:
        InputError: a model of plain modules has no config.
    """
    if description.config is None:
        raise InputError("A model of plain modules has no transformers config and cannot be written as a folder.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(description.config)
    config.dtype = dtype
    config.architectures = [description.architecture]
    config.save_pretrained(folder)
    _generation_config(description).save_pretrained(folder)


def save_tensors(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard_size: int = MAXIMUM_SHARD_BYTES,
) -> list[Path]:
    """Write safetensors files, and an index for several files; only one shard's tensors are in memory at a time.

    Args:
        tensors: (name on disk, tensor), on any device, drawn one by one. The caller omits a tied head.
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
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _generation_config(description: Description) -> GenerationConfig:
    """Return the generation config that came with the weights, or else the default for the model's config."""
    if description.source is not None:
        try:
            return GenerationConfig.from_pretrained(description.source)
        except OSError:
            pass  # the folder has no generation config
    given = getattr(description.model, "generation_config", None)
    if given is not None:
        return copy.deepcopy(given)
    return copy.deepcopy(getattr(description.skeleton, "generation_config", None)) or GenerationConfig()
