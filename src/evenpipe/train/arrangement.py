"""Arranges the order of a run by measured pass times: in its first steps, and again when the times drift.

A schedule is a rule; the order of its passes depends on their times. A run starts with an order arranged by computed
times. Steps 3 to 6 are recorded, and their median times of passes and transfers (over steps, replicas and ranks) give
another order. The run switches to it, between two steps, if a step is predicted to become more than 1 % shorter and no
device holds more activations than before. Checkpoints save the times, so a resumed run begins with the same order.
Every 100 steps one step is recorded: if a pass takes 5 % more or less time than before (a slow device, longer
sequences), four steps are measured again.

Two runs measure different times, but their weights are bitwise identical: models whose gradients depend on the order
(`order_matters`) keep it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from evenpipe.costs import costs_of
from evenpipe.errors import InputError
from evenpipe.runtime.pipeline import Pipeline
from evenpipe.runtime.result import StepResult
from evenpipe.schedule import Costs, Program
from evenpipe.schedule.held import peak_activations
from evenpipe.schedule.trace import Trace
from evenpipe.simulate import simulate
from evenpipe.train.config import Config

WARM_UP, MEASURED = 2, 4
"""Warm-up steps after a start, and the measured steps that follow."""
EVERY = 100
"""Steps between two checks for drift."""
DRIFT = 0.05
"""Relative change in the time of a pass that triggers a new measurement."""
WORTH = 0.01
"""A new order must shorten the predicted step by more than this fraction."""
PASSES = ("F", "B", "I", "W", "R", "S", "C", "T")


class Arrangement:
    """Made on every process of a run; all methods except `records` and `state` are collective."""

    def __init__(self, pipeline: Pipeline, config: Config) -> None:
        self._pipeline = pipeline
        self._tokens = config.data.sequence_length
        resolved = {"layers_per_stage": pipeline.layout.layers_per_stage, "sequence_length": self._tokens}
        self._valid_for = json.loads(json.dumps({**asdict(config.pipeline), **resolved}))
        """The settings for which the times are valid, as read back from a checkpoint."""
        is_requested = config.pipeline.arrange == "measured" and config.pipeline.costs is None
        has_named_schedule = isinstance(pipeline.recipe.schedule, str) and pipeline.devices > 1
        self._is_on = is_requested and has_named_schedule and not pipeline.order_matters
        self._to_record: range = range(0)
        """Steps to record."""
        self._traces: list[Trace] = []
        self._known: dict[str, Any] | None = None
        """Times at the last decision; valid only on the first process of the run."""
        self._arranged_by: dict[str, Any] | None = None
        """Times that arranged the order, as `Costs.to_dict`; None: the initial order. The same on all processes."""

    def begin(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Begin after `step` steps of the run. state: `state()` from the checkpoint to continue from."""
        self._to_record = range(step + WARM_UP + 1, step + WARM_UP + MEASURED + 1)
        if not self._is_on or state is None or state["for"] != self._valid_for:
            return
        self._known = state["known"]
        if self._known is not None and state["next"] > step:
            self._to_record = _single_step(state["next"])
        if state["arranged_by"] is not None:
            self._take(state["arranged_by"])

    def state(self) -> dict[str, Any]:
        """Return the values for a checkpoint, which saves those of the first process of the run."""
        return {
            "for": self._valid_for,
            "known": self._known,
            "arranged_by": self._arranged_by,
            "next": self._to_record.start,
        }

    def records(self, step: int) -> bool:
        """Return whether to record the passes of a step; the first step is 1."""
        return self._is_on and step in self._to_record

    def observe(self, step: int, result: StepResult) -> str | None:
        """Evaluate a recorded step. Returns a message for the user, if any, on the first process of the run."""
        trace = self._pipeline.trace(result)
        if trace is not None:
            self._traces.append(trace)
        if step + 1 in self._to_record:
            return None
        measured = len(self._to_record)
        costs = self._costs()
        if measured == 1 and self._pipeline.from_the_first(self._drifted(costs), "drifting passes") is not None:
            self._to_record = range(step + 1, step + MEASURED + 1)
            return None
        self._to_record = _single_step(step + EVERY)
        return None if measured == 1 else self._decide(costs, step)

    def _take(self, costs: dict[str, Any]) -> None:
        """Switch to the order arranged by these times."""
        self._arranged_by = costs
        self._pipeline.arrange(Costs.from_dict(costs))

    # --- on the first process of the run ----------------------------------------------------------------------------

    def _decide(self, costs: Costs | None, step: int) -> str | None:
        """Switch to another order if it is worthwhile."""
        message = text = None
        if costs is not None:
            self._known, pipeline = costs.to_dict(), self._pipeline
            try:
                program = pipeline.layout_by(costs).program
                old_seconds, new_seconds = (
                    simulate(candidate, costs).makespan for candidate in (pipeline.program, program)
                )
            except InputError as error:  # no reason to end a run
                message = f"the order stays: it cannot be arranged by measured passes ({error})"
            else:
                if new_seconds < (1 - WORTH) * old_seconds and not _holds_more(program, pipeline.program):
                    text = json.dumps(self._known)
                    message = (
                        f"order arranged by the passes of steps {step - MEASURED + 1} to {step}: a step is predicted to"
                        f" take {new_seconds:.3g} s, {100 * (1 - new_seconds / old_seconds):.1f} % less than before"
                    )
        text = self._pipeline.from_the_first(text, "another order")
        if text is not None:
            self._take(json.loads(text))
        return message

    def _drifted(self, costs: Costs | None) -> str | None:
        """Return the passes whose times differ from those at the last decision."""
        if costs is None or self._known is None:
            return None
        known, now = dict(_numbers(self._known)), dict(_numbers(costs.to_dict()))
        changed = [
            ".".join(map(str, path))
            for path, seconds in known.items()
            if path[0] in PASSES and path in now and abs(now[path] - seconds) > DRIFT * seconds
        ]
        return ", ".join(changed) or None

    def _costs(self) -> Costs | None:
        """Return the median times over all replicas and ranks, on the first process of the run; collective."""
        pipeline, traces = self._pipeline, self._traces
        self._traces = []
        measured: dict[str, Any] = {}
        by_rank = [rank_trace for trace in traces for rank_trace in trace.by_rank]
        lengths = pipeline.slice_lengths(self._tokens)
        with suppress(InputError):  # indistinguishable times cannot arrange anything
            measured = costs_of(by_rank, tokens=lengths if len(lengths) > 1 else ()).to_dict() if traces else {}
        seconds = dict(_numbers(measured))
        if pipeline.replicas * pipeline.context_ranks > 1:
            names = pipeline.from_the_first(json.dumps([list(path) for path in seconds]), "names of passes")
            paths = [tuple(path) for path in json.loads(names or "[]")]
            table = pipeline.gather_numbers([seconds.get(path, math.nan) for path in paths])
            seconds = {
                path: statistics.median(value for value in column if not math.isnan(value))
                for path, column in zip(paths, zip(*table, strict=True), strict=True)
            }
        if not measured or not (pipeline.feeds and pipeline.replica == 0):
            return None
        return Costs.from_dict(_filled(measured, seconds))


