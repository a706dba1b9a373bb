"""Makes a small copy of a model's config that keeps everything in which architectures differ.

Widths and counts become small, multipliers and soft-caps move away from neutral values, and dropouts become
zero. Relations between sizes are kept: heads times head size equals the hidden size only if it did before. Attributes
are set on a copy, not passed through the constructor, since validators and derived defaults of many configs reject or
undo partial changes; read-only attributes stay unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from transformers import PreTrainedConfig

HIDDEN, HEADS, HEAD_SIZE, ROTARY, VOCABULARY = 64, 4, 16, 8, 251

FEW_TOKENS = 16
"""Some rotary tables are different for longer sequences."""

# (pattern, limit): an integer becomes `limit` if it is larger and its name matches. The first matching pattern applies.
SMALLER = [
    (re.compile(pattern), limit)
    for pattern, limit in (
        (r"vocab_size|ngram_vocab", VOCABULARY),
        (r"^original_max_position", FEW_TOKENS),
        (r"^floor_scale$", 4),
        (r"max_position|max_target_position|^n_positions$|^n_ctx$|max_seq_len|context_length", 256),
        (r"window(_size|_len)?$|attention_chunk_size|^local_attention$|^index_topk$|^rel_extent$", 5),
        (r"(?<!inference_)chunk_size$|block_size$", 8),
        (r"experts?(_num)?$", 4),
        (r"^topk_group$|^n_group$|^num_expert_group$", 1),
        (r"per_tok(en)?$|top_?k$|moe_k$", 2),
        (r"_rank$", 24),
        (r"(^|_)[no]_groups$", 2),
        (r"d_state$|state_size$", 16),
        (r"rotary_dim$", ROTARY),
        (r"head_?dim$|head_size$|d_head$|dim_head$|kv_channels", HEAD_SIZE),
        (r"intermediate_size|ff(n)?_(dim|hidden_size)$|^n_inner$|^d_?ff$|^dim_ff$|^d_inner$|^feed_forward_size$", 96),
    )
]
HEAD_COUNT = re.compile(r"heads?$")
GROUP_COUNT = re.compile(r"(key|kv)_.*heads$|kv_heads$|query_groups$")
LAYER_COUNT = re.compile(r"layers?$|blocks$|^depth$")
LAYER_INDICES = re.compile(r"layer|idx|indices")
SCALED = re.compile(r"hidden_size|embed(ding)?_(dim|size)$|proj_dim$|lru_width|d_ssm$")
DROPOUT = re.compile(r"drop|jitter")
MULTIPLIER = re.compile(r"multiplier|scal(e|ing|ar)|soft_?cap|^mup_|residual_alpha")
NOT_A_MULTIPLIER = re.compile(r"rope|rotary|init|layer_?norm|^scale_|use_")

HEADS_OF = {
    "head_dim": ("num_attention_heads", "num_heads"),
    "attention_head_dim": ("num_attention_heads",),
    "kv_channels": ("num_attention_heads",),
    "swa_head_dim": ("swa_num_attention_heads",),
    "mamba_d_head": ("mamba_n_heads",),
    "mamba_head_dim": ("mamba_num_heads",),
    "mamba_headdim": ("n_mamba_heads",),
}
"""Head sizes -> head counts: the product is a width that may have to match the hidden size."""

LATENT = ("qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim", "v_head_dim", "head_dim")
"""Head sizes of latent attention, which keep their proportions instead."""

STEPS = ({"narrow": True, "moved": True}, {"narrow": True, "moved": False}, {"narrow": False, "moved": True})
"""Arguments for `small_config`, the strictest first; the others are for architectures that do not run with those."""


def said_of_layers(config: PreTrainedConfig, layers: int) -> list[list[Any]]:
    """Return all per-layer settings of a config, each as a list with one value per layer."""
    config = config.get_text_config()
    settings = [list(value) for value in vars(config).values() if _is_per_layer(value, layers)]
    for name, value in vars(config).items():
        if _are_indices(value, name, layers):
            settings.append([index in value for index in range(layers)])
    return [*settings, *_layerwise(config).values()]


def small_config(
    config: PreTrainedConfig, layers: int, kept_layers: Sequence[int], *, narrow: bool, moved: bool
) -> PreTrainedConfig:
    """Return a copy with few layers and few tokens.

    Args:
        layers: number of layers of the model.
        kept_layers: for each layer of the copy, the original layer.
        narrow: also make widths small.
        moved: change multipliers, scales and soft-caps (a test could not see the effect of a multiplier of 1).
    """
    result = copy.deepcopy(config)
    small = result.get_text_config()
    layerwise = _layerwise(small)
    if layerwise:
        small.per_layer_config = None  # the settings of all layers can then be read and set
    usual = {name: getattr(small, name, None) for name in layerwise}
    for name, value in list(vars(small).items()):
        if _is_per_layer(value, layers):
            entries = [value[index] for index in kept_layers]
            _set(small, name, type(value)(entries))
        elif _are_indices(value, name, layers):
            positions = [position for position, index in enumerate(kept_layers) if index in value]
            _set(small, name, type(value)(positions))
        elif LAYER_COUNT.search(name) and _is_whole(value) and value % layers == 0:  # LongCat counts each twice
            _set(small, name, value // layers * len(kept_layers))
    if narrow:
        _narrow(small)
    _fewer_tokens(small)
    if layerwise:
        small.per_layer_config = {
            position: {
                name: _in_proportion(values[index], usual[name], getattr(small, name, None))
                for name, values in layerwise.items()
            }
            for position, index in enumerate(kept_layers)
        }
    for nested in _nested_configs(small):
        _make_telling(nested, moved)
    for tower in vars(result).values():  # towers for images or sound are not used for text
        if isinstance(tower, PreTrainedConfig) and tower.model_type and tower is not small:
            for name, value in list(vars(tower).items()):
                if LAYER_COUNT.search(name) and _is_whole(value):
                    _set(tower, name, min(value, 1))
    if result._attn_implementation not in (None, "eager", "sdpa"):
        result._attn_implementation = None  # kernels for accelerators do not run here
    result._experts_implementation = "eager"  # the grouped product of experts takes no fp64
    return result


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_per_layer(value: Any, layers: int) -> TypeGuard[list]:
    return isinstance(value, (list, tuple)) and len(value) == layers > 1 and list(value) != list(range(layers))


def _are_indices(value: Any, name: str, layers: int) -> TypeGuard[list[int]]:
    """Return whether a list contains indices of layers."""
    if not (isinstance(value, (list, tuple)) and value and LAYER_INDICES.search(name)):
        return False
    return all(_is_whole(entry) and 0 <= entry < layers for entry in value) and sorted({*value}) == list(value)


def _layerwise(config: PreTrainedConfig) -> dict[str, list[Any]]:
    """Return attribute -> its values by layer, for configs with a config per layer instead of lists (Gemma 4)."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    layers = list(config.per_layer_config)
    return {name: [getattr(layer, name) for layer in layers] for name in sorted(config.per_layer_attributes or ())}


