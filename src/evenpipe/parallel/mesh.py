"""Which processes form a pipeline, and which device of it this process is."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from evenpipe.errors import InputError


@dataclass(frozen=True, slots=True)
class PipelineGroup:
    """The processes of one pipeline, in the order of its devices."""

    ranks: tuple[int, ...]
    """Global ranks; position = device."""
    device: int
    """The device that this process is."""

    @property
    def devices(self) -> int:
        return len(self.ranks)


def pipeline_group(mesh: DeviceMesh | None) -> PipelineGroup:
    """The pipeline of this process: the mesh's axis "pp", or all processes where no mesh is given.

    Without an initialised process group it is a pipeline of one device.

    Raises:
        InputError: the mesh has no axis "pp", another axis longer than 1, or not all processes.
    """
    if mesh is None:
        if not dist.is_initialized():
            return PipelineGroup(ranks=(0,), device=0)
        return PipelineGroup(ranks=tuple(range(dist.get_world_size())), device=dist.get_rank())
    names = mesh.mesh_dim_names or ()
    if "pp" not in names:
        raise InputError(f'mesh: axes are {names}, expected one named "pp" (the pipeline)')
    longer = {name: mesh.size(index) for index, name in enumerate(names) if name != "pp" and mesh.size(index) > 1}
    if longer:
        raise InputError(f'mesh: axes {longer} beside "pp" are not supported yet, expected length 1')
    ranks = tuple(mesh["pp"].mesh.flatten().tolist())
    if sorted(ranks) != list(range(dist.get_world_size())):
        raise InputError(
            f'mesh: its axis "pp" holds the processes {list(ranks)} of {dist.get_world_size()}, expected all of them'
            " (several pipelines side by side are not supported yet)"
        )
    return PipelineGroup(ranks=ranks, device=ranks.index(dist.get_rank()))
