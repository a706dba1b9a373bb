"""Fills stages and vocabulary shards with weights: from a Hugging Face folder, from a live model, or fresh.

A folder is read lazily: only the requested tensors, rows and experts. Only safetensors are read, so nothing in it is
executed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from evenpipe.errors import InputError
from evenpipe.model.description import Description, describe
from evenpipe.model.initialization import held_by, initial_rows, initialize, initialize_added
from evenpipe.model.modules import ModuleStage
from evenpipe.model.placement import Held
from evenpipe.model.stage import Stage
from evenpipe.model.weight_files import WeightFiles, listed
from evenpipe.words import count


def fill_parameters(
    stage: Stage | ModuleStage,
    description: Description,
    seed: int = 0,
    held: Mapping[str, Held[torch.Tensor]] | None = None,
) -> None:
    """Fill a stage with the weights of its description's live model or folder, or else with fresh weights; parameters
    that transforms have added start fresh.

    held: this process's shards of the parameters and persistent buffers, by name, if they are not in the stage; no
        other tensor is allocated on their device.
    """
    if description.model is not None:
        copy_parameters(stage, description, held)
    elif description.source is not None:
        load_parameters(stage, description, description.source, held)
    else:
        assert isinstance(stage, Stage)
        initialize(stage, description, seed, held)
    if drawn_parameters(description):
        assert isinstance(stage, Stage)
        initialize_added(stage, description, seed, held)


def fill_rows(description: Description, name: str, start: int, stop: int, seed: int = 0) -> torch.Tensor:
    """Return rows [start, stop) of a vocabulary matrix or entries of the head's bias, from the source of
    `fill_parameters`.

    Returns: [stop - start, hidden_size] (bias: [stop - start]) on the CPU, in the dtype of the source, fp32 if fresh.
    """
    if description.model is not None:
        return description.model.get_parameter(name).detach()[start:stop].cpu().clone()
    if description.source is not None:
        return load_rows(description, description.source, name, start, stop)
    return initial_rows(description, name, start, stop, seed)


def copy_parameters(
    stage: Stage | ModuleStage, description: Description, held: Mapping[str, Held[torch.Tensor]] | None = None
) -> None:
    """Copy a stage's parameters and buffers, including unsaved buffers, from the description's live model.

    held: as for `fill_parameters`.
    """
    assert description.model is not None
    with torch.no_grad():
        drawn = drawn_parameters(description)
        for name, shard in (held or held_by(stage, description)).items():
            if name not in drawn:
                shard.fill(live_tensor(description, name))
        if isinstance(stage, Stage):  # modules of plain models were copied with their buffers
            _copy_unsaved(stage.whole, description.model)


def _copy_unsaved(model: nn.Module, live: nn.Module) -> None:
    """Copy buffers that are in no checkpoint, such as rotary frequencies, even if they have grown."""
    live_buffers = dict(live.named_buffers(remove_duplicate=False))
    for prefix, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            buffer, name = module._buffers.get(key), f"{prefix}.{key}" if prefix else key
            if buffer is not None and name in live_buffers:
                module._buffers[key] = live_buffers[name].detach().to(buffer.device, buffer.dtype, copy=True)


def live_tensor(description: Description, name: str) -> torch.Tensor:
    """Return a full parameter or buffer of the description's live model."""
    assert description.model is not None
    parent, _, attribute = name.rpartition(".")
    tensor: torch.Tensor = getattr(description.model.get_submodule(parent), attribute)
    return tensor.detach()


def load_parameters(
    stage: Stage | ModuleStage,
    description: Description,
    folder: str | Path,
    held: Mapping[str, Held[torch.Tensor]] | None = None,
) -> None:
    """Read a stage's parameters and persistent buffers from a Hugging Face folder (or hub name), cast to its dtype.
    held: as for `fill_parameters`.

    Raises:
        InputError: there are no safetensors, names are missing, or shapes differ.
    """
    files = WeightFiles(description, folder)
    shapes, drawn = description.shapes, drawn_parameters(description)
    shards = {name: shard for name, shard in (held or held_by(stage, description)).items() if name not in drawn}
    files.require(shards)
    for name in shards:
        files.require_shape(name, tuple(shapes[name]))
    with torch.no_grad():
        for name, shard in shards.items():  # one at a time, so that only one tensor is in memory twice
            shard.tensor.copy_(files.part(name, shard.placement))


def load_rows(description: Description, folder: str | Path, name: str, start: int, stop: int) -> torch.Tensor:
    """Read rows [start, stop) of a vocabulary matrix from a folder, without reading the others.

    Returns: [stop - start, hidden_size] (the head's bias: [stop - start]) on the CPU, in the dtype of the file.
    """
    files = WeightFiles(description, folder)
    if description.tied and name in (description.embedding_name, description.head_name):
        # Usually under the embedding's name; older programs may have saved it only under the head's.
        names = (description.embedding_name, description.head_name)
        name = next((known for known in names if known in files.stored), description.embedding_name)
    files.require([name])
    shape = (description.rows_of(name), description.hidden_size)
    files.require_shape(name, shape[:1] if name == description.head_bias_name else shape)
    return files.rows(name, start, stop)


def as_stored(description: Description, *, say: Callable[[str], None] | None = None) -> Description:
    """Return the description of the model as stored: untied if the files contain two different vocabulary matrices.

    transformers then keeps both, whatever `tie_word_embeddings` says. Every process that loads the weights must call
    this, since it decides the number of matrices.

    Args:
        description: returned unchanged if it has no `source`.
        say: receives messages about differences between files and config: two matrices despite the tie, and tensors
            that the model does not have, which transformers ignores too.

    Raises:
        InputError: the folder has no weights, or they are damaged.
    """
    if description.source is None:
        return description
    files = WeightFiles(description, description.source)
    say = say or (lambda text: None)
    surplus = files.surplus()
    if surplus:
        say(
            f"{description.source} holds {count(len(surplus), 'tensor')} that its config gives"
            f" {description.architecture} no place for; left out: {listed(surplus)}"
        )
    if not description.tied or files.same(description.embedding_name, description.head_name):
        return description
    say(
        f"{description.source}: {description.embedding_name} and {description.head_name} differ, so both are kept, as"
        " transformers does, though its config has tie_word_embeddings = true"
    )
    config = copy.deepcopy(description.config)
    config.tie_word_embeddings = False
    untied = describe(config, spec=description.spec, trust_remote_code=description.trust_remote_code)
    if untied.tied:
        raise InputError(
            f"{description.source}: {description.embedding_name} and {description.head_name} differ; they must be"
            f" equal, since {description.architecture} has one matrix for both"
        )
    return replace(untied, source=description.source)


def drawn_parameters(description: Description) -> Set[str]:
    """Return the names of the parameters that transforms have added, and that the live model, if any, does not have."""
    added = description.added
    return added if description.model is None else added - {name for name, _ in description.model.named_parameters()}
