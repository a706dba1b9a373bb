"""The models whose passes are measured and whose pipelines are simulated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import published
from transformers import AutoConfig, PreTrainedConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "models"
LADDER = (8, 16, 32)
TOKENS = (2048, 4096)
"""Of a microbatch, which is one sequence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A shape of transformers, and the pipelines that it is looked at in."""

    name: str
    values: Mapping[str, Any]
    """Of the transformers config, `model_type` and the number of layers among them."""
    vocabularies: tuple[int, ...]
    devices: Mapping[int, tuple[int, ...]]
    """By stages per device."""

    @property
    def layers(self) -> int:
        """All of them."""
        layers: int = self.values["num_hidden_layers"]
        return layers

    @property
    def hidden_size(self) -> int:
        """Width of a token."""
        return int(self.config(256, 2).hidden_size)

    def config(self, vocabulary: int, tokens: int, layers: int | None = None) -> PreTrainedConfig:
        """With so many rows, sequences of so many tokens, and all layers or fewer."""
        size = {"vocab_size": vocabulary, "max_position_embeddings": tokens, "tie_word_embeddings": False}
        return AutoConfig.for_model(**{**self.values, **size, "num_hidden_layers": layers or self.layers})


def _gpt(name: str, layers: int, heads: int, hidden_size: int, devices: Mapping[int, tuple[int, ...]]) -> Model:
    """GPT as in arXiv 2411.05288, table 1 and 4: an MLP of four times the width, nothing tied, no dropout."""
    values = {
        "model_type": "gpt2",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": hidden_size,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    }
    return Model(name=name, values=values, vocabularies=published.VOCABULARIES, devices=devices)


def _example(name: str, file: str) -> Model:
    """A shape of examples/models with its own vocabulary, wherever it has layers enough."""
    values = json.loads((EXAMPLES / file).read_text(encoding="utf-8"))
    layers = values["num_hidden_layers"]
    devices = {stages: tuple(size for size in LADDER if size * stages <= layers) for stages in (1, 2)}
    return Model(name=name, values=values, vocabularies=(values["vocab_size"],), devices=devices)


PAPER = (
    _gpt("4B", 32, 24, 3072, {1: (8,), 2: (8,)}),
    _gpt("10B", 48, 32, 4096, {1: (16,)}),
    _gpt("21B", 64, 40, 5120, {1: (32,)}),
    _gpt("7B", 32, 32, 4096, {2: (16,)}),
    _gpt("30B", 64, 48, 6144, {2: (32,)}),
)
"""1F1B ran with the first three, one stage per device, V-Half with 7B and 30B."""

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        *PAPER,
        _example("Llama-3-8B", "llama-3.1-8b.json"),
        _example("Llama-3-70B", "llama-3.1-70b.json"),
        _example("Qwen3-8B", "qwen3-8b.json"),
        Model(
            name="tiny",
            values={
                "model_type": "llama",
                "num_hidden_layers": 16,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "hidden_size": 128,
                "intermediate_size": 352,
            },
            vocabularies=(4096,),
            devices={1: (8,), 2: (8,)},
        ),
    )
}
"""By name; "tiny" is for trying scripts."""

DEFAULT = tuple(name for name in MODELS if name != "tiny")


def costs_name(model: str, tokens: int, vocabulary: int, devices: int, mode: str) -> str:
    """Of the cost file with what passes of one of so many devices take."""
    return f"{model}-{tokens}-tokens-{vocabulary}-rows-{devices}-devices-{mode}.toml"
