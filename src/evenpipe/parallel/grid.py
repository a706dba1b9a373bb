"""Which processes form a pipeline, how many pipelines there are side by side, and the position of this process.

axis "pp" --->        device 0   device 1   device 2
axis "dp"  replica 0     0          1          2        each row is a pipeline with the whole model and its own data;
   |       replica 1     3          4          5        each column holds the same parameters and sums their gradients
   v
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from evenpipe.errors import InputError

PIPELINE_AXIS, DATA_AXIS = "pp", "dp"


@dataclass(frozen=True, slots=True)
class Grid:
    """All processes, by replica and device. The numbers are global ranks."""

    pipelines: tuple[tuple[int, ...], ...]
    """[replica][device]; the same on every process."""
    replica: int
    """The pipeline of this process."""
    device: int
    """The position of this process in it."""

    @property
    def devices(self) -> int:
        """Number of devices of one pipeline."""
        return len(self.pipelines[0])

    @property
    def replicas(self) -> int:
        """Number of pipelines side by side."""
        return len(self.pipelines)

    @property
    def pipeline(self) -> tuple[int, ...]:
        """This process's own pipeline, by device."""
        return self.pipelines[self.replica]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All processes: those of the first pipeline by device, then those of the next."""
        return tuple(rank for pipeline in self.pipelines for rank in pipeline)

    def column(self, device: int) -> tuple[int, ...]:
        """The processes with this position in all pipelines, by rank."""
        return tuple(sorted(pipeline[device] for pipeline in self.pipelines))


def process_grid(mesh: DeviceMesh | None, replicas: int | None = None) -> Grid:
    """Return the position of this process.

    Args:
        mesh: with an axis "pp", and "dp" for several pipelines, in any order. None: all processes, neighbours in one
            pipeline.
        replicas: pipelines side by side; None: as many as in the mesh, one without a mesh.

    Without an initialised process group it is one pipeline of one device.

    Raises:
        InputError: the mesh has no axis "pp", another axis longer than 1, other processes than all, or another number
            of replicas; or `replicas` does not divide the processes.
    """
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if replicas is not None and (not isinstance(replicas, int) or replicas < 1):
        raise InputError(f"replicas: {replicas!r}, expected a whole number of at least 1")
    if mesh is None:
        count = replicas or 1
        if world_size % count:
            raise InputError(f"replicas: {count}, expected a divisor of {world_size}, the number of processes")
        devices = world_size // count
        rows = [list(range(first, first + devices)) for first in range(0, world_size, devices)]
    else:
        rows = _rows(mesh)
        if replicas not in (None, len(rows)):
            raise InputError(
                f'replicas: {replicas}, expected {len(rows)}, the length of the mesh\'s axis "dp", or None'
            )
        held = sorted(member for row in rows for member in row)
        if held != list(range(world_size)):
            raise InputError(
                f"mesh: {len(rows)} x {len(rows[0])} processes (dp x pp, ranks {held}), expected each of the"
                f" {world_size} processes once"
            )
    replica = next(index for index, row in enumerate(rows) if rank in row)
    return Grid(tuple(map(tuple, rows)), replica, rows[replica].index(rank))


def _rows(mesh: DeviceMesh) -> list[list[int]]:
    """Return ranks by (dp, pp)."""
    names = mesh.mesh_dim_names or ()
    if PIPELINE_AXIS not in names:
        raise InputError(f'mesh: axes are {names}, expected one named "pp" (the pipeline)')
    others = [name for name in names if name not in (PIPELINE_AXIS, DATA_AXIS)]
    longer = {name: size for name in others if (size := mesh.size(names.index(name))) > 1}
    if longer:
        raise InputError(f'mesh: axes {longer} beside "pp" and "dp" are not supported yet, expected length 1')
    axes = [*others, DATA_AXIS, PIPELINE_AXIS] if DATA_AXIS in names else [*others, PIPELINE_AXIS]
    ranks = mesh.mesh.permute([names.index(name) for name in axes])
    return ranks.reshape(-1, ranks.shape[-1]).tolist()
