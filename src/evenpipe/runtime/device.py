"""One device's part of a model: its stages, its rows of the vocabulary matrices, and all their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.attention.function import OwnAttention
from evenpipe.communication.communicator import Communicator
from evenpipe.experts.adopt import OwnExperts, Spread
from evenpipe.experts.adopt import placements as placements_of_experts
from evenpipe.experts.load import Load
from evenpipe.host.offload import Activations, KeptOnDevice
from evenpipe.layers.checkpointing import Checkpointing, Switch
from evenpipe.layers.compilation import Compilation
from evenpipe.layers.random_state import Draws
from evenpipe.layers.weight_gradients import SplitBackward, WeightGradients, report_unsplit, unsplit_matrices
from evenpipe.model import (
    Description,
    ModuleStage,
    Stage,
    build_stage,
    drawn_parameters,
    fill_parameters,
    fill_rows,
    live_tensor,
    persistent_buffers,
)
from evenpipe.model.placement import Cut, Held, TensorPlacement
from evenpipe.model.transform import LayerTransform
from evenpipe.parallel import Grid, ShardedModule
from evenpipe.parallel.grid import COPIES
from evenpipe.parallel.parameters import Matrix, ShardedMatrix, StageParameters
from evenpipe.parallel.tensor_ranks import TensorRanks
from evenpipe.recipe.layout import Layout
from evenpipe.runtime.vocabulary_layers import EmbeddingShard, OutputShard
from evenpipe.schedule import Kind
from evenpipe.tensor.layers import ModelCut, TensorCut
from evenpipe.vocabulary import LossOptions, Shard

BLOCK_ELEMENTS = 1 << 24
"""Approximate number of elements sent at once when a tensor sharded over replicas is broadcast."""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """Parameters of a stage that are all held by the same processes."""

    stage: int
    name: str
    parameters: StageParameters | ShardedModule
    """Whole on this process, or sharded over replicas."""
    are_experts: bool = False
    """Whether these are the experts that the members of a group share."""


@dataclass(slots=True)
class HeldModel:
    """One device's part of a model, with weights."""

    stages: dict[int, Stage | ModuleStage] = field(default_factory=dict)
    """By number."""
    parts: list[HeldPart] = field(default_factory=list)
    """The parameters of its stages."""
    shards: dict[str, Held[nn.Parameter]] = field(default_factory=dict)
    """All parameters by Hugging Face name: the masters, with their gradients."""
    buffers: dict[str, Held[nn.Parameter]] = field(default_factory=dict)
    """Buffers that the model saves, treated as frozen parameters."""
    embedding: EmbeddingShard | None = None
    """None if the whole embedding is on another device."""
    output: OutputShard | None = None
    """None if the whole output layer is on another device."""
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    """The queue that the linear layers of all stages share."""
    checkpointing: Switch = field(default_factory=Switch)
    """The switch that all checkpointed layers share."""
    tied_copy: Matrix | None = None
    """The tied matrix, if another device also holds all of it."""
    embedding_matrix: Matrix | None = None
    head_matrices: tuple[Matrix, ...] = ()
    """The output layer's rows and their bias; the embedding's matrix if tied weights are held once."""
    shared: list[Held[nn.Parameter]] = field(default_factory=list)
    """Parameters that several tensor ranks hold, in the same order on all of them."""

    @property
    def unsharded(self) -> list[StageParameters]:
        """The parts that are not sharded over replicas."""
        return [part.parameters for part in self.parts if isinstance(part.parameters, StageParameters)]

    @property
    def matrices(self) -> list[Matrix]:
        """Its rows of the vocabulary matrices; a tied matrix appears once."""
        return list(
            dict.fromkeys(matrix for matrix in (self.embedding_matrix, *self.head_matrices) if matrix is not None)
        )

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return all tensors held between steps, by purpose."""
        modules = [module for stage in self.stages.values() for module in stage.modules()]
        parameters: list[Tensor] = [shard.tensor for shard in self.shards.values()]
        copies: list[Tensor] = [matrix.weight for matrix in self.matrices]
        copies += [parameter for stage in self.stages.values() for parameter in stage.parameters()]
        buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        return {
            "parameters": parameters,
            "copies": copies,
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "buffers": buffers + ([] if self.output is None else self.output.room),
        }

    def refresh(self) -> None:
        """Update the tensors that products read, after the optimizer has changed the masters."""
        for parameters in self.unsharded:
            parameters.refresh()
        for matrix in self.matrices:
            matrix.refresh()


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Options that apply to the layers of every stage."""

    checkpointing: tuple[str, ...]
    """For each layer of the model."""
    draws: Draws | None = None
    """Seeds the random numbers of each layer; None if layers draw none."""
    compiled: bool = False
    activations: Activations | None = None
    """Moves activations to the host; None if they stay."""
    kept_layers: Collection[int] = ()
    """Layers whose activations stay on the device nevertheless."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How parameters are initialised."""

    dtype: torch.dtype
    seed: int
    """Of fresh weights."""
    broadcast: Callable[[torch.Tensor], None] | None = None
    """Overwrites a tensor with that of the first replica; None if all replicas have the same weights anyway."""


