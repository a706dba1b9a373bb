"""Reads the properties of a model's layers that determine bytes and arithmetic, from its config and skeleton."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.words import count

LOCAL = "sliding_attention"
NORM_PLACES = ("before attention", "after attention", "before mlp", "after mlp")


NormStyle = Literal["torch", "narrow", "wide", "plus one", "centred"]
"""How transformers' module computes a norm: torch's own function; in fp32, rounded before the weight ("narrow") or
after it ("wide"); with 1 + weight; with the mean subtracted in a separate step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The attention of a layer."""

    heads: int
    """Number of query heads."""
    key_value_heads: int
    head_size: int
    """Of queries, keys and values."""
    qkv: Literal["apart", "packed", "sliced"] = "apart"
    """Queries, keys and values are three matrices; or one ("packed"); or one, and separate slices of its product
    ("sliced"), so each slice's gradient has its full size."""
    bias: bool = False
    """Queries, keys and values have a bias."""
    output_bias: bool = False
    """The product after attention has a bias."""
    query_key_norm: Literal["none", "head", "whole"] = "none"
    """Queries and keys have norms: over each head, or over all heads at once."""
    late_norm: bool = False
    """Queries and keys are normalised after the values are computed, not each immediately."""
    window: int | None = None
    """Number of tokens that attention sees; None: all."""
    eager: bool = False
    """transformers' default for this model is eager attention, not sdpa."""
    wide_softmax: bool = True
    """Probabilities of eager attention are computed in fp32."""
    soft_cap: bool = False
    """Scores are capped by a tanh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryShape:
    """The rotary embedding of a layer's queries and keys."""

    size: int
    """Number of rotated columns per head; 0: no rotary embedding."""
    table: str = "rotary"
    """Layers of one stage with the same name share their tables of cosines and sines."""
    wide_table: bool = False
    """These tables are fp32 for every dtype of the hidden states."""
    wide: bool = False
    """Queries and keys are rotated in fp32."""
    joined: bool = False
    """Rotated and other columns are joined in a new tensor, even if there are no other columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """The experts of a layer, whose router takes the largest of softmaxes in fp32."""

    count: int
    choices: int
    """Number of experts that a token meets."""
    shares: bool
    """The weights of a token are divided by their sum."""
    narrow_weights: bool
    """Weights have the dtype of the hidden states; otherwise they are fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpShape:
    """The MLP of a layer."""

    size: int
    """Inner width; of each expert, if there are any."""
    gated: bool
    """There are two input products, and one is the other's gate."""
    activation: str
    """Name in the config."""
    packed_gate: bool = False
    """Gate and up are one matrix."""
    bias: bool = False
    experts: ExpertsShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The shape of one transformer layer. Sizes are in elements."""

    hidden_size: int
    attention: AttentionShape
    rotary: RotaryShape
    mlp: MlpShape
    norms: tuple[str, ...]
    """Positions of the norms of the residual stream, from `NORM_PLACES`."""
    norm_style: NormStyle = "narrow"
    parallel: bool = False
    """Attention and MLP read the same input and are added together."""
    holds_attention: bool = False
    """The result of attention is live until the layer ends, since a variable refers to it."""
    scaled_residual: bool = False
    """Additions to the residual stream are multiplied by a number."""
    dropout: bool = False
    """The layer uses dropout in training."""


def layer_shapes(description: Description) -> tuple[LayerShape, ...]:
    """Return the shape of every layer.

    Raises:
        InputError: the model type, or a part of a layer, is unknown.
    """
    model_type = _model_type(description)
    if model_type not in _KNOWN:
        raise InputError(
            f"model_type: {model_type!r} has layers that are not known in closed form; it must be one of "
            f"{', '.join(sorted(_KNOWN))}."
        )
    styles: dict[type[nn.Module], NormStyle] = {}
    wide_table = _has_wide_table(description)
    return tuple(_read(description, index, styles, wide_table) for index in range(description.layers))


_KNOWN = frozenset(
    [
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "granite",
        "smollm3",
        "gpt_neox",
        "cohere2",
        "starcoder2",
        "gpt2",
        "phi",
        "mixtral",
        "qwen3_moe",
        "olmoe",
    ]
)
"""Model types whose layers `_read` describes completely; some properties are listed by type below."""
_JOINED_ROTARY = ("phi3", "phi", "gpt_neox")
_WIDE_ROTARY, _SLICED_QKV, _NARROW_SOFTMAX = ("cohere2",), ("phi3",), ("gpt2",)
_LATE_NORM, _HOLDS_ATTENTION = ("gemma3_text", "phi"), ("gpt2",)

_WIDE_WEIGHTS = ("mixtral",)

_ATTENTION, _MLP = ("self_attn", "attention", "attn"), ("mlp",)
_QUERIES, _PACKED_QKV = ("q_proj",), ("qkv_proj", "query_key_value", "c_attn")
_OUTPUT = ("o_proj", "dense", "c_proj")
_UP, _PACKED_GATE = ("up_proj", "c_fc", "fc1", "dense_h_to_4h"), ("gate_up_proj",)
_DOWN = ("down_proj", "c_proj", "fc2", "dense_4h_to_h")
_ACTIVATION = ("hidden_activation", "hidden_act", "activation_function")
_DROPOUT = ("dropout", "pdrop")


def _model_type(description: Description) -> str:
    if description.config is None:
        return description.architecture
    return str(description.config.get_text_config().model_type)


def _read(
    description: Description, index: int, styles: dict[type[nn.Module], NormStyle], wide_table: bool
) -> LayerShape:
    config, layer = description.config.get_text_config(), description.layer(index)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds else None
    attention = _attention(description, _one_of(layer, _ATTENTION), kind)
    places = _norm_places(description, layer)
    norm = next(iter(places.values()))
    if type(norm) not in styles:
        styles[type(norm)] = norm_style(norm)
    rotary = getattr(config, "rope_parameters", None) or {}
    rotated = attention.head_size * rotary.get("partial_rotary_factor", 1.0) if _rotates(config, index, kind) else 0
    one_norm = "before mlp" not in places and "after mlp" not in places
    return LayerShape(
        hidden_size=description.hidden_size,
        attention=attention,
        rotary=RotaryShape(
            size=int(rotated),
            table=str(kind) if isinstance(rotary.get(kind), Mapping) else "rotary",
            wide_table=wide_table,
            wide=config.model_type in _WIDE_ROTARY,
            joined=config.model_type in _JOINED_ROTARY,
        ),
        mlp=_mlp(config, _one_of(layer, _MLP)),
        norms=tuple(place for place in NORM_PLACES if place in places),
        norm_style=styles[type(norm)],
        parallel=bool(getattr(config, "use_parallel_residual", one_norm)),
        holds_attention=config.model_type in _HOLDS_ATTENTION,
        scaled_residual=hasattr(config, "residual_multiplier"),
        dropout=has_dropout(config),
    )


def _attention(description: Description, attention: nn.Module, kind: str | None) -> AttentionShape:
    config = description.config.get_text_config()
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    output, queries = _one_of(attention, _OUTPUT), _one_of(attention, _QUERIES + _PACKED_QKV)
    size = _rows(output, inputs=True) // heads
    packed = not hasattr(attention, "q_proj")
    expected = heads * size + (2 * key_value_heads * size if packed else 0)
    if _rows(queries) != expected:
        raise _unknown(
            description,
            f"{count(_rows(queries), 'column')} of queries, where {count(heads, 'head')} of {size} were expected",
        )
    return AttentionShape(
        heads=heads,
        key_value_heads=key_value_heads,
        head_size=size,
        qkv="apart" if not packed else "sliced" if config.model_type in _SLICED_QKV else "packed",
        bias=queries.bias is not None,
        output_bias=output.bias is not None,
        query_key_norm=_query_key_norm(attention, size),
        late_norm=config.model_type in _LATE_NORM,
        window=_window(config, kind),
        eager=description.skeleton.config._attn_implementation == "eager",
        wide_softmax=config.model_type not in _NARROW_SOFTMAX,
        soft_cap=getattr(config, "attn_logit_softcapping", None) is not None,
    )


def _mlp(config: Any, mlp: nn.Module) -> MlpShape:
    activation = str(next(getattr(config, name) for name in _ACTIVATION if hasattr(config, name)))
    experts: Any = mlp._modules.get("experts")
    if experts is not None:
        shape = ExpertsShape(
            count=experts.num_experts,
            choices=config.num_experts_per_tok,
            shares=getattr(config, "norm_topk_prob", True),
            narrow_weights=config.model_type not in _WIDE_WEIGHTS,
        )
        return MlpShape(size=experts.intermediate_dim, gated=True, activation=activation, experts=shape)
    packed = hasattr(mlp, "gate_up_proj")
    return MlpShape(
        size=_rows(_one_of(mlp, _DOWN), inputs=True),
        gated=packed or hasattr(mlp, "gate_proj"),
        activation=activation,
        packed_gate=packed,
        bias=_one_of(mlp, _UP + _PACKED_GATE).bias is not None,
    )


def has_dropout(config: Any) -> bool:
    """Return whether layers of such a model use dropout in training."""
    return any(isinstance(value, float) and value > 0 and _drops(name) for name, value in vars(config).items())


def _drops(name: str) -> bool:
    return name.endswith(_DROPOUT) and not name.startswith(("embd", "embedding", "classifier", "summary"))


def _one_of(module: nn.Module, names: tuple[str, ...]) -> Any:
    for name in names:
        if name in module._modules:
            return module._modules[name]
    raise InputError(f"model: {type(module).__name__} has none of {', '.join(names)}, by which its shape is read.")


def _rows(linear: nn.Module, *, inputs: bool = False) -> int:
    """Return the columns of a linear layer's result, or of its input."""
    weight = linear.weight
    assert isinstance(weight, torch.Tensor)
    return int(
        weight.shape[(0 if isinstance(linear, Conv1D) else 1) if inputs else (1 if isinstance(linear, Conv1D) else 0)]
    )


