"""Steps that a user has measured, and the hardware fitted to them.

The fraction of a GPU's peak that a product reaches, the bandwidth of the network and the least time of a kernel differ
between machines of the same name. `fitted` finds factors for them by least squares, with a penalty for unlikely
factors, so that a few measurements, or one, determine the factors that they depend on and leave the others alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evenpipe.costs.hardware import Hardware
from evenpipe.errors import InputError
from evenpipe.memory.programs import planned
from evenpipe.recipe.parallelism import AXES, DATA_PARALLEL
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import MODES, SCHEDULES
from evenpipe.words import refused, seconds_text

from .configuration import POLICIES, Configuration
from .evaluation import timed
from .problem import Problem

SPREAD, SPREAD_WITH_CONTEXT_RANKS = (0.93, 1.13), (0.95, 1.35)
"""Measured over predicted seconds of nine in ten published steps, on A100, H100 and B200 alike: without and with
context parallelism (benchmarks/published_rows.py and published_steps.py)."""
SPREAD_OF_MEASURED = (0.88, 1.14)
"""The same after any single step of the same source was measured (`calibrated` of published_rows.py): this removes the
error that all steps of a source have in common and adds the error specific to the measured one."""
SPREAD_OF_PASSES = (0.96, 1.04)
"""The same for steps whose passes were measured (benchmarks/planned.py)."""

ACCEPTED = (
    'a layout as a plan is called, or a configuration of evenpipe train, a colon, and what it reached, as in "dp4·pp2'
    ' zero-3 zbv 1 x 16: 8.4 s", "dp8 zero-3 microbatch 2: 52000 tokens/s" (or tokens/s/GPU) or "run.toml: 8.4 s"; or a'
    " file with such lines"
)
WORDS = (
    "an axis (dp8), zero-3 or zero-3/8, a schedule, a vocabulary mode, none, selective, full, 1 x 16, microbatch 2 or"
    " slices 4"
)
ReadRun = Callable[[str], Recipe]
"""Returns the recipe of a configuration file."""


def _with_wires(hardware: Hardware, factor: float) -> Hardware:
    inside, across = (replace(wire, bandwidth=wire.bandwidth * factor) for wire in (hardware.inside, hardware.across))
    return replace(hardware, inside=inside, across=across)


def _with_operations(hardware: Hardware, factor: float) -> Hardware:
    start = hardware.attention_start_seconds / factor
    return replace(hardware, operation_seconds=hardware.operation_seconds / factor, attention_start_seconds=start)


def _with_compute(hardware: Hardware, factor: float) -> Hardware:
    backward = hardware.attention_backward_fraction
    return replace(
        hardware,
        product_fraction=min(1.0, hardware.product_fraction * factor),
        attention_fraction=min(1.0, hardware.attention_fraction * factor),
        attention_backward_fraction=None if backward is None else min(1.0, backward * factor),
    )


def _with_memory(hardware: Hardware, factor: float) -> Hardware:
    return replace(hardware, memory_bandwidth=hardware.memory_bandwidth * factor)


SCALED: dict[str, tuple[float, Callable[[Hardware, float], Hardware]]] = {
    "products and attention": (0.1, _with_compute),
    "memory": (0.05, _with_memory),
    "transfers between GPUs": (0.3, _with_wires),
    "single kernels": (0.5, _with_operations),
}
"""Each uncertain speed: the usual deviation of the logarithm of its factor, and the function that applies a factor."""
ERROR = 0.01
"""Usual relative error of a measurement."""
IMPLAUSIBLE = 3.0
"""Ratio of measured and predicted seconds from which on something else must have been measured."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A layout, and the seconds of its step."""

    text: str
    recipe: Recipe
    seconds: float

    def predicted(self, problem: Problem, hardware: Hardware) -> float:
        """Return the predicted seconds on the given hardware, for the model of a problem."""
        parallelism, batch = self.recipe.parallelism, self.recipe.batch
        step_problem = replace(
            problem,
            hardware=hardware,
            gpus=parallelism.gpus,
            sequences_per_step=parallelism.dp * batch.microbatch_size * self.recipe.microbatches,
            known={},
        )
        return timed(step_problem, Configuration.of(step_problem, self.recipe)).seconds