@dataclass(frozen=True, slots=True)
class SharedLayers:
    """How processes share each layer."""

    tensor: tuple[ModelCut, TensorRanks] | None = None
    """How layers are cut over the tensor ranks of the device; None for a single rank."""
    experts: Spread | None = None
    """How the members of a group share experts; None if each device has all of its experts."""
    load: Load | None = None
    """Counts the experts that tokens choose; None without experts."""
    pieces: bool = False
    """Whether stages use evenpipe's attention: they get pieces of sequences, or documents to be kept apart."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """How this process holds the parameters of a stage."""

    placements: Mapping[str, TensorPlacement | None]
    """Of the parameters that are not whole; None if this process does not hold the parameter."""
    experts: Set[str]
    """Parameters that the members of a group share."""
    on_first_rank: Set[str]
    """Parameters that only the first tensor rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Builds this process's part of a model and fills it from the description's source."""

    description: Description
    layout: Layout
    grid: Grid
    loss: LossOptions
    layers: LayerOptions
    weights: Weights
    compute_dtype: torch.dtype
    torch_device: torch.device
    shards: Communicator | None = None
    """Over replicas that shard parameters: each process allocates only its shards."""
    expert_shards: Communicator | None = None
    """The same for the experts that the members of a group share."""
    ranks: SharedLayers = field(default_factory=SharedLayers)
    held: HeldModel = field(init=False, default_factory=HeldModel)

    def build(self) -> HeldModel:
        description, layout, device, held = self.description, self.layout, self.grid.coordinate("pp"), self.held
        if (activations := self.layers.activations) is not None:
            held.checkpointing.hooks = activations.pack, activations.unpack
        placement = layout.program.placement
        unsplit = [name for stage in placement.stages_of(device) for name in self._add_stage(stage)]
        if layout.program.order.splits_backward(device):
            report_unsplit(unsplit)
        ranks, exchange = self.grid.size("tp"), None if self.ranks.tensor is None else self.ranks.tensor[1]
        shard_index = device * ranks + self.grid.coordinate("tp")
        embedding_shard, head_shard = layout.embedding_shards[shard_index], layout.head_shards[shard_index]
        has_embedding = layout.sharded or device == placement.first_device
        has_head = layout.sharded or device == placement.last_device
        embedding = self._matrix(description.embedding_name, embedding_shard) if has_embedding else None
        if has_embedding and has_head and description.tied:
            head = embedding
        elif description.tied:  # two devices hold the same matrix
            head = self._matrix(description.embedding_name, head_shard, is_copy=True) if has_head else None
            held.tied_copy = embedding or head
        else:
            head = self._matrix(description.head_name, head_shard) if has_head else None
        bias = self._matrix(description.head_bias_name, head_shard) if has_head and description.head_bias_name else None
        held.embedding_matrix = embedding
        held.head_matrices = tuple(matrix for matrix in (head, bias) if matrix is not None)
        if head is not None:
            one_barrier = layout.program.vocabulary.combining is Kind.C
            held.output = OutputShard(head, bias, head_shard, self.loss, one_barrier=one_barrier, exchange=exchange)
        if embedding is not None:
            first = 0 if layout.sharded else device * ranks
            shards = layout.embedding_shards if layout.sharded else layout.embedding_shards[first : first + ranks]
            held.embedding = EmbeddingShard(embedding, shards, shard_index - first, description.padding_index, exchange)
        held.refresh()
        return held

    def _add_stage(self, stage: int) -> list[str]:
        """Build a stage. Return the names of the matrices whose gradient is computed in I because no linear layer holds
        them."""
        held, description, placement = self.held, self.description, self.layout.program.placement
        first, last = self.layout.layers[stage]
        cut = self._cut(range(first, last))
        module = build_stage(
            description,
            first,
            last,
            is_first=stage == 0,
            is_last=stage == placement.last_stage,
            dtype=self.weights.dtype,
            compute_dtype=self.compute_dtype,
            torch_device=self.torch_device,
            with_memory=False,
            held=cut.placements,
            tensor_ranks=self.grid.size("tp"),
        )
        held.stages[stage] = module
        layers_name = description.structure.layers_name
        layers = {index: module.get_submodule(f"{layers_name}.{index}") for index in range(first, last)}
        local_tensors = self._hold(stage, module, list(layers.values()), cut)
        for name, buffer in persistent_buffers(module):
            shared = nn.Parameter(buffer, requires_grad=False)
            # Every stage has the buffers outside of layers.
            is_copy = not name.startswith(f"{layers_name}.") and stage != placement.last_stage
            local_tensors[name] = held.buffers[name] = self._held(
                shared, TensorPlacement(tuple(buffer.shape)), is_copy=is_copy
            )
        fill_parameters(module, description, self.weights.seed, local_tensors)
        if self.weights.broadcast is not None:
            drawn = drawn_parameters(description)
            for name, local_tensor in local_tensors.items():
                if name not in drawn:
                    self._take_from_first_replica(name, local_tensor)
        for transform in self._transforms():
            transform.apply(module, layers)
        return unsplit_matrices(module)

    def _transforms(self) -> Iterator[LayerTransform]:
        """Yield the changes to layers: how they compute this process's part, then when they do so and where their
        activations are kept. Each transform wraps the previous ones."""
        if self.ranks.tensor is not None:
            choices = self.layers.checkpointing
            checkpointed = [index for index, choice in enumerate(choices) if choice != "none"]
            yield TensorCut(*self.ranks.tensor, checkpointed)
        if self.ranks.pieces:
            yield OwnAttention()
        options, queue, switch = self.layers, self.held.weight_gradients, self.held.checkpointing
        yield OwnExperts(queue, self.ranks.experts, self.ranks.load)
        yield SplitBackward(queue)
        checkpointing = Checkpointing(options.checkpointing, switch, self.torch_device)
        yield Compilation(checkpointing, queue) if options.compiled else checkpointing
        if options.activations is not None:
            yield KeptOnDevice(options.activations, options.kept_layers)
        if options.draws is not None:
            yield options.draws

    def _cut(self, layers: range) -> _Cut:
        description, ranks = self.description, self.ranks
        placements: dict[str, TensorPlacement | None] = {}
        on_first_rank: set[str] = set()
        experts: dict[str, TensorPlacement | None] = {}
        for index in layers:
            if ranks.tensor is not None:
                model_cut, rank_and_size = ranks.tensor[0], (self.grid.coordinate("tp"), self.grid.size("tp"))
                placements |= model_cut.placements(description, index, *rank_and_size)
                on_first_rank |= model_cut.alone(description, index)
            if ranks.experts is not None:
                experts |= placements_of_experts(description, index, ranks.experts, placements)
        return _Cut(placements | experts, experts.keys(), on_first_rank)

    def _hold(
        self, stage: int, module: Stage | ModuleStage, layers: Sequence[nn.Module], cut: _Cut
    ) -> dict[str, Held[nn.Parameter]]:
        """Create this process's part of a stage's parameters: of the experts that members of a group share, and of all
        others. Return it by name."""
        local_parameters: dict[str, Held[nn.Parameter]] = {}
        names = {name for name, _ in module.named_parameters()}
        parts = (
            (f"stage {stage}", names - cut.experts, self.shards, False),
            (f"experts of stage {stage}", names & cut.experts, self.expert_shards, True),
        )
        for label, selected, shards, are_experts in parts:
            if are_experts and not selected:
                continue
            parameters: StageParameters | ShardedModule
            if shards is None:
                parameters = StageParameters(
                    module,
                    self.compute_dtype,
                    selected,
                    fp32_parameters=module.fp32_parameters,
                    torch_device=self.torch_device,
                )
                masters = {name: Held.whole(parameter) for name, parameter in parameters}
            else:
                parameters = ShardedModule(
                    module,
                    layers,
                    shards,
                    compute_dtype=self.compute_dtype,
                    torch_device=self.torch_device,
                    label=label,
                    names=selected,
                    fp32_parameters=module.fp32_parameters,
                    inner=are_experts,
                )
                masters = dict(parameters)
            self.held.parts.append(HeldPart(stage, label, parameters, are_experts))
            local_parameters |= {name: self._hold_parameter(name, master, cut) for name, master in masters.items()}
        return local_parameters

    def _hold_parameter(self, name: str, master: Held[nn.Parameter], cut: _Cut) -> Held[nn.Parameter]:
        ranks, of_replicas = self.grid.size("tp"), master.placement
        over_ranks = cut.placements.get(name) or TensorPlacement(of_replicas.shape)
        over_both = replace(over_ranks, cuts=(*over_ranks.cuts, *of_replicas.cuts))
        held = self.held.shards[name] = self._held(master.tensor, over_both, is_alone=name in cut.on_first_rank)
        part_counts = [rank_cut.parts for rank_cut in over_ranks.cuts if "tp" in rank_cut.axes]
        if ranks > 1 and name not in cut.on_first_rank and all(parts < ranks for parts in part_counts):
            self.held.shared.append(held)
        return held

    def _take_from_first_replica(self, name: str, held: Held[Any]) -> None:
        """Overwrite this process's part of a tensor with the values of the first replica's live model.

        A tensor that is sharded over replicas is broadcast in blocks of rows; each replica keeps its own.
        """
        assert self.weights.broadcast is not None
        local, placement = held.tensor.detach(), held.placement
        over_replicas = tuple(cut for cut in placement.cuts if not {"dp", "edp", "ep"}.isdisjoint(cut.axes))
        if not over_replicas:
            self.weights.broadcast(local)
            return
        within_replica = replace(placement, cuts=tuple(cut for cut in placement.cuts if cut not in over_replicas))
        source = live_tensor(self.description, name)
        if within_replica.cuts:
            source = within_replica.of(source)
        shard = Held(local, TensorPlacement(tuple(source.shape), over_replicas))
        rows = max(1, BLOCK_ELEMENTS // max(1, math.prod(source.shape[1:])))
        for start in range(0, len(source), rows):
            block = source[start : start + rows].to(local.device, local.dtype, copy=True)
            self.weights.broadcast(block)
            shard.fill(block, start)

    def _matrix(self, name: str, shard: Shard, *, is_copy: bool = False) -> Matrix:
        """Return this process's rows of a vocabulary matrix.

        is_copy: whether an earlier device holds the same rows.
        """
        layout, description, grid = self.layout, self.description, self.grid
        axes = [axis for axis in (("pp", "tp") if layout.sharded else ("tp",)) if grid.size(axis) > 1]
        index = 0
        for axis in axes:
            index = index * grid.size(axis) + grid.coordinate(axis)
        cuts = (Cut(tuple(axes), index, math.prod(map(grid.size, axes))),) if axes else ()
        (rows,) = TensorPlacement((description.rows_of(name),), cuts).ranges(0)
        assert (rows.start, rows.stop) == (shard.start, shard.stop), f"{name}: {rows} on this device, not {shard}"
        width = () if name == description.head_bias_name else (description.hidden_size,)
        device = self.torch_device if self.shards is None else "meta"
        empty = torch.empty((len(rows), *width), dtype=self.weights.dtype, device=device)
        parameter = nn.Parameter(empty, requires_grad=_is_trained(description, name))
        if self.shards is None:
            matrix = Matrix(parameter, self.compute_dtype)
        else:
            matrix = ShardedMatrix(parameter, self.compute_dtype, self.shards, self.torch_device, name)
        placement = TensorPlacement((description.rows_of(name), *width), (*cuts, *matrix.cuts))
        held = self.held.shards[name] = self._held(matrix.parameter, placement, is_copy=is_copy)
        (local_rows,) = placement.ranges(0)
        with torch.no_grad():
            matrix.parameter.copy_(fill_rows(description, name, local_rows.start, local_rows.stop, self.weights.seed))
        if self.weights.broadcast is not None:
            self._take_from_first_replica(name, held)
        return matrix

    def _held(
        self,
        parameter: nn.Parameter,
        placement: TensorPlacement,
        *,
        is_copy: bool = False,
        is_alone: bool = False,
    ) -> Held[nn.Parameter]:
        """Return a parameter with its placement, and the axes of replicas and tensor ranks along which it is copied.

        Args:
            is_copy: whether an earlier device holds the same parameter.
            is_alone: whether only the first tensor rank holds it.
        """
        copied = {"pp"} if is_copy else set()
        cut_along = {axis for cut in placement.cuts for axis in cut.axes}
        for axis in COPIES if is_alone else (*COPIES, "tp"):
            # Members of a block of replicas hold different experts.
            copies = "edp" if axis == "dp" and "ep" in cut_along else axis
            if self.grid.coordinate(copies) and copies not in cut_along:
                copied.add(axis)
        return Held(parameter, replace(placement, copied_along=placement.copied_along | copied))


def _is_trained(description: Description, name: str) -> bool:
    """Return whether a parameter is trainable. Only live models have frozen parameters."""
    model = description.skeleton if description.model is None else description.model
    return model.get_parameter(name).requires_grad
