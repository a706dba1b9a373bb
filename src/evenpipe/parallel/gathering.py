"""Whole tensors on the first process, streamed one at a time from the processes that hold their parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from evenpipe.communication.communicator import Communicator
from evenpipe.communication.messages import dtype_name, dtype_of, values_of_members
from evenpipe.model.placement import Cut, Held, TensorPlacement

Entry = tuple[TensorPlacement, torch.dtype]


def stream_whole(
    held: Mapping[str, Held[Tensor]],
    communicator: Communicator | None,
    torch_device: torch.device,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor on the CPU) on the first process, nothing on the others; all must exhaust the iterator.

    Collective over the communicator: all processes first exchange which parts they hold. Then, for each name, every
    holder sends its part to the first process, which holds one whole tensor at a time.

    Args:
        held: first copies only.
        communicator: of all processes that hold parts; None for a single one.
        torch_device: device of the tensors.
        dtypes: dtype to send a tensor in, by name; others keep their own.
    """
    dtypes = dtypes or {}
    entries: dict[str, Entry] = {
        name: (shard.placement, dtypes.get(name, shard.tensor.dtype)) for name, shard in held.items()
    }
    json = {name: _to_json(entry) for name, entry in entries.items()}
    tables = [
        {name: _from_json(fields) for name, fields in table.items()}
        for table in values_of_members(communicator, json, "names of tensors")
    ]
    members = (0,) if communicator is None else communicator.members
    rank = members[0] if communicator is None else communicator.rank
    for name in dict.fromkeys(name for table in tables for name in table):
        holders = {holder: table[name] for holder, table in zip(members, tables, strict=True) if name in table}
        if rank == members[0]:
            yield name, _collect(name, holders, held.get(name), communicator, torch_device)
        elif rank in holders and held[name].tensor.numel():
            assert communicator is not None
            tensor = held[name].tensor.detach().to(entries[name][1]).contiguous()
            communicator.send(tensor, members[0], f"part of {name}").wait("the first process")


def _to_json(entry: Entry) -> list[Any]:
    placement, dtype = entry
    return [placement.shape, [astuple(cut) for cut in placement.cuts], dtype_name(dtype)]


def _from_json(fields: list[Any]) -> Entry:
    shape, cuts, dtype = fields
    restored = (
        Cut(tuple(axes), index, parts, dimension, tuple(segments)) for axes, index, parts, dimension, segments in cuts
    )
    return TensorPlacement(tuple(shape), tuple(restored)), dtype_of(dtype)


def _collect(
    name: str,
    holders: Mapping[int, Entry],
    held: Held[Tensor] | None,
    communicator: Communicator | None,
    torch_device: torch.device,
) -> Tensor:
    """On the first process: assemble the whole tensor from its own part and those of the other holders."""
    rank = 0 if communicator is None else communicator.rank
    tensor: Tensor | None = None
    for holder, (placement, dtype) in holders.items():
        if holder == rank:
            assert held is not None
            shard = held.tensor.detach().to(dtype).cpu()
        else:
            assert communicator is not None
            buffer = torch.empty(placement.local_shape, dtype=dtype, device=torch_device)
            if buffer.numel():
                communicator.receive(buffer, holder, f"part of {name}").wait("the caller")
            shard = buffer.cpu()
        if not placement.cuts:
            return shard.clone() if holder == rank else shard
        tensor = torch.empty(placement.shape, dtype=dtype) if tensor is None else tensor
        for box in placement.boxes():
            tensor[box.whole] = shard[box.local]
    assert tensor is not None
    return tensor