def changes_of_order(pipeline: Pipeline, previous: str) -> list[str]:
    """Return messages for a resumed run whose order is arranged by other times than `previous`."""
    now = pipeline.layout.arranged_by
    if now == previous or not pipeline.order_matters:
        return []
    return [
        f"the schedule was arranged by {previous}, and is now by {now}: gradients may be summed in another order, so"
        " results may differ in their last bits; pipeline.arrange keeps an order"
    ]


def _holds_more(program: Program, reference: Program) -> bool:
    """Return whether any device has more activations in flight than in `reference`."""
    peaks, reference_peaks = (
        [peak_activations(candidate.order.passes(device)) for device in range(candidate.devices)]
        for candidate in (program, reference)
    )
    return any(peak > reference_peak for peak, reference_peak in zip(peaks, reference_peaks, strict=True))


Path = tuple[str | int, ...]


def _numbers(values: Any, path: Path = ()) -> Iterator[tuple[Path, float]]:
    """Yield (path, number) for every number in nested dicts and lists."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _numbers(value, (*path, name))
    elif isinstance(values, (list, tuple)):
        for index, value in enumerate(values):
            yield from _numbers(value, (*path, index))
    elif isinstance(values, (int, float)):
        yield path, float(values)


def _filled(values: Any, numbers: Mapping[Path, float], path: Path = ()) -> Any:
    """Return nested dicts and lists with numbers replaced by those in `numbers`."""
    if isinstance(values, Mapping):
        return {name: _filled(value, numbers, (*path, name)) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_filled(value, numbers, (*path, index)) for index, value in enumerate(values)]
    return numbers.get(path, values)


def _single_step(step: int) -> range:
    return range(step, step + 1)
