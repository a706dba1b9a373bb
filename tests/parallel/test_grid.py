"""The grid of processes: where a rank stands, and who are on its lines and in its groups."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from evenpipe.costs.collectives import Axes
from evenpipe.errors import InputError
from evenpipe.parallel.grid import Grid

SIZES = {"dp": 4, "pp": 3, "cp": 2, "tp": 2, "ep": 2}
WORLD = 48
AXES = ("dp", "pp", "cp", "tp", "ep", "edp")


def grids() -> list[Grid]:
    return [Grid.from_sizes(rank, **SIZES) for rank in range(WORLD)]


@pytest.fixture
def world() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    torch.distributed.destroy_process_group()


def test_neighbours_without_other_axes_are_replicas_of_one_device() -> None:
    grid = Grid.from_sizes(3, dp=2, pp=3)
    assert grid.ranks == (0, 2, 4, 1, 3, 5)
    assert (grid.coordinate("dp"), grid.coordinate("pp")) == (1, 1)
    assert grid.group("pp") == (1, 3, 5)
    assert grid.group("dp") == (2, 3)
    assert grid.group("dp", pp=2) == (4, 5)
    assert grid.groups("pp") == [(0, 2, 4), (1, 3, 5)]
    assert grid.groups("dp") == [(0, 1), (2, 3), (4, 5)]
    assert grid.groups("dp", "pp") == [grid.ranks]
    assert (grid.at(dp=0), grid.at(pp=2), grid.at(dp=0, pp=0)) == (2, 5, 0)


def test_ranks_count_as_the_planner_times_them() -> None:
    """Neighbours on an axis are as far apart as the axis of the costs says."""
    sizes = {"dp": 4, "pp": 3, "tp": 2, "ep": 2}
    grid, axes = Grid.from_sizes(0, **sizes), Axes.of(cp=1, **sizes)
    shared = axes.experts
    every = {"tp": axes.tensor, "dp": axes.replicas, "pp": axes.pipeline, "ep": shared.members, "edp": shared.replicas}
    for name, axis in every.items():
        line = grid.group(name)
        assert (len(line), line[1] - line[0]) == (axis.size, axis.stride)


def test_every_process_is_where_its_coordinates_say() -> None:
    for grid in grids():
        own = {axis: grid.coordinate(axis) for axis in AXES}
        assert grid.at() == grid.at(**{axis: own[axis] for axis in ("dp", "pp", "cp", "tp")}) == grid.rank
        assert own["dp"] == own["edp"] * SIZES["ep"] + own["ep"]
        for axis in AXES:
            line = grid.group(axis)
            assert line[own[axis]] == grid.rank and len(line) == grid.size(axis)
            assert [grid.at(**{axis: place}) for place in range(len(line))] == list(line)


def test_groups_share_out_all_processes() -> None:
    everyone = grids()
    for axes in (axes for count in (1, 2, 3) for axes in itertools.combinations(AXES[:4], count)):
        groups = everyone[0].groups(*axes)
        assert all(grid.groups(*axes) == groups for grid in everyone)
        assert sorted(rank for group in groups for rank in group) == list(range(WORLD))
        others = [axis for axis in AXES[:4] if axis not in axes]
        places = {grid.rank: [grid.coordinate(axis) for axis in others] for grid in everyone}
        for grid in everyone:
            alike = {rank for rank, place in places.items() if place == places[grid.rank]}
            assert grid.group(*axes) in groups and set(grid.group(*axes)) == alike


@pytest.mark.parametrize("names", [("tp", "pp", "dp", "cp"), ("cp", "dp", "tp", "pp"), ("dp", "pp", "cp", "tp")])
def test_the_axes_of_a_mesh_may_have_any_order(world: None, names: tuple[str, ...]) -> None:
    ranks = torch.randperm(WORLD, generator=torch.Generator().manual_seed(0)).reshape([SIZES[name] for name in names])
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    for place in itertools.product(*(range(SIZES[name]) for name in names)):
        coordinates = dict(zip(names, place, strict=True))
        grid = Grid.from_mesh(int(ranks[place]), mesh, WORLD, ep=2)
        assert {name: grid.coordinate(name) for name in names} == coordinates
        assert grid.coordinate("ep") == coordinates["dp"] % 2 and grid.size("edp") == 2


def test_a_mesh_with_an_axis_of_experts_has_blocks_beside_it(world: None) -> None:
    mesh = DeviceMesh("cpu", torch.arange(WORLD).reshape(2, 3, 8), mesh_dim_names=("dp", "pp", "ep"))
    grid = Grid.from_mesh(29, mesh, WORLD)
    assert [grid.size(axis) for axis in ("dp", "pp", "ep", "edp")] == [16, 3, 8, 2]
    assert [grid.coordinate(axis) for axis in ("dp", "pp", "ep", "edp")] == [13, 0, 5, 1]
    assert grid.group("ep") == tuple(range(24, 32)) and grid.group("edp") == (5, 29)


def test_what_is_no_grid_is_refused(world: None) -> None:
    with pytest.raises(InputError, match="ep is 4; it must be a divisor of 6, the number of replicas"):
        Grid.from_sizes(0, dp=6, ep=4)
    for names, shape, text in (
        (("dp", "tp"), (4, 12), 'must have one named "pp"'),
        (("pp", "sp"), (4, 12), r"axes \{'sp': 12\} beside dp, ep, pp, cp, tp are unknown"),
        (("pp", "tp"), (4, 3), r"1 x 4 x 3 processes \(dp x pp x tp, ranks .*expected all 48 of the run, each once"),
    ):
        count = shape[0] * shape[1]
        mesh = DeviceMesh("cpu", torch.arange(count).reshape(shape), mesh_dim_names=names)
        with pytest.raises(InputError, match=text):
            Grid.from_mesh(0, mesh, WORLD)
