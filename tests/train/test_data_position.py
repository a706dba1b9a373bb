"""The position in the data: whatever changes between starts of a run, each row is read once per epoch."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from rows_of_runs import LENGTH, Start, batches, faults_of_run, prepared

from evenpipe.train.position import resumed_position


def state_of_old_version(
    step: int, size: int, *, tokens: int | None = None, length: int = LENGTH, fraction: float = 0.0
) -> dict[str, object]:
    """What a checkpoint without a position says."""
    identity = {"data.sequence_length": length, "data.validation_fraction": fraction, "sequences per step": size}
    return {"data": identity, "tokens": step * size * length if tokens is None else tokens}


starts = st.lists(st.builds(Start, st.integers(0, 6), st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=8)


@settings(max_examples=100)
@given(rows=st.integers(2, 40), starts=starts, fraction=st.sampled_from([0.0, 0.2]), packed=st.booleans())
def test_each_row_is_read_once_per_epoch(rows: int, starts: list[Start], fraction: float, packed: bool) -> None:
    assert not faults_of_run(rows, starts, fraction=fraction, packed=packed)


OTHER_SIZES = [
    # state, step, rows per epoch now, rows per step now, position
    # a checkpoint of an older version says how many rows its steps had
    (state_of_old_version(6, 4), 6, 40, 4, 24),
    (state_of_old_version(6, 4), 6, 40, 8, 24),
    (state_of_old_version(6, 4), 6, 40, 3, 24),
    (state_of_old_version(0, 4), 0, 40, 8, 0),
    # with other rows it continues at the same share of the epoch
    ({"position": {"rows": 30, "rows_per_epoch": 20}}, 3, 40, 2, 60),  # half of the second epoch, rows half as long
    ({"position": {"rows": 40, "rows_per_epoch": 20}}, 3, 7, 2, 14),  # two whole epochs
    ({"position": {"rows": 1, "rows_per_epoch": 20}}, 3, 10, 2, 0),  # rather once more than not at all
    # rows were of 8 tokens, and a quarter of them validation rows; 15 of 15 training rows were read
    (state_of_old_version(5, 3, length=8, fraction=0.25), 5, 40, 2, 40),
]


def test_a_run_with_other_rows_or_steps_continues_at_the_same_place() -> None:
    for state, step, rows, size, position in OTHER_SIZES:
        assert resumed_position(state, step, prepared(rows * LENGTH), batches(rows, size)) == (position, [])


def test_one_of_a_run_whose_steps_had_different_sizes_says_that_rows_are_not_known() -> None:
    """Three steps of 8 rows, then three of 4, at the position that the older version would have gone on from."""
    state = state_of_old_version(6, 4, tokens=(3 * 8 + 3 * 4) * LENGTH)
    position, (said,) = resumed_position(state, 6, prepared(40 * LENGTH), batches(40, 4))
    assert position == 24
    assert "continues after 24 rows, and some rows of this epoch may be read twice or not at all" in said
