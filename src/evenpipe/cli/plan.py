"""`evenpipe plan --model MODEL --gpus N ...`."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from dataclasses import replace
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
    from evenpipe.train.planned_run import PlannedRun

SEQUENCE = 4096
"""Default length of a sequence, unless the model's longest is shorter."""
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
    parser.add_argument(
        "--sequence", metavar="TOKENS", type=int, help="length of a sequence (default: 4096, or the longest)"
    )
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
        "--data",
        metavar="FOLDER|FILE",
        help="with -o: what the run trains on, as for evenpipe init (default: a placeholder, to replace in the file)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME|FOLDER",
        help="with -o: the tokenizer of the run (default: that of the model, or one that the run trains)",
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
    for name in ("data", "tokenizer"):
        if getattr(arguments, name) is not None and arguments.output is None:
            raise InputError(f"--{name} goes into the configuration that -o writes, but there is no -o")
    problem, planned = _problem(arguments)
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
        _write(found, planned, arguments)
    if interrupted:
        return 128 + signal.SIGINT
    if found.best is not None:
        return 0
    return RunError.exit_code if found.ended else 1


def _problem(arguments: argparse.Namespace) -> tuple[Problem, PlannedRun]:
    """The problem, and the rest of the configuration to write."""
    from evenpipe.costs.hardware import find_hardware
    from evenpipe.plan.problem import problem_of
    from evenpipe.train.planned_run import PlannedRun, planned_run

    hardware = find_hardware(arguments.hardware)
    memory_bytes = memory(arguments)
    check_gpus(arguments.gpus)
    sequence, batch = arguments.sequence, arguments.batch
    from_configuration = arguments.model.endswith(".toml")
    if from_configuration:
        from evenpipe.model import describe
        from evenpipe.train.config_file import config_from_dict, read_toml
        from evenpipe.train.planned_config import configured_model

        for name in ("data", "tokenizer"):
            if getattr(arguments, name) is not None:
                raise InputError(
                    f"--{name} is for models given by name, folder or config.json, but {plain(arguments.model)} has its"
                    " own"
                )
        run = PlannedRun(tables=read_toml(arguments.model))
        config = config_from_dict(run.tables)
        description = describe(configured_model(config))
        sequence = sequence or config.data.sequence_length
        batch = batch or config.pipeline.sequences_per_step
    else:
        description = read_model(arguments.model)
        run = PlannedRun(tables={})
        if arguments.output is not None:
            run = planned_run(description, arguments.model, arguments.data, arguments.tokenizer)
    longest = description.maximum_length
    sequence = min(SEQUENCE, longest or SEQUENCE) if sequence is None else sequence
    if arguments.output is not None and longest is not None and sequence > longest:
        raise InputError(f"--sequence is {sequence}, but evenpipe train takes at most {longest}, the model's longest")
    if batch is None:
        usual = max(arguments.gpus, BATCH_TOKENS // max(1, sequence))
        batch = run.sequences_per_step(sequence, usual)
        if batch < usual:
            _note(f"a step has {batch} sequences instead of {usual}: --data is small (--batch gives another number)")
    problem = problem_of(
        description,
        hardware,
        gpus=arguments.gpus,
        sequence=sequence,
        sequences_per_step=batch,
        memory_bytes=memory_bytes,
        dtype=arguments.dtype or ("fp32" if hardware.torch_device == "cpu" else "bf16"),
        kernels=arguments.kernels,
        skew=arguments.skew,
    )
    if arguments.data is not None:
        run.check_amount(sequence, batch)
    if arguments.output is not None and not from_configuration:
        run = replace(run, tables=run.with_sections(sequence, batch))
    return problem, run


def _note(text: str) -> None:
    print(f"evenpipe: {plain(text)}", file=sys.stderr)


def _space(arguments: argparse.Namespace, problem: Problem) -> Space:
    from evenpipe.plan.space import usual_space

    given: dict[str, Any] = {}
    for name in (*NUMBERS, "schedule", "vocabulary", "checkpointing", "offload"):
        text = getattr(arguments, name)
        if text is not None:
            given[PLURALS.get(name, name)] = whole_numbers(name, text) if name in NUMBERS else words(name, text)
    if arguments.host_share is not None:
        given["host_shares"] = tuple(map(_share, words("host_share", arguments.host_share)))
    if "vocabularies" in given:
        from evenpipe.schedule import VocabularyMode

        given["vocabularies"] = tuple(dict.fromkeys(map(VocabularyMode.of, given["vocabularies"])))
    return replace(usual_space(problem), **given)


def _share(text: str) -> float | None:
    if text == "least":
        return None
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--host-share is '{plain(text)}', expected numbers between 0 and 1, or least") from None


def _write(found: Found, run: PlannedRun, arguments: argparse.Namespace) -> None:
    """Write the best plan that can run, and say if better plans are estimates only, and what is to be replaced."""
    from evenpipe.plan.runnable import refusal
    from evenpipe.train.config_file import sections
    from evenpipe.train.new_config import how_to_train
    from evenpipe.train.planned_config import planned_tables, write_tables

    assert found.best is not None
    runnable = (plan for plan in found.plans if not refusal(found.problem, plan.configuration.recipe))
    plan = next(runnable, found.best)
    path = Path(arguments.output)
    tables = planned_tables(found.problem, plan, run.tables, path.stem, arguments.hardware)
    notes = f"Planned for {found.problem.gpus} x {found.problem.hardware.name}: {plan.configuration.name}"
    tables = {section: tables[section] for section in sections() if section in tables}
    write_tables(tables, path, f"{notes}\n{how_to_train(path)}", run.comments)
    if arguments.json:
        return
    note = "" if plan is found.best else f" (plan {found.plans.index(plan) + 1}: the plans above it are estimates only)"
    say(f"wrote {path}{note}; the run will write to {tables['output']['folder']}")
    for remark in run.remarks:
        say(remark)
    if run.replace:
        say(f"replace {', '.join(run.replace)} in {path} before evenpipe train, or give --data")
