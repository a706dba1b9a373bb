"""Differences between the config that weights were trained with and the config that they are used with.

Weights of equal shapes fit into models that compute different functions: with other heads, another activation, another
base of the rotary angles. So every field counts as part of the model's function, except the fields named here.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from evenpipe.errors import InputError
from evenpipe.model.structure import first_line

BOOKKEEPING = re.compile(
    r"_.*|transformers_version|name_or_path|architectures|(torch_)?dtype|auto_map|tokenizer_class|use_cache|return_dict"
    r"|torchscript|output_(hidden_states|attentions)|(attn|experts)_implementation|gradient_checkpointing|pretraining_tp"
    r"|chunk_size_feed_forward|id2label|label2id|num_labels|problem_type|task_specific_params|finetuning_task"
)
"""Fields that affect neither the model's function nor its training; transformers itself changes some of them."""

TRAINING_ONLY = re.compile(
    r".*drop.*|(.*_)?init(_.*|ializer.*)?|.*jitter.*|.*loss_coef.*|output_router_logits|.*_token_(id|index)"
)
"""Fields that affect training, initialisation or generation, but not the function of given weights: dropouts, noise and
losses of routers, initial values, and token ids (padding is an embedding's row without gradient).
"""

_LIMIT = "max_position_embeddings"
_ROTARY_WITHOUT_LIMIT = {"default", "linear", "llama3"}


@dataclass(frozen=True, slots=True)
class Change:
    """A field that differs."""

    name: str
    """Fields of nested tables follow a dot: `rope_parameters.rope_theta`."""
    before: Any
    now: Any
    changes_function: bool
    """Whether the same weights give different logits."""

    def __str__(self) -> str:
        return f"{self.name} is now {json.dumps(self.now)}, was {json.dumps(self.before)}"


def config_changes(before: Mapping[str, Any], now: PreTrainedConfig) -> list[Change]:
    """Return the fields in which two configs differ, except bookkeeping.

    Args:
        before: the result of the other config's `to_dict`, from any version of transformers. Missing fields have the
            defaults of this version; a field that this version does not know has no effect in it.

    Raises:
        InputError: transformers refuses `before`.
    """
    if before.get("model_type") != now.model_type:
        return [Change("model_type", before.get("model_type"), now.model_type, True)]
    try:
        completed = type(now).from_dict(copy.deepcopy(dict(before)))
    except Exception as error:  # validators of transformers raise several types
        raise InputError(
            f"a config of the type {now.model_type!r} that transformers refuses: {first_line(error)}"
        ) from error
    old, new = (json.loads(json.dumps(config.to_dict())) for config in (completed, now))
    changes = []
    for name, was, value in _differences(old, new):
        path = name.split(".")
        if any(BOOKKEEPING.fullmatch(key) for key in path):
            continue
        known = path[0] in old.keys() & new.keys()
        harmless = TRAINING_ONLY.fullmatch(path[-1]) or (path[-1] == _LIMIT and _is_only_a_limit(new))
        changes.append(Change(name, was, value, known and not harmless))
    return changes


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key in [*new, *(key for key in old if key not in new)]:
        was, value = old.get(key), new.get(key)
        if isinstance(was, Mapping) and isinstance(value, Mapping):
            yield from _differences(was, value, f"{prefix}{key}.")
        elif was != value:
            yield f"{prefix}{key}", was, value


def _is_only_a_limit(config: Mapping[str, Any]) -> bool:
    """Return whether `max_position_embeddings` is only a limit: position tables of another size have other shapes
    anyway, and rotary angles depend on it only if they are stretched to it.
    """
    kinds = re.findall(r'"rope_type": "(\w+)"', json.dumps(config))
    return set(kinds) <= _ROTARY_WITHOUT_LIMIT
