"""Measures costs on this hardware by tracing real steps of the configured model and pipeline.

All devices compute at the same time, as in training: processes that share memory bandwidth, caches or power slow each
other down, so pass times measured on one process at a time would predict steps that are too short. The configured
schedule runs

    unchanged                               for its own passes and transfers
    with backwards whole, split, recomputed for the other kinds of passes
    with one microbatch after the other     for the slowdown that devices cause each other
    on shorter sequences                    for latency as opposed to bandwidth

Token ids are random, and small ones are frequent (Zipf's law), as with a tokenizer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from evenpipe.costs import BACKWARDS, completed, costs_of, one_by_one, with_backward
from evenpipe.costs.links import Size, with_links
from evenpipe.processes.launcher import launch
from evenpipe.processes.worker import initialise_worker
from evenpipe.recipe.parallelism import divisor_of, for_replicas
from evenpipe.runtime.pipeline import Pipeline
from evenpipe.schedule import Costs, Order, plan_program, without_sharding
from evenpipe.schedule.costs import Cost
from evenpipe.schedule.trace import Trace
from evenpipe.schedule.trace_file import trace_from_dict, trace_to_dict
from evenpipe.train.build import build_pipeline, compute_dtype
from evenpipe.train.config import Config
from evenpipe.train.data import open_data
from evenpipe.train.model_source import check_pipeline
from evenpipe.words import refused

WARM_UP = 2
"""Default number of warm-up steps, which do not count."""

SHORTER = 8
"""Factor by which sequences are shortened to measure the costs that do not depend on tokens."""

AS_IT_IS, ALONE, RECOMPUTED, SHORT = "as it is", "one by one", "recomputed", "short"

VARIANTS = (*BACKWARDS, ALONE, SHORT)
"""Variants of an order."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs."""

    costs: Costs
    bare: Cost | None
    """Cost of a forward that is repeated later and therefore keeps no tensors for its backward."""
    traces: dict[str, list[Trace]]
    """Traces of every measured step, by variant; "as it is" is the unchanged schedule."""

    @property
    def about(self) -> dict[str, Any]:
        """Machine and versions."""
        return dict(next(iter(self.traces.values()))[0].about)


def profile(config: Config, *, steps: int, warm_up: int = WARM_UP, variants: Sequence[str] = VARIANTS) -> Profile:
    """Run the configured pipeline in local processes; measure `steps` steps of the schedule and of each of `variants`.

    Raises InputError for a configuration that does not fit together, RunError if a process fails.
    """
    check_profile(config, steps)
    pipeline, arguments = config.pipeline, (config, steps, warm_up, variants)
    results = launch(measure_config, *arguments, processes=pipeline.processes, timeout_seconds=pipeline.timeout_seconds)
    return profile_of(results[:1])


def check_profile(config: Config, steps: int) -> None:
    """Raise InputError for a configuration that `profile` refuses, before any process starts."""
    if steps < 1:
        raise refused("steps", steps, "a whole number of at least 1")
    check_pipeline(config)


def profile_of(results: Sequence[dict[str, Any]], contention: float | None = None, *, free: int = 1) -> Profile:
    """Return the profile from one or several results of `measure_pipeline` on the first process.

    F, S, C, T, E, G and transfers come from the unchanged schedule; other kinds come from the variants.

    contention: None: derived from the traces if they include one microbatch after the other. free: as for `costs_of`.
    """
    traces: dict[str, list[Trace]] = {}
    for name, measured in ((name, measured) for result in results for name, measured in result["traces"].items()):
        traces.setdefault(name, []).extend(map(trace_from_dict, measured))
    shorter = [trace_from_dict(trace) for result in results for trace in result["shorter"]]
    sizes = {name: Size(*size) for name, size in results[0]["sizes"].items()}
    # Contention compares equal passes of a kind; a forward that keeps no tensors for its backward is a different pass.
    everything = [trace for name, measured in traces.items() if name != RECOMPUTED for trace in measured]
    tokens = results[0].get("tokens_of_slices", ())
    costs = costs_of(traces[AS_IT_IS], everything, tokens, contention=contention, free=free)
    variants = {
        name: costs_of(traces[name], (), tokens, contention=costs.contention, free=free)
        for name in BACKWARDS
        if name in traces
    }
    for variant in variants.values():
        costs = completed(costs, variant)
    bare = variants[RECOMPUTED].F if RECOMPUTED in variants else None
    return Profile(with_links(costs, costs_of(shorter), sizes) if shorter else costs, bare, traces)


def measure_config(config: Config, steps: int, warm_up: int, variants: Sequence[str]) -> dict[str, Any]:
    """Run and trace on every process. The first process returns traces as JSON, and sizes of transfers."""
    worker = initialise_worker(timeout_seconds=config.pipeline.timeout_seconds)
    size, end = _tokenizer(config)
    with closing(build_pipeline(config, size, end, worker.torch_device, self_check=False)) as pipeline:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        return measure_pipeline(pipeline, config, steps, warm_up, variants)


