"""Orders of slices, sound and damaged, are judged as the rules judge them; `sliced_agreement` says how."""

from __future__ import annotations

import pytest
from sliced_agreement import case_of, complaints


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_at_random(first: int) -> None:
    """`python tests/schedule/sliced_agreement.py --cases 10000` does as many more."""
    for seed in range(first, first + 50):
        case = case_of(seed)
        assert not list(complaints(case)), f"case {seed}, {case.name}"
