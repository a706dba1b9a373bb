"""A small copy of a model's config that keeps everything by which architectures differ.

Widths and counts become small, one layer of every kind stays, multipliers and soft-caps move away from the values at
which they would not show, dropouts become zero. Attributes are set on a copy, not passed through the constructor, since
validators and derived defaults of many configs reject or undo partial changes; what is read-only is left as it is.
"""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any

from transformers import PreTrainedConfig

HIDDEN, HEADS, HEAD_SIZE, INTERMEDIATE, VOCABULARY = 64, 4, 16, 96, 251
MINIMUM_LAYERS = 4
WINDOW = 5

# Integers that become this when they are larger. Names as in transformers, most common first.
SMALLER = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "head_dim": HEAD_SIZE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "window_size": WINDOW,
    # mixture of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    # latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": HEAD_SIZE,
    "qk_nope_head_dim": HEAD_SIZE,
    "qk_head_dim": 2 * HEAD_SIZE,
    "v_head_dim": HEAD_SIZE,
    "rotary_dim": HEAD_SIZE // 2,
    # linear attention and state spaces
    "num_heads": HEADS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": HEAD_SIZE,
    "linear_value_head_dim": HEAD_SIZE,
    "mamba_d_ssm": 2 * HIDDEN,
    "mamba_n_heads": 8,
    "mamba_d_head": HEAD_SIZE,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
FEED_FORWARD = re.compile(r"intermediate_size|^ffn_dim$|^n_inner$|ffn_hidden_size|^block_ff_dim$")
DROPOUT = re.compile(r"drop|jitter")
MULTIPLIER = re.compile(r"multiplier|scal(e|ing|ar)|soft_?cap|^mup_|residual_alpha")
NOT_A_MULTIPLIER = re.compile(r"rope|rotary|init|layer_?norm|^scale_|use_")


STEPS = ({"narrow": True, "moved": True}, {"narrow": True, "moved": False}, {"narrow": False, "moved": True})
"""Arguments for `small_copy`, the most telling first, for the case that an architecture does not run from one."""


def kept_layers(config: PreTrainedConfig) -> list[int]:
    """Indices of the layers that stay: the first of each kind, and the earliest others up to four."""
    count = config.num_hidden_layers
    per_layer = [tuple(value) for value in vars(config).values() if _is_per_layer(value, count)]
    per_layer += [tuple(values) for values in _of_layers(config).values()]
    kinds = list(zip(*([repr(entry) for entry in values] for values in per_layer), strict=True)) or [()] * count
    kept = {kinds.index(kind) for kind in kinds}
    for index in range(count):
        if len(kept) >= min(MINIMUM_LAYERS, count):
            break
        kept.add(index)
    return sorted(kept)


def _is_per_layer(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count and count > 1


def _of_layers(config: PreTrainedConfig) -> dict[str, list[Any]]:
    """Attribute -> its value in every layer, of those that a config has per layer and not as a list (Gemma 4)."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    layers = list(config.per_layer_config)
    return {name: [getattr(layer, name) for layer in layers] for name in sorted(config.per_layer_attributes or ())}


def small_copy(config: PreTrainedConfig, *, narrow: bool, moved: bool) -> PreTrainedConfig:
    """A copy with few layers and few tokens.

    Args:
        narrow: make widths small too.
        moved: move multipliers, scales and soft-caps away from their values (a multiplier of 1 hides that it is there).
    """
    whole = copy.deepcopy(config)
    small = whole.get_text_config()
    count, kept = small.num_hidden_layers, kept_layers(small)
    of_layers = _of_layers(small)
    if of_layers:
        small.per_layer_config = None  # what holds for all layers can then be read and set
    usual = {name: getattr(small, name, None) for name in of_layers}
    for name, value in list(vars(small).items()):
        if _is_per_layer(value, count):
            _set(small, name, type(value)(value[index] for index in kept))
    layers = len(kept) if count >= MINIMUM_LAYERS else MINIMUM_LAYERS
    if count < MINIMUM_LAYERS:
        for name, value in list(vars(small).items()):
            if _is_per_layer(value, count):
                _set(small, name, type(value)(value[index % count] for index in range(layers)))
    _set(small, "num_hidden_layers", layers)
    if narrow:
        _narrow(small)
    _fewer_tokens(small)
    if of_layers:
        small.per_layer_config = {
            index: {
                name: _like(name, values[kept[index % len(kept)]], usual[name], getattr(small, name, None))
                for name, values in of_layers.items()
            }
            for index in range(layers)
        }
    for name, value in list(vars(small).items()):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and DROPOUT.search(name):
            _set(small, name, 0.0)
        elif moved and MULTIPLIER.search(name) and not NOT_A_MULTIPLIER.search(name):
            if "cap" in name and (number or value is None):
                _set(small, name, 3.0)
            elif number:
                _set(small, name, type(value)(round(value * 1.37, 6)) if value else 0.37)
    if whole._attn_implementation not in (None, "eager", "sdpa"):
        whole._attn_implementation = None  # kernels for accelerators do not run here
    whole._experts_implementation = "eager"  # the grouped product of experts takes no fp64
    return whole


def _narrow(small: PreTrainedConfig) -> None:
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size")
    heads, groups, hidden = (getattr(small, name, None) for name in names)
    for name, limit in SMALLER.items():
        if _larger(getattr(small, name, None), limit):
            _set(small, name, limit)
    for name, value in list(vars(small).items()):
        if FEED_FORWARD.search(name) and _larger(value, INTERMEDIATE):
            _set(small, name, INTERMEDIATE)
        elif value == hidden and _larger(value, HIDDEN):  # another name for the same width
            _set(small, name, HIDDEN)
        elif isinstance(value, dict) and not name.startswith("rope"):
            smaller = {key: SMALLER[key] for key, entry in value.items() if _larger(entry, SMALLER.get(key))}
            _set(small, name, value | smaller)
    if isinstance(groups, int) and isinstance(heads, int):
        _set(small, "num_key_value_heads", HEADS if groups == heads else 1 if groups == 1 else 2)
    _shorten_rotary_factors(small)


def _like(name: str, value: Any, usual: Any, small: Any) -> Any:
    """What a layer of the small copy has for `value`: what all have, or something else where its model differs."""
    if small == usual:
        return value
    if value == usual:
        return small
    return small // 2 if name == "num_key_value_heads" and small == HEADS else small * 2


def _larger(value: Any, limit: int | None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and limit is not None and value > limit


def _fewer_tokens(small: PreTrainedConfig) -> None:
    _set(small, "vocab_size", VOCABULARY)
    for name, value in list(vars(small).items()):
        if name.endswith(("token_id", "token_index")):
            if isinstance(value, int) and value >= VOCABULARY:
                _set(small, name, value % VOCABULARY)
            elif isinstance(value, (list, tuple)):
                _set(small, name, type(value)(entry % VOCABULARY for entry in value))


def _shorten_rotary_factors(small: PreTrainedConfig) -> None:
    """Rotary tables with one factor per frequency (longrope) follow the smaller head."""
    parameters = getattr(small, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    head = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
    for entry in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        length = int(head * entry.get("partial_rotary_factor", 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            if isinstance(entry.get(name), (list, tuple)):
                entry[name] = list(entry[name])[:length]
        if isinstance(entry.get("original_max_position_embeddings"), int):
            entry["original_max_position_embeddings"] = min(entry["original_max_position_embeddings"], 128)


def _set(config: PreTrainedConfig, name: str, value: Any) -> None:
    with contextlib.suppress(AttributeError, ValueError, TypeError):  # read-only properties and validators
        setattr(config, name, value)