def measure_pipeline(
    pipeline: Pipeline, config: Config, steps: int, warm_up: int, variants: Sequence[str] = VARIANTS
) -> dict[str, Any]:
    """Do the same with an existing pipeline that `config` describes. Collective."""
    tokens = config.data.sequence_length
    order = pipeline.layout.program.order
    if pipeline.recipe.parallelism.replicas > 1:
        order = without_sharding(order)  # other orders have these passes at other positions
    traces = {AS_IT_IS: _run(pipeline, config, tokens, steps, warm_up)}
    variant_orders = {name: with_backward(order, name) for name in BACKWARDS if name in variants}
    if ALONE in variants and pipeline.devices > 1 and pipeline.microbatches > 1:
        variant_orders[ALONE] = one_by_one(order)
    for name, variant_order in variant_orders.items():
        if variant_order != order:
            with _following(pipeline, variant_order):
                traces[name] = _run(pipeline, config, tokens, steps, warm_up)
    ranks, slices = pipeline.tensor_ranks, pipeline.layout.program.slices
    divisor = divisor_of(pipeline.context_ranks, ranks)
    short = shorter_length(tokens, divisor, slices)
    shorter = _run(pipeline, config, short, steps, warm_up) if SHORT in variants else []
    if not pipeline.feeds:
        return {}
    narrow = pipeline.torch_device.type == "cuda"
    element_bytes = (compute_dtype(config) or (torch.bfloat16 if narrow else torch.float32)).itemsize
    hidden = config.pipeline.microbatch_size * pipeline.description.hidden_size * element_bytes
    # Bytes per token that each tensor rank sends, and the number of chunks per sequence (slices x context ranks). The
    # statistics are only a few numbers, so their transfers are mostly latency and stay a duration.
    local_bytes, parts = hidden // ranks, slices * pipeline.context_ranks
    per_token = {
        "p2p": local_bytes,
        "broadcast": local_bytes,
        "reduce": local_bytes,
        "embedding": local_bytes // pipeline.devices,
    }
    return {
        "traces": {name: [trace_to_dict(trace) for trace in step_traces] for name, step_traces in traces.items()},
        "shorter": [trace_to_dict(trace) for trace in shorter],
        "sizes": {name: (size * tokens // parts, size * short // parts) for name, size in per_token.items()},
        "tokens_of_slices": pipeline.slice_lengths(tokens),
    }


def shorter_length(tokens: int, divisor: int, slices: int = 1) -> int:
    """Return the length of the shorter sequences measured in addition to sequences of `tokens` tokens: a multiple of
    `divisor`, with at least `divisor` tokens in each slice."""
    return max(2, max(tokens // SHORTER // divisor, slices) * divisor)


def _run(pipeline: Pipeline, config: Config, tokens: int, steps: int, warm_up: int) -> list[Trace]:
    """Return traces of `steps` steps after the warm-up; empty on all processes except the first."""
    traces = []
    for step in range(warm_up + steps):
        ids = None
        if pipeline.feeds:
            sequences = pipeline.microbatches * config.pipeline.microbatch_size
            ids = token_ids(sequences, tokens, pipeline.description.vocabulary_size, step)
        result = pipeline.step(ids, record_passes=step >= warm_up)
        pipeline.zero_grad()
        if step >= warm_up:
            trace = pipeline.trace(result, schedule=config.pipeline.schedule, step=step + 1)
            if trace is not None:
                traces.append(trace)
    return traces


@contextmanager
def _following(pipeline: Pipeline, order: Order) -> Iterator[None]:
    """Temporarily run a pipeline with another order of the same placement and vocabulary mode."""
    layout = pipeline.layout
    sharing = layout.program.sharing
    _, program = plan_program(order, order.devices, order.microbatches, layout.mode, layout.costs, sharing=sharing)
    program = for_replicas(program, pipeline.recipe.parallelism, tied=pipeline.description.tied)
    pipeline.layout = replace(layout, program=program)
    try:
        yield
    finally:
        pipeline.layout = layout


def token_ids(sequences: int, tokens: int, rows: int, seed: int) -> torch.Tensor:
    """Return random ids [sequences, tokens]: id k below `rows` has a probability of about 1 / (k + 1)."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(sequences, tokens, generator=generator, dtype=torch.float64)
    return (float(rows) ** share).long().sub_(1).clamp_(0, rows - 1)


def _tokenizer(config: Config) -> tuple[int, int]:
    """Return the tokenizer's number of entries and end-of-text id, without reading any text."""
    if (config.run_folder / "data.json").is_file():
        data = open_data(config)
        return data.tokenizer_size, data.end_of_text_id
    if config.trained_tokenizer_entries is not None:
        return config.trained_tokenizer_entries, 0
    from evenpipe.train.tokenizer import load_tokenizer, tokenizer_size

    assert config.tokenizer_source is not None
    tokenizer = load_tokenizer(config.tokenizer_source, config.tokenizer.end_of_text, config.model.trust_remote_code)
    return tokenizer_size(tokenizer), tokenizer.eos_token_id
