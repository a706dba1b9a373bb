"""Runs of the trainer under every schedule, resumed under other schedules, placements, modes and replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_processes
from test_training import StoppedError, curve, write_config

from evenpipe.schedule import SCHEDULES
from evenpipe.train import trainer
from evenpipe.train.config_file import load_config
from evenpipe.train.data import prepare

STEPS = 3


def options(**pipeline: Any) -> list[str]:
    return [f"pipeline.{name}={value}" for name, value in pipeline.items()]


def train_with(path: str, folder: str, until: int | None, pipeline: dict[str, Any]) -> None:
    """The trainer on these processes, stopped before step `until` + 1 is taken."""
    given = ["model.self_check=false", f"output.folder={folder}", *options(processes=dist.get_world_size(), **pipeline)]
    config = load_config(Path(path), [*given, f"data.cache_folder={Path(path).parent / 'data'}"])
    if dist.get_rank() == 0:
        prepare(config, say=lambda text: None)  # finds it in the cache
    dist.barrier()
    take_step = trainer._Run._step

    def step(run: trainer._Run) -> None:
        if run.progress.step == until:
            run.save()
            raise StoppedError
        take_step(run)

    trainer._Run._step = step
    try:
        trainer.train(config)
    except StoppedError:
        pass
    finally:
        trainer._Run._step = take_step


def train_all(path: str, folder: str, names: list[str]) -> None:
    for name in names:
        train_with(path, f"{folder}/{name}/run", None, {"schedule": name})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration whose data is prepared."""
    path = write_config(tmp_path, steps=STEPS)
    prepare(load_config(path, [f"data.cache_folder={tmp_path / 'data'}"]), say=lambda text: None)
    return path


def test_every_schedule_trains_alike(config: Path, tmp_path: Path, sample) -> None:
    names = ["1f1b", *sample([name for name in SCHEDULES if name != "1f1b"], 4)]
    run_processes(train_all, 2, str(config), str(tmp_path), names)
    expected = curve(tmp_path / "1f1b")
    assert [line[0] for line in expected] == [*range(1, STEPS + 1), STEPS]
    for name in names:
        for found, wanted in zip(curve(tmp_path / name), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-6), name


PARTS = [
    # processes, options, stopped behind this step
    (2, {"schedule": "zbv", "vocabulary": "first-last"}, 2),
    (3, {"schedule": "1f1b", "vocabulary": "vocab-2"}, 4),
    (2, {"schedule": "v-half", "vocabulary": "vocab-1", "checkpointing": "full"}, 5),
    (4, {"schedule": "zb-h1", "vocabulary": "vocab-2", "replicas": 2, "microbatches": 2}, 7),
    (4, {"schedule": "zbv", "replicas": 2, "microbatches": 2, "data_parallel": "shard"}, 8),
    (2, {"schedule": "interleaved", "vocabulary": "interlaced", "layers_per_stage": [1, 1, 1, 1]}, None),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.sampled(1)
def test_resumed_under_another_schedule_and_placement_the_losses_agree(tmp_path: Path, tied: bool, sample) -> None:
    path = write_config(tmp_path, steps=9, tied=tied)
    prepare(load_config(path, [f"data.cache_folder={tmp_path / 'data'}"]), say=lambda text: None)
    run_processes(train_with, 2, str(path), str(tmp_path / "whole" / "run"), None, {})
    for processes, pipeline, until in [*sample(PARTS[:-1], 2), PARTS[-1]]:
        folder = str(tmp_path / "parts" / "run")
        run_processes(train_with, processes, str(path), folder, until, pipeline)
    expected, found = curve(tmp_path / "whole"), curve(tmp_path / "parts")
    assert [line[0] for line in found] == [line[0] for line in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[1] == pytest.approx(other[1], rel=1e-6)
