"""The configuration of a training run: one dataclass per section of the TOML file, a docstring under every field.

`evenpipe train --help` prints these docstrings. This module does not import torch, so mistakes are reported at once.
Paths are relative to the folder in which the command is started.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from evenpipe.recipe.offload import OffloadOptions
from evenpipe.recipe.recipe import Recipe
from evenpipe.train.input_sections import DEFAULT_TOKENIZER_ENTRIES, DataConfig, ModelConfig, TokenizerConfig
from evenpipe.train.pipeline_sections import ExpertsConfig, LossConfig, PipelineConfig
from evenpipe.train.run_sections import CheckpointConfig, OptimizerConfig, OutputConfig, SampleConfig, TrainingConfig
from evenpipe.words import refused, show


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run. Read one with `evenpipe.train.config_file.load_config`."""

    model: ModelConfig
    data: DataConfig
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    def __post_init__(self) -> None:
        if self.keeps_weights and self.tokenizer.vocabulary_size is not None:
            why = f"training continues from the weights of model.source, {show(self.model.source)}"
            raise refused("tokenizer.vocabulary_size", self.tokenizer.vocabulary_size, f"left out when {why}")
        if self.training.evaluate_every_steps is not None and not self.data.validates:
            accepted = "none when data.validation_fraction is 0 and no data.validation_files are given"
            raise refused("training.evaluate_every_steps", self.training.evaluate_every_steps, accepted)
        if self.sample.prompts and not self.output.export:
            raise refused("output.export", False, "true when sample.prompts are given")

    def recipe(self) -> Recipe:
        """Return the recipe of these sections. Raises InputError for a file that cannot be read."""
        return self.pipeline.recipe(self.offload, self.experts, self.data.sequence_length, self.documents)

    @property
    def keeps_weights(self) -> bool:
        """Whether training continues from the weights of `model.source`."""
        return self.model.source is not None and not self.model.fresh_weights

    @property
    def documents(self) -> Literal["separate", "joined"]:
        """`data.documents`, or its default."""
        if self.data.documents is not None:
            return self.data.documents
        return "separate" if self.keeps_weights and self.data.is_json_lines else "joined"

    @property
    def run_folder(self) -> Path:
        """Folder of this run."""
        return Path(self.output.folder)

    @property
    def cache_folder(self) -> Path:
        """Folder of the prepared tokens."""
        return self.run_folder / "data" if self.data.cache_folder is None else Path(self.data.cache_folder)

    @property
    def checkpoint_folder(self) -> Path:
        """Folder of the checkpoints."""
        return self.run_folder / "checkpoints" if self.checkpoint.folder is None else Path(self.checkpoint.folder)

    @property
    def trace_folder(self) -> Path:
        """Folder of the traces."""
        return self.run_folder / "traces" if self.output.trace_folder is None else Path(self.output.trace_folder)

    @property
    def flight_recorder_folder(self) -> Path:
        """Where a run that fails writes torch's records of its last operations."""
        return self.run_folder / "flight_recorder"

    @property
    def export_folder(self) -> Path:
        """Folder of the exported model."""
        return self.run_folder / "model" if self.output.export_folder is None else Path(self.output.export_folder)

    @property
    def folders(self) -> dict[str, Path]:
        """Folders that the run writes into, by the field that names them."""
        folders = {
            "output.folder": self.run_folder,
            "data.cache_folder": self.cache_folder,
            "checkpoint.folder": self.checkpoint_folder,
        }
        if self.output.trace_steps:
            folders["output.trace_folder"] = self.trace_folder
        if self.output.export:
            folders["output.export_folder"] = self.export_folder.parent
        return folders

    @property
    def trained_tokenizer_entries(self) -> int | None:
        """Size of the tokenizer to train, or None when an existing one is used."""
        if self.tokenizer.source is not None:
            return None
        if self.tokenizer.vocabulary_size is not None:
            return self.tokenizer.vocabulary_size
        return DEFAULT_TOKENIZER_ENTRIES if self.model.source is None else None

    @property
    def tokenizer_source(self) -> str | None:
        """Folder or hub name of the tokenizer, or None when one is trained."""
        return None if self.trained_tokenizer_entries is not None else self.tokenizer.source or self.model.source