@dataclass(frozen=True, slots=True)
class Fitted:
    """Hardware fitted to measured steps."""

    hardware: Hardware
    factors: dict[str, float]
    """Ratios of new to old speeds, by the names in `SCALED`."""
    errors: tuple[float, ...]
    """Predicted over measured seconds minus 1, for each step."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {"factors": self.factors, "errors": list(self.errors)}

    @property
    def text(self) -> str:
        """Return the changes in a sentence."""
        moved = [
            f"{name} {100 * abs(factor - 1):.0f} % {'faster' if factor > 1 else 'slower'}"
            for name, factor in self.factors.items()
            if abs(factor - 1) >= 0.005
        ]
        worst = max(map(abs, self.errors))
        return f"{', '.join(moved) or 'as assumed'}; so measured steps are predicted within {100 * worst:.1f} %"


def fitted(problem: Problem, steps: Sequence[MeasuredStep]) -> Fitted:
    """Return the hardware of a problem, adjusted to predict these steps as well as likely factors allow. Raises
    InputError for a step that is far from its prediction."""
    for step in steps:
        predicted = step.predicted(problem, problem.hardware)
        if not 1 / IMPLAUSIBLE < predicted / step.seconds < IMPLAUSIBLE:
            raise InputError(
                f"--measured: {step.text}: that is {seconds_text(step.seconds)} per step, but {seconds_text(predicted)}"
                " are predicted: was it this model, sequence length and hardware, and with these --kernels?"
            )
    names, usual = list(SCALED), np.array([sigma for sigma, _ in SCALED.values()])

    def hardware(logs: Iterable[float]) -> Hardware:
        machine = problem.hardware
        for name, log in zip(names, logs, strict=True):
            machine = SCALED[name][1](machine, math.exp(log))
        return machine

    def errors(logs: Iterable[float]) -> np.ndarray:
        machine = hardware(logs)
        return np.array([math.log(step.predicted(problem, machine) / step.seconds) for step in steps])

    logs = np.zeros(len(names))
    for _ in range(3):
        current, difference = errors(logs), 0.01
        slopes = np.stack(
            [(errors(logs + row) - current) / difference for row in difference * np.eye(len(names))], axis=1
        )
        system = np.concatenate((slopes / ERROR, np.diag(1 / usual)))
        target = np.concatenate(((slopes @ logs - current) / ERROR, np.zeros(len(names))))
        logs = np.linalg.lstsq(system, target, rcond=None)[0]
    factors = {name: math.exp(log) for name, log in zip(names, logs, strict=True)}
    return Fitted(hardware(logs), factors, tuple(np.expm1(errors(logs)).tolist()))


def spread(problem: Problem, configuration: Configuration, *, measured: bool) -> tuple[float, float] | None:
    """Return the range of actual over predicted seconds; None on a CPU whose passes were not measured. measured:
    whether the hardware was `fitted`."""
    if problem.measured:
        return SPREAD_OF_PASSES
    if problem.hardware.torch_device == "cpu":
        return None
    if measured:
        return SPREAD_OF_MEASURED
    return SPREAD if configuration.recipe.parallelism.cp == 1 else SPREAD_WITH_CONTEXT_RANKS


# --- reading ---------------------------------------------------------------------------------------------------


def measured_steps(problem: Problem, text: str, read_run: ReadRun) -> list[MeasuredStep]:
    """Read measured steps of the model and the sequence length of a problem: a single one, or the lines of a file.
    Raises InputError for text that cannot be parsed, and for a layout that is impossible for the model or the
    kernels."""
    lines = [text]
    if ":" not in text or Path(text).is_file():
        try:
            lines = [line for line in Path(text).read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError):
            raise refused("--measured", text, ACCEPTED) from None
    return [_step(problem, line, read_run) for line in lines]


def _step(problem: Problem, text: str, read_run: ReadRun) -> MeasuredStep:
    layout, _, reached = (word.strip() for word in text.rpartition(":"))
    value = re.fullmatch(r"([0-9][0-9 ,_]*(?:\.[0-9]+)?)\s*(s|ms|tokens/s|tokens/s/GPU)", reached)
    words = layout.replace("·", " ").split()
    if value is None or not words:
        raise refused("--measured", text, ACCEPTED)
    number, unit = float(re.sub("[ ,_]", "", value[1])), value[2]
    if not number:
        raise refused("--measured", text, "a time or a speed above 0")
    try:
        recipe = read_run(layout) if layout.endswith(".toml") else _recipe(problem, words)
        if recipe.batch.sequence_length != problem.sequence:
            raise refused("sequence_length", recipe.batch.sequence_length, f"that of the plan, {problem.sequence}")
        plan = planned(problem.description, recipe, problem.hardware, problem.dtype, problem.loss)
    except InputError as error:
        raise InputError(f"--measured: {text.strip()}: {error}") from None
    parallelism = recipe.parallelism
    tokens = parallelism.dp * recipe.batch.microbatch_size * recipe.microbatches * problem.sequence
    each = parallelism.gpus if unit.endswith("GPU") else 1
    seconds = {"s": number, "ms": number / 1e3}.get(unit, tokens / number / each)
    return MeasuredStep(text.strip(), replace(recipe, layers_per_stage=plan.layers_per_stage), seconds)


def _recipe(problem: Problem, words: list[str]) -> Recipe:
    """Return the recipe that the words of a plan's name describe, with defaults for everything else."""
    fields: dict[str, Any] = {"schedule": "1f1b", "vocabulary": "redistribute" if problem.is_ours else "first-last"}
    options: dict[str, Any] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        schedule, _, stages = word.partition("/")
        axis = re.fullmatch(rf"({'|'.join(AXES)})([1-9][0-9]*)", word)
        zero = re.fullmatch(r"zero-([0-3])(/[1-9][0-9]*)?", word)
        if axis:
            fields[axis[1]] = int(axis[2])
        elif zero:
            fields["data_parallel"] = DATA_PARALLEL[int(zero[1])]
            fields["dp_shard"] = int(zero[2][1:]) if zero[2] else None
        elif schedule in SCHEDULES and (not stages or stages.isdecimal()):
            fields["schedule"] = schedule
            options = {"stages_per_device": int(stages)} if stages else {}
        elif word in MODES:
            fields["vocabulary"] = word
        elif word in POLICIES:
            fields["activation_checkpointing"] = word
        elif word == "heads":
            fields["context_exchange"] = word
        elif word in {"microbatch", "slices"} and remaining and remaining[0].isdecimal():
            fields["microbatch_size" if word == "microbatch" else "slices"] = int(remaining.pop(0))
        elif word.isdecimal() and len(remaining) > 1 and remaining[0] == "x" and remaining[1].isdecimal():
            fields |= {"microbatch_size": int(word), "microbatches": int(remaining[1])}
            del remaining[:2]
        else:
            raise refused("a word", word, WORDS)
    replicas, size = fields.get("dp", 1), fields.get("microbatch_size", 1)
    fields.setdefault("microbatches", max(1, problem.sequences_per_step // (replicas * size)))
    return Recipe.of(sequence_length=problem.sequence, schedule_options=options, **fields)
