"""The result of a search as text and JSON: a ranked table, the limits of each plan, and the rejected configurations."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from evenpipe.recipe.parallelism import AXES
from evenpipe.sizes import gib_text
from evenpipe.words import count, refused, seconds_text, table

from .bounds import order_bound
from .configuration import name_of_axes, name_of_zero
from .configuration_search import PlanSearchResult, Rejected, head_layers
from .evaluation import Evaluation, timed
from .measured_steps import Fitted, spread
from .problem import Problem
from .runnable import refusal
from .space import refuses

if TYPE_CHECKING:
    from .without_pipeline import WithoutPipeline

REJECTED = 8
"""Number of rejected configurations to explain."""

FIXES = 3
"""Number of fixes to offer for each of them."""

# --- figures of a plan -------------------------------------------------------------------------------------


def tokens_per_second(problem: Problem, plan: Evaluation) -> float:
    """Return the number of tokens that all GPUs together train on per second."""
    return problem.sequence * problem.sequences_per_step / plan.seconds


def utilization(problem: Problem, plan: Evaluation) -> float:
    """Return the model FLOPs utilization (MFU) over the peak of all GPUs: forward and backward, without recomputation
    and masked pairs of attention."""
    tokens = problem.sequence * problem.sequences_per_step
    layers = sum(work.flops + work.attention.flops(work.attention.pairs(problem.sequence)) for work in problem.works)
    flops = 3.0 * tokens * (layers + problem.model_costs.head)
    return flops / plan.seconds / problem.gpus / problem.hardware.peak(problem.dtype)


def recomputation(plan: Evaluation) -> str:
    """Return the checkpointing policies in a few words."""
    policies = plan.configuration.checkpointing
    counts = {policy: policies.count(policy) for policy in dict.fromkeys(policies)}
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{policy} {number}" for policy, number in counts.items())


def binding(problem: Problem, plan: Evaluation) -> str:
    """Return what limits the speed of a plan, in a sentence."""
    memory = plan.devices[plan.worst] if plan.devices else None
    limits = []
    work = plan.busy
    busiest = max(range(len(work)), key=work.__getitem__)
    mean = sum(work) / len(work)
    if work[busiest] > 1.03 * mean:
        limits.append(f"device {busiest} with {100 * (work[busiest] / mean - 1):.0f} % more work than the mean")
    if plan.bubble_rate > 0.03:
        limits.append(f"bubble of {100 * plan.bubble_rate:.0f} % on the busiest device")
    if max(plan.recomputation) > 0:
        recomputed = sum(plan.recomputation) / sum(work)
        limits.append(f"recomputation, {100 * recomputed:.0f} % of the work")
    if plan.end_seconds > 0.03 * plan.seconds:
        limits.append(f"gradients and optimizer, {100 * plan.end_seconds / plan.seconds:.0f} % of the step")
    host = max((use.host_bytes for use in plan.devices), default=0)
    if host:
        limits.append(f"up to {gib_text(host)} of activations on the host per device")
    if memory is not None and memory.spare < 0.1 * problem.memory_bytes:
        limits.append(f"memory: {gib_text(memory.spare)} left on device {plan.worst}, {memory.event}")
    return "; ".join(limits) or "compute only"


WORTH_REPORTING = 0.01
"""Smallest gain from the arrangement of an order that is reported."""


def arranging_gain(problem: Problem, plan: Evaluation) -> float:
    """Return how much longer the step of an evaluated plan would be with its order arranged by FLOPs, as a fraction of
    the step; negative if it would be shorter. Both times are extrapolated."""
    if plan.configuration.recipe.devices == 1:
        return 0.0
    by_flops = timed(replace(problem, arranged_by="flops"), plan.configuration).seconds
    return by_flops / timed(problem, plan.configuration).seconds - 1


def arrangement_in_words(gain: float) -> str:
    """Return the result of `arranging_gain` in a sentence; empty if it is negligible."""
    if abs(gain) < WORTH_REPORTING:
        return ""
    length = "longer" if gain > 0 else "shorter"
    return (
        f"its order is arranged by the times of its passes; by FLOPs the step would be {100 * abs(gain):.1f} % {length}"
    )


def split_in_words(layers_per_stage: Sequence[int]) -> str:
    """Return the numbers of layers of the stages, with runs of equal numbers combined."""
    runs = [(layers, len(list(run))) for layers, run in groupby(layers_per_stage)]
    return ", ".join(f"{layers}" if stages == 1 else f"{layers} in each of {stages} stages" for layers, stages in runs)


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of a training run: a number of tokens or of GPU-days."""

    tokens: float | None
    gpu_days: float | None

    @classmethod
    def of(cls, text: str) -> Budget:
        """Read "15T" tokens (or M, B), or "1000 GPU-days". Raises InputError."""
        match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([MBT]|GPU-days)\s*", text)
        try:
            amount = float(match[1]) if match else 0.0
        except ValueError:
            amount = 0.0
        if match is None or not 0 < amount < math.inf:
            raise refused("--budget", text, 'a number of tokens, as in 15T (or M, B), or as in "1000 GPU-days"')
        factor = {"M": 1e6, "B": 1e9, "T": 1e12}.get(match[2])
        return cls(None, amount) if factor is None else cls(amount * factor, None)

    def to_dict(self, problem: Problem, plan: Evaluation) -> dict[str, float]:
        """Return the tokens, the GPU-days, and the days on all GPUs with a plan."""
        tokens_per_day = 86400 * tokens_per_second(problem, plan)
        tokens = self.tokens or (self.gpu_days or 0.0) * tokens_per_day / problem.gpus
        return {"tokens": tokens, "gpu_days": problem.gpus * tokens / tokens_per_day, "days": tokens / tokens_per_day}

    def text(self, problem: Problem, plan: Evaluation) -> str:
        """Return the same in words."""
        figures = self.to_dict(problem, plan)
        power, letter = (1e12, "T") if figures["tokens"] >= 1e12 else (1e9, "B")
        return (
            f"{figures['tokens'] / power:.4g} {letter} tokens take {figures['gpu_days']:,.0f} GPU-days,"
            f" {figures['days']:,.1f} days on {count(problem.gpus, 'GPU')}"
        )


