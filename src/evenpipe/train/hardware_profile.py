"""Measures this machine's hardware for `evenpipe plan --hardware FILE` and `estimate`.

    products     matrix products of several sizes; the fastest gives the peak
    attention    fused causal attention, forward and backward, relative to the peak
    memory       copies of a large tensor
    contention   products on one process alone, and on all processes at once
    wires        small and large messages between processes 0 and 1, through the communicators of the runtime
    passes       with a configuration: passes of its model in pipelines over all processes, with sharded vocabulary
                 layers, with whole ones, and with two stages per device, for several sizes of a microbatch, and on
                 shorter sequences

On a GPU "host" is a copy between the device and pinned memory; on a CPU it is a copy in memory.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.benchmark import Timer

from evenpipe.communication.communicators import Communicators
from evenpipe.costs.hardware import Hardware, Wire, with_own_cores
from evenpipe.costs.measured_passes import MeasuredPasses, Ranks, fingerprint, passes_of, stage_passes, whole_passes
from evenpipe.costs.work import layers_of
from evenpipe.errors import InputError
from evenpipe.model.context_exchange import heads_can_be_shared
from evenpipe.plan.configuration_search import cores
from evenpipe.processes.launcher import launch
from evenpipe.processes.worker import Worker, initialise_worker
from evenpipe.recipe.parallelism import ContextExchange, divisor_of
from evenpipe.schedule import even_split
from evenpipe.train.config import Config
from evenpipe.train.pipeline_sections import PipelineConfig
from evenpipe.train.planned_config import NOT_PLANNED, configured_model
from evenpipe.train.profile import (
    RECOMPUTED,
    VARIANTS,
    WARM_UP,
    check_profile,
    measure_config,
    profile_of,
    shorter_length,
)
from evenpipe.words import count, refused

SIZES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
"""Sizes N of the N x N matrices that are multiplied."""
DTYPES = {"cpu": {"fp32": torch.float32}, "cuda": {"bf16": torch.bfloat16, "fp32": torch.float32}}
COPIED = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Size in bytes of the copied tensor, much larger than caches."""
SECONDS = 0.15
"""Approximate seconds per measurement."""
MICROBATCH_SIZES = (1, 4)
"""Sequences per microbatch in measured passes of a model."""
WHILE = 1.0
"""Seconds during which all processes compute at the same time."""
ROUNDS = 5
"""Rounds per measurement; the fastest counts, since the others were disturbed."""
SMALL, LARGE = 4, 4 * 2**20
"""Sizes of the messages in bytes."""


def profile_hardware(
    processes: int,
    *,
    config: Config | None = None,
    sizes: Sequence[int] = MICROBATCH_SIZES,
    steps: int = 6,
) -> Hardware:
    """Measure with `processes` processes on this machine, one device each. Takes about half a minute.

    config: also measure passes of its model, with each number of sequences per microbatch in `sizes`, over `steps`
    steps for each form of backward.

    Raises InputError for less than one process, or a configuration that does not fit; RunError if a process fails.
    """
    if processes < 1:
        raise refused("processes", processes, "at least 1")
    if not sizes or min(sizes) < 1:
        raise InputError(f"microbatch sizes are {list(sizes)}; each must be a whole number of at least 1")
    pipelines = [] if config is None else pipelines_to_measure(config, processes, sizes)
    for pipeline in chain.from_iterable(configs.values() for configs in pipelines):
        check_profile(pipeline, steps)
    figures: dict[str, Any] = launch(measure, processes=processes)[0]
    device = figures["device"]
    passes: tuple[MeasuredPasses, ...] = ()
    if config is not None:
        timeout = config.pipeline.timeout_seconds
        measured = launch(measure_passes, pipelines, steps, WARM_UP, processes=processes, timeout_seconds=timeout)[0]
        passes = tuple(
            passes_from({name: [result] for name, result in results.items()}, configs["sharded"], device)
            for configs, results in zip(pipelines, measured, strict=True)
        )
    wire = Wire(latency_seconds=figures["hop"][0], bandwidth=figures["hop"][1])
    products = figures["products"].items()
    peaks = {dtype: max(2.0 * size**3 / seconds for size, seconds in took.items()) for dtype, took in products}
    widest = "bf16" if "bf16" in peaks else "fp32"
    return Hardware(
        name=f"{figures['name']}, {count(processes, 'process')}",
        source=f"measured by evenpipe profile --hardware, torch {torch.__version__}",
        torch_device=device,
        peak_flops=peaks,
        product_fraction=1.0,
        attention_fraction=min(1.0, figures["attention"] / peaks[widest]),
        memory_bytes=figures["memory_bytes"] // (processes if device == "cpu" else 1),
        memory_bandwidth=figures["copied"],
        operation_seconds=figures["operation"],
        devices_per_node=processes,
        inside=wire,
        across=wire,
        host_bandwidth=figures["host"],
        contention=max(1.0, figures["contention"]),
        cores=cores() if device == "cpu" else 0,
        context_bytes=figures["context_bytes"],
        passes=passes,
    )


