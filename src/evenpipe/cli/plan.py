"""`evenpipe plan --model MODEL --gpus N ...`."""

from __future__ import annotations

import math
import signal
import sys
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evenpipe.cli.declarations import Count
from evenpipe.cli.options import (
    SEQUENCE,
    Gpus,
    belongs_to_configuration,
    bytes_of,
    check_output,
    read_model,
    whole_numbers,
    words,
)
from evenpipe.cli.printing import progress_line, say, say_json
from evenpipe.errors import InputError, RunError
from evenpipe.words import refused

if TYPE_CHECKING:
    from evenpipe.plan.configuration_search import PlanSearchResult
    from evenpipe.plan.problem import Problem
    from evenpipe.plan.space import Space
    from evenpipe.plan.without_pipeline import WithoutPipeline
    from evenpipe.recipe.recipe import Recipe
    from evenpipe.train.planned_run import PlannedRun

BATCH_TOKENS = 2**22
"""Default tokens of a step, or one sequence per GPU if that is more."""
NUMBERS = ("dp", "ep", "tp", "cp", "pp", "zero", "dp_shard", "microbatch_size", "slices", "stages_per_device")
CHOICES = (*NUMBERS, "schedule", "vocabulary", "checkpointing", "host_share", "offload")
"""Choices of the search; `NUMBERS` are the numeric ones."""
FIELDS = {
    "microbatch_size": "microbatch_sizes",
    "schedule": "schedules",
    "vocabulary": "vocabularies",
    "host_share": "host_shares",
}
"""Fields of `Space` whose names differ from the option."""


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """The model, the machine and the batch, and what the configuration to write has besides."""

    model: str
    gpus: Gpus
    hardware: str = "H100-80G"
    gpu_memory: str | None = None
    sequence: Count | None = None
    batch: Count | None = None
    dtype: Literal["bf16", "fp32"] | None = None
    gradient_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    master_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    moment_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    kernels: str = "transformers"
    skew: float = 1.0
    output: Path | None = None
    data: str | None = None
    tokenizer: str | None = None

    def problem(self) -> tuple[Problem, PlannedRun]:
        """The problem, and the rest of the configuration to write."""
        from evenpipe.costs.hardware import find_hardware
        from evenpipe.memory.kernels import COMPILED
        from evenpipe.memory.states import MIXED, SINGLE, Dtypes
        from evenpipe.plan.problem import EVENPIPE, problem_of
        from evenpipe.train.planned_run import PlannedRun, planned_run

        machine = find_hardware(self.hardware)
        dtype = self.dtype or ("fp32" if machine.torch_device == "cpu" else "bf16")
        dtypes = Dtypes(
            compute=dtype, gradients=self.gradient_dtype, masters=self.master_dtype, moments=self.moment_dtype
        )
        if self.output is not None and dtypes not in {MIXED, SINGLE}:
            raise InputError(
                "-o writes what evenpipe train runs, with gradients, masters and moments in fp32: leave out"
                " --gradient-dtype, --master-dtype and --moment-dtype"
            )
        if self.output is not None and self.kernels not in {EVENPIPE, COMPILED}:
            raise refused("--kernels with -o", self.kernels, f"{EVENPIPE} or {COMPILED}, which evenpipe train runs")
        memory_bytes, kernels = bytes_of(self.gpu_memory), self.kernels
        sequence, batch, loss = self.sequence, self.batch, None
        from_configuration = self.model.endswith(".toml")
        if from_configuration:
            from evenpipe.train.config_file import config_from_dict, read_toml
            from evenpipe.train.planned_config import configured_model

            if self.data or self.tokenizer:
                raise belongs_to_configuration("data" if self.data else "tokenizer", self.model)
            run = PlannedRun(tables=read_toml(self.model))
            config = config_from_dict(run.tables)
            description = configured_model(config)
            sequence = sequence or config.data.sequence_length
            batch = batch or config.pipeline.sequences_per_step
            loss = config.loss.options()
            if config.pipeline.compile_layers and kernels == EVENPIPE:
                kernels = COMPILED
        else:
            description = read_model(self.model)
            run = PlannedRun(tables={})
            if self.output is not None:
                run = planned_run(description, self.model, self.data, self.tokenizer)
        longest = description.maximum_length
        sequence = min(SEQUENCE, longest or SEQUENCE) if sequence is None else sequence
        if self.output is not None and longest is not None and sequence > longest:
            raise refused("--sequence", sequence, f"at most {longest}, the model's longest, for evenpipe train")
        if batch is None:
            usual = max(self.gpus, BATCH_TOKENS // sequence)
            batch = run.sequences_per_step(sequence, usual)
            if batch < usual:
                note = (
                    f"a step has {batch} sequences instead of {usual}: --data is small (--batch gives another number)"
                )
                print(f"evenpipe: {note}", file=sys.stderr)
        problem = problem_of(
            description,
            machine,
            gpus=self.gpus,
            sequence=sequence,
            sequences_per_step=batch,
            memory_bytes=memory_bytes,
            dtype=dtype,
            dtypes=dtypes,
            kernels=kernels,
            skew=self.skew,
            loss=loss,
        )
        if self.data is not None:
            run.check_amount(sequence, batch)
        if self.output is not None and not from_configuration:
            run = replace(run, tables=run.with_sections(sequence, batch))
        return problem, run


SpaceOptions: Any = make_dataclass(
    "SpaceOptions", [(name, str | None, field(default=None)) for name in CHOICES], frozen=True, kw_only=True
)
"""The choices as the user writes them."""


def run(
    *,
    options: ProblemOptions,
    choices: SpaceOptions,
    best: Count = 10,
    budget: str | None = None,
    measured: str | None = None,
    explain: bool = False,
    minutes: float | None = None,
    workers: Count | None = None,
    no_cache: bool = False,
    json_: bool = False,
) -> int:
    """Search, print, and write.

    --model MODEL               hub name, folder, config.json, or a configuration of evenpipe train (its model, data,
                                batch and loss)
    --batch SEQUENCES           sequences per step over all GPUs; default: as many as make 4 Mi tokens
    --dtype                     type of the matrix products; default: bf16, fp32 on a CPU
    --gradient-dtype            of the gradients; like the next two, runs of evenpipe have fp32
    --master-dtype              of the weights that the optimizer updates
    --moment-dtype              of the optimizer's moments
    -o, --output CONFIG.toml    write the best plan for evenpipe train
    --data FOLDER|FILE          with -o: what the run trains on, as for evenpipe init; default: a placeholder, to
                                replace in the file
    --tokenizer NAME|FOLDER     with -o: the tokenizer of the run; default: that of the model, or one that the run
                                trains
    --dp X[,X...]               replicas
    --ep X[,X...]               replicas that share the experts of a layer
    --tp X[,X...]               tensor parallelism
    --cp X[,X...]               context parallelism
    --pp X[,X...]               devices of a pipeline
    --zero X[,X...]             shard over replicas: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters;
                                default: 0 and 3, which evenpipe trains with; with --kernels of another framework 1
                                and 3
    --dp-shard X[,X...]         replicas over which states are sharded; the others hold copies (HSDP); default: all
    --microbatch-size X[,X...]  sequences per microbatch
    --slices X[,X...]           slices of every sequence; default: 1, and 4 for long sequences in few microbatches
    --stages-per-device X[,X...]  stages per device, for schedules that leave a choice
    --schedule X[,X...]         names of schedules
    --vocabulary X[,X...]       vocabulary modes
    --checkpointing X[,X...]    none, selective, full, or least: on each device only as much as its memory requires
    --host-share X[,X...]       share of AdamW's moments on the host, 0 to 1, or least: as much as is needed and worth
                                it; default: 0
    --offload X[,X...]          activations on the host: scheduled (as the schedule says; default), none, free (all that
                                lower the memory of a device and cost no time), all, or least (free, if memory is short)
    --best N                    plans to show
    --budget AMOUNT             tokens of a whole training, such as 15T (or M, B), or "1000 GPU-days": also print
                                the other of the two for the best plan
    --measured PLAN:TIME|FILE   a measured step, as in "dp4·pp2 zero-3 zbv 1 x 16: 8.4 s", "dp8 zero-3 microbatch 2:
                                52000 tokens/s" or "run.toml: 8.4 s", or a file with such lines: the search fits the
                                speeds of the hardware to them
    --explain                   show the gain of each vocabulary mode, and which configurations were rejected, why, and
                                what would help
    --minutes N                 end the search after this time, with the best plans so far; default: when no
                                better one is left
    --workers N                 processes; default: one per core
    --no-cache                  neither use nor write the cache on disk

    Choices of the search, from --dp to --offload, are one value, or several separated by commas.

    Every plan fits in memory, as estimated by evenpipe estimate for every device. Times come from evenpipe simulate,
    with pass times from the shapes of the model and the speed of the hardware.

    A search takes seconds to hours: it shows the best plan so far on stderr. Ctrl-C ends it, with that plan.

    exit codes: 0 a plan, 1 nothing fits, 2 the input is wrong, 3 no plan was found within --minutes,
    130 ended by Ctrl-C, with the plans found until then
    """
    from evenpipe.schedule.collection import collecting_rarely

    with collecting_rarely():
        from evenpipe.plan.configuration_search import SearchInterrupted, search_configurations
        from evenpipe.plan.evaluation_cache import EvaluationCache
        from evenpipe.plan.measured_steps import fitted, measured_steps
        from evenpipe.plan.nearest import nearest
        from evenpipe.plan.ranking import Budget, Ranking, progress_text
        from evenpipe.plan.without_pipeline import without_pipeline

    output, seconds = options.output, math.inf if minutes is None else 60 * minutes
    if not seconds > 0:
        raise InputError(f"--minutes is {seconds / 60:g}; it must be above 0")
    check_output(output, ".toml")
    for name in ("data", "tokenizer"):
        if getattr(options, name) is not None and output is None:
            raise InputError(f"--{name} goes into the configuration that -o writes, but there is no -o")
    total_budget = None if budget is None else Budget.of(budget)
    problem, written = options.problem()
    known = None if measured is None else fitted(problem, measured_steps(problem, measured, _recipe_of_run))
    if known is not None:
        problem = replace(problem, hardware=known.hardware, known={})
    space = _space(problem, choices)
    cache = EvaluationCache() if no_cache else EvaluationCache.of(problem)
    if not no_cache:
        problem.bytes.keep_traces()
    near = None
    unpiped: tuple[WithoutPipeline, ...] = ()
    with progress_line() as show:

        def progress(state: PlanSearchResult) -> None:
            show(progress_text(state))

        try:
            result = search_configurations(
                problem,
                space,
                count=best,
                each_vocabulary=explain,
                workers=workers,
                cache=cache,
                progress=progress,
                seconds=seconds,
            )
        except SearchInterrupted as ending:
            result = ending.found()
        interrupted = result.ended == "interrupt"
        cache.save()
        if result.best is None and not result.ended:
            if result.failed and all(failure.fault for failure in result.failed):
                raise InputError(result.failed[0].fault)
            seconds -= result.seconds
            try:
                near = nearest(result, workers=workers, cache=cache, progress=progress, seconds=seconds)
            except KeyboardInterrupt:
                interrupted = True
            cache.save()
        elif not result.ended:
            left = seconds - result.seconds
            try:
                unpiped = without_pipeline(result, workers=workers, cache=cache, progress=progress, seconds=left)
            except KeyboardInterrupt:
                interrupted = True
            cache.save()
    ranking = Ranking(result, best, unpiped, total_budget, known)
    if json_:
        say_json(ranking.to_dict() | ({} if near is None else near.to_dict()))
    else:
        say(ranking.text(explain=explain))
        if near is not None:
            say(near.text())
    if output is not None and result.best is not None:
        _write(result, written, output, options.hardware, quiet=json_)
    if interrupted:
        return 128 + signal.SIGINT
    if result.best is not None:
        return 0
    return RunError.exit_code if result.ended else 1


def _recipe_of_run(path: str) -> Recipe:
    """Return the recipe of a configuration of evenpipe train."""
    from evenpipe.train.config_file import config_from_dict, read_toml

    return config_from_dict(read_toml(path)).recipe()


def _space(problem: Problem, choices: Any) -> Space:
    from evenpipe.plan.space import usual_space
    from evenpipe.schedule import VocabularyMode

    fields: dict[str, Any] = {}
    for name, text in vars(choices).items():
        if text is not None:
            fields[FIELDS.get(name, name)] = whole_numbers(name, text) if name in NUMBERS else words(name, text)
    if "host_shares" in fields:
        fields["host_shares"] = tuple(map(_share, fields["host_shares"]))
    if "vocabularies" in fields:
        fields["vocabularies"] = tuple(dict.fromkeys(map(VocabularyMode.of, fields["vocabularies"])))
    return replace(usual_space(problem), **fields)


def _share(text: str) -> float | None:
    if text == "least":
        return None
    try:
        return float(text)
    except ValueError:
        raise refused("--host-share", text, "numbers from 0 to 1, or least") from None


def _write(result: PlanSearchResult, run: PlannedRun, path: Path, hardware: str, *, quiet: bool) -> None:
    """Write the best plan that can run; report whether better plans are estimates only, and fields to replace."""
    from evenpipe.plan.runnable import refusal
    from evenpipe.train.config_file import sections
    from evenpipe.train.new_config import how_to_train
    from evenpipe.train.planned_config import planned_tables, write_tables

    assert result.best is not None
    runnable = (plan for plan in result.plans if not refusal(result.problem, plan.configuration.recipe))
    plan = next(runnable, result.best)
    tables = planned_tables(result.problem, plan, run.tables, path.stem, hardware)
    notes = f"Planned for {result.problem.gpus} x {result.problem.hardware.name}: {plan.configuration.name}"
    tables = {section: tables[section] for section in sections() if section in tables}
    write_tables(tables, path, f"{notes}\n{how_to_train(path)}", run.comments)
    if quiet:
        return
    note = (
        "" if plan is result.best else f" (plan {result.plans.index(plan) + 1}: the plans above it are estimates only)"
    )
    say(f"wrote {path}{note}; the run will write to {tables['output']['folder']}")
    for remark in run.remarks:
        say(remark)
    if run.replace:
        say(f"replace {', '.join(run.replace)} in {path} before evenpipe train, or give --data")
