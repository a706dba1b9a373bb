"""Show the imbalance of a model, and the gain of each alternative, to people who see it for the first time.

The usual configuration (1F1B, the whole output layer on the last device) is compared with other vocabulary modes and
schedules in a single layout of the GPUs: the one in which it is fastest, so that no gain is due to the layout.
`search_configurations` compares all layouts.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from evenpipe.errors import InputError
from evenpipe.recipe.offload import OffloadOptions
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Timeline
from evenpipe.schedule.collection import collecting_rarely
from evenpipe.simulate import simulate
from evenpipe.sizes import gib_text
from evenpipe.words import count, refused, seconds_text, table

from .bounds import order_bound, work_bound
from .configuration import Configuration, costs_of
from .configuration_search import PlanSearchResult, head_layers, search_configurations
from .evaluation import Evaluation, evaluate
from .problem import EVENPIPE, Problem
from .programs import Shape
from .ranking import arrangement_in_words, arranging_gain, progress_text
from .space import Space, divisors, layouts
from .splits import splits

SHALLOWEST = 4
"""Least number of devices of the pipeline, if there are enough GPUs: shorter pipelines show little imbalance."""

USUAL = ("1f1b", "first-last")
"""The usual schedule and vocabulary mode, the baseline of all comparisons."""

OTHERS = (
    ("1f1b", "redistribute"),
    ("1f1b", "vocab-1"),
    ("1f1b", "vocab-2"),
    ("zb-h1", "redistribute"),
    ("zb-h1", "vocab-2"),
    ("v-half", "redistribute"),
    ("v-half", "vocab-2"),
    ("v-half", "vocab-2", "free"),
)
"""Schedules, modes, and choices for activations on the host: each schedule with whole and with sharded vocabulary
layers, so that the gains of the two can be told apart. Their orders are quick to generate, even for deep pipelines; the
search covers all schedules."""

DRAWN = 2
"""Microbatches per device in the picture: enough to show the warm-up, a steady part, and the end."""

HEADER = ("schedule", "vocabulary", "step", "speed", "busy", "busiest/mean", "fullest", "emptiest", "recomputed", "")

BAR = 24
"""Length of the longest bar, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The comparison for one model on one machine."""

    problem: Problem
    name: str
    """Name of the model, as given by the user."""
    head_layers: float
    """Time of the output layer, in units of a transformer layer."""
    layer_parameters: float
    """Mean number of parameters of a layer."""
    usual: Evaluation
    alternatives: tuple[Evaluation, ...]

    @property
    def all(self) -> tuple[Evaluation, ...]:
        """Return all evaluations, the usual one first."""
        return (self.usual, *self.alternatives)

    @property
    def best(self) -> Evaluation:
        """Return the fastest evaluation that fits; the usual one if none does."""
        return min(
            (evaluation for evaluation in self.all if evaluation.fits),
            key=lambda evaluation: evaluation.seconds,
            default=self.usual,
        )

    @property
    def gains(self) -> dict[str, tuple[Evaluation, float]]:
        """Return the gains of the best evaluation over those that differ from it in one respect only: "shards" (one
        without shards) and "schedule" (one with the usual schedule). Each is (the other evaluation, ratio of steps)."""
        best = self.best.configuration
        gains: dict[str, tuple[Evaluation, float]] = {}
        for evaluation in self.alternatives:
            configuration = evaluation.configuration
            same_schedule = configuration.schedule == best.schedule
            same_mode = configuration.recipe.vocabulary == best.recipe.vocabulary
            if math.isinf(evaluation.seconds) or same_schedule == same_mode:
                continue
            if same_schedule and best.recipe.mode.sharded and not configuration.recipe.mode.sharded:
                gains["shards"] = evaluation, evaluation.seconds / self.best.seconds
            if same_mode and configuration.schedule == USUAL[0]:
                gains["schedule"] = evaluation, evaluation.seconds / self.best.seconds
        return gains

    @property
    def arranging_gain(self) -> float:
        """Return the gain from the arrangement of the best order, as `arranging_gain`."""
        return 0.0 if math.isinf(self.best.seconds) else arranging_gain(self.problem, self.best)

    @property
    def matrix_layers(self) -> float:
        """Return the number of layers that have as many parameters as the output layer."""
        description = self.problem.description
        return description.vocabulary_size * description.hidden_size / self.layer_parameters

    def timelines(self) -> dict[str, Timeline]:
        """Return the timelines of short steps, in seconds, for a picture: of the usual mode and of vocab-2, both with
        the usual schedule."""
        timelines = {}
        for configuration in (evaluation.configuration for evaluation in self.all if not evaluation.fault):
            recipe = configuration.recipe
            if configuration.schedule == USUAL[0] and recipe.vocabulary in (USUAL[1], "vocab-2"):
                program = self.problem.arranged(recipe, min(recipe.microbatches, DRAWN * recipe.devices))
                timeline = simulate(program, costs_of(self.problem, configuration)).timeline
                timelines[f"{configuration.schedule}, {recipe.vocabulary}"] = timeline
        return timelines

    def to_dict(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "model": self.name,
            "gpus": problem.gpus,
            "hardware": problem.hardware.name,
            "memory_bytes": problem.memory_bytes,
            "sequence": problem.sequence,
            "output_layer_in_layers_of_time": self.head_layers,
            "output_layer_in_layers_of_parameters": self.matrix_layers,
            "arranging_gain": self.arranging_gain,
            "gains": {name: gain for name, (_, gain) in self.gains.items()},
            "usual": self.usual.to_dict(),
            "others": [evaluation.to_dict() for evaluation in self.alternatives],
            "next": list(self.commands()),
        }

    def text(self) -> str:
        """Return the report as text, without the picture."""
        return "\n".join([*self._head(), "", *self._devices(), "", *self._gains()])

    def _head(self) -> Iterator[str]:
        problem, layout = self.problem, self.usual.configuration.recipe
        description, parallelism, batch = problem.description, layout.parallelism, layout.batch
        yield (
            f"{self.name} on {count(problem.gpus, 'GPU')} ({problem.hardware.name}, {gib_text(problem.memory_bytes)}):"
            f" {count(description.layers, 'layer')}, hidden size {description.hidden_size:,},"
            f" vocabulary {description.vocabulary_size:,}{', tied' if description.tied else ''}"
        )
        axes = ", ".join(
            f"{name} {getattr(parallelism, name)}" for name in ("tp", "dp") if getattr(parallelism, name) > 1
        )
        yield (
            f"a pipeline of {count(parallelism.pp, 'device')}{f' ({axes})' if axes else ''}; a step of"
            f" {count(layout.microbatches, 'microbatch')} of {batch.microbatch_size} x"
            f" {count(problem.sequence, 'token', ',')}"
        )
        yield (
            f"the output layer takes as long as {self.head_layers:.1f} transformer layers; it and the embedding have as"
            f" many parameters as {self.matrix_layers:.1f} layers {'together' if description.tied else 'each'}"
        )

    def _devices(self) -> Iterator[str]:
        """Yield lines on the imbalance of the usual configuration, device by device."""
        usual = self.usual
        yield f"Out of balance: {' + '.join(USUAL)}"
        if usual.fault:
            yield f"  {usual.fault}"
            return
        if not usual.busy:
            yield "  does not fit, even with full recomputation"
        times = usual.busy or (0.0,) * len(usual.devices)
        longest, mean = max(times), sum(times) / len(times)
        layers_per_stage = usual.configuration.layers_per_stage  # a stage is a device
        for device, (time, use) in enumerate(zip(times, usual.devices, strict=True)):
            bar = "#" * round(BAR * time / longest) if longest else ""
            layers = count(layers_per_stage[device], "layer")
            ends = [text for text, at in (("embedding", 0), ("output", len(times) - 1)) if at == device]
            shortfall = "" if use.fits else f", {gib_text(-use.spare)} too much"
            yield (
                f"  device {device:<3} {' + '.join([layers, *ends]):<30} {f'{1e3 * time:.1f} ms':>9} {bar:<{BAR}}"
                f" {gib_text(use.peak_bytes):>10}{shortfall}"
            )
        if longest:
            busiest = max(range(len(times)), key=times.__getitem__)
            idle = 1 - mean / longest
            yield (
                f"  device {busiest} works {longest / mean:.2f} times the mean of a microbatch, so the devices wait"
                f" {100 * idle:.0f} % of the time, even without bubbles"
            )

    def _gains(self) -> Iterator[str]:
        rows: list[tuple[str, ...]] = [HEADER]
        for evaluation in self.all:
            rows.append((_name(evaluation), evaluation.configuration.recipe.vocabulary, *self._cells(evaluation)))
        yield "Alternatives"
        yield from (f"  {line}" for line in table(rows, left=(0, 1, 8, 9)))
        best = self.best
        name = _whole_name(best)
        if best is not self.usual and not math.isinf(self.usual.seconds):
            yield f"  {name}: {self.usual.seconds / best.seconds:.2f} times as fast as {' + '.join(USUAL)}"
        for reason, (compared, gain) in self.gains.items():
            yield f"  {name}: {gain:.2f} times as fast as {_whole_name(compared)}, which is the gain of the {reason}"
        arrangement = arrangement_in_words(self.arranging_gain)
        if arrangement:
            yield f"  {name}: {arrangement}"

    def _cells(self, evaluation: Evaluation) -> tuple[str, ...]:
        if evaluation.fault:
            return ("", "", "", "", "", "", "", evaluation.fault)
        sizes = [use.peak_bytes for use in evaluation.devices]
        memory = (gib_text(max(sizes)), gib_text(min(sizes)))
        if not evaluation.fits:
            return (
                "-",
                "",
                "",
                "",
                *memory,
                "",
                f"does not fit: {gib_text(-evaluation.devices[evaluation.worst].spare)} too much",
            )
        usual = self.usual.seconds
        speed = "" if math.isinf(usual) else f"{usual / evaluation.seconds:.2f}x"
        uneven = max(evaluation.busy) / (sum(evaluation.busy) / len(evaluation.busy))
        recomputed = (
            ""
            if max(evaluation.recomputation) == 0
            else f"{100 * sum(evaluation.recomputation) / sum(evaluation.busy):.0f} %"
        )
        return (
            seconds_text(evaluation.seconds),
            speed,
            f"{100 * evaluation.mean_busy:.0f} %",
            f"{uneven:.2f}",
            *memory,
            recomputed,
            "",
        )

    def commands(self) -> tuple[str, ...]:
        """Return the commands to continue with for the same problem; the training plan uses evenpipe's own kernels."""
        problem = self.problem
        options = {
            "model": shlex.quote(self.name),
            "gpus": problem.gpus,
            "hardware": problem.hardware.name,
            "sequence": problem.sequence,
            "batch": problem.sequences_per_step,
        }
        if problem.memory_bytes != problem.hardware.memory_bytes:
            options["gpu-memory"] = f"{problem.memory_bytes}B"
        plan = " ".join(["evenpipe plan", *(f"--{name} {value}" for name, value in options.items())])
        kernels = "" if problem.kernels_name == EVENPIPE else f" --kernels {problem.kernels_name}"
        kernels_to_train = kernels if problem.compiles else ""
        return (
            f"{plan}{kernels} --explain",
            f"{plan}{kernels_to_train} --data FOLDER -o run.toml",
            "evenpipe train run.toml",
        )


