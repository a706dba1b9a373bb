"""The part of a model on one device: its stages, its rows of the vocabulary matrices, and all their parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from evenpipe.communication.communicator import Communicator
from evenpipe.host.offload import Activations, keep_on_device
from evenpipe.layers.checkpointing import Switch, checkpoint_layer
from evenpipe.layers.compilation import compile_layer
from evenpipe.layers.experts import split_experts
from evenpipe.layers.weight_gradients import WeightGradients, report_unsplit, split_layers
from evenpipe.model import Description, build_stage, fill_parameters, fill_rows, persistent_buffers
from evenpipe.parallel import Grid, ShardedModule
from evenpipe.parallel.parameters import Matrix, ShardedMatrix, StageParameters
from evenpipe.model.placement import Cut, Held, TensorPlacement
from evenpipe.recipe.layout import Layout
from evenpipe.runtime.vocabulary_layers import EmbeddingShard, OutputShard
from evenpipe.schedule import Kind, parts_of
from evenpipe.vocabulary import LossOptions, Shard


@dataclass(slots=True)
class HeldModel:
    """One device's part of a model, with weights."""

    stages: dict[int, nn.Module] = field(default_factory=dict)
    """By number."""
    parameters: dict[int, StageParameters] = field(default_factory=dict)
    """Parameters of each stage."""
    shards: dict[str, Held[nn.Parameter]] = field(default_factory=dict)
    """All parameters (masters, with their gradients), by Hugging Face name."""
    buffers: dict[str, Held[nn.Parameter]] = field(default_factory=dict)
    """Buffers that a model saves, treated as parameters that are not trained."""
    embedding: EmbeddingShard | None = None
    """None if the whole embedding is on another device."""
    output: OutputShard | None = None
    """None if the whole output layer is on another device."""
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    """The queue of all stages' linear layers."""
    checkpointing: Switch = field(default_factory=Switch)
    """Switch of all checkpointed layers."""
    tied_copy: Matrix | None = None
    """The matrix of a model with tied weights that another device also holds whole."""
    embedding_matrix: Matrix | None = None
    head_matrices: tuple[Matrix, ...] = ()
    """The output layer's rows and their bias; if tied weights are held once, the embedding's matrix."""
    sharded: dict[int, ShardedModule] = field(default_factory=dict)
    """Each stage's parameters, if they are sharded over replicas; then `parameters` is empty."""

    @property
    def matrices(self) -> list[Matrix]:
        """Its rows of the vocabulary matrices; tied ones once."""
        return list(dict.fromkeys(one for one in (self.embedding_matrix, *self.head_matrices) if one is not None))

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
        """Update the tensors that products read from the masters that the optimizer has changed."""
        for parameters in self.parameters.values():
            parameters.refresh()
        for matrix in self.matrices:
            matrix.refresh()


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What is made of every layer of a stage."""

    checkpointing: tuple[str, ...]
    """By layer of the model."""
    compiled: bool = False
    activations: Activations | None = None
    """Moves activations to the host; None: they stay."""
    kept: Collection[int] = ()
    """Layers whose activations stay on the device anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Builds this process's part of a model, and fills it from the source of the description."""

    description: Description
    layout: Layout
    grid: Grid
    loss: LossOptions
    layers: LayerOptions
    parameter_dtype: torch.dtype
    compute_dtype: torch.dtype
    torch_device: torch.device
    seed: int
    shards: Communicator | None = None
    """Over replicas that share parameters: a stage is built whole, then sharded, before the next one is built."""
    broadcast: Callable[[torch.Tensor], None] | None = None
    """Overwrites a tensor by that of the first replica; None: all replicas have the same weights anyway."""
    held: HeldModel = field(init=False, default_factory=HeldModel)

    def build(self) -> HeldModel:
        description, layout, device, held = self.description, self.layout, self.grid.coordinate("pp"), self.held
        unsplit = [name for stage in layout.program.placement.stages_of(device) for name in self._add_stage(stage)]
        if any(part.kind is Kind.I for item in layout.program.order.rows[device] if item for part in parts_of(item)):
            report_unsplit(unsplit)
        embedding_shard, head_shard = layout.embedding_shards[device], layout.head_shards[device]
        embedding = self._matrix(description.embedding_name, embedding_shard)
        if not description.tied:
            head = self._matrix(description.head_name, head_shard)
        elif embedding_shard == head_shard:
            head = embedding
        else:  # two devices hold the same matrix
            head = self._matrix(description.embedding_name, head_shard, is_copy=True) if head_shard.rows else None
            held.tied_copy = embedding or head
        bias = self._matrix(description.head_bias_name, head_shard) if description.head_bias_name else None
        held.embedding_matrix = embedding
        held.head_matrices = tuple(one for one in (head, bias) if one is not None)
        if head is not None:
            held.output = OutputShard(head, bias, head_shard, self.loss, one_barrier=layout.program.barriers == 1)
        if layout.sharded:
            held.embedding = EmbeddingShard(embedding, layout.embedding_shards, device, description.padding_index)
        elif embedding is not None:
            held.embedding = EmbeddingShard(embedding, (embedding_shard,), 0, description.padding_index)
        return held

    def _add_stage(self, stage: int) -> list[str]:
        """Return the names of the matrices whose gradient is computed in I, because no linear layer holds them."""
        held, description, placement = self.held, self.description, self.layout.program.placement
        first, last = self.layout.layers[stage]
        module = build_stage(
            description,
            first,
            last,
            is_first=stage == 0,
            is_last=stage == placement.last_stage,
            dtype=self.parameter_dtype,
            compute_dtype=self.compute_dtype,
            torch_device=self.torch_device,
        )
        fill_parameters(module, description, self.seed)
        held.stages[stage] = module
        if self.broadcast is not None:
            for tensor in (*module.parameters(), *(buffer for _, buffer in persistent_buffers(module))):
                self.broadcast(tensor.detach())
        layers_name = description.structure.layers_name
        layers = {index: module.get_submodule(f"{layers_name}.{index}") for index in range(first, last)}
        if self.shards is None:
            held.parameters[stage] = StageParameters(module, self.compute_dtype)
            for name, parameter in held.parameters[stage]:
                held.shards[name] = self._held(parameter, tuple(parameter.shape))
        else:
            held.sharded[stage] = ShardedModule(
                module, list(layers.values()), self.shards, compute_dtype=self.compute_dtype, what=f"stage {stage}"
            )
            held.shards |= dict(held.sharded[stage])
        for name, buffer in persistent_buffers(module):
            shared = nn.Parameter(buffer, requires_grad=False)
            # All stages have those outside of layers.
            is_copy = not name.startswith(f"{layers_name}.") and stage != placement.last_stage
            held.buffers[name] = self._held(shared, tuple(buffer.shape), is_copy=is_copy)
        return self._prepare(module, layers)

    def _prepare(self, module: nn.Module, layers: Mapping[int, nn.Module]) -> list[str]:
        """Give layers, by number, their split backward, checkpointing and compilation; return as `_add_stage`."""
        held, options = self.held, self.layers
        if options.activations is not None:
            held.checkpointing.hooks = options.activations.pack, options.activations.unpack
        experts = split_experts(module, held.weight_gradients)
        unsplit = [name for name in split_layers(module, held.weight_gradients) if name not in experts]
        for index, layer in layers.items():
            choice = options.checkpointing[index]
            if options.compiled:
                compile_layer(layer, held.weight_gradients, choice, held.checkpointing, self.torch_device)
            else:
                checkpoint_layer(layer, choice, held.checkpointing, self.torch_device)
            if options.activations is not None and index in options.kept:
                keep_on_device(layer, options.activations)
        return unsplit

    def _matrix(self, name: str, shard: Shard, *, is_copy: bool = False) -> Matrix | None:
        """Return the rows of a vocabulary matrix on this device; None if the whole matrix is on another one.

        is_copy: whether a device before this one holds the same rows.
        """
        layout, description, devices = self.layout, self.description, self.grid.size("pp")
        if not shard.rows and not layout.sharded:
            return None
        cuts = (Cut(("pp",), self.grid.coordinate("pp"), devices),) if layout.sharded and devices > 1 else ()
        (rows,) = TensorPlacement((description.vocabulary_size,), cuts).ranges(0)
        assert (rows.start, rows.stop) == (shard.start, shard.stop), f"{name}: {rows} on this device, not {shard}"
        filled = fill_rows(description, name, rows.start, rows.stop, self.seed)
        filled = filled.to(self.torch_device, self.parameter_dtype)
        if self.broadcast is not None:
            self.broadcast(filled)
        parameter = nn.Parameter(filled, requires_grad=_is_trained(description, name))
        if self.shards is None:
            found = Matrix(parameter, self.compute_dtype)
        else:
            found = ShardedMatrix(parameter, self.compute_dtype, self.shards, name)
        shape = (description.vocabulary_size, *filled.shape[1:])
        self.held.shards[name] = self._held(found.parameter, shape, (*cuts, *found.cuts), is_copy=is_copy)
        return found

    def _held(
        self, parameter: nn.Parameter, shape: tuple[int, ...], cuts: tuple[Cut, ...] = (), *, is_copy: bool = False
    ) -> Held[nn.Parameter]:
        """Return a parameter with its placement; over replicas that do not cut it, it has copies."""
        copied = {"pp"} if is_copy else set()
        if self.grid.coordinate("dp") and all("dp" not in cut.axes for cut in cuts):
            copied.add("dp")
        return Held(parameter, TensorPlacement(shape, cuts, frozenset(copied)))


def _is_trained(description: Description, name: str) -> bool:
    """Return whether a parameter is trainable. Only live models have frozen parameters."""
    model = description.skeleton if description.model is None else description.model
    return model.get_parameter(name).requires_grad
