"""Marks of health on checkpoints: which ones are kept, found and listed, and what is set aside when a run goes back."""

from __future__ import annotations

import random
from pathlib import Path

from checkpoint_run import Run, flip, saved_steps, truncate

from evenpipe.checkpoints import (
    abandon_later,
    find_latest,
    find_step,
    list_checkpoints,
    mark_unhealthy,
    open_checkpoint,
)
from evenpipe.checkpoints import save as save_checkpoint

FAULT = "the loss has doubled"


def save(folder: Path, step: int, *, healthy: bool = True, keep: int | None = 2) -> Path:
    run = Run()
    metadata = {"extra": {"step": step}, **({} if healthy else {"unhealthy": FAULT})}
    return save_checkpoint(folder, step, run.shards, run.optimizer, metadata, keep=keep)


def steps_in(folder: Path) -> str:
    """`1 2- 3`: steps 1 to 3, of which the second is unhealthy."""
    listed = reversed(list_checkpoints(folder))
    return " ".join(f"{saved.step}" + ("" if saved.unhealthy is None else "-") for saved in listed)


KEPT = [
    # saved in this order ("-": unhealthy), keep, left
    ("1 2 3 4", 2, "3 4"),
    ("1 2", 1, "2"),
    ("1 2 3- 4-", 2, "2 3- 4-"),
    ("1 2 3- 4- 5- 6-", 2, "2 5- 6-"),
    ("1 2 3- 4", 2, "3- 4"),
    ("1 2- 3-", 1, "1 3-"),
    ("1 2- 3- 4", 1, "4"),
    ("1- 2- 3- 4-", 2, "3- 4-"),
    ("1 2- 3-", None, "1 2- 3-"),
    ("1 2- 3 4-", 3, "2- 3 4-"),
]


def test_the_newest_healthy_one_is_never_deleted(tmp_path: Path) -> None:
    for number, (saved, keep, left) in enumerate(KEPT):
        for step in saved.split():
            save(tmp_path / str(number), int(step.rstrip("-")), healthy=not step.endswith("-"), keep=keep)
        assert steps_in(tmp_path / str(number)) == left, (saved, keep)


def test_a_truncated_one_is_no_healthy_one(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, keep=None)
    truncate(tmp_path / "step-00000002" / "__0_0.distcp", random.Random(0))
    for step in (3, 4, 5):
        save(tmp_path, step, healthy=False, keep=1)
    assert steps_in(tmp_path) == "1 5-"


def test_one_that_turns_out_to_be_ruined_is_marked_afterwards(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, healthy=step != 3, keep=None)
    mark_unhealthy(tmp_path, 2, "it led to a loss of nan")
    assert steps_in(tmp_path) == "1 2- 3-"
    assert find_step(tmp_path, 2).checkpoint.unhealthy == "it led to a loss of nan"
    assert open_checkpoint(tmp_path / "step-00000003").unhealthy == FAULT
    assert open_checkpoint(tmp_path / "step-00000001").unhealthy is None
    save(tmp_path, 4, healthy=False, keep=2)
    assert steps_in(tmp_path) == "1 3- 4-"


def test_a_step_is_found_by_its_number(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=None)
    assert find_step(tmp_path, 2).checkpoint.extra == {"step": 2}
    assert find_step(tmp_path, 5).checkpoint is None
    flip(tmp_path / "step-00000002" / "__0_0.distcp", random.Random(0))
    found = find_step(tmp_path, 2)
    assert found.checkpoint is None
    assert [rejected.path.name for rejected in found.rejected] == ["step-00000002"]
    assert [saved.step for saved in list_checkpoints(tmp_path)] == [3, 2, 1], "it does not read what is large"


def test_later_ones_are_abandoned_and_deleted_when_the_run_has_passed_them(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step, keep=None)
    assert abandon_later(tmp_path, 2) == [4, 6]
    assert find_latest(tmp_path).checkpoint.step == 2
    assert steps_in(tmp_path) == "2"
    assert open_checkpoint(tmp_path / "step-00000006.abandoned").step == 6, "renaming it back is all it takes"
    save(tmp_path, 3)
    abandoned = ["step-00000004.abandoned", "step-00000006.abandoned"]
    assert saved_steps(tmp_path) == ["step-00000002", "step-00000003", *abandoned]
    save(tmp_path, 4)
    assert saved_steps(tmp_path) == ["step-00000003", "step-00000004", abandoned[1]]
    save(tmp_path, 7)
    assert saved_steps(tmp_path) == ["step-00000004", "step-00000007"]


def test_a_step_may_be_abandoned_again(tmp_path: Path) -> None:
    """Also one whose save was interrupted between two renames."""
    for _ in range(2):
        save(tmp_path, 2)
        save(tmp_path, 4)
        assert abandon_later(tmp_path, 2) == [4]
        assert saved_steps(tmp_path) == ["step-00000002", "step-00000004.abandoned"]
    save(tmp_path, 4)
    (tmp_path / "step-00000004").rename(tmp_path / "step-00000004.replaced")
    assert abandon_later(tmp_path, 2) == [4]
    assert saved_steps(tmp_path) == ["step-00000002", "step-00000004.abandoned"]
    assert abandon_later(tmp_path, 2) == []
