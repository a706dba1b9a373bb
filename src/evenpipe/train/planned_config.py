"""Turns a plan into the configuration of a training run: the file that `evenpipe plan -o` writes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenpipe.costs.toml import toml_lines
from evenpipe.errors import InputError
from evenpipe.given import plain, write_text
from evenpipe.model import Description, describe
from evenpipe.plan.configuration import Configuration
from evenpipe.plan.evaluation import Evaluation
from evenpipe.plan.problem import Problem
from evenpipe.plan.runnable import refusal
from evenpipe.schedule import even_split
from evenpipe.train.config import Config
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.model_source import is_field, model_config
from evenpipe.train.run_sections import OutputConfig

CORPUS = "python-standard-library:asyncio,json,logging,unittest"
"""Default training data, which exists on every machine."""
TOKENIZER_ENTRIES = 8192

NOT_PLANNED = (
    *("arrange", "compile_layers", "communicators", "tensor_overlap", "nccl_high_priority", "nccl_channels"),
    "timeout_seconds",
)
"""Fields of [pipeline] that a plan does not decide."""
_OF_COPIES = ("activations", "copy_time", "layers", "streams")
"""Fields of [offload] that a plan decides: all layers offload their activations, and copies take turns."""
_OF_THE_TOKENIZER = ("eos_token_id", "bos_token_id", "pad_token_id")
_NOT_SHAPE = ("transformers_version", "architectures", "model_type", "dtype", "torch_dtype", "_name_or_path")


def planned_tables(
    problem: Problem, plan: Evaluation, base: Mapping[str, Any], name: str, hardware: str
) -> dict[str, Any]:
    """Return the tables of `base` with the planned pipeline. Their run has a new folder, `name`, because it would
    otherwise resume the run of `base`. hardware: the hardware of the problem, as `find_hardware` takes it.

    Raises InputError for a plan that evenpipe cannot run, and for a configuration that does not fit together.
    """
    parallelism = plan.configuration.recipe.parallelism
    reason = refusal(problem, plan.configuration.recipe)
    if reason:
        raise InputError(
            f"the plan {plan.configuration.name} is an estimate only, evenpipe train does not run it: {reason}"
        )
    tables = {name: dict(table) for name, table in base.items()}
    tables.setdefault("data", {})["sequence_length"] = problem.sequence
    if "config" in tables["model"]:  # a trained tokenizer may have fewer entries
        tables["model"]["config"] = {"vocab_size": problem.description.vocabulary_size, **tables["model"]["config"]}
    unplanned = {key: value for key, value in tables.get("pipeline", {}).items() if key in NOT_PLANNED}
    tables["pipeline"] = {**unplanned, **_pipeline(problem, plan.configuration)}
    if problem.compiles:
        tables["pipeline"]["compile_layers"] = True
    if parallelism.pp > 1:
        tables["pipeline"].setdefault("arrange", hardware)
    tables |= _offload(tables.get("offload"), plan.configuration)
    if parallelism.ep > 1:
        expert_options = {"columns": parallelism.experts.columns, "arrivals": parallelism.experts.arrivals}
        tables["experts"] = {**tables.get("experts", {}), **expert_options}
    _move_output(tables, name)
    share = plan.configuration.host_share
    if share or "host_share" in tables.get("optimizer", {}):
        tables.setdefault("optimizer", {})["host_share"] = float(share or 0.0)
    config_from_dict(tables)
    return tables


def model_tables(description: Description, source: str) -> dict[str, Any]:
    """Return [model], [data] and [tokenizer] for a model given by name, folder or config file, with a small corpus. The
    model has the weights of the folder, or fresh weights if the folder has none."""
    folder = Path(source)
    weights = not folder.exists() or any(folder.glob("*.safetensors"))
    data = {"corpus": CORPUS}
    if weights:
        return {"model": {"source": source}, "data": data}
    config = description.config.get_text_config()
    values = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in (*_NOT_SHAPE, *_OF_THE_TOKENIZER) and value is not None and is_field(type(config), name)
    }
    values["vocab_size"] = config.vocab_size
    return {
        "model": {"architecture": config.model_type, "config": values},
        "data": data,
        "tokenizer": {"vocabulary_size": min(TOKENIZER_ENTRIES, description.vocabulary_size)},
    }


def _pipeline(problem: Problem, configuration: Configuration) -> dict[str, Any]:
    recipe = configuration.recipe
    parallelism, batch = recipe.parallelism, recipe.batch
    values: dict[str, Any] = {
        "processes": parallelism.gpus,
        "dp": parallelism.dp,
        "tp": parallelism.tp,
        "data_parallel": parallelism.data_parallel,
        "schedule": configuration.schedule,
        **recipe.options,
        "vocabulary": recipe.vocabulary,
        "microbatches": batch.microbatches,
        "microbatch_size": batch.microbatch_size,
    }
    if parallelism.ep > 1:
        values["ep"] = parallelism.ep
    if recipe.slices > 1:
        values["slices"] = recipe.slices
    if parallelism.cp > 1:
        values |= {"cp": parallelism.cp, "context_exchange": parallelism.context_exchange}
    split = configuration.layers_per_stage
    if not recipe.mode.sharded or split != even_split(problem.layers, len(split)):
        values["layers_per_stage"] = list(split)
    policies = list(configuration.checkpointing)
    values["activation_checkpointing"] = policies[0] if len(set(policies)) == 1 else policies
    return values


def _offload(table: Mapping[str, Any] | None, configuration: Configuration) -> dict[str, Any]:
    """Return [offload] if `table` is given or the plan offloads activations."""
    if table is None and not configuration.moves:
        return {}
    values: dict[str, Any] = {name: value for name, value in (table or {}).items() if name not in _OF_COPIES}
    values["activations"] = configuration.offload
    if configuration.moves:
        times = configuration.copy_time
        values["copy_time"] = times[0] if len(set(times)) == 1 else list(times)
    return {"offload": values}


def _move_output(tables: dict[str, Any], name: str) -> None:
    """Give the run a folder next to the configured one, and write all results there."""
    output = tables.setdefault("output", {})
    folder = Path(output.get("folder", OutputConfig().folder))
    output["folder"] = folder.with_name(name if name != folder.name else f"{name}-planned").as_posix()
    for field in ("trace_folder", "export_folder"):
        output.pop(field, None)
    tables.get("checkpoint", {}).pop("folder", None)


def write_tables(
    tables: Mapping[str, Any], path: str | Path, notes: str, comments: Mapping[str, str] | None = None
) -> None:
    """Write tables as TOML, with `notes` as comments at the top. Raises InputError if the file cannot be written.

    comments: comments above fields, by `section.field`.
    """
    lines = [f"# {plain(line)}".rstrip() for line in notes.split("\n")]
    for name, table in tables.items():
        inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
        lines += ["", f"[{name}]"]
        for key, value in table.items():
            if key not in inner and value is not None:
                lines += textwrap.wrap(
                    (comments or {}).get(f"{name}.{key}", ""), 100, initial_indent="# ", subsequent_indent="# "
                )
                lines += toml_lines({key: value}, digits=None)
        for key, values in inner.items():
            lines += ["", f"[{name}.{key}]", *toml_lines(values, digits=None)]
    write_text(path, "\n".join(lines).lstrip("\n") + "\n")


def configured_model(config: Config) -> Description:
    """Return the description of the model of a training run before its tokenizer exists: it has as many rows as the
    tokenizer will have entries."""
    model = model_config(config.model)
    entries = config.trained_tokenizer_entries
    if entries is not None and "vocab_size" not in config.model.config:
        model.vocab_size = entries
        for name in _OF_THE_TOKENIZER:
            setattr(model, name, None)
    return describe(model, trust_remote_code=config.model.trust_remote_code)
