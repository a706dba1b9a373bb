"""A process's part of a model between steps: parameters, gathering of whole tensors, checkpoints and export."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.checkpoints import Checkpoint, load, open_checkpoint, save
from evenpipe.checkpoints.resumed_model import changes_of_draws, check_same_model
from evenpipe.communication.messages import dtype_name, dtype_of, values_of_members
from evenpipe.errors import InputError, RunError
from evenpipe.layers.random_state import RandomState
from evenpipe.model import (
    STORED_DTYPES,
    Description,
    Origin,
    disk_tensors,
    dtypes_to_write,
    save_tensors,
    write_folder_metadata,
)
from evenpipe.model.placement import Held
from evenpipe.optimizers.held import HeldParameter
from evenpipe.parallel import clip_gradients, total_norm
from evenpipe.parallel.gathering import stream_whole
from evenpipe.parallel.grid import COPIES, Grid
from evenpipe.parallel.groups import Groups
from evenpipe.runtime.device import HeldModel
from evenpipe.words import refused

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class ModelState:
    """The part of a model that a process holds, and access to the other parts."""

    description: Description
    held: HeldModel
    groups: Groups
    grid: Grid
    torch_device: torch.device
    parameter_dtype: torch.dtype
    is_first: bool
    """Whether this is the first process of all."""
    sharded: bool
    """Whether parameters are sharded by rows over replicas."""
    origin: Origin
    """What the model was made from: its files on the first process, the dtypes of this process's tensors."""
    drawn_by: Callable[[], Mapping[str, Any]] | None
    """Returns what the random numbers of layers depend on; None if layers draw none."""

    @property
    def spread_over(self) -> tuple[str, ...]:
        """The axes over which the parameters of the model are spread."""
        return ("pp", "tp", *COPIES) if self.sharded or self.grid.size("ep") > 1 else ("pp", "tp")

    @property
    def shards(self) -> dict[str, Held[nn.Parameter]]:
        """This process's part of each parameter and saved buffer, by name."""
        return self.held.shards | self.held.buffers

    def held_parameters(self) -> Iterator[HeldParameter]:
        """As `Pipeline.held_parameters`."""
        for name, shard in self.held.shards.items():
            axes = [axis for cut in shard.placement.cuts for axis in cut.axes]
            yield HeldParameter(name, shard.tensor, shard.placement, self.groups.over(*axes))

    def name_of_a_part(self) -> str | None:
        """Return the name of a parameter of which other processes hold rows; None without any."""
        return next((parameter.name for parameter in self.held_parameters() if parameter.communicator), None)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """As `Pipeline.clip_grad_norm_`."""
        held = [
            (shard.tensor.grad, shard.placement) for shard in self.held.shards.values() if shard.tensor.grad is not None
        ]
        counted = [gradient for gradient, placement in held if placement.is_first_copy(*self.spread_over)]
        norm = total_norm(
            counted, self.torch_device, lambda square: self.groups.sum("clip_grad_norm_", square, *self.spread_over)
        )
        if max_norm != float("inf"):
            clip_gradients([gradient for gradient, _ in held], norm, max_norm)
        return float(norm)

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Stream whole gradients to the first process."""
        return self._whole({name: shard.tensor.grad for name, shard in self.held.shards.items()})

    def whole_tensors(self, dtypes: Mapping[str, torch.dtype] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Stream whole parameters and saved buffers to the first process. dtypes: by name; others keep their own."""
        return self._whole({name: shard.tensor for name, shard in self.shards.items()}, dtypes)

    def _whole(
        self, tensors: Mapping[str, Tensor | None], dtypes: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Stream whole tensors, each part from the first process that holds it."""
        placements = {name: shard.placement for name, shard in self.shards.items()}
        held = {
            name: Held(tensor, placements[name])
            for name, tensor in tensors.items()
            if tensor is not None and placements[name].is_first_copy()
        }
        return stream_whole(held, self.groups.everyone, self.torch_device, dtypes)

    # --- checkpoints -----------------------------------------------------------------------------------------

    def save(
        self,
        folder: str | Path,
        step: int,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        extra: Mapping[str, Any] | None,
        *,
        keep: int | None,
        unhealthy: str | None,
    ) -> Path:
        """As `Pipeline.save_checkpoint`."""
        self.groups.check_same_call("save_checkpoint")
        config = self.description.config
        metadata = {
            **({} if config is None else {"model_config": config.to_dict(), "origin": self._whole_origin().to_json()}),
            **({} if self.drawn_by is None else {"draws": self.drawn_by()}),
            "tied": self.description.tied,
            "extra": dict(extra or {}),
            **({} if unhealthy is None else {"unhealthy": unhealthy}),
        }
        return save(
            folder,
            step,
            self.shards,
            optimizer,
            metadata,
            self._everyone,
            scheduler=scheduler,
            of_process=RandomState.of(self.torch_device).tensors,
            keep=keep,
        )

    def load(
        self,
        checkpoint: Checkpoint | str | Path,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        *,
        drawn_otherwise: str | None,
    ) -> dict[str, Any]:
        """As `Pipeline.load_checkpoint`. drawn_otherwise: why random numbers are not those of an uninterrupted run."""
        self.groups.check_same_call("load_checkpoint")
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = open_checkpoint(checkpoint, self._everyone)
        changes = check_same_model(checkpoint, self.description)
        if self.drawn_by is not None:
            changes += changes_of_draws(checkpoint.metadata.get("draws"), self.drawn_by())
        for change in (*changes, drawn_otherwise) if self.is_first else ():
            if change:
                logger.warning(change)
        state = RandomState.of(self.torch_device)
        load(checkpoint, self.shards, optimizer, self._everyone, scheduler=scheduler, of_process=state.tensors)
        if any(trains for trains, *_ in self.groups.numbers([optimizer is not None])):
            state.restore()
        return checkpoint.extra

    @property
    def _everyone(self) -> torch.distributed.ProcessGroup | None:
        return None if self.groups.everyone is None else self.groups.everyone.group

    def _whole_origin(self) -> Origin:
        """Return what the model was made from, with the dtypes of all tensors. Collective."""
        if self.description.source is None:  # with a live model, every process knows them all
            return self.origin
        local_dtypes = {name: dtype_name(dtype) for name, dtype in self.origin.dtypes.items()}
        tables = values_of_members(self.groups.everyone, local_dtypes, "the dtypes of the model's weights")
        dtypes = {name: dtype_of(dtype) for table in tables for name, dtype in table.items()}
        return replace(self.origin, dtypes=dtypes)

    # --- export ----------------------------------------------------------------------------------------------

    def save_pretrained(self, path: str | Path, dtype: torch.dtype | None) -> None:
        """As `Pipeline.save_pretrained`."""
        description = self.description
        if description.added:
            raise InputError(
                f"save_pretrained: transforms have added {min(description.added)} and others, which a"
                f" {description.architecture} has no place for; save_checkpoint keeps them"
            )
        if dtype is not None and dtype not in STORED_DTYPES.values():
            raise refused("dtype", dtype, f"one of {', '.join(map(str, STORED_DTYPES.values()))}")
        self.groups.check_same_call("save_pretrained")
        fault: str | None = None
        dtypes = {} if description.config is None else dtypes_to_write(description, self.origin.dtypes, dtype)
        tensors = self.whole_tensors(dtypes)
        try:
            if self.is_first:
                has_origin = self.origin.dtypes or (description.source is not None and not self.shards)
                written = dtype or (None if has_origin else self.parameter_dtype)
                write_folder_metadata(description, path, written, self.origin)
                save_tensors(path, disk_tensors(description, tensors))
        except Exception as error:  # from disk, safetensors or transformers: all processes must raise it
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            fault = f"the model was not written to {str(path)!r}: {reason}"
        for _ in tensors:  # the other processes send; after a failure the first one must still receive
            pass
        fault = self.groups.from_the_first(fault, "the saved model", "save_pretrained")
        if fault is not None:
            raise RunError(fault)
