"""How the work of layers grows along a row, and where rows are cut."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
from families import tiny_config

from evenpipe.model import RowWork, describe, layer_flops, slice_ends

WORKS = {
    "no attention": RowWork(per_token=3.0, per_key=()),
    "whole rows": RowWork(per_token=5.0, per_key=((None, 0.25),)),
    "windows": RowWork(per_token=5.0, per_key=((None, 0.25), (24, 1.0))),
}


def counted(work: RowWork, tokens: int) -> float:
    """Token by token."""
    keys = [(min(place + 1, window or tokens), each) for window, each in work.per_key for place in range(tokens)]
    return work.per_token * tokens + sum(count * each for count, each in keys)


def test_closed_form() -> None:
    for work, tokens in itertools.product(WORKS.values(), (0, 1, 2, 23, 24, 25, 100)):
        assert work.on(tokens) == pytest.approx(counted(work, tokens))
        assert work.attention(tokens) == pytest.approx(counted(work, tokens) - work.per_token * tokens)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_of_a_model(family: str) -> None:
    description = describe(tiny_config(family))
    work = RowWork.of(description)
    matrices = sum(layer_flops(description, 1)) - work.attention(1)
    assert work.per_token == pytest.approx(matrices)
    assert 0 < work.share(16) < work.share(32) < 1


def test_slices_have_equal_work_as_far_as_the_multiple_allows() -> None:
    cases = [(96, 4, 1), (96, 3, 8), (64, 8, 8), (4096, 4, 2), (12288, 5, 6), (131072, 16, 4)]
    for work, (length, slices, multiple) in itertools.product(WORKS.values(), cases):
        ends = slice_ends(work, length, slices, multiple)
        lengths = [end - start for start, end in pairwise((0, *ends))]
        assert sum(lengths) == length and len(lengths) == slices and min(lengths) >= multiple
        step = 384 if multiple == 6 and length == 12288 else 128 if length >= 512 * slices else multiple
        assert all(end % multiple == 0 and end % step == 0 for end in ends[:-1])
        for number, end in enumerate(ends[:-1], 1):
            if lengths[number - 1] > step and lengths[number] > step:
                target = work.on(length) * number / slices
                assert work.on(end - step) < target < work.on(end + step)
    assert slice_ends(WORKS["windows"], 77, 1, 11) == (77,)


def test_another_share_of_attention() -> None:
    work = WORKS["windows"].with_share(0.6, 100)
    assert work.share(100) == pytest.approx(0.6)
    assert work.on(100) == pytest.approx(WORKS["windows"].on(100))
    assert WORKS["no attention"].with_share(0.6, 100) == WORKS["no attention"]


@pytest.mark.parametrize("share", [0.2, 0.7])
@pytest.mark.parametrize("name", ["whole rows", "windows"])
def test_measured_slices_tell_the_share_of_attention(name: str, share: float) -> None:
    true = WORKS[name].with_share(share, 120)
    ends = (0, 48, 72, 120)
    times = [2.5 * (true.on(end) - true.on(start)) for start, end in pairwise(ends)]
    found = WORKS[name].as_measured(times, [48, 24, 48], 120)
    assert found.share(120) == pytest.approx(share)
    assert slice_ends(found, 120, 5, 1) == slice_ends(true, 120, 5, 1)
    assert WORKS["no attention"].as_measured(times, [48, 24, 48], 120) == WORKS["no attention"]
