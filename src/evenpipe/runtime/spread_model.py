"""A model that is spread over processes: its layout, parameters, whole tensors, and checkpoints."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from evenpipe.checkpoints import Checkpoint, load, open_checkpoint, save
from evenpipe.checkpoints.resumed_model import changes_of_draws, check_same_model
from evenpipe.communication.messages import dtype_name, dtype_of, values_of_members
from evenpipe.errors import InputError, RunError
from evenpipe.experts.bias import is_router_bias, move_biases
from evenpipe.experts.load import Load
from evenpipe.layers.random_state import Draws, RandomState
from evenpipe.model import (
    STORED_DTYPES,
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
from evenpipe.runtime.accounting import ByteCounter
from evenpipe.runtime.arguments import (
    check_kinds,
    check_positive,
    refuse_use_of_a_part,
)
from evenpipe.runtime.device import HeldModel
from evenpipe.runtime.pieces import Cutter
from evenpipe.runtime.result import html_table
from evenpipe.runtime.scheduled_model import ScheduledModel
from evenpipe.runtime.walker import Walker
from evenpipe.words import count, refused

logger = logging.getLogger(__name__)


class SpreadModel(ScheduledModel):
    """A model of which every process holds a part."""

    microbatches: int
    device: int
    devices: int
    tensor_rank: int
    context_rank: int
    context_ranks: int
    """Processes that share every sequence, each with the same parameters."""
    replica: int
    replicas: int
    expert_rank: int
    expert_ranks: int
    """Neighbouring replicas that share the experts of every layer."""
    _held: HeldModel
    _walker: Walker
    _pieces: Cutter | None
    _load: Load | None
    _origin: Origin
    """What the model was made from: its files on the very first process, the dtypes of this process's tensors."""
    _draws: Draws | None
    """None: layers draw no random numbers."""
    _sharded: bool
    """Whether replicas share the rows of parameters."""

    def __repr__(self) -> str:
        numbers = sum(math.prod(shape) for shape in self.description.shapes.values())
        parts = [
            f"{self.description.architecture} of {count(self.description.layers, 'layer')} and {numbers:,} parameters",
            f"device {self.device} of {self.devices}",
            *([f"tensor rank {self.tensor_rank} of {self.tensor_ranks}"] if self.tensor_ranks > 1 else []),
            *([f"context rank {self.context_rank} of {self.context_ranks}"] if self.context_ranks > 1 else []),
            *([f"replica {self.replica} of {self.replicas}"] if self.replicas > 1 else []),
            *([f"expert rank {self.expert_rank} of {self.expert_ranks}"] if self.expert_ranks > 1 else []),
            count(self.layout.program.placement.stages, "stage"),
            count(self.microbatches, "microbatch"),
            f"vocabulary {self.layout.mode}",
        ]
        return f"<Pipeline: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: layers and vocabulary rows of each device, from 0, the last one excluded."""
        layout, rows = self.layout, []
        for device in range(self.devices):
            stages = layout.program.placement.stages_of(device)
            layers = ", ".join(f"{first}:{last}" for first, last in (layout.layers[stage] for stage in stages))
            own = slice(device * self.tensor_ranks, (device + 1) * self.tensor_ranks)
            shards = [shards[own] for shards in (layout.embedding_shards, layout.head_shards)]
            rows.append([str(device), layers, *(f"{held[0].start}:{held[-1].stop}" for held in shards)])
        return html_table(repr(self), ["device", "layers", "rows of the embedding", "rows of the output layer"], rows)

    def _take_place(self, grid: Grid) -> None:
        self.device, self.devices = grid.coordinate("pp"), grid.size("pp")
        self.tensor_rank, self.tensor_ranks = grid.coordinate("tp"), grid.size("tp")
        self.context_rank, self.context_ranks = grid.coordinate("cp"), grid.size("cp")
        self.replica, self.replicas = grid.coordinate("dp"), grid.size("dp")
        self.expert_rank, self.expert_ranks = grid.coordinate("ep"), grid.size("ep")

    def _let_go_of_the_model(self) -> None:
        """Release a live model, which has been copied; keep only its generation config."""
        model, skeleton = self.description.model, self.description.skeleton
        if isinstance(skeleton, PreTrainedModel) and model is not None:
            skeleton.generation_config = copy.deepcopy(model.generation_config)
            self.description = replace(self.description, model=None)

    @property
    def _tied_twice(self) -> tuple[int, int] | None:
        """The two devices that each have a copy of the one matrix of tied weights, if two have."""
        placement = self.layout.program.placement
        ends = placement.first_device, placement.last_device
        return ends if self.description.tied and not self.layout.sharded and len({*ends}) > 1 else None

    @property
    def feeds(self) -> bool:
        """Whether this is the first process of its replica, which passes the data of every step."""
        return not (self.device or self.context_rank or self.tensor_rank)

    @property
    def _is_very_first(self) -> bool:
        """Whether this is the first process of the first replica."""
        return self.feeds and not self.replica

    @property
    def _separate(self) -> bool:
        """Whether documents of a sequence do not see each other."""
        return self.recipe.batch.separate

    @property
    def expert_layers(self) -> tuple[str, ...]:
        """Names of the modules of experts in the whole model, one for each layer that has some."""
        return () if self._load is None else self._load.layers

    @property
    def keeps_documents_apart(self) -> str | None:
        """What keeps separate documents of a sequence apart: "the model's attention" or "evenpipe's attention"; None if
        they are joined."""
        if not self._separate:
            return None
        return "the model's attention" if self._pieces is None else "evenpipe's attention"

    @property
    def _spread_over(self) -> tuple[str, ...]:
        """The axes over which the parameters of a whole model are spread."""
        return ("pp", "tp", *COPIES) if self._sharded or self.expert_ranks > 1 else ("pp", "tp")

    def slice_lengths(self, tokens: int) -> tuple[int, ...]:
        """Return the tokens of each slice of a sequence of `tokens` tokens; they are a multiple of what `step` needs.

        Slices are cut so that the layers take equal time, by the costs of the recipe if these were measured on slices,
        else by FLOPs.
        """
        ends = (tokens,) if self._pieces is None else self._pieces.ends_of(tokens)
        return tuple(end - start for start, end in pairwise((0, *ends)))

    def count_bytes(self) -> ByteCounter:
        """Return a context that counts the bytes of all tensors of this process, for every pass of the steps inside.

        Tensors of the pipeline count from the start: "parameters", their "copies" in another dtype, "gradients" and
        "buffers". Optimizer state counts only if it is created inside.
        """

        def follow(counter: ByteCounter | None) -> None:
            self._walker.counter = counter

        return ByteCounter(self._held.tensors(), follow)

    # --- parameters ------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over (Hugging Face name, parameter) of this process; of vocabulary matrices, it has only rows."""
        if self.devices > 1 or self.tensor_ranks > 1 or self._sharded:
            refuse_use_of_a_part(lambda: next((one.name for one in self.held_parameters() if one.communicator), None))
        for name, shard in self._held.shards.items():
            yield name, shard.tensor

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of this process, for an optimizer.

        Other processes have the rest of the model, so a norm or mean over these parameters differs between processes.
        Clip with `clip_gradients`, which uses the norm of all gradients. The call
        `torch.nn.utils.clip_grad_norm_(pipeline.parameters(), ...)` raises InputError. If this process has only rows of
        a matrix, so do `torch.optim.Adafactor` and `torch.optim.Muon`. A list of parameters that was made before is not
        detected.
        """
        return (parameter for _, parameter in self.named_parameters())

    def parameter_shards(self) -> dict[str, Held[nn.Parameter]]:
        """Return this process's part of each parameter by Hugging Face name.

        Saved buffers (such as the bias that corrects a router's scores) are included as frozen parameters.
        """
        return self._held.shards | self._held.buffers

    def held_parameters(self) -> Iterator[HeldParameter]:
        """Iterate, for optimizers that need whole matrices, over this process's part of each parameter, with its
        communicator to the processes with the other rows. The order is the same on all of them."""
        for name, shard in self._held.shards.items():
            axes = [axis for cut in shard.placement.cuts for axis in cut.axes]
            yield HeldParameter(name, shard.tensor, shard.placement, self._groups.over(*axes))

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters():
            parameter.grad = None

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over all devices is at most `max_norm`; return the norm before.

        With an infinite `max_norm` it only measures. Collective; every process gets the same number.
        """
        check_positive("max_norm", max_norm)
        held = [
            (shard.tensor.grad, shard.placement)
            for shard in self._held.shards.values()
            if shard.tensor.grad is not None
        ]
        counted = [gradient for gradient, placement in held if placement.is_first_copy(*self._spread_over)]
        norm = total_norm(
            counted, self.torch_device, lambda square: self._groups.sum("clip_gradients", square, *self._spread_over)
        )
        if max_norm != float("inf"):
            clip_gradients([gradient for gradient, _ in held], norm, max_norm)
        return float(norm)

    def move_router_biases(self, load: Tensor, rate: float) -> None:
        """Balance experts without a loss, after the optimizer's step: move the biases by which routers choose experts
        (arXiv 2408.15664; DeepSeek-V3 and others have them) by `rate` towards experts with few tokens. Collective.

        Args:
            load: the sum of `StepResult.expert_load` over the steps of an update; the same on all processes.

        Raises:
            InputError: no router of the model has such a bias.
        """
        check_positive("rate", rate)
        if not self.has_router_biases:
            raise InputError(
                f"move_router_biases: no router of {self.description.architecture} has a bias to choose by"
            )
        self._groups.agree("move_router_biases")
        move_biases(self.parameter_shards(), load, self.expert_layers, rate)

    @property
    def has_router_biases(self) -> bool:
        """Whether a router of the model has a bias by which it only chooses experts."""
        return any(map(is_router_bias, self.description.shapes))

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of all processes of all replicas; None for a single process."""
        return None if self._groups.everyone is None else self._groups.everyone.group

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process, replica by replica and in each by device, on every process. All
        processes must give equally many numbers. Collective."""
        return self._groups.numbers(numbers)

    # --- whole tensors ---------------------------------------------------------------------------------------

    def stream_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, whole gradient on the CPU) on the first process; on the others there is nothing, but
        every process must exhaust it: a process that has not raises InputError in its next collective method."""
        return self._groups.stream("stream_gradients", self._whole_gradients())

    def stream_state(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, whole parameter or saved buffer on the CPU), as `stream_gradients` does."""
        return self._groups.stream("stream_state", self._whole_state())

    def _whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        return self._whole({name: shard.tensor.grad for name, shard in self._held.shards.items()})

    def _whole_state(self, dtypes: Mapping[str, torch.dtype] | None = None) -> Iterator[tuple[str, Tensor]]:
        return self._whole({name: shard.tensor for name, shard in self.parameter_shards().items()}, dtypes)

    def _whole(
        self, tensors: Mapping[str, Tensor | None], dtypes: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Stream whole tensors: those that replicas share from all of them, everything else from the first one.

        dtypes: dtypes to stream in, by name; other tensors keep their own.
        """
        if (self.replica or self.context_rank) and not {*COPIES} & {*self._spread_over}:
            return iter(())
        placements = {name: shard.placement for name, shard in self.parameter_shards().items()}
        held = {
            name: Held(tensor, placements[name])
            for name, tensor in tensors.items()
            if tensor is not None and placements[name].is_first_copy()
        }
        return stream_whole(held, self._groups.over(*self._spread_over), self.torch_device, dtypes)

    def full_gradients(self) -> dict[str, Tensor]:
        """Return all whole gradients by Hugging Face name on the first process; empty on the others. Collective."""
        return dict(self._groups.stream("full_gradients", self._whole_gradients()))

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return all whole parameters and saved buffers by Hugging Face name on the first process; empty on the others.

        Collective.
        """
        return dict(self._groups.stream("full_state_dict", self._whole_state()))

    def save_checkpoint(
        self,
        folder: str | Path,
        step: int,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
        *,
        keep: int | None = 2,
        unhealthy: str | None = None,
    ) -> Path:
        """Save everything that a loop needs to continue as if it had not stopped; return the checkpoint's folder,
        `folder/step-NNNNNNNN`. Any number of processes, any schedule and any vocabulary mode can load it.

        `evenpipe.newest_checkpoint` never finds an incomplete checkpoint, even after a failure of a process or disk.
        The first save locks the folder until the first process ends; saves of other runs are refused. The states of
        torch's random generators are saved: of the CPU, and of the GPU that a process computes on; those of Python and
        numpy are not. Collective.

        Args:
            folder: folder of all checkpoints of the run, visible to all processes.
            step: number of optimizer steps taken. An existing checkpoint of this step is replaced.
            optimizer: an optimizer of parameters of this pipeline; its state and the options of its groups, such as
                learning rates, are saved. None for a process without a trainable parameter.
            scheduler: a scheduler of this optimizer, as in `torch.optim.lr_scheduler`; the optimizer must then have
                equally many groups on every process.
            extra: JSON values that the loop needs in addition, such as its position in the data. Only the first
                process's are saved.
            keep: number of checkpoints to keep, this one and the newest before it; None: all. The newest healthy one is
                kept in any case.
            unhealthy: why the state may be ruined, such as "the loss has doubled"; None: it is healthy. The checkpoint
                keeps it (`Checkpoint.unhealthy`).

        Raises:
            InputError: another run has locked the folder, or a value cannot be saved; the sentence names it.
            RunError: a disk or a process failed; earlier checkpoints have not changed.
        """
        check_kinds(step=step, optimizer=optimizer, extra=extra, unhealthy=unhealthy)
        self._groups.agree("save_checkpoint")
        config = self.description.config
        metadata = {
            **({} if config is None else {"model_config": config.to_dict(), "origin": self._whole_origin().to_json()}),
            **({} if self._draws is None else {"draws": self._drawn_by}),
            "tied": self.description.tied,
            "extra": dict(extra or {}),
            **({} if unhealthy is None else {"unhealthy": unhealthy}),
        }
        shards = self.parameter_shards()
        return save(
            folder,
            step,
            shards,
            optimizer,
            metadata,
            self.process_group,
            scheduler=scheduler,
            of_process=RandomState.of(self.torch_device).tensors,
            keep=keep,
        )

    def load_checkpoint(
        self,
        checkpoint: Checkpoint | str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
    ) -> dict[str, Any]:
        """Load parameters, optimizer and scheduler from a checkpoint; return its `extra`.

        If anything fails, none of them has changed. The options of optimizer groups, such as learning rates, become the
        saved ones; to use others, set them afterwards. Parameters that are trained now, but were not when the
        checkpoint was saved, begin with new optimizer state; a warning names them. With an optimizer, torch's random
        generators continue too: those of all processes if as many have saved theirs, else that of the first process,
        which dropout follows. Collective.

        Args:
            checkpoint: from `evenpipe.newest_checkpoint`, or the folder of a checkpoint.
            optimizer: an optimizer of the saved kind; None does not read its state.
            scheduler: a scheduler of the saved kind.

        Raises:
            InputError: the checkpoint is damaged, or does not fit the model, the optimizer or the scheduler.
            RunError: a disk or a process failed.
        """
        check_kinds(optimizer=optimizer)
        self._groups.agree("load_checkpoint")
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = open_checkpoint(checkpoint, self.process_group)
        changes = check_same_model(checkpoint, self.description)
        if self._draws is not None:
            changes += changes_of_draws(checkpoint.metadata.get("draws"), self._drawn_by)
            order = self.layout.program.order
            if self.recipe.compile_layers and any(map(order.splits_backward, range(self.devices))):
                changes.append(
                    "compiled layers with a split backward run their first microbatch uncompiled: with dropout it draws"
                    " other random numbers than in an uninterrupted run"
                )
        for change in changes:
            if self._is_very_first:
                logger.warning(change)
        state = RandomState.of(self.torch_device)
        load(
            checkpoint,
            self.parameter_shards(),
            optimizer,
            self.process_group,
            scheduler=scheduler,
            of_process=state.tensors,
        )
        if any(trains for trains, *_ in self.gather_numbers([optimizer is not None])):
            state.restore()
        return checkpoint.extra

    def _whole_origin(self) -> Origin:
        """Return what the model was made from, with the dtypes of all tensors. Collective."""
        if self.description.source is None:  # every process knows all of a live model
            return self._origin
        own = {name: dtype_name(dtype) for name, dtype in self._origin.dtypes.items()}
        tables = values_of_members(self._groups.everyone, own, "the dtypes of the model's weights")
        return replace(
            self._origin, dtypes={name: dtype_of(dtype) for table in tables for name, dtype in table.items()}
        )

    @property
    def _drawn_by(self) -> dict[str, Any]:
        """What the random numbers of layers depend on, besides the number of each step, in the words of messages."""
        return {
            "microbatches of all replicas": self.replicas * self.microbatches,
            "slices": self.layout.program.slices,
            "context ranks": self.context_ranks,
            "tensor ranks": self.tensor_ranks,
            "compiled layers": self.recipe.compile_layers,
            "device": self.torch_device.type,
        }

    def save_pretrained(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face folder that `from_pretrained` loads: safetensors, config and generation config.

        A model that was loaded is written as it came, except for its weights: config.json and generation_config.json
        are the same files, and every tensor has the dtype in which it was stored. A live model is written as its own
        `save_pretrained` would write it. The tokenizer is not written: it has a `save_pretrained` of its own.

        The first process writes one whole tensor at a time. Collective.

        Args:
            dtype: dtype of the weights; default: that of the model which the pipeline was made from, so that masters of
                16-bit weights are rounded; fresh weights have `parameter_dtype`. Parameters that transformers keeps in
                fp32 beside 16-bit ones stay in fp32.

        Raises:
            InputError: the dtype is none that models have.
            RunError: the folder cannot be written, or the model consists of plain modules; raised on every process.
        """
        if dtype is not None and dtype not in STORED_DTYPES.values():
            raise refused("dtype", dtype, f"one of {', '.join(map(str, STORED_DTYPES.values()))}")
        self._groups.agree("save_pretrained")
        fault: str | None = None
        dtypes = (
            {} if self.description.config is None else dtypes_to_write(self.description, self._origin.dtypes, dtype)
        )
        tensors = self._whole_state(dtypes)
        try:
            if self._is_very_first:
                written = dtype or (None if self._origin.dtypes else next(self.parameters()).dtype)
                write_folder_metadata(self.description, path, written, self._origin)
                save_tensors(path, disk_tensors(self.description, tensors))
        except Exception as error:  # of disk, safetensors or transformers: all processes must raise it
            fault = f"the model was not written to {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        for _ in tensors:  # the other processes send; after a failure the first one must still receive
            pass
        fault = self._groups.from_the_first(fault, "the saved model", "save_pretrained")
        if fault is not None:
            raise RunError(fault)