def _in_proportion(value: Any, usual: Any, small: Any) -> Any:
    """Return a layer's value in the small copy: larger or smaller than the usual value if it is so in the model."""
    if small == usual or not (_is_whole(value) and _is_whole(usual) and _is_whole(small)):
        return value
    if value == usual:
        return small
    near = max(1, round(small * value / usual))
    return near if near != small else 2 * small if value > usual else max(1, small // 2)


def _nested_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a config and its nested configs that are not models themselves (DBRX's `attn_config`)."""
    yield config
    yield from (
        value for value in vars(config).values() if isinstance(value, PreTrainedConfig) and not value.model_type
    )


def _narrow(small: PreTrainedConfig) -> None:
    original = copy.deepcopy(small)
    hidden, heads = getattr(original, "hidden_size", None), getattr(original, "num_attention_heads", None)
    for nested in _nested_configs(small):
        for name, value in list(vars(nested).items()):
            if GROUP_COUNT.search(name) and _is_whole(value):
                of = getattr(original, name.replace("key_value", "attention").replace("key", "value"), heads)
                _set(nested, name, _fewer_groups(value, of if _is_whole(of) else heads))
            elif not name.startswith("rope"):
                _set(nested, name, _smaller(name, value, hidden))
    rotary_size = getattr(original, "qk_rope_head_dim", None)
    for name in LATENT if _is_whole(rotary_size) else HEADS_OF:
        size = vars(original).get(name)
        count = next((count for count in HEADS_OF.get(name, ()) if _is_whole(getattr(original, count, None))), None)
        if _is_whole(size) and _is_whole(rotary_size):
            _set(small, name, max(1, size * min(rotary_size, ROTARY) // rotary_size))
        elif _is_whole(size) and count is not None:
            _set(small, name, _scaled(size * getattr(original, count), hidden) // getattr(small, count))
    _shorten_rotary_factors(small)


def _smaller(name: str, value: Any, hidden: Any) -> Any:
    if isinstance(value, dict):
        return {key: _smaller(str(key), entry, hidden) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_smaller(name, entry, hidden) for entry in value)
    if not _is_whole(value):
        return value
    if HEAD_COUNT.search(name):
        return _fewer_heads(value)
    limit = next((limit for pattern, limit in SMALLER if pattern.search(name)), None)
    if limit is not None:
        return min(value, limit)
    return _scaled(value, hidden) if value == hidden or SCALED.search(name) else value


def _scaled(width: int, hidden: Any) -> int:
    """Scale a width like the hidden size, in steps of 32; the two become equal only if they were before."""
    if not _is_whole(hidden) or hidden <= HIDDEN:
        return width
    near = 32 * max(1, round(width * HIDDEN / hidden / 32))
    if near == HIDDEN and width != hidden:
        near += 32 if width > hidden else -32
    return min(width, near)


def _fewer_heads(count: int) -> int:
    """Return a power of two, so that the number of heads divides the hidden size."""
    return 1 << (min(count, HEADS).bit_length() - 1) if count > 0 else count


def _fewer_groups(groups: int, heads: Any) -> int:
    """Return the number of key and value heads: all, one, or some, as before."""
    few = _fewer_heads(groups)
    return few if not _is_whole(heads) or groups in (1, heads) else max(1, min(few, _fewer_heads(heads) // 2))


def _make_telling(config: PreTrainedConfig, moved: bool) -> None:
    """Remove dropout, and with `moved` change multipliers and soft-caps."""
    for name, value in list(vars(config).items()):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and DROPOUT.search(name):
            _set(config, name, type(value)(0))
        elif moved and MULTIPLIER.search(name) and not NOT_A_MULTIPLIER.search(name):
            if "cap" in name and (number or value is None):
                _set(config, name, 3.0)
            elif number:
                _set(config, name, type(value)(round(value * 1.37, 6)) if value else 0.37)


def _fewer_tokens(small: PreTrainedConfig) -> None:
    _set(small, "vocab_size", VOCABULARY)
    for name, value in list(vars(small).items()):
        if name.endswith(("token_id", "token_index")):
            if isinstance(value, int) and value >= VOCABULARY:
                _set(small, name, value % VOCABULARY)
            elif isinstance(value, (list, tuple)):
                _set(small, name, type(value)(entry % VOCABULARY for entry in value))


def _shorten_rotary_factors(small: PreTrainedConfig) -> None:
    """Shorten rotary tables with one factor per frequency (longrope) to the smaller head."""
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
            entry["original_max_position_embeddings"] = min(entry["original_max_position_embeddings"], FEW_TOKENS)


def _set(config: PreTrainedConfig, name: str, value: Any) -> None:
    with contextlib.suppress(AttributeError, ValueError, TypeError):  # read-only properties and validators
        setattr(config, name, value)
