"""A run that takes another order after its first steps: for one slow device, in the same steps after a kill, and with
the weights of a run that keeps its order, to the last bit."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_processes
from test_training import StoppedError, curve, train_config_until, write_config
from transformers import LlamaConfig, MixtralConfig

from evenpipe import Pipeline
from evenpipe.checkpoints import open_checkpoint
from evenpipe.errors import InputError
from evenpipe.runtime.walker import Walker
from evenpipe.schedule import Costs, plan_order
from evenpipe.schedule.passes import STAGE_KINDS, VOCABULARY_KINDS
from evenpipe.train.config import Config
from evenpipe.train.config_file import load_config
from evenpipe.train.data import prepare
from evenpipe.train.trainer import _Run

PAUSE = (0.03, 0.02)
"""Seconds that every pass takes at least, by device."""


def slow(walker: Walker, seconds: float) -> None:
    def slowed(handler: Callable[..., None]) -> Callable[..., None]:
        def run(item: Any) -> None:
            handler(item)
            time.sleep(seconds)

        return run

    for kind in {*STAGE_KINDS, *VOCABULARY_KINDS} & walker._pass_handlers.keys():
        walker._pass_handlers[kind] = slowed(walker._pass_handlers[kind])


def orders_of_a_run(config: Config, until: int | None) -> list[str]:
    """The order of each step of one start on this process. It is stopped before step `until` is taken."""
    begin, take_step, orders = _Run.resume, _Run._step, []

    def resume(run: _Run) -> None:
        slow(run.pipeline._walker, PAUSE[run.pipeline.device])
        begin(run)

    def step(run: _Run) -> None:
        orders.append("\n".join(" ".join(map(str, row)) for row in run.pipeline.order.rows))
        take_step(run)

    _Run.resume, _Run._step = resume, step
    with contextlib.suppress(StoppedError):
        train_config_until(config, until)
    return orders


def configured(folder: Path, *, tied: bool = False, **changes: Any) -> Config:
    config = load_config(write_config(folder, tied=tied))
    changes = {"schedule": "zb-h1", "vocabulary": "vocab-1", "microbatches": 2, **changes}
    config = replace(config, pipeline=replace(config.pipeline, **changes))
    prepare(config, say=lambda text: None)
    return config


# --- gradients of all orders ------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": LlamaConfig(**SIZES, intermediate_size=32, tie_word_embeddings=False),
    "mixtral": MixtralConfig(**SIZES, intermediate_size=16, num_local_experts=4, output_router_logits=True),
}


def orders_and_bits(model: str, options: dict[str, Any]) -> tuple[int, int]:
    """How many different orders some random times arrange, and how many different gradients they give."""
    pipeline = Pipeline(MODELS[model], microbatches=6, self_check=False, **options)
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


ORDERS = [
    *(("llama", {"schedule": name, "vocabulary": "vocab-2"}) for name in ("1f1b", "interleaved", "zb-h1", "v-half")),
    *(("llama", {"schedule": "zbv", "vocabulary": mode}) for mode in ("first-last", "vocab-1", "interlaced")),
    ("llama", {"schedule": "zbv", "tensor_parallel": 2}),
    ("llama", {"schedule": "zb-h1", "slices": 2, "context_parallel": 2}),
    ("mixtral", {"schedule": "zbv"}),
    ("mixtral", {"schedule": "zbv", "replicas": 2, "expert_parallel": 2}),
]


@pytest.mark.parametrize(("model", "options"), ORDERS, ids=str)
def test_gradients_do_not_depend_on_the_order(model: str, options: dict[str, Any]) -> None:
    ranks = [options.get(axis, 1) for axis in ("tensor_parallel", "context_parallel", "replicas")]
    found = run_processes(orders_and_bits, 2 * max(ranks), model, options)
    assert {bits for _, bits in found} == {1}
    assert {orders for orders, _ in found} == {found[0][0]}
    assert found[0][0] > 2


def refused(schedule: Any) -> str:
    pipeline = Pipeline(MODELS["llama"], microbatches=6, self_check=False, schedule=schedule)
    with pytest.raises(InputError) as caught:
        pipeline.arrange(Costs(F=1.0, B=2.0, S=0.1, T=0.1))
    return str(caught.value)


def test_a_given_order_is_not_arranged() -> None:
    (said,) = run_processes(refused, 1, plan_order("1f1b", 1, 6, "vocab-2"))
    assert said == "arrange: this pipeline runs a given order, expected one with a named schedule"


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
    assert arranged["arranged_by"]["F"] == pytest.approx(PAUSE, rel=0.5)
    second = run_processes(orders_of_a_run, 2, config, None)
    assert second == [[first[0][6]] * 4] * 2
    assert curve(tmp_path / "run") == curve(tmp_path / "kept")


@pytest.mark.parametrize("changes", [{"tied": True}, {"schedule": "1f1b", "vocabulary": "first-last"}], ids=str)
def test_orders_stay_where_another_one_would_change_bits_or_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    orders = run_processes(orders_of_a_run, 2, configured(tmp_path, **changes), None)
    assert len({*orders[0], *orders[1]}) == 1


def test_replicas_agree_on_the_times(tmp_path: Path) -> None:
    config = configured(tmp_path, processes=4, replicas=2)
    orders = run_processes(orders_of_a_run, 4, config, 8)
    assert orders == [orders[0]] * 4
    assert orders[0][6] != orders[0][0]
