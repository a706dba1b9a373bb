"""A collective method that only some processes call: all of them raise one sentence that says who called what, and the
pipeline goes on as if nothing had happened."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import describe, run_outcomes, run_processes
from small_families import CONFIGS

from evenpipe import Adafactor, InputError, Muon, Pipeline, Recipe, RunError, newest_checkpoint
from evenpipe.schedule import Costs

IDS = torch.arange(64).view(4, 16) % 61
LAYOUTS: dict[str, dict[str, Any]] = {
    "devices": {"pp": 2},
    "replicas": {"pp": 2, "dp": 2},
    "shards": {"pp": 2, "dp": 2, "data_parallel": "shard"},
    "replicas alone": {"dp": 2},
    "tensor ranks": {"tp": 2},
    "context ranks": {"pp": 2, "cp": 2},
}


def make(config: Any = None, *, timeout_seconds: float = 600.0, **layout: Any) -> Pipeline:
    return Pipeline(
        config or CONFIGS["llama"](),
        recipe=Recipe.of(microbatches=4, sequence_length=16, **layout),
        self_check=False,
        timeout_seconds=timeout_seconds,
    )


def methods_of(pipeline: Pipeline, folder: Path) -> dict[str, Callable[[], Any]]:
    """All collective methods, and functions that take the group of a pipeline, by the name in the sentence."""
    result = pipeline.step(IDS, record_passes=True)
    return {
        "step": lambda: pipeline.step(IDS),
        "evaluate": lambda: pipeline.evaluate(IDS),
        "clip_grad_norm_": lambda: pipeline.clip_grad_norm_(1e-3),
        "gather_numbers": lambda: pipeline.gather_numbers([1.0, 2.0]),
        "from_the_first": lambda: pipeline.from_the_first("text", "a text"),
        "trace": lambda: pipeline.trace(result),
        "arrange": lambda: pipeline.arrange(pipeline.layout.costs),
        "stream_state": lambda: list(pipeline.stream_state()),
        "stream_gradients": lambda: list(pipeline.stream_gradients()),
        "full_state_dict": pipeline.full_state_dict,
        "full_gradients": pipeline.full_gradients,
        "save_pretrained": lambda: pipeline.save_pretrained(folder / "model"),
        "save_checkpoint": lambda: pipeline.save_checkpoint(folder / "checkpoints", 1, None),
        "load_checkpoint": lambda: pipeline.load_checkpoint(folder / "checkpoints" / "step-00000001"),
        "newest_checkpoint": lambda: newest_checkpoint(folder / "checkpoints", pipeline.process_group),
    }


def sentence(calls: list[str]) -> str:
    """What everyone reads if processes make these calls, by rank. Places of processes aside."""
    ranks = {name: [str(rank) for rank, call in enumerate(calls) if call == name] for name in dict.fromkeys(calls)}
    said = [f"process{'es' if len(own) > 1 else ''} {', '.join(own)} called {name}" for name, own in ranks.items()]
    return f"{', '.join(said)}: every process must call it"


def raised_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except InputError as error:
        return str(error)
    return "nothing was raised"


def mix_all_pairs(layout: dict[str, Any], folder: Path) -> list[str]:
    """Every pair of methods, another process being the odd one each time; returns what went wrong."""
    pipeline, rank, processes = make(**layout), dist.get_rank(), dist.get_world_size()
    methods = methods_of(pipeline, folder)
    norm, loss = pipeline.clip_grad_norm_(float("inf")), pipeline.evaluate(IDS).loss
    faults, names = [], list(methods)
    for place, odd in enumerate(names):
        for others in names[:place]:
            calls = [others] * processes
            calls[(place + names.index(others)) % processes] = odd
            said = re.sub(r" \(device [^)]*\)", "", raised_by(methods[calls[rank]]))
            if said != sentence(calls):
                faults.append(f"{calls}: {said}")
    if pipeline.clip_grad_norm_(float("inf")) != norm or pipeline.evaluate(IDS).loss != loss:
        faults.append("gradients or parameters have changed")
    if list(folder.iterdir()):
        faults.append(f"{list(folder.iterdir())} were written")
    for name, method in methods.items():  # and then all of them, everywhere
        try:
            method()
        except Exception as error:
            faults.append(f"{name} on all processes: {error!r}")
    pipeline.close()
    return faults


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(1)
def test_every_mix_of_two_methods_is_named_on_all_processes(layout: str, tmp_path: Path) -> None:
    options = LAYOUTS[layout]
    processes = options.get("pp", 1) * options.get("dp", 1) * options.get("tp", 1) * options.get("cp", 1)
    assert run_processes(mix_all_pairs, processes, options, tmp_path) == [[]] * processes


# --- further ways to disagree -----------------------------------------------------------------------------------------

Calls = tuple[Pipeline, list[Callable[[], Any]]]
"""A pipeline, and what each of its processes calls."""


def router_biases() -> Calls:
    pipeline = make(CONFIGS["deepseek-v3"](), pp=2)
    load = pipeline.step(IDS).expert_load
    return pipeline, [lambda: pipeline.move_router_biases(load, 0.1), lambda: pipeline.step(IDS)]


def optimizers(kind: Callable[[Pipeline], Any]) -> Calls:
    pipeline = make(dp=2, data_parallel="shard")
    optimizer = kind(pipeline)
    pipeline.step(IDS)
    return pipeline, [optimizer.step, lambda: pipeline.clip_grad_norm_(1.0)]


def other_numbers() -> Calls:
    pipeline = make(pp=2)
    return pipeline, [lambda: pipeline.gather_numbers([0.5]), lambda: pipeline.gather_numbers([0.5] * 40)]


def other_costs() -> Calls:
    pipeline = make(pp=2, schedule="zbv")
    even = Costs(F=1.0, B=2.0, I=1.0, W=1.0, S=0.1, T=0.1, E=0.1, G=0.1)
    uneven = Costs(F=[1.0, 3.0, 0.5, 0.5], B=5.0, I=4.9, W=0.1, S=3.0, T=3.0, E=0.1, G=0.1)
    return pipeline, [lambda: pipeline.arrange(even), lambda: pipeline.arrange(uneven)]


def three_methods() -> Calls:
    pipeline = make(pp=2, dp=2)
    gradients = pipeline.full_gradients
    return pipeline, [gradients, lambda: pipeline.step(IDS), lambda: pipeline.evaluate(IDS), gradients]


DISAGREEMENTS: list[tuple[Callable[..., Calls], tuple[Any, ...], list[str] | str]] = [
    # who makes the calls, its arguments, and the methods that are called, or the sentence
    (router_biases, (), ["move_router_biases", "step"]),
    (optimizers, (Muon,), ["Muon.step", "clip_grad_norm_"]),
    (optimizers, (Adafactor,), ["Adafactor.step", "clip_grad_norm_"]),
    (other_numbers, (), "gather_numbers: [1, 40] numbers on the processes; expected equally many on all of them"),
    (other_costs, (), "arrange: processes were given other pass times; expected the same on all of them"),
    (three_methods, (), ["full_gradients", "step", "evaluate", "full_gradients"]),
]


def disagree(makes_calls: Callable[..., Calls], arguments: tuple[Any, ...]) -> str:
    """What each process reads; the pipeline still steps afterwards."""
    rank = dist.get_rank()
    pipeline, calls = makes_calls(*arguments)
    said = raised_by(calls[rank])
    pipeline.step(IDS)
    assert pipeline.gather_numbers([rank]) and pipeline.gather_numbers([float(rank)] * 40)
    pipeline.close()
    return said


@pytest.mark.parametrize(("makes_calls", "arguments", "says"), DISAGREEMENTS)
@pytest.mark.sampled(1)
def test_other_disagreements_are_named_too(makes_calls, arguments, says: list[str] | str) -> None:
    processes = 2 if isinstance(says, str) else len(says)
    expected = says if isinstance(says, str) else sentence(says)
    assert run_processes(disagree, processes, makes_calls, arguments) == [expected] * processes


# --- processes that call nothing any more -----------------------------------------------------------------------------

LIMIT_SECONDS = 8.0


def wait_for_others_in_vain(method: str, others: str, folder: Path) -> str:
    pipeline = make(pp=2, timeout_seconds=LIMIT_SECONDS)
    methods, done = methods_of(pipeline, folder), folder / "done"
    if dist.get_rank():
        while others == "work" and not done.exists():
            time.sleep(0.05)
        return ""
    started = time.monotonic()
    try:
        methods[method]()
    except RunError as error:
        assert others == "end" or time.monotonic() - started >= LIMIT_SECONDS
        return str(error)
    finally:
        done.touch()
    return "nothing was raised"


@pytest.mark.parametrize("method", ["save_checkpoint", "full_state_dict", "trace"])
@pytest.mark.parametrize(
    ("others", "says"),
    [
        ("work", "process 0 timed out awaiting the call of {0} from process 1; process 1 does not wait"),
        ("end", "has ended while others still needed it; process 0 was awaiting the call of {0} from process 1"),
    ],
)
@pytest.mark.sampled(1)
def test_the_limit_of_a_wait_holds_if_others_call_nothing(method: str, others: str, says: str, tmp_path: Path) -> None:
    outcomes = run_outcomes(wait_for_others_in_vain, 2, method, others, tmp_path)
    assert says.format(method) in outcomes[0].value, describe(outcomes)


def leave_a_stream() -> str:
    pipeline = make(pp=2, timeout_seconds=LIMIT_SECONDS)
    pipeline.step(IDS)
    for _ in pipeline.stream_state():
        break
    try:
        pipeline.step(IDS)
    except (InputError, RunError) as error:
        return str(error)
    return "nothing was raised"


def test_a_stream_that_is_left_is_named_by_the_next_method() -> None:
    outcomes = run_outcomes(leave_a_stream, 2)
    assert outcomes[0].value == "step: stream_state was left before its end; expected it to be exhausted first"
    assert outcomes[1].exception is not None and "awaiting part of " in str(outcomes[1].exception), describe(outcomes)
