"""The configured model for the pipeline, checked against the pipeline, the data and the tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from typing import TYPE_CHECKING, Any

from evenpipe.errors import InputError
from evenpipe.train.config import Config
from evenpipe.train.input_sections import DataConfig, ModelConfig
from evenpipe.words import count, nearest, refused, show

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


LEAST_SHARE = 0.5
"""Minimum tokenizer entries per row of the embedding; models on the hub have at least 0.9."""


def model_config(model: ModelConfig) -> PreTrainedConfig:
    """Return the transformers config of `[model]`, before the tokenizer is known. Raises `InputError`."""
    if model.architecture is not None:
        return _described_config(model.architecture, model.config)
    from evenpipe.model.config import read_config

    assert model.source is not None, "a model has a source or an architecture"
    config = read_config(model.source, model.trust_remote_code, field="model.source")
    text: PreTrainedConfig = config.get_text_config()
    return text


def check_pipeline(config: Config) -> None:
    """Refuse a pipeline, a schedule or sequences that do not fit the model, before any process starts."""
    model = model_config(config.model)
    pipeline, layers = config.pipeline, model.num_hidden_layers
    if pipeline.devices > layers:
        maximum = f"{layers * pipeline.processes // pipeline.devices}, the layers of the model"
        maximum += f" times {pipeline.dp} replicas" if pipeline.dp > 1 else ""
        maximum += f" times {pipeline.cp} context ranks" if pipeline.cp > 1 else ""
        maximum += f" times {pipeline.tp} tensor ranks" if pipeline.tp > 1 else ""
        raise refused("pipeline.processes", pipeline.processes, f"at most {maximum}")
    split = pipeline.layers_per_stage
    may_be_empty = pipeline.vocabulary == "redistribute"
    if split is not None and (sum(split) != layers or (min(split) == 0 and not may_be_empty)):
        raise InputError(
            f"pipeline.layers_per_stage is {show(split)}; it must add up to the {count(layers, 'layer')} of the"
            f" model with at least {0 if may_be_empty else 1} each"
        )
    checkpointing = pipeline.activation_checkpointing
    if isinstance(checkpointing, tuple) and len(checkpointing) != layers:
        accepted = f"one choice, or {layers}, one per layer of the model"
        raise refused("pipeline.activation_checkpointing", checkpointing, accepted)
    _check_chunks(config)
    longest = getattr(model, "max_position_embeddings", None)
    if longest is not None and config.data.sequence_length > longest:
        length = config.data.sequence_length
        value = (
            f"{length}, its default" if length == DataConfig.__dataclass_fields__["sequence_length"].default else length
        )
        accepted = f"at most {longest}, the longest sequence of the model"
        raise InputError(f"data.sequence_length is {value}; it must be {accepted}")
    _check_schedule(config, layers)


def _check_chunks(config: Config) -> None:
    """Refuse sequences that cannot be shared by the processes, or cut into slices."""
    from evenpipe.recipe.parallelism import divisor_of

    pipeline = config.pipeline
    divisor = divisor_of(pipeline.cp, pipeline.tp)
    if config.data.sequence_length % divisor:
        whose = "2 x pipeline.cp, and of pipeline.tp in each chunk"
        raise refused(
            "data.sequence_length",
            config.data.sequence_length,
            f"a multiple of {divisor}, {'pipeline.tp' if pipeline.cp == 1 else whose}",
        )
    if pipeline.slices != "auto" and config.data.sequence_length < divisor * pipeline.slices:
        raise refused(
            "data.sequence_length",
            config.data.sequence_length,
            f"at least {divisor * pipeline.slices} for {count(pipeline.slices, 'slice')}",
        )


def _check_schedule(config: Config, layers: int) -> None:
    """Refuse a schedule that is not valid, has no order of this size, or has more stages than the model has layers."""
    from evenpipe.recipe.layout import runnable_order
    from evenpipe.schedule import plan_program

    pipeline, recipe = config.pipeline, config.recipe()
    devices, microbatches = recipe.devices, recipe.microbatches
    try:
        order = runnable_order(recipe)
    except InputError as error:
        field = str(error).split()[0]
        whose = "pipeline." if field in pipeline.schedule_options else "pipeline.schedule: "
        raise InputError(f"{whose}{error}") from None
    if order.devices != devices:
        replicas = f" for each of {pipeline.dp} replicas" if pipeline.dp > 1 else ""
        raise InputError(
            f"pipeline.processes is {pipeline.processes}; it must be"
            f" {order.devices * pipeline.processes // pipeline.devices}: the order in {pipeline.schedule} has"
            f" {count(order.devices, 'device')}{replicas}"
        )
    if order.microbatches != microbatches:
        raise refused(
            "pipeline.microbatches",
            microbatches,
            f"{order.microbatches}, as many as the order in {pipeline.schedule} has",
        )
    if recipe.costs is not None or not isinstance(recipe.schedule, str):  # sound, in this mode, a time for all?
        plan_program(recipe.schedule, devices, microbatches, recipe.vocabulary, recipe.costs, **recipe.options)
    stages, split = order.placement.stages, pipeline.layers_per_stage
    if split is not None and len(split) != stages:
        raise refused(
            "pipeline.layers_per_stage",
            split,
            f"{count(stages, 'number')}, one for each stage"
            f" of schedule {show(pipeline.schedule)} on {count(devices, 'device')}",
        )
    if stages > layers and split is None:
        raise InputError(
            f"pipeline.schedule is {show(pipeline.schedule)}, which has {count(stages, 'stage')} on"
            f" {count(devices, 'device')}; it must have at most {layers}, the layers of the model"
        )


def pipeline_model(config: Config, tokenizer_size: int, end_of_text_id: int) -> str | PreTrainedConfig:
    """Return the model for `evenpipe.Pipeline`: a folder or hub name with weights, or a config for fresh weights.

    A model described by [model.config], or with fresh weights and a newly trained tokenizer, gets the tokenizer's size
    and end-of-text id unless [model.config] gives them. Raises `InputError` if the tokenizer has more entries than the
    embedding has rows, or for existing weights far fewer.
    """
    model = model_config(config.model)
    if config.model.architecture is not None or config.trained_tokenizer_entries is not None:
        configured = config.model.config
        if "vocab_size" not in configured:
            model.vocab_size = tokenizer_size
        for name, value in (("eos_token_id", end_of_text_id), ("bos_token_id", end_of_text_id), ("pad_token_id", None)):
            if name not in configured:
                setattr(model, name, value)
    _check_vocabulary(config, model.vocab_size, tokenizer_size)
    if config.model.source is not None and not config.model.fresh_weights:
        return config.model.source
    return model


def _check_vocabulary(config: Config, rows: int, tokenizer_size: int) -> None:
    """Refuse a tokenizer with more entries than the embedding has rows, or, for existing weights, with so few that it
    must belong to another model: normally only a small fraction of the rows is unused."""
    whose = f"the tokenizer {show(config.tokenizer_source)}" if config.tokenizer_source else "the tokenizer"
    if tokenizer_size > rows:
        where = "model.config.vocab_size" if "vocab_size" in config.model.config else "the model's vocabulary"
        raise InputError(
            f"{where} is {rows}; it must be at least {tokenizer_size}, the size of {whose}"
            + ("; tokenizer.source names another one" if config.keeps_weights else "")
        )
    if config.keeps_weights and tokenizer_size < LEAST_SHARE * rows:
        raise InputError(
            f"{whose} has {count(tokenizer_size, 'token')}, but the embedding of model.source ="
            f" {show(config.model.source)} has {rows:,} rows, so it is not the tokenizer of these weights; give"
            " tokenizer.source, a folder or hub name with the tokenizer of the model"
        )


def _described_config(architecture: str, values: dict[str, Any]) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS

    from evenpipe.model.config import check_sizes
    from evenpipe.model.structure import first_line

    if architecture not in CAUSAL_LMS:
        raise refused(
            "model.architecture",
            architecture,
            f"a causal language model's type in transformers{nearest(architecture, CAUSAL_LMS)}",
        )
    config_class = CONFIG_MAPPING[architecture]
    for name in values:
        if not is_field(config_class, name):  # transformers would keep it, and ignore it
            near = nearest(name, _field_names(config_class))
            raise InputError(f"model.config.{name} is no field of {config_class.__name__}{near}")
    try:
        check_sizes({"model_type": architecture, **values})
        return config_class(**values)
    except Exception as error:  # validators of transformers raise several types
        raise InputError(f"[model.config] does not describe a {architecture} model: {first_line(error)}") from error


def is_field(config_class: type, name: str) -> bool:
    """Return whether a config has a field, or its model reads one that the class does not declare, such as `head_dim`
    of Qwen3-MoE."""
    return name in _field_names(config_class) or name in _names_read(config_class)


@functools.cache
def _names_read(config_class: type) -> frozenset[str]:
    """Return the names that the code of the causal language model looks for in its config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    module = inspect.getmodule(MODEL_FOR_CAUSAL_LM_MAPPING[config_class])
    assert module is not None
    return frozenset(re.findall(r"\bconfig(?:\.|, *[\"'])(\w+)", inspect.getsource(module)))


def _field_names(config_class: type) -> list[str]:
    if dataclasses.is_dataclass(config_class):
        names = [field.name for field in dataclasses.fields(config_class)]
    else:
        names = [name for name in inspect.signature(config_class).parameters if name != "kwargs"]
    return [*names, *getattr(config_class, "attribute_map", {})]