def _norm_places(description: Description, layer: nn.Module) -> dict[str, nn.Module]:
    """Return the norms of the residual stream by position. "post_attention_layernorm" is after attention if the MLP has
    its own norm, and before the MLP otherwise."""
    found = {
        name: module
        for name, module in layer._modules.items()
        if module is not None and name not in _ATTENTION + _MLP and any(True for _ in module.parameters())
    }
    own = "pre_feedforward_layernorm" in found or "post_feedforward_layernorm" in found
    places = {
        "input_layernorm": "before attention",
        "ln_1": "before attention",
        "post_attention_layernorm": "after attention" if own else "before mlp",
        "ln_2": "before mlp",
        "pre_feedforward_layernorm": "before mlp",
        "post_feedforward_layernorm": "after mlp",
    }
    for name in found:
        if name not in places:
            raise _unknown(description, f"a part {name!r}")
    return {places[name]: module for name, module in found.items()}


def _unknown(description: Description, what: str) -> InputError:
    return InputError(f"model_type: layers of {_model_type(description)!r} are not as expected: {what}.")


def _query_key_norm(attention: nn.Module, size: int) -> Literal["none", "head", "whole"]:
    norm = attention._modules.get("q_norm", attention._modules.get("q_layernorm"))
    if norm is None:
        return "none"
    return "head" if norm.weight.shape[0] == size else "whole"  # type: ignore[index]