# --- figures ---------------------------------------------------------------------------------------------------------


@collecting_rarely()
def explain(
    problem: Problem,
    name: str,
    *,
    pp: int | None = None,
    tp: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Explanation:
    """Evaluate the usual configuration and the alternatives in one layout.

    Args:
        name: name of the model, for the report and its commands.
        pp: devices of the pipeline; None: 4 or more, if there are enough GPUs.
        tp: size of the tensor axis; None: any.
        progress: called now and then with a line about the current work.

    Raises InputError if there is no such layout, if there is only one GPU, and if nothing can be estimated in the
    layout.
    """
    if problem.gpus < 2:
        raise refused("gpus", problem.gpus, "at least 2: one GPU is no pipeline")
    layout = _layout(problem, pp, tp, progress)
    compared = [
        choice for choice in (USUAL, *OTHERS) if _shape(problem, layout, choice[0]).placement.stages <= problem.layers
    ]
    evaluations = []
    for number, choice in enumerate(compared, 1):
        progress(f"alternative {number} of {len(compared)}: {', '.join(choice)}")
        evaluations.append(_evaluated(problem, layout, *choice))
    if all(evaluation.fault for evaluation in evaluations):
        raise InputError(evaluations[0].fault)
    works = problem.works
    return Explanation(
        problem=problem,
        name=name,
        head_layers=head_layers(problem, layout),
        layer_parameters=sum(work.parameters for work in works) / len(works),
        usual=evaluations[0],
        alternatives=tuple(evaluation for evaluation in evaluations[1:] if not evaluation.fault),
    )


def _layout(problem: Problem, pp: int | None, tp: int | None, progress: Callable[[str], None]) -> Recipe:
    """Return the layout in which the usual configuration is fastest; if none fits, the layout with the most model
    parallelism."""
    shallowest = max(2, min(SHALLOWEST, problem.gpus, problem.layers))
    depths = tuple(size for size in divisors(problem.gpus) if shallowest <= size <= problem.layers)
    if pp is None and not depths:
        raise InputError(
            f"gpus is {problem.gpus}, but no pipeline of at least {shallowest} devices divides it: give pp"
        )
    space = Space(
        pp=depths if pp is None else (pp,),
        tp=None if tp is None else (tp,),
        cp=(1,),
        zero=(3,) if problem.is_ours else (1,),
        microbatch_sizes=(1,),
        schedules=USUAL[:1],
        vocabularies=USUAL[1:],
    )

    def show(result: PlanSearchResult) -> None:
        progress(progress_text(result))

    # In this process, because what it learns about the model's memory is needed again.
    best = search_configurations(problem, space, count=1, workers=1, progress=show).best
    if best is not None:
        return best.configuration.recipe
    return max(layouts(problem, space), key=lambda layout: (layout.parallelism.model_parallel, layout.parallelism.tp))


def _shape(problem: Problem, layout: Recipe, schedule: str) -> Shape:
    shape = problem.programs.shape(schedule, (), layout.devices)
    assert shape is not None, f"{schedule} has an order of every size"
    return shape


def _evaluated(problem: Problem, layout: Recipe, schedule: str, mode: str, offload: str = "scheduled") -> Evaluation:
    """Return the evaluation with the best split of layers; if none fits, with the split that lacks the least memory."""
    shape = _shape(problem, layout, schedule)
    possible = []
    for split in splits(problem, layout, shape, mode, head_layers(problem, layout)):
        recipe = Recipe(
            parallelism=layout.parallelism,
            batch=layout.batch,
            schedule=schedule,
            vocabulary=mode,
            layers_per_stage=split,
            offload=OffloadOptions(activations=offload),
        )
        possible.append(Configuration(recipe=recipe, shape=shape, open=("activation_checkpointing",)))
        if mode == USUAL[1]:
            break
    bounds = [work_bound(problem, configuration, traced=True) for configuration in possible]
    best: Evaluation | None = None
    for bound, configuration in sorted(
        zip(bounds, possible, strict=True), key=lambda pair: (pair[0].shortfall, pair[0].seconds)
    ):
        limit = math.inf if best is None else best.seconds
        if (
            best is not None
            and best.fits
            and (bound.shortfall or order_bound(problem, configuration, bound.recomputation) >= limit)
        ):
            continue
        evaluation = evaluate(problem, configuration, limit)
        if best is None or (not evaluation.late and _rank(evaluation) < _rank(best)):
            best = evaluation
    assert best is not None
    return best


def _rank(evaluation: Evaluation) -> tuple[bool, float, float]:
    """Return a key that is smaller for the better of two evaluations."""
    return (
        bool(evaluation.fault),
        evaluation.seconds,
        0.0 if evaluation.fits or not evaluation.devices else -evaluation.devices[evaluation.worst].spare,
    )


def _whole_name(evaluation: Evaluation) -> str:
    return f"{_name(evaluation)} + {evaluation.configuration.recipe.vocabulary}"


def _name(evaluation: Evaluation) -> str:
    """Return the name of the schedule, with its choice for activations."""
    configuration = evaluation.configuration
    return f"{configuration.schedule_name}, offload" if configuration.offload == "free" else configuration.schedule_name
