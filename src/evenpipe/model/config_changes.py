"""What differs between the config that weights were trained with and the one they are to be used with.

Weights of equal shapes fit into models that compute something else: with other heads, another activation, another
base of the rotary angles. So every field counts as part of what a model computes, but for those named here.
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
"""Fields that neither the model's function nor its training depends on; transformers changes some by itself."""

TRAINING_ONLY = re.compile(
    r".*drop.*|(.*_)?init(_.*|ializer.*)?|.*jitter.*|.*loss_coef.*|output_router_logits|.*_token_(id|index)"
)
"""Fields that act while a model is trained, initialised or generates, and not on what it computes from given weights:
dropouts, noise and losses of routers, initial values, and token ids (padding is an embedding's row without gradient).
"""

_LIMIT = "max_position_embeddings"
_ROTARY_WITHOUT_LIMIT = {"default", "linear", "llama3"}


@dataclass(frozen=True, slots=True)
class Change:
    """One field that differs."""

    name: str
    """With a dot before fields of tables: `rope_parameters.rope_theta`."""
    before: Any
    now: Any
    changes_function: bool
    """Whether the same weights give other logits."""

    def __str__(self) -> str:
        return f"{self.name} is now {json.dumps(self.now)}, was {json.dumps(self.before)}"


def config_changes(before: Mapping[str, Any], now: PreTrainedConfig) -> list[Change]:
    """The fields in which two configs differ, without those that matter to nobody.

    Args:
        before: what `to_dict` of the other config gave, with any version of transformers. Fields that it lacks have the
            defaults of this version; a field that this version does not know cannot act in it.

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
    """Whether `max_position_embeddings` is a limit and no more: tables of positions have other shapes anyway, and
    rotary angles depend on it only where they are stretched to it.
    """
    kinds = re.findall(r'"rope_type": "(\w+)"', json.dumps(config))
    return set(kinds) <= _ROTARY_WITHOUT_LIMIT
