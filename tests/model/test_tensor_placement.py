"""Placements of tensors: whole -> parts -> whole, for every combination of cuts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from evenpipe.model.placement import Cut, TensorPlacement

SIZES = {"pp": 3, "dp": 2, "tp": 2, "ep": 2, "edp": 3}
PHI_3_ROWS = (8, 2, 2)
"""Rows of queries, keys and values in one matrix."""
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[dict[str, int]], tuple[Cut, ...]]]] = {
    "whole": ((5, 3), lambda at: ()),
    "one number": ((), lambda at: ()),
    "rows over devices": ((10, 3), lambda at: (cut(at, "pp"),)),
    "rows over devices, then replicas": ((11, 3), lambda at: (cut(at, "pp"), cut(at, "dp"))),
    "rows over devices and tensor ranks together": ((17, 3), lambda at: (cut(at, "pp", "tp"),)),
    "fewer rows than processes": ((2, 3), lambda at: (cut(at, "pp"), cut(at, "dp"))),
    "no rows": ((0, 3), lambda at: (cut(at, "dp"),)),
    "columns, then rows": ((7, 6), lambda at: (cut(at, "tp", dimension=1), cut(at, "dp"))),
    "experts, then columns": ((8, 9, 4), lambda at: (cut(at, "ep"), cut(at, "edp", dimension=1))),
    "gate and up": ((12, 3), lambda at: (cut(at, "tp", segments=(6, 6)), cut(at, "dp"))),
    "queries, keys and values": ((12, 3), lambda at: (cut(at, "tp", segments=PHI_3_ROWS), cut(at, "edp"))),
    "gate and up of experts": (
        (4, 12, 5),
        lambda at: (cut(at, "ep"), cut(at, "tp", dimension=1, segments=(6, 6)), cut(at, "dp", dimension=1)),
    ),
}


def cut(at: dict[str, int], *axes: str, dimension: int = 0, segments: tuple[int, ...] = ()) -> Cut:
    """The cut by these axes, for the process at these coordinates."""
    part, parts = 0, 1
    for axis in axes:
        part, parts = part * SIZES[axis] + at[axis], parts * SIZES[axis]
    return Cut(axes, part, parts, dimension, segments)


def everywhere() -> list[dict[str, int]]:
    return [dict(zip(SIZES, place, strict=True)) for place in itertools.product(*map(range, SIZES.values()))]


def part_of(whole: Tensor, placement: TensorPlacement) -> Tensor:
    part = torch.full(placement.local_shape, -1, dtype=whole.dtype)
    for box in placement.boxes():
        part[box.local] = whole[box.whole]
    return part


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_parts_make_up_the_whole_once_and_are_those_of_torch_chunk(name: str) -> None:
    shape, cuts = LAYOUTS[name]
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    again, times = torch.full_like(whole, -1), torch.zeros_like(whole)
    cutting = {axis for cut in cuts(dict.fromkeys(SIZES, 0)) for axis in cut.axes}
    for at in everywhere():
        placement = TensorPlacement(shape, cuts(at))
        expected = whole
        for cut in cuts(at):
            segments = expected.split(cut.segments or (expected.shape[cut.dimension],), cut.dimension)
            expected = torch.cat([chunked(segment, cut) for segment in segments], cut.dimension)
        assert torch.equal(part_of(whole, placement), expected)
        if any(place for axis, place in at.items() if axis not in cutting):
            continue  # a copy
        for box in placement.boxes():
            again[box.whole] = expected[box.local]
            times[box.whole] += 1
    assert torch.equal(again, whole) and bool((times == 1).all())


def chunked(whole: Tensor, cut: Cut) -> Tensor:
    """torch gives fewer parts than asked for if some would be empty."""
    parts = whole.chunk(cut.parts, cut.dimension)
    return parts[cut.part] if cut.part < len(parts) else whole.narrow(cut.dimension, whole.shape[cut.dimension], 0)


def test_state_is_cut_like_its_parameter_where_it_fits() -> None:
    rows = TensorPlacement((9, 4), (Cut(("pp",), 2, 4),), frozenset({"dp"}))
    assert rows.local_shape == (3, 4)
    assert rows.of_state((3, 4)) == rows == rows.of_state((9, 4), whole=True)
    means = rows.of_state((3, 1))
    assert means is not None and (means.shape, means.local_shape, means.cuts) == ((9, 1), (3, 1), rows.cuts)
    assert rows.of_state((9, 1), whole=True) == means
    for shape in ((), (3,), (9, 4), (1, 4), (3, 4, 1)):
        assert rows.of_state(shape) is None
    columns = TensorPlacement((9, 4), (Cut(("tp",), 1, 2, dimension=1),))
    assert columns.of_state((1, 2)) == TensorPlacement((1, 4), columns.cuts) and columns.of_state((9, 1)) is None


def test_of_all_copies_one_counts() -> None:
    placements = {
        "replicated": TensorPlacement((4,), copied_along=frozenset({"dp"})),
        "tied": TensorPlacement((4,), copied_along=frozenset({"pp"})),
        "first": TensorPlacement((4,), (Cut(("pp",), 1, 2),)),
    }
    counts = {name: [one.is_first_copy(), one.is_first_copy("pp")] for name, one in placements.items()}
    assert counts == {"replicated": [False, True], "tied": [False, False], "first": [True, True]}
    assert not placements["first"].is_first_part and placements["tied"].is_first_part