# --- the table -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ranking:
    """The result of `evenpipe plan`."""

    result: PlanSearchResult
    count: int
    unpiped: tuple[WithoutPipeline, ...] = ()
    """The best layouts without a pipeline."""
    budget: Budget | None = None
    measured: Fitted | None = None
    """The measurements that the hardware of the problem is fitted to."""

    @property
    def plans(self) -> list[Evaluation]:
        return self.result.plans[: self.count]

    def to_dict(self) -> dict[str, Any]:
        problem, result = self.result.problem, self.result
        return {
            "gpus": problem.gpus,
            "hardware": problem.hardware.name,
            "memory_bytes": problem.memory_bytes,
            "sequence": problem.sequence,
            "sequences_per_step": problem.sequences_per_step,
            "layouts": result.layouts,
            "bounded": result.bounded,
            "evaluated": result.evaluated,
            "finished": not result.ended,
            "ended_by": result.ended or None,
            "layouts_left": result.layouts_left if result.ended else 0,
            "configurations_left": result.configurations_left if result.ended else 0,
            "least_seconds_left": result.least_seconds if result.ended and result.left else None,
            "plans": [self._figures(plan) for plan in self.plans],
            "without_pipeline": [
                {
                    "kind": alternative.kind,
                    "plan": None if alternative.plan is None else self._figures(alternative.plan),
                    "nearest": None if alternative.nearest is None else alternative.nearest.to_dict(),
                }
                for alternative in self.unpiped
            ],
            "budget": None if self.budget is None or not self.plans else self.budget.to_dict(problem, self.plans[0]),
            "measured": None if self.measured is None else self.measured.to_dict(),
            "arranging_gain": arranging_gain(problem, self.plans[0]) if self.plans and not result.ended else None,
            "vocabulary": [gain.to_dict() for gain in gains(self.result)],
            "rejected": [rejection.to_dict() for rejection in explained(self.result)],
        }

    def _figures(self, plan: Evaluation) -> dict[str, Any]:
        problem = self.result.problem
        return {
            **plan.to_dict(),
            "seconds_range": self._range(plan),
            "tokens_per_second": tokens_per_second(problem, plan),
            "model_flops_utilization": utilization(problem, plan),
            "binding": binding(problem, plan),
            "runnable": not refusal(problem, plan.configuration.recipe),
        }

    def _range(self, plan: Evaluation) -> tuple[float, float] | None:
        """Return the likely range of the step time of a plan, in seconds."""
        factors = spread(self.result.problem, plan.configuration, measured=self.measured is not None)
        return None if factors is None else (factors[0] * plan.seconds, factors[1] * plan.seconds)

    def text(self, *, explain: bool = False) -> str:
        lines = [*self._table()]
        if explain:
            lines += ["", *self._gains(), "", *self._rejections()]
        return "\n".join(lines)

    def _table(self) -> Iterator[str]:
        problem, result = self.result.problem, self.result
        yield (
            f"{count(problem.gpus, 'GPU')} ({problem.hardware.name}, {gib_text(problem.memory_bytes)}),"
            f" {count(problem.sequences_per_step, 'sequence')} of {count(problem.sequence, 'token')} per step:"
            f" {count(result.layouts, 'layout')}, {count(result.bounded, 'configuration')} considered,"
            f" {result.evaluated} simulated"
        )
        yield from _about_measured(problem)
        if self.measured is not None:
            yield f"measured: {self.measured.text}"
        if result.ended:
            yield _about_the_end(result)
        if not self.plans:
            yield "no plan was found so far" if result.ended else "no plan fits"
            for reason, layouts in result.refused.items():
                yield f"left out: {count(layouts, 'layout')}: {reason}"
            return
        yield ""
        rows: list[tuple[str, ...]] = [
            ("", "plan", "step", "tokens/s", "per GPU", "MFU", "most memory", "recomputed", "")
        ]
        rows += [self._row(str(number), plan) for number, plan in enumerate(self.plans, 1)]
        shown = {plan.configuration for plan in self.plans}
        for alternative in self.unpiped:
            if alternative.plan is None:
                assert alternative.nearest is not None
                remark = f"without a pipeline: {gib_text(alternative.nearest.shortfall)} too much"
                rows.append(("", alternative.kind, "-", "-", "-", "-", "-", "-", remark))
            elif alternative.plan.configuration not in shown:
                rows.append(self._row("", alternative.plan, "without a pipeline"))
        yield from table(rows, left=(1, 7, 8))
        yield ""
        namesakes = Counter(plan.configuration.name for plan in self.plans)
        for number, plan in enumerate(self.plans, 1):
            configuration = plan.configuration
            split = (
                f"; layers: {split_in_words(configuration.layers_per_stage)}"
                if namesakes[configuration.name] > 1
                else ""
            )
            yield f"{number:>{len(str(len(self.plans)))}}  limits: {binding(problem, plan)}{split}"
        interval = self._range(self.plans[0])
        if interval is not None:
            hint = "" if self.measured or problem.measured else "; --measured corrects that by a step of your own"
            yield f"plan 1: as predictions go, {seconds_text(interval[0])} to {seconds_text(interval[1])}{hint}"
        if self.budget is not None:
            yield f"plan 1: {self.budget.text(problem, self.plans[0])}"
        arrangement = "" if result.ended else arrangement_in_words(arranging_gain(problem, self.plans[0]))
        if arrangement:
            yield f"plan 1: {arrangement}"

    def _row(self, label: str, plan: Evaluation, remark: str = "") -> tuple[str, ...]:
        problem, tokens = self.result.problem, tokens_per_second(self.result.problem, plan)
        remarks = (remark, "estimate only" if refusal(problem, plan.configuration.recipe) else "")
        return (
            label,
            plan.configuration.name,
            seconds_text(plan.seconds),
            f"{tokens:,.0f}".replace(",", " "),
            f"{tokens / problem.gpus:,.0f}".replace(",", " "),
            f"{100 * utilization(problem, plan):.1f} %",
            gib_text(plan.devices[plan.worst].peak_bytes),
            recomputation(plan),
            ", ".join(filter(None, remarks)),
        )

    def _gains(self) -> Iterator[str]:
        compared = gains(self.result)
        if len(compared) > 1:
            yield "best plan of each vocabulary mode:"
        for gain in compared if len(compared) > 1 else ():
            yield f"  {gain.mode:<13}{seconds_text(gain.plan.seconds):>9}  {gain.words}"

    def _rejections(self) -> Iterator[str]:
        rejections = explained(self.result)
        if rejections:
            yield "would be faster, but do not fit:"
        for rejection in rejections:
            yield f"  {rejection.text()}"


