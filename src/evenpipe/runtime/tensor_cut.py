"""Finds how layers are cut over the tensor ranks of a device, and how these exchange rows beside products: the same on
every process."""

from __future__ import annotations

import torch

from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.parallel.groups import Groups
from evenpipe.parallel.symmetric_memory import Fused, obstacle_to_fused
from evenpipe.parallel.tensor_ranks import TensorRanks
from evenpipe.tensor.check import cut_of_model
from evenpipe.tensor.layers import ModelCut, report_whole
from evenpipe.tensor.ring import Ring


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


def overlap_ranks(
    exchange: TensorRanks, groups: Groups, wanted: str, torch_device: torch.device, *, compiled: bool
) -> str:
    """Let transfers between the tensor ranks of a device run beside products, if that is wanted and possible. Return
    what does so in F and I, and if nothing, why. Collective.

    Args:
        wanted: "auto", "none", "ring" or "fused".
        compiled: whether layers are: a transfer would end the compiled region.

    Raises:
        InputError: on every process: "fused", but it cannot run here; the sentence says why.
    """
    if wanted == "none":
        return "none, as asked for"
    if compiled:
        return "none, because layers are compiled"
    if wanted == "ring":
        exchange.overlap = Ring(exchange)
        return "ring; its gain on GPUs has not been measured"
    obstacle = obstacle_to_fused(exchange, torch_device)
    cannot = [bool(one) for (one,) in groups.numbers([obstacle is not None])]
    if not any(cannot):
        exchange.overlap = Fused(exchange)
        return "torch's fused operations on symmetric memory; they have not been run on a GPU yet"
    obstacle = obstacle or "some other devices cannot"
    if wanted == "fused":
        raise InputError(f"tensor_overlap: 'fused', but {obstacle}; expected 'auto', 'none' or 'ring'")
    return f"none, because {obstacle}"
