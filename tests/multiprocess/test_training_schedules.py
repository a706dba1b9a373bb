"""A run of the trainer that is resumed under other schedules, placements, modes and replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from training_runs import curve, prepared, train

PARTS = [
    # overrides of [pipeline], and the number of steps after which the part is stopped
    ("processes=2 schedule=zbv vocabulary=first-last", 2),
    ("processes=3 schedule=1f1b vocabulary=vocab-2", 4),
    ("processes=2 schedule=v-half vocabulary=vocab-1 checkpointing=full", 5),
    ("processes=4 schedule=zb-h1 vocabulary=vocab-2 replicas=2 microbatches=2", 7),
    ("processes=4 schedule=zbv replicas=2 microbatches=2 data_parallel=shard", 8),
    ("processes=2 schedule=interleaved vocabulary=interlaced layers_per_stage=[1,1,1,1]", None),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.slow
def test_resumed_under_another_schedule_and_placement_the_losses_agree(
    tmp_path: Path, tied: bool, sample: Callable
) -> None:
    changes = {"training.steps": 9, "checkpoint.every_steps": 1, "model.config.tie_word_embeddings": tied}
    whole, parts = (prepared(tmp_path / name, changes) for name in ("whole", "parts"))
    train(whole)
    for options, until in [*sample(PARTS[:-1], 2), PARTS[-1]]:
        train(parts, *(f"pipeline.{option}" for option in options.split()), until=until)
    expected, found = curve(tmp_path / "whole"), curve(tmp_path / "parts")
    assert [line[0] for line in found] == [line[0] for line in expected]
    assert [line[1] for line in found] == pytest.approx([line[1] for line in expected], rel=1e-6)