# --- gain of vocabulary modes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gain:
    """The best plan of a vocabulary mode, compared with the fastest of all modes. factor: ratio of their step times."""

    mode: str
    plan: Evaluation
    factor: float
    words: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "vocabulary": self.mode,
            "seconds": self.plan.seconds,
            "factor": self.factor,
            "plan": self.plan.configuration.name,
            "why": self.words,
        }


def gains(result: PlanSearchResult) -> list[Gain]:
    """Return the best plan found for each vocabulary mode, fastest first, each with the reason for its time."""
    best = [plan for mode in result.space.vocabularies if (plan := result.best_of(mode)) is not None]
    best.sort(key=lambda plan: plan.seconds)
    factors = [plan.seconds / best[0].seconds for plan in best]
    return [
        Gain(plan.configuration.recipe.vocabulary, plan, factor, _why(result.problem, plan, factor))
        for plan, factor in zip(best, factors, strict=True)
    ]


def _why(problem: Problem, plan: Evaluation, factor: float) -> str:
    configuration = plan.configuration
    busy = plan.busy
    busiest = max(range(len(busy)), key=busy.__getitem__)
    idlest = min(range(len(busy)), key=busy.__getitem__)
    mean = sum(busy) / len(busy)
    longer = f"+{100 * (factor - 1):.1f} %: " if factor > 1 else ""
    words = f"{longer}{configuration.name}; a microbatch takes {seconds_text(busy[busiest])} on device {busiest}"
    if busy[busiest] < 1.02 * mean:
        words += ", as on all others"
    else:
        words += f", {seconds_text(busy[idlest])} on device {idlest}"
        if not configuration.recipe.mode.sharded:
            last_layers = count(configuration.layers_per_stage[-1], "layer")
            layers = f"{head_layers(problem, configuration.recipe):.1f} layers' time, beside {last_layers}"
            words += f": the output layer ({layers}) is whole on one device"
    worst = plan.devices[plan.worst] if plan.devices else None
    return words if worst is None else f"{words}; at most {gib_text(worst.peak_bytes)}"


