"""The position in the data: whatever changes between starts of a run, each row is read once per epoch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_of_runs import LENGTH, Start, batches, faults_of_run, prepared

from evenpipe.train.position import resumed_position, saved_position


def state_of_old_version(
    step: int, size: int, *, tokens: int | None = None, length: int = LENGTH, fraction: float = 0.0
) -> dict[str, object]:
    """What a checkpoint without a position says."""
    identity = {"data.sequence_length": length, "data.validation_fraction": fraction, "sequences per step": size}
    return {"data": identity, "tokens": step * size * length if tokens is None else tokens}


starts = st.lists(st.builds(Start, st.integers(0, 6), st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=8)


@settings(max_examples=200)
@given(rows=st.integers(2, 40), starts=starts, fraction=st.sampled_from([0.0, 0.2]), packed=st.booleans())
def test_each_row_is_read_once_per_epoch(rows: int, starts: list[Start], fraction: float, packed: bool) -> None:
    assert not faults_of_run(rows, starts, fraction=fraction, packed=packed)


@given(steps=st.integers(0, 30), size=st.integers(1, 9), rows=st.integers(1, 40))
def test_with_the_same_sizes_a_resumed_run_has_the_batches_of_an_uninterrupted_one(
    steps: int, size: int, rows: int
) -> None:
    whole = batches(rows, size)
    state = {"position": saved_position(steps * size, whole)}
    position, _ = resumed_position(state, steps, prepared(rows * LENGTH), batches(rows, size))
    assert batches(rows, size).row_numbers(position) == whole.row_numbers(steps * size)


OLD = [
    # step, rows per step then, rows per step now, position
    (6, 4, 4, 24),
    (6, 4, 8, 24),
    (6, 4, 3, 24),
    (0, 4, 8, 0),
]


@pytest.mark.parametrize(("step", "before", "now", "position"), OLD)
def test_a_checkpoint_of_an_older_version_says_how_many_rows_its_steps_had(
    step: int, before: int, now: int, position: int
) -> None:
    state = state_of_old_version(step, before)
    assert resumed_position(state, step, prepared(40 * LENGTH), batches(40, now)) == (position, [])


def test_one_of_a_run_whose_steps_had_different_sizes_says_that_rows_are_not_known() -> None:
    """Three steps of 8 rows, then three of 4, at the position that the older version would have gone on from."""
    state = state_of_old_version(6, 4, tokens=(3 * 8 + 3 * 4) * LENGTH)
    position, (said,) = resumed_position(state, 6, prepared(40 * LENGTH), batches(40, 4))
    assert position == 24
    assert "continues after 24 rows, and some rows of this epoch may be read twice or not at all" in said


CHANGED_ROWS = [
    # rows read, rows per epoch then, rows per epoch now, position
    (30, 20, 40, 60),  # half of the second epoch, with sequences of half the length
    (40, 20, 7, 14),  # two whole epochs
    (1, 20, 10, 0),  # rather once more than not at all
]


@pytest.mark.parametrize(("rows", "before", "now", "position"), CHANGED_ROWS)
def test_with_other_rows_it_continues_at_the_same_share_of_the_epoch(
    rows: int, before: int, now: int, position: int
) -> None:
    state = {"position": {"rows": rows, "rows_per_epoch": before}}
    assert resumed_position(state, 3, prepared(now * LENGTH), batches(now, 2)) == (position, [])


def test_so_does_a_checkpoint_of_an_older_version() -> None:
    """Its rows were of 8 tokens, and a quarter of them validation rows; 15 of 15 training rows were read."""
    state = state_of_old_version(5, 3, length=8, fraction=0.25)
    assert resumed_position(state, 5, prepared(40 * LENGTH), batches(40, 2)) == (40, [])