MEASURED_AS: dict[str, tuple[str, ...]] = {
    "sharded": VARIANTS,
    "whole": ("split", RECOMPUTED),
    "looped": ("split",),
}
"""Variants to measure for each of `pipelines_to_measure`, in addition to the unchanged order."""


def pipelines_to_measure(config: Config, processes: int, sizes: Sequence[int]) -> list[dict[str, Config]]:
    """Return the configurations to measure: for every number of sequences per microbatch in `sizes`, and for the
    smallest one with shorter sequences, 1F1B with sharded vocabulary layers (vocab-2), with whole ones (first-last),
    and, if the model has enough layers, with sharded ones and two stages per device. If context ranks may exchange
    either keys or heads, both are measured."""
    sequence, pipeline = config.data.sequence_length, config.pipeline
    ranks = {"ranks": pipeline.cp, "tensor_ranks": pipeline.tp}
    short = shorter_length(sequence, divisor_of(pipeline.cp, pipeline.tp))
    shapes = [(sequence, size) for size in sizes] + ([(short, min(sizes))] if short < sequence else [])
    either = pipeline.cp > 1 and pipeline.context_exchange == "auto"
    both = either and heads_can_be_shared(configured_model(config), **ranks)
    ways: tuple[ContextExchange, ...] = ("keys", "heads") if both else (pipeline.context_exchange,)
    return [
        _pipelines(replace(config, data=replace(config.data, sequence_length=tokens)), processes, size, way)
        for way, (tokens, size) in product(ways, shapes)
    ]


def _pipelines(config: Config, processes: int, microbatch_size: int, exchange: ContextExchange) -> dict[str, Config]:
    ranks = Ranks(config.pipeline.tp, config.pipeline.cp)
    devices = processes // ranks.processes
    plain = PipelineConfig(
        processes=processes,
        tp=ranks.tensor,
        cp=ranks.context,
        context_exchange=exchange,
        schedule="1f1b",
        vocabulary="vocab-2",
        microbatches=max(1, 2 * devices),
        microbatch_size=microbatch_size,
        **{name: getattr(config.pipeline, name) for name in NOT_PLANNED},
    )
    pipelines = {"sharded": plain, "whole": replace(plain, vocabulary="first-last")}
    if configured_model(config).layers >= 2 * devices:
        pipelines["looped"] = replace(plain, schedule="interleaved", stages_per_device=2)
    return {name: replace(config, pipeline=pipeline) for name, pipeline in pipelines.items()}


def measure_passes(
    pipelines: Sequence[Mapping[str, Config]], steps: int, warm_up: int
) -> list[dict[str, dict[str, Any]]]:
    """Measure pipelines in sequence, on every process; the first process returns results of `measure_pipeline` by
    name."""
    return [
        {name: measure_config(config, steps, warm_up, MEASURED_AS[name]) for name, config in configs.items()}
        for configs in pipelines
    ]


