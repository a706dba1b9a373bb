"""Finds how layers are cut over the tensor ranks of a device, the same on every process."""

from __future__ import annotations

import itertools

from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.parallel.grid import Grid
from evenpipe.parallel.groups import Groups
from evenpipe.parallel.tensor_ranks import TensorRanks
from evenpipe.tensor.check import cut_of_model
from evenpipe.tensor.layers import ModelCut, report_whole


def cut_layers(
    description: Description, groups: Groups, *, check: bool, is_first: bool
) -> tuple[ModelCut, TensorRanks] | None:
    """Return the cut and the exchange of this device's ranks; None for one process per device. Collective.

    Args:
        check: compare a small copy of the model, cut, with the whole one, on the first process.
        is_first: whether this is the first process of all.

    Raises:
        InputError: on every process: the model cannot be cut, or would be trained wrongly.
    """
    if groups.tensor is None:
        return None
    exchange = TensorRanks(groups.tensor)
    cut, fault = None, None
    try:
        cut = cut_of_model(description, exchange.size, check=check and is_first)
    except InputError as error:
        fault = str(error)
    fault = groups.from_the_first(fault, "the self-check of tensor parallelism")
    if fault is not None:
        raise InputError(fault)
    assert cut is not None
    if is_first:
        report_whole(cut)
    return cut, exchange


def alone(description: Description, tensor: tuple[ModelCut, TensorRanks] | None) -> set[str]:
    """Return the names of parameters that only the first tensor rank of a device holds. tensor: as `cut_layers` has
    returned it."""
    if tensor is None:
        return set()
    return {name for index in range(description.layers) for name in tensor[0].alone(description, index)}


def places_of(grid: Grid) -> dict[int, str]:
    """Return what messages say of a process beside its number, by process; nothing without tensor ranks."""
    replicas, devices, ranks = (grid.size(axis) for axis in ("dp", "pp", "tp"))
    found: dict[int, str] = {}
    if ranks == 1:
        return found
    for replica, device, rank in itertools.product(range(replicas), range(devices), range(ranks)):
        place = f"device {device}, tensor rank {rank}"
        found[grid.at(dp=replica, pp=device, tp=rank)] = place if replicas == 1 else f"replica {replica}, {place}"
    return found
