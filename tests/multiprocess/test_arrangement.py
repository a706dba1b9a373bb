"""A run that takes another order after its first steps: for one slow device, in the same steps after a kill, and with
the weights of a run that keeps its order, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_processes
from small_families import CONFIGS
from traced_steps import measured
from training_runs import curve, prepared, train_config_until
from transformers import PreTrainedConfig

from evenpipe import Pipeline
from evenpipe.checkpoints import open_checkpoint
from evenpipe.errors import InputError
from evenpipe.runtime.result import StepResult
from evenpipe.schedule import Costs, plan_order
from evenpipe.schedule.passes import REDUCING_KINDS
from evenpipe.schedule.trace import Trace
from evenpipe.train.config import Config
from evenpipe.train.config_file import load_config
from evenpipe.train.trainer import _Run

SECONDS = (0.006, 0.004)
"""Of every pass, by device."""
TIMES = Costs(F=SECONDS, B=SECONDS, I=SECONDS, W=SECONDS, S=SECONDS, T=SECONDS, E=0.0, G=0.0, p2p=1e-4)


class TimedPipeline(Pipeline):
    """Its traces have the passes that ran, with the times of a machine whose first device is slow. What a busy machine
    takes is a throw of dice, and then nobody can say which order suits it."""

    def trace(self, result: StepResult, **about: Any) -> Trace | None:
        real = super().trace(result, **about)
        if real is None:
            return None
        rows = ([item for item in row if item is None or item.kind not in REDUCING_KINDS] for row in self.program.rows)
        timed = measured(replace(self.program, rows=tuple(map(tuple, rows))), TIMES)
        for row, timed_row in zip(real.devices, timed.devices, strict=True):
            assert {entry.item for entry in row.passes} >= {entry.item for entry in timed_row.passes}
        return timed


def orders_of_a_run(config: Config, until: int | None) -> list[str]:
    """Return the order of each step of one start on this process. It is stopped after `until` steps of the run."""
    begin, take_step, orders = _Run.resume, _Run._step, []

    def resume(run: _Run) -> None:
        run.pipeline.__class__ = TimedPipeline
        begin(run)

    def step(run: _Run) -> None:
        orders.append("\n".join(" ".join(map(str, row)) for row in run.pipeline.order.rows))
        take_step(run)

    _Run.resume, _Run._step = resume, step
    train_config_until(config, until)
    return orders


def configured(folder: Path, **changes: Any) -> Config:
    options = {"schedule": "zb-h1", "vocabulary": "vocab-1", "microbatches": 2, **changes}
    tied = {"model.config.tie_word_embeddings": options.pop("tied", False)}
    return load_config(prepared(folder, {**tied, **{f"pipeline.{name}": value for name, value in options.items()}}))


# --- gradients of all orders ------------------------------------------------------------------------------------------


def model_of(family: str) -> PreTrainedConfig:
    routers = {"output_router_logits": True} if family == "mixtral" else {}
    return CONFIGS[family](num_hidden_layers=8, **routers)


def orders_and_bits(family: str, options: dict[str, Any]) -> tuple[int, int]:
    """How many different orders some random times arrange, and how many different gradients they give."""
    pipeline = Pipeline(model_of(family), microbatches=6, self_check=False, **options)
    assert not pipeline.order_matters
    ids = torch.randint(0, 61, (6, 16), generator=torch.Generator().manual_seed(1))
    chance = random.Random(5)
    orders, bits = set(), set()
    for _ in range(6):
        pipeline.zero_grad()
        pipeline.step(ids)
        orders.add(pipeline.order.rows)
        bits.add(b"".join(one.grad.numpy().tobytes() for _, one in sorted(pipeline.named_parameters())))
        stages, devices = pipeline.program.placement.stages, pipeline.devices
        times = {kind: [chance.uniform(0.5, 3) for _ in range(stages)] for kind in "FBIW"}
        times |= {kind: [chance.uniform(0.1, 3) for _ in range(devices)] for kind in "SCTEG"}
        pipeline.arrange(Costs.from_dict({**times, "p2p": chance.uniform(0, 1)}))
    pipeline.close()
    return len(orders), len(bits)


RANKS = ("tp", "cp", "dp")
ORDERS = [
    *(("llama", {"schedule": name, "vocabulary": "vocab-2"}) for name in ("1f1b", "interleaved", "zb-h1", "v-half")),
    *(("llama", {"schedule": "zbv", "vocabulary": mode}) for mode in ("first-last", "vocab-1", "interlaced")),
    ("llama", {"schedule": "zbv", "tp": 2}),
    ("llama", {"schedule": "zb-h1", "slices": 2, "cp": 2}),
    ("mixtral", {"schedule": "zbv"}),
    ("mixtral", {"schedule": "zbv", "dp": 2, "ep": 2}),
]


def all_orders_and_bits(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, int]]:
    return [orders_and_bits(*case) for case in cases]


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.slow
def test_gradients_do_not_depend_on_the_order(processes: int, sample: Callable) -> None:
    cases = [case for case in ORDERS if 2 * max([1, *(case[1].get(axis, 1) for axis in RANKS)]) == processes]
    cases = sample(cases, 1)
    counted = run_processes(all_orders_and_bits, processes, cases)
    for case, *counts in zip(cases, *counted, strict=True):
        orders = counts[0][0]
        assert orders > 2 and counts == [(orders, 1)] * processes, case


def refused(schedule: Any) -> str:
    pipeline = Pipeline(model_of("llama"), microbatches=6, self_check=False, schedule=schedule)
    with pytest.raises(InputError) as caught:
        pipeline.arrange(Costs(F=1.0, B=2.0, S=0.1, T=0.1))
    return str(caught.value)


def test_a_given_order_is_not_arranged() -> None:
    (said,) = run_processes(refused, 1, plan_order("1f1b", 1, 6, "vocab-2"))
    assert said == "arrange: this pipeline runs a given order; expected one with a named schedule"


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_slow_device_gets_another_order_which_a_resumed_run_has_again(tmp_path: Path) -> None:
    kept = run_processes(orders_of_a_run, 2, configured(tmp_path / "kept", arrange="auto"), None)
    assert len({*kept[0], *kept[1]}) == 1
    config = configured(tmp_path / "run")
    first = run_processes(orders_of_a_run, 2, config, 10)
    assert first[0] == first[1]
    assert len(set(first[0][:6])) == len(set(first[0][6:])) == 1
    assert first[0][5] == kept[0][0]
    assert first[0][6] != kept[0][0]
    arranged = open_checkpoint(tmp_path / "run/run/checkpoints/step-00000008").extra["arrangement"]
    assert arranged["next"] == 106
    assert arranged["arranged_by"]["F"] == pytest.approx(SECONDS)
    second = run_processes(orders_of_a_run, 2, config, None)
    assert second == [[first[0][6]] * 4] * 2
    assert curve(tmp_path / "run") == curve(tmp_path / "kept")


@pytest.mark.parametrize("changes", [{"tied": True}, {"schedule": "1f1b", "vocabulary": "first-last"}], ids=str)
@pytest.mark.sampled(1)
def test_orders_stay_where_another_one_would_change_bits_or_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    orders = run_processes(orders_of_a_run, 2, configured(tmp_path, **changes), None)
    assert len({*orders[0], *orders[1]}) == 1


def test_replicas_agree_on_the_times(tmp_path: Path) -> None:
    config = configured(tmp_path, processes=4, dp=2)
    orders = run_processes(orders_of_a_run, 4, config, 8)
    assert orders == [orders[0]] * 4
    assert orders[0][6] != orders[0][0]