def passes_from(results: Mapping[str, Sequence[dict[str, Any]]], config: Config, device: str) -> MeasuredPasses:
    """Return the measured passes of `pipelines_to_measure` for a hardware file.

    results: for each pipeline, one or more results of `measure_pipeline`, as for `profile_of`. config: any of the
    configurations.
    """
    model = configured_model(config)
    dtypes = {"float32": "fp32", "bfloat16": "bf16", "auto": "bf16" if device == "cuda" else "fp32"}
    devices = config.pipeline.devices
    processes = config.pipeline.processes
    free = max(1, with_own_cores(cores() if device == "cpu" else 0, processes) * devices // processes)
    shards = profile_of(results["sharded"], free=free)
    # If devices never compute alone (more processes than cores), a profile that does not run microbatches in sequence
    # shows no contention, and its passes would seem longer than these.
    contention = shards.costs.contention
    unsharded = profile_of(results["whole"], contention, free=free)
    looped = {}
    if "looped" in results:
        looped = stage_passes(shards.costs, profile_of(results["looped"], contention, free=free).costs)
    sharded = passes_of(shards.costs, shards.bare, looped) | looped
    split = even_split(model.layers, devices)
    heads = config.pipeline.cp > 1 and config.pipeline.context_exchange == "heads"
    return MeasuredPasses(
        model=fingerprint(layers_of(model), model.vocabulary_size, model.hidden_size),
        dtype=dtypes[config.model.compute_dtype],
        sequence=config.data.sequence_length,
        microbatch_size=config.pipeline.microbatch_size,
        devices=devices,
        contention=contention,
        seconds=sharded | whole_passes(unsharded.costs, split, sharded, unsharded.bare, looped),
        tp=config.pipeline.tp,
        cp=config.pipeline.cp,
        context_exchange="heads" if heads else "keys",
    )


def measure() -> dict[str, Any]:
    """Measure on every process; the first process returns the results."""
    worker = initialise_worker()
    device = worker.torch_device
    kind = device.type
    single = _measure_single(device) if worker.rank == 0 else {}
    _barrier(worker)
    dtype = next(iter(DTYPES[kind].values()))
    large = SIZES[kind][-2]
    shared = _mean_rate_seconds(worker, _seconds_at_length(_product(large, dtype, device), device))
    hop = _hop(worker)
    if worker.rank:
        return {}
    first = single["products"][next(iter(DTYPES[kind]))]
    return {**single, "device": kind, "contention": shared / first[large], "hop": hop or (1e-6, single["copied"])}


def _barrier(worker: Worker) -> None:
    if worker.world_size > 1:
        dist.barrier()


def _mean_rate_seconds(worker: Worker, seconds: float) -> float:
    """Return the seconds per call at the mean rate of all processes, because processes that share cores do not get
    equal shares."""
    rate = torch.tensor(1 / seconds, dtype=torch.float64)
    if worker.world_size > 1:
        dist.all_reduce(rate)
    return worker.world_size / rate.item()


def _measure_single(device: torch.device) -> dict[str, Any]:
    """Measure one process while the others wait."""
    kind = device.type
    products = {
        name: {size: _seconds(_product(size, dtype, device)) for size in SIZES[kind]}
        for name, dtype in DTYPES[kind].items()
    }
    large = torch.empty(COPIED[kind] // 4, device=device).normal_()
    destination = torch.empty_like(large)
    copied = 2 * large.nbytes / _seconds(lambda: destination.copy_(large))
    host = copied
    if kind == "cuda":
        pinned = torch.empty(large.shape, pin_memory=True)
        host = large.nbytes / _seconds(lambda: pinned.copy_(large, non_blocking=True))
    tiny = torch.ones(8, device=device, requires_grad=True)
    attention = _attention(device)
    if kind == "cuda":  # without other processes on the device, the context takes what is not free or reserved
        free, memory = torch.cuda.mem_get_info(device)
        context = max(0, memory - free - torch.cuda.memory_reserved(device))
        name = torch.cuda.get_device_name(device)
    else:
        context, memory = 0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        name = platform.processor() or platform.machine()
    return {
        "products": products,
        "copied": copied,
        "host": host,
        "attention": attention,
        "operation": _seconds(lambda: functional.silu(tiny)),
        "memory_bytes": memory,
        "context_bytes": context,
        "name": name,
    }


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    result = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=result)


def _attention(device: torch.device) -> float:
    """Return FLOPs per second of causal attention, forward and backward, not counting masked pairs."""
    sequence, heads, size = (4096, 16, 128) if device.type == "cuda" else (512, 4, 64)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (1, heads, sequence, size)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.ones(shape, device=device, dtype=dtype)

    def both() -> None:
        functional.scaled_dot_product_attention(query, key, value, is_causal=True).backward(gradient)

    pairs = sequence * (sequence + 1) / 2
    return 3.5 * 4 * pairs * heads * size / _seconds(both)


def _seconds(work: Callable[[], Any]) -> float:
    """Return the seconds per call, from enough calls to take about `SECONDS` in total."""
    return _fastest(work, max(1, int(SECONDS / ROUNDS / max(1e-7, _fastest(work, 1)))))


def _seconds_at_length(work: Callable[[], Any], device: torch.device) -> float:
    """Return the mean seconds per call over a period that is equally long on all processes: processes that share a core
    take turns, and the fastest call had the core to itself."""
    calls, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < WHILE:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        calls += 1
    return elapsed / calls


def _fastest(work: Callable[[], Any], calls: int) -> float:
    """Return the seconds per call in the fastest round. A GPU is synchronized at the end of each round."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return min(timer.timeit(calls).mean for _ in range(ROUNDS))


def _hop(worker: Worker) -> tuple[float, float] | None:
    """Return latency and bandwidth of a message from process 0 to 1, valid on process 0; None without a process 1, and
    on all processes above 1."""
    if worker.world_size < 2:
        return None
    communicators = Communicators(
        [("F:0>1", [(0, 1)]), ("B:1>0", [(1, 0)])],
        timeout_seconds=worker.timeout_seconds,
        torch_device=worker.torch_device,
        watch=worker.watch,
    )
    communicators.warm_up()
    if worker.rank > 1:
        communicators.close()
        return None
    forward, backward = communicators["F:0>1"], communicators["B:1>0"]
    times = []
    for size, calls in ((SMALL, 200), (LARGE, 20)):
        buffer = torch.zeros(size // 4, device=worker.torch_device)

        def round_trip(buffer: torch.Tensor = buffer) -> None:
            if worker.rank == 0:
                forward.send(buffer, 1, "0SEND_F0").wait()
                backward.receive(buffer, 1, "0RECV_B0").wait()
            else:
                forward.receive(buffer, 0, "1RECV_F0").wait()
                backward.send(buffer, 0, "1SEND_B0").wait()

        times.append(_fastest(round_trip, calls) / 2)
    communicators.close()
    small, large = times
    return small, LARGE / max(1e-9, large - small)
