"""`evenpipe plan --model MODEL --gpus N ...`."""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenpipe.cli.model_argument import add_hardware, add_kernels, add_skew, check_gpus, read_model
from evenpipe.cli.printing import progress_line, say, say_json
from evenpipe.cli.schedule_arguments import add_json
from evenpipe.cli.values import check_output, memory, whole_numbers, words
from evenpipe.errors import InputError, RunError
from evenpipe.given import plain

if TYPE_CHECKING:
    from evenpipe.plan.configuration_search import Found
    from evenpipe.plan.problem import Problem
    from evenpipe.plan.space import Space

BATCH_TOKENS = 2**22
"""Default tokens of a step, or one sequence per GPU if that is more."""
NUMBERS = ("dp", "ep", "tp", "cp", "pp", "zero", "microbatch_size", "slices", "stages_per_device")
"""Choices of the search that are numbers."""
PLURALS = {"microbatch_size": "microbatch_sizes", "schedule": "schedules", "vocabulary": "vocabularies"}
"""Their fields of `Space`, where the name differs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the machine, the batch, and the choices of the search."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        required=True,
        help="hub name, folder, config.json, or a configuration of evenpipe train (its model, data and batch)",
    )
    add_hardware(parser)
    parser.add_argument("--sequence", metavar="TOKENS", type=int, help="length of a sequence (default: 4096)")
    parser.add_argument(
        "--batch",
        metavar="SEQUENCES",
        type=int,
        help="sequences per step over all GPUs (default: as many as make 4 Mi tokens)",
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="type of the matrix products (default: bf16, fp32 on a CPU)"
    )
    add_kernels(parser)
    add_skew(parser)
    space = parser.add_argument_group("choices of the search: one value, or several separated by commas")
    for name, what in (
        ("dp", "replicas"),
        ("ep", "replicas that share the experts of a layer"),
        ("tp", "tensor parallelism"),
        ("cp", "context parallelism"),
        ("pp", "devices of a pipeline"),
        (
            "zero",
            "shard over replicas: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters (default: 0 and 3,"
            " which evenpipe trains with; with --kernels of another framework 1 and 3)",
        ),
        ("microbatch-size", "sequences per microbatch"),
        ("slices", "slices of every sequence (default: 1, and 4 for long sequences in few microbatches)"),
        ("stages-per-device", "stages per device, for schedules that leave a choice"),
        ("schedule", "names of schedules"),
        ("vocabulary", "vocabulary modes"),
        ("checkpointing", "none, selective, full, or least: on each device only as much as its memory requires"),
        (
            "host-share",
            "share of AdamW's moments on the host, 0 to 1, or least: as much as is needed and worth it (default: 0)",
        ),
        (
            "offload",
            "activations on the host: scheduled (as the schedule says; default), none, free (all that lower the memory"
            " of a device and cost no time), all, or least (free, if memory is short)",
        ),
    ):
        space.add_argument(f"--{name}", metavar="X[,X...]", help=what)
    parser.add_argument("--best", metavar="N", type=int, default=10, help="plans to show (default: %(default)s)")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="show the gain of each vocabulary mode, and which configurations were rejected, why, and what would help",
    )
    parser.add_argument(
        "-o", "--output", metavar="CONFIG.toml", type=Path, help="write the best plan for evenpipe train"
    )
    parser.add_argument(
        "--minutes",
        metavar="N",
        type=float,
        default=math.inf,
        help="end the search after so long, with the best plans found until then (default: when no better one is left)",
    )
    parser.add_argument("--workers", metavar="N", type=int, help="processes (default: one per core)")
    parser.add_argument("--no-cache", action="store_true", help="neither use nor write the cache on disk")
    add_json(parser)
    parser.epilog = (
        "Every plan fits in memory, as estimated by `evenpipe estimate` for every device. Times come from `evenpipe\n"
        "simulate`, with pass times from the shapes of the model and the speed of the hardware.\n\n"
        "A search takes seconds to hours: it shows the best plan so far on stderr. Ctrl-C ends it, with that plan.\n\n"
        "exit codes: 0 a plan, 1 nothing fits, 2 the input is wrong, 3 no plan was found within --minutes,\n"
        "130 ended by Ctrl-C, with the plans found until then"
    )


def run(arguments: argparse.Namespace) -> int:
    """Search, print, and write."""
    from evenpipe.schedule.collection import collecting_rarely

    with collecting_rarely():
        from evenpipe.plan.configuration_search import SearchInterrupted, search_configurations
        from evenpipe.plan.evaluation_cache import EvaluationCache
        from evenpipe.plan.nearest import nearest
        from evenpipe.plan.ranking import Ranking, progress_text

    if arguments.best < 1:
        raise InputError(f"--best is {arguments.best}, expected at least 1")
    if arguments.workers is not None and arguments.workers < 1:
        raise InputError(f"--workers is {arguments.workers}, expected at least 1")
    if not arguments.minutes > 0:
        raise InputError(f"--minutes is {arguments.minutes:g}, expected more than 0")
    if arguments.output is not None:
        check_output(arguments.output, ".toml", "a configuration")
    problem, base = _problem(arguments)
    space = _space(arguments, problem)
    cache = EvaluationCache() if arguments.no_cache else EvaluationCache.of(problem)
    seconds, near = 60 * arguments.minutes, None
    with progress_line() as show:

        def progress(found: Found) -> None:
            show(progress_text(found))

        try:
            found = search_configurations(
                problem,
                space,
                wanted=arguments.best,
                each_vocabulary=arguments.explain,
                workers=arguments.workers,
                cache=cache,
                progress=progress,
                seconds=seconds,
            )
        except SearchInterrupted as ending:
            found = ending.found()
        interrupted = found.ended == "interrupt"
        cache.save()
        if found.best is None and not found.ended:
            if found.failed and all(one.fault for one in found.failed):
                raise InputError(found.failed[0].fault)
            seconds -= found.seconds
            try:
                near = nearest(found, workers=arguments.workers, cache=cache, progress=progress, seconds=seconds)
            except KeyboardInterrupt:
                interrupted = True
            cache.save()
    ranking = Ranking(found, arguments.best)
    if arguments.json:
        say_json(ranking.to_dict() | ({} if near is None else near.to_dict()))
    else:
        say(ranking.text(explain=arguments.explain))
        if near is not None:
            say(near.text())
    if arguments.output is not None and found.best is not None:
        _write(found, base, arguments)
    if interrupted:
        return 128 + signal.SIGINT
    if found.best is not None:
        return 0
    return RunError.exit_code if found.ended else 1


def _problem(arguments: argparse.Namespace) -> tuple[Problem, Mapping[str, Any]]:
    """Return the problem, and the tables of the configuration to write."""
    from evenpipe.costs.hardware import find_hardware
    from evenpipe.plan.problem import problem_of

    hardware = find_hardware(arguments.hardware)
    memory_bytes = memory(arguments)
    check_gpus(arguments.gpus)
    sequence, batch = arguments.sequence, arguments.batch
    if arguments.model.endswith(".toml"):
        from evenpipe.model import describe
        from evenpipe.train.config_file import config_from_dict, read_toml
        from evenpipe.train.planned_config import configured_model

        base = read_toml(arguments.model)
        config = config_from_dict(base)
        description = describe(configured_model(config))
        sequence = sequence or config.data.sequence_length
        batch = batch or config.pipeline.sequences_per_step
    else:
        from evenpipe.train.planned_config import model_tables

        description = read_model(arguments.model)
        base = model_tables(description, arguments.model)
    sequence = 4096 if sequence is None else sequence
    if batch is None:
        batch = max(arguments.gpus, BATCH_TOKENS // max(1, sequence))
    return (
        problem_of(
            description,
            hardware,
            gpus=arguments.gpus,
            sequence=sequence,
            sequences_per_step=batch,
            memory_bytes=memory_bytes,
            dtype=arguments.dtype or ("fp32" if hardware.torch_device == "cpu" else "bf16"),
            kernels=arguments.kernels,
            skew=arguments.skew,
        ),
        base,
    )


def _space(arguments: argparse.Namespace, problem: Problem) -> Space:
    from dataclasses import replace

    from evenpipe.plan.space import usual_space

    given: dict[str, Any] = {}
    for name in (*NUMBERS, "schedule", "vocabulary", "checkpointing", "offload"):
        text = getattr(arguments, name)
        if text is not None:
            given[PLURALS.get(name, name)] = whole_numbers(name, text) if name in NUMBERS else words(name, text)
    if arguments.host_share is not None:
        given["host_shares"] = tuple(map(_share, words("host_share", arguments.host_share)))
    if "vocabularies" in given:
        from evenpipe.schedule import vocabulary_mode

        given["vocabularies"] = tuple(dict.fromkeys(map(vocabulary_mode, given["vocabularies"])))
    return replace(usual_space(problem), **given)


def _share(text: str) -> float | None:
    if text == "least":
        return None
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--host-share is '{plain(text)}', expected numbers between 0 and 1, or least") from None


def _write(found: Found, base: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Write the best plan that can run, and say if better plans are estimates only."""
    from evenpipe.plan.runnable import refusal
    from evenpipe.train.planned_config import planned_tables, write_tables

    assert found.best is not None
    runnable = (plan for plan in found.plans if not refusal(found.problem, plan.configuration.recipe))
    plan = next(runnable, found.best)
    tables = planned_tables(found.problem, plan, base, Path(arguments.output).stem, arguments.hardware)
    notes = f"Planned for {found.problem.gpus} x {found.problem.hardware.name}: {plan.configuration.name}"
    write_tables(tables, arguments.output, notes)
    if not arguments.json:
        note = (
            ""
            if plan is found.best
            else f" (plan {found.plans.index(plan) + 1}: the plans above it are estimates only)"
        )
        say(f"wrote {arguments.output}{note}; the run will write to {tables['output']['folder']}")
