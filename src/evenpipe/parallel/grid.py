"""All processes as a grid with named axes, and the lines and groups in it.

    dp   replicas: pipelines side by side, each with the whole model and its own data
    pp   devices of a pipeline
    cp   pieces of every sequence
    tp   parts of every matrix
    ep   members of a block of neighbouring replicas that share out experts: replica = block * ep + member
    edp  these blocks; members with the same number in each have the same experts

    axis "pp" --->        device 0   device 1   device 2
    axis "dp"  replica 0     0          2          4        each row is a pipeline; each column holds the same
       |       replica 1     1          3          5        parameters and sums their gradients
       v

Processes that exchange more are nearer to each other: without a mesh, ranks count tp first, then cp, ep, edp, pp. The
pipeline comes last because a step sends less in hops than it sums over replicas. Megatron, torchtitan and our planner
(`costs.collectives.Axes`) number processes in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from evenpipe.errors import InputError
from evenpipe.given import is_whole
from evenpipe.words import refused

AXES = ("dp", "pp", "cp", "tp")
"""The order in which all processes are listed: by replica, then by device, and so on."""
_CUT = ("edp", "ep", "pp", "cp", "tp")
"""The same with "dp" split in two. No other axis has sub-axes."""
_SUB_AXES = {axis: ("edp", "ep") if axis == "dp" else (axis,) for axis in (*AXES, "edp", "ep")}
COPIES = ("dp", "cp")
"""Processes that differ only along these axes hold the same parameters, or shard them by rows."""
EXPERT_COPIES = ("edp", "cp")
"""The same for experts that members share."""
_FAR_TO_NEAR = ("pp", "edp", "ep", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Grid:
    """All processes by their coordinates. Create it with `from_sizes`, `from_mesh` or `process_grid`."""

    sizes: Mapping[str, int]
    """Sizes of edp, ep, pp, cp and tp."""
    ranks: tuple[int, ...]
    """All processes in the order of `AXES`; the same on every process."""
    rank: int
    """The rank of this process."""
    _coordinates: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        position, coordinates = self.ranks.index(self.rank), {}
        for axis in reversed(_CUT):
            position, coordinates[axis] = divmod(position, self.sizes[axis])
        object.__setattr__(self, "_coordinates", coordinates)

    @classmethod
    def from_sizes(cls, rank: int, *, dp: int = 1, pp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1) -> Grid:
        """Return the grid of processes 0, 1, 2, ..., where neighbours differ along the axes that exchange most.

        Raises:
            InputError: ep is not a divisor of dp.
        """
        sizes = _cut_sizes({"dp": dp, "pp": pp, "cp": cp, "tp": tp, "ep": ep})
        strides, stride = {}, 1
        for axis in reversed(_FAR_TO_NEAR):
            strides[axis] = stride
            stride *= sizes[axis]
        offsets = itertools.product(*(range(0, sizes[axis] * strides[axis], strides[axis]) for axis in _CUT))
        return cls(sizes, tuple(map(sum, offsets)), rank)

    @classmethod
    def from_mesh(cls, rank: int, mesh: DeviceMesh, world_size: int, *, ep: int = 1) -> Grid:
        """Return the grid of a mesh with an axis "pp" and any other axes of the grid, in any order.

        Args:
            ep: members of a block of replicas, if the mesh has no axis "ep". If it has one, its "dp" counts blocks.

        Raises:
            InputError: the mesh has no axis "pp", has an unknown axis longer than 1, or does not consist of all
                processes; or ep is not a divisor of dp.
        """
        names = mesh.mesh_dim_names or ()
        if "pp" not in names:
            raise InputError(f'mesh has axes {names}; it must have one named "pp" (the pipeline)')
        axes = ("dp", "ep", "pp", "cp", "tp")
        sizes = dict.fromkeys(axes, 1) | dict(zip(names, mesh.mesh.shape, strict=True))
        unknown = {name: size for name, size in sizes.items() if name not in axes and size > 1}
        if unknown:
            raise InputError(f"mesh: axes {unknown} beside {', '.join(axes)} are unknown; expected length 1")
        order = [name for name in names if name not in axes] + [name for name in axes if name in names]
        ranks = mesh.mesh.permute([names.index(name) for name in order]).flatten().tolist()
        if sorted(ranks) != list(range(world_size)):
            shown = [axis for axis in axes if axis in ("dp", "pp") or sizes[axis] > 1]
            raise InputError(
                f"mesh: {' x '.join(str(sizes[axis]) for axis in shown)} processes ({' x '.join(shown)}, ranks"
                f" {sorted(ranks)}); expected all {world_size} of the run, each once"
            )
        sizes |= {"dp": sizes["dp"] * sizes["ep"]} if "ep" in names else {"ep": ep}
        return cls(_cut_sizes(sizes), tuple(ranks), rank)

    def size(self, axis: str) -> int:
        """Return the length of an axis."""
        return math.prod(self.sizes[sub_axis] for sub_axis in _SUB_AXES[axis])

    def coordinate(self, axis: str) -> int:
        """Return the position of this process along an axis."""
        return _flat_index(_SUB_AXES[axis], self._coordinates, self.sizes)

    @property
    def feeds(self) -> bool:
        """Whether this is the first process of its replica, which provides the data of every step."""
        return not any(map(self.coordinate, ("pp", "cp", "tp")))

    @property
    def is_first(self) -> bool:
        """Whether this is the first process of the first replica."""
        return self.feeds and not self.coordinate("dp")

    def at(self, **coordinates: int) -> int:
        """Return the rank of the process with these coordinates, and with this process's along all other axes."""
        target = dict(self._coordinates)
        for axis, coordinate in coordinates.items():
            outer_axis, *inner_axes = _SUB_AXES[axis]
            for sub_axis in inner_axes:
                target[sub_axis] = coordinate % self.sizes[sub_axis]
            target[outer_axis] = coordinate // math.prod(self.sizes[sub_axis] for sub_axis in inner_axes)
        return self.ranks[_flat_index(_CUT, target, self.sizes)]

    def group(self, *axes: str, **coordinates: int) -> tuple[int, ...]:
        """Return the processes that differ only along these axes from this one, or from the one at `coordinates`. The
        first axis varies slowest."""
        ranges = (range(self.size(axis)) for axis in axes)
        return tuple(
            self.at(**coordinates, **dict(zip(axes, position, strict=True))) for position in itertools.product(*ranges)
        )

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return all groups over these axes, in the same order on every process. They partition the processes."""
        covered = {sub_axis for axis in axes for sub_axis in _SUB_AXES[axis]}
        other_axes = [sub_axis for sub_axis in _CUT if sub_axis not in covered]
        positions = itertools.product(*(range(self.sizes[sub_axis]) for sub_axis in other_axes))
        return [self.group(*axes, **dict(zip(other_axes, position, strict=True))) for position in positions]


def process_grid(
    mesh: DeviceMesh | None,
    *,
    dp: int | None = None,
    pp: int | None = None,
    cp: int | None = None,
    tp: int | None = None,
    ep: int | None = None,
) -> Grid:
    """Return the grid of all processes of torch.distributed, or of a single process without it.

    Args:
        mesh: with an axis "pp" and others, in any order. None: all processes, with neighbours in one device.
        dp: number of replicas; None: that of the mesh, 1 without a mesh.
        pp: devices of a pipeline; None: all remaining processes.
        cp: processes that share every sequence; None: as for `dp`.
        tp: processes that share every layer; None: as for `dp`.
        ep: neighbouring replicas that share the experts of every layer, a divisor of the number of replicas; None: that
            of the mesh, if it has an axis "ep", else 1.

    Raises:
        InputError: the mesh has no axis "pp", has an unknown axis longer than 1, does not consist of all processes, or
            has axes of other lengths; or these numbers do not divide the number of processes.
    """
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    sizes = {"dp": dp, "cp": cp, "tp": tp, "ep": ep, "pp": pp}
    for axis, size in sizes.items():
        if size is not None and (not is_whole(size) or size < 1):
            raise refused(axis, size, "a whole number of at least 1")
    if mesh is not None:
        has_members = "ep" in (mesh.mesh_dim_names or ())
        grid = Grid.from_mesh(rank, mesh, world_size, ep=1 if has_members else ep or 1)
        for axis, size in sizes.items():
            if size not in (None, grid.size(axis)):
                raise InputError(
                    f'{axis} is {size}; it must be {grid.size(axis)}, the length of the mesh\'s axis "{axis}", or None'
                )
        return grid
    remaining = world_size
    for axis in ("dp", "cp", "tp"):
        if remaining % (size := sizes[axis] or 1):
            raise refused(axis, size, f"a divisor of {remaining}, the number of processes")
        remaining //= size
    if pp not in (None, remaining):
        raise refused("pp", pp, f"{remaining}, the number of processes that dp, cp and tp leave, or None")
    _check_members(ep or 1, dp or 1)
    return Grid.from_sizes(rank, **{axis: size or 1 for axis, size in sizes.items()} | {"pp": remaining})


def _cut_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes with "dp" split into blocks and members."""
    _check_members(sizes["ep"], sizes["dp"])
    return {**{axis: sizes[axis] for axis in _CUT[1:]}, "edp": sizes["dp"] // sizes["ep"]}


def _check_members(members: int, replicas: int) -> None:
    if replicas % members:
        raise refused("ep", members, f"a divisor of {replicas}, the number of replicas")


def _flat_index(axes: Sequence[str], coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Return the index of these coordinates, where the last axis varies fastest."""
    number = 0
    for axis in axes:
        number = number * sizes[axis] + coordinates[axis]
    return number