def _rotates(config: Any, index: int, kind: str | None) -> bool:
    if getattr(config, "rope_parameters", None) is None:
        return False
    if config.model_type == "cohere2":
        return kind == LOCAL
    turns = getattr(config, "no_rope_layers", None)
    return turns is None or bool(turns[index])


def _window(config: Any, kind: str | None) -> int | None:
    if kind is not None and kind != LOCAL:
        return None
    if kind is None and not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None)


# --- properties found by running a module -----------------------------------------------------------------------------


@torch.no_grad()
def norm_style(norm: nn.Module) -> NormStyle:
    """Find out how a norm is computed, from its results on simple inputs.

    norm: with one weight, on any device; a copy is run.
    """
    if isinstance(norm, nn.LayerNorm):
        return "torch"
    real = copy.deepcopy(norm).to_empty(device="cpu").float()
    weight = next(real.parameters())
    hidden = torch.arange(1.0, weight.shape[-1] + 1)
    weight.zero_()
    if real(hidden).any():
        return "plus one"
    weight.fill_(1.0)
    if not real(torch.ones_like(hidden)).any():
        return "centred"
    # If the weight is applied after the rounding, the result has the weight's dtype.
    return "narrow" if real(hidden.bfloat16()).dtype == torch.float32 else "wide"


@torch.no_grad()
def _has_wide_table(description: Description) -> bool:
    """Return whether tables of cosines are fp32 for hidden states in bf16."""
    base = description.skeleton.base_model
    rotary = next((module for name, module in base.named_modules() if name.endswith("rotary_emb")), None)
    if rotary is None:
        return False
    real = copy.deepcopy(rotary).to_empty(device="cpu")
    for buffer in real.buffers():
        buffer.zero_()
    hidden = torch.zeros(1, 2, 2, dtype=torch.bfloat16)
    kinds = getattr(real, "layer_types", None)
    more = [kinds[0]] if kinds and "layer_type" in inspect.signature(rotary.forward).parameters else []
    cosine, _ = real(hidden, torch.arange(2)[None], *more)
    return bool(cosine.dtype == torch.float32)
