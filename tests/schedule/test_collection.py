"""How often Python collects garbage while orders are made."""

from __future__ import annotations

import gc

import pytest

from evenpipe.schedule.collection import collecting_rarely


@pytest.mark.parametrize(("before", "inside"), [(700, 50_000), (100_000, 100_000), (0, 0)])
def test_garbage_is_collected_rarely_for_a_while_but_never_more_often_than_before(before: int, inside: int) -> None:
    kept = gc.get_threshold()
    gc.set_threshold(before, 10, 10)
    try:
        with pytest.raises(ValueError, match="ends"), collecting_rarely():
            assert gc.get_threshold() == (inside, 10, 10)
            raise ValueError("ends")
        assert gc.get_threshold() == (before, 10, 10)
    finally:
        gc.set_threshold(*kept)