# --- configurations that do not fit ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a configuration does not fit, and the plans nearest to it. fixes: pairs of a change and the resulting
    plan."""

    name: str
    shortfall: int
    where: str
    seconds: float
    fixes: tuple[tuple[str, Evaluation], ...]

    def text(self) -> str:
        line = f"{self.name}: out of memory by up to {gib_text(self.shortfall)} {self.where}"
        if not self.fixes:
            return line
        offers = ", ".join(f"{change} {100 * (plan.seconds / self.seconds - 1):+.1f} %" for change, plan in self.fixes)
        return f"{line}; cheapest fixes: {offers}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "lacking_bytes": self.shortfall,
            "where": self.where,
            "fixes": [
                {"change": change, "plan": plan.configuration.name, "seconds": plan.seconds}
                for change, plan in self.fixes
            ],
        }


def explained(result: PlanSearchResult) -> list[Rejection]:
    """Return the configurations that would be fastest, and faster than all plans, if memory were unlimited, each with
    the plans that differ least from it."""
    limit = math.inf if result.best is None else result.best.seconds
    candidates = [
        (
            order_bound(result.problem, plan.configuration.decided(activation_checkpointing="none")),
            plan.configuration.name,
            plan,
        )
        for plan in (*result.failed, *result.plans)
        if plan.without_recomputation or (plan.devices and not plan.fits)
    ]
    seen: set[tuple[Any, ...]] = set()
    rejections: list[Rejection] = []
    for seconds, name, plan in sorted(candidates, key=lambda candidate: candidate[:2]):
        family = (plan.configuration.recipe.parallelism, plan.configuration.recipe.vocabulary)
        if family not in seen and len(rejections) < REJECTED and seconds < limit:
            seen.add(family)
            rejections.append(_of_plan(result, plan, name, seconds))
    fastest: dict[Any, Rejected] = {}  # by the sizes of the axes
    for rejected in sorted(_rejected(result, limit), key=lambda rejected: rejected.bound.seconds):
        fastest.setdefault(rejected.layout.parallelism, rejected)
    return rejections + [_of_floor(rejected) for rejected in fastest.values()][: REJECTED - len(rejections)]


def by_shortfall(result: PlanSearchResult) -> list[Rejection]:
    """Return the rejections in order of the memory that they lack, smallest first."""
    rejections = [
        _of_plan(result, plan, plan.configuration.name, plan.seconds)
        for plan in result.failed
        if plan.devices and not plan.fault
    ]
    return sorted(
        [*rejections, *map(_of_floor, _rejected(result))], key=lambda rejection: (rejection.shortfall, rejection.name)
    )


def _rejected(result: PlanSearchResult, limit: float = math.inf) -> list[Rejected]:
    """Return what a bound rejected that may be faster than `limit`, without layouts that would be refused anyway: the
    search has not checked these."""
    faster = (rejected for rejected in result.rejected if rejected.bound.seconds < limit)
    return [rejected for rejected in faster if not refuses(result.problem, result.space, rejected.layout)]


def _of_plan(result: PlanSearchResult, plan: Evaluation, name: str, seconds: float) -> Rejection:
    """Return why a plan is slower than it would be with enough memory."""
    uses = plan.without_recomputation or plan.devices
    device = min(range(len(uses)), key=lambda device: uses[device].spare)
    where = f"on device {device}, {uses[device].event}"
    fixes: list[tuple[str, Evaluation]] = []
    if plan.fits:
        fixes.append((_measures(plan), plan))
    elif plan.without_recomputation:
        worst = plan.devices[plan.worst]
        where += f"; by {gib_text(-worst.spare)} on device {plan.worst} even if all layers keep only their input"
    alternatives = (fix for fix in _fixes(result, plan) if fix[1] is not plan)
    fixes += islice(alternatives, FIXES - len(fixes))
    return Rejection(name, max(0, -uses[device].spare), where, seconds, tuple(fixes))


def _measures(plan: Evaluation) -> str:
    """Return the measures that make a plan fit."""
    configuration = plan.configuration
    policies = configuration.checkpointing
    recomputed = [
        f"{count(policies.count(name), 'layer')} {name}" for name in ("selective", "full") if name in policies
    ]
    words = ["activations to the host"] if configuration.copy_seconds else []
    if configuration.host_share:
        words.append(f"{100 * configuration.host_share:.0f} % of the moments to the host")
    if recomputed:
        words.append(f"recompute ({', '.join(recomputed)})")
    return " and ".join(words)


def _of_floor(rejected: Rejected) -> Rejection:
    if rejected.configuration is not None:
        name, where = rejected.configuration.name, f"at least on device {rejected.bound.device}"
        where += ", even with full recomputation" * ("activation_checkpointing" in rejected.configuration.open)
    else:
        name = f"{name_of_axes(rejected.layout.parallelism)} {name_of_zero(rejected.layout.parallelism)}"
        where = "at least, for parameters, gradients and optimizer state alone"
    return Rejection(name, rejected.bound.shortfall, where, rejected.bound.seconds, ())


def _fixes(result: PlanSearchResult, failed: Evaluation) -> Iterator[tuple[str, Evaluation]]:
    """Yield plans as fixes of a configuration that does not fit, fastest first; those with more than two changes come
    last."""
    failed_choices = _choices(failed)
    ranked = []
    for plan in result.plans:
        choices = _choices(plan)
        changed = [
            f"{name} {value}" if name not in ("schedule", "vocabulary") else str(value)
            for name, value in choices.items()
            if value != failed_choices[name] and name not in ("dp", "layers")
        ]
        ranked.append((len(changed), plan.seconds, changed, plan))
    ranked.sort(key=lambda entry: (entry[0] > 2, entry[1], entry[0]))
    for _, _, changed, plan in ranked:
        yield " and ".join(changed) or "another split of layers", plan


def _choices(plan: Evaluation) -> dict[str, Any]:
    configuration = plan.configuration
    return {
        **{axis: getattr(configuration.recipe.parallelism, axis) for axis in (*AXES, "zero")},
        "microbatch size": configuration.recipe.batch.microbatch_size,
        "slices": configuration.recipe.slices,
        "schedule": configuration.schedule_name,
        "vocabulary": configuration.recipe.vocabulary,
        "layers": configuration.layers_per_stage,
        "offload": configuration.offload,
        "host share": configuration.host_share,
    }


# --- text --------------------------------------------------------------------------------------------------------


def progress_text(result: PlanSearchResult) -> str:
    """Return the progress of a search, in one line."""
    best = result.best
    plan = "no plan yet" if best is None else f"best step {seconds_text(best.seconds)}: {best.configuration.name}"
    if result.ended:
        return f"{_duration(result.seconds)}, checking {plan} (Ctrl-C: leave it unchecked)"
    return f"{_duration(result.seconds)}, {plan}; {_left(result)}"


def _left(result: PlanSearchResult) -> str:
    layouts = count(result.layouts, "layout")
    return f"{result.layouts_left} of {layouts} and {count(result.configurations_left, 'configuration')} left"


def _about_the_end(result: PlanSearchResult) -> str:
    """Return why a search ended early, and what that means."""
    reason = "the time is up" if result.ended == "time" else "interrupted"
    sentence = f"unfinished, {reason} after {_duration(result.seconds)}: {_left(result)}"
    if result.left:
        sentence += f", with steps of {seconds_text(result.least_seconds)} or more"
    if len(result.plans) > 1:
        sentence += "; steps of all plans but the first are rough"
    return sentence


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} minutes"


def _about_measured(problem: Problem) -> Iterator[str]:
    """If the hardware file has measured passes, yield a line on whether they are used for this model."""
    if not problem.hardware.passes:
        return
    sizes = sorted(
        {measurement.microbatch_size for measurement in problem.measured if measurement.sequence == problem.sequence}
    )
    if sizes:
        yield f"pass times corrected by measurements of this model with microbatches of {', '.join(map(str, sizes))}"
    else:
        yield "pass times from shapes alone: the hardware file measured other models, lengths or kernels"
