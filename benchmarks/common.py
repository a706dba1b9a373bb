"""What benchmarks of real steps share: the model, the arguments that say its size, and the file with all figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from provenance import provenance
from torch import Tensor
from transformers import LlamaConfig

from evenpipe.train.config import Config
from evenpipe.train.input_sections import DataConfig, ModelConfig, TokenizerConfig
from evenpipe.train.pipeline_sections import PipelineConfig

CPU = torch.device("cpu")


def option(default: int, text: str) -> Any:
    """A field of `Settings` that is an argument too."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured. Every field of a class below this one is an argument of the command line."""


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """What is measured of a pipeline."""

    processes: int = option(2, "devices of the pipeline")
    layers: int = option(8, "of the model")
    hidden_size: int = option(256, "of the model; heads have 64")
    tokens: int = option(128, "of a microbatch, which is one sequence")


S = TypeVar("S", bound=Options)


def add_arguments(parser: argparse.ArgumentParser, settings: type[Options]) -> None:
    """An argument for every field, and one for the file."""
    for one in fields(settings):
        assert one.default is not MISSING
        text = f"{one.metadata['help']} (default: {one.default})"
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=int, default=one.default, metavar="N", help=text)
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="all figures")


def settings_of(given: argparse.Namespace, settings: type[S]) -> S:
    """The settings that were given."""
    return settings(**{one.name: getattr(given, one.name) for one in fields(settings)})


class Results:
    """Figures, case by case; written after each, so that a run that is broken off leaves what it found."""

    def __init__(
        self,
        settings: Options | Mapping[str, Any],
        output: Path | None,
        torch_device: torch.device = CPU,
        **more: Any,
    ) -> None:
        self._all: dict[str, Any] = {
            "settings": asdict(settings) if isinstance(settings, Options) else dict(settings),
            **provenance(torch_device),
            **more,
            "cases": [],
        }
        self._output = output

    @property
    def cases(self) -> list[dict[str, Any]]:
        """What was found so far."""
        cases: list[dict[str, Any]] = self._all["cases"]
        return cases

    def add(self, case: dict[str, Any]) -> None:
        """One more case."""
        self.cases.append(case)
        if self._output is not None:
            self._output.write_text(json.dumps(self._all, indent=1) + "\n", encoding="utf-8")


def llama(settings: Settings, vocabulary: int) -> LlamaConfig:
    """A Llama of that size; heads of 64, MLP 2.75 times as wide, embedding and output layer of their own."""
    width = settings.hidden_size
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=int(2.75 * width) // 64 * 64,
        num_hidden_layers=settings.layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=settings.tokens,
        tie_word_embeddings=False,
    )


def configuration(settings: Settings, rows: int, **pipeline: Any) -> Config:
    """Training of that Llama with so many rows of the vocabulary, which reads nothing of its data.

    pipeline: the fields of its [pipeline].
    """
    model = llama(settings, rows).to_diff_dict()
    del model["model_type"]
    return Config(
        model=ModelConfig(architecture="llama", config=model, self_check=False),
        data=DataConfig(corpus="python-standard-library", sequence_length=settings.tokens),
        tokenizer=TokenizerConfig(vocabulary_size=rows),
        pipeline=PipelineConfig(processes=settings.processes, **pipeline),
    )


def token_ids(settings: Settings, vocabulary: int, microbatches: int, seed: int = 0) -> Tensor:
    """[microbatches, tokens], all ids equally often."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (microbatches, settings.tokens), generator=generator)
