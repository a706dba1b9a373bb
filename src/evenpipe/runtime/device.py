"""The part of a model on one device: its stages, its rows of the vocabulary matrices, and all their parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from evenpipe.host.offload import Activations, keep_on_device
from evenpipe.layers.checkpointing import Switch, checkpoint_layer
from evenpipe.layers.compilation import compile_layer
from evenpipe.layers.experts import split_experts
from evenpipe.layers.weight_gradients import WeightGradients, report_unsplit, split_layers
from evenpipe.model import Description, build_stage, fill_parameters, fill_rows, persistent_buffers
from evenpipe.parallel import ShardedModule
from evenpipe.parallel.parameters import Matrix, ParameterShard, ShardedMatrix, Sharding, StageParameters
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
    matrices: list[Matrix] = field(default_factory=list)
    """Its rows of the vocabulary matrices; tied ones once."""
    shards: dict[str, ParameterShard] = field(default_factory=dict)
    """All parameters, by Hugging Face name."""
    buffers: dict[str, ParameterShard] = field(default_factory=dict)
    """Buffers that a model saves, treated as parameters that are not trained."""
    embedding: EmbeddingShard | None = None
    """None if the whole embedding is on another device."""
    output: OutputShard | None = None
    """None if the whole output layer is on another device."""
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    """The queue of all stages' linear layers."""
    checkpointing: Switch = field(default_factory=Switch)
    """Switch of all checkpointed layers."""
    unsplit: list[str] = field(default_factory=list)
    """Names of the matrices whose gradient is computed in I, because no linear layer holds them."""
    tied_copy: Matrix | None = None
    """The matrix of a model with tied weights that another device also holds whole."""
    embedding_matrix: Matrix | None = None
    head_matrices: tuple[Matrix, ...] = ()
    """The output layer's rows and their bias; if tied weights are held once, the embedding's matrix."""
    sharded: dict[int, ShardedModule] = field(default_factory=dict)
    """Each stage's parameters, if they are sharded over replicas; then `parameters` is empty."""

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return all tensors held between steps, by purpose."""
        modules = [module for stage in self.stages.values() for module in stage.modules()]
        parameters: list[Tensor] = [shard.parameter for shard in self.shards.values()]
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


def build(
    description: Description,
    layout: Layout,
    device: int,
    *,
    options: LossOptions,
    parameter_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    torch_device: torch.device,
    seed: int,
    checkpointing: tuple[str, ...],
    compile_layers: bool = False,
    activations: Activations | None = None,
    kept_layers: Collection[int] = (),
    sharding: Sharding | None = None,
    row_mesh: DeviceMesh | None = None,
    broadcast: Callable[[torch.Tensor], None] | None = None,
) -> HeldModel:
    """Build the part of `device`, and fill it from the source of the description.

    Args:
        activations: moves activations to the host; None: they stay.
        kept_layers: layers whose activations stay on the device anyway.
        sharding: over replicas. A stage is built whole, then sharded, before the next one is built.
        row_mesh: mesh of the rows of the vocabulary, if every device has some; see `ParameterShard.mesh`.
        broadcast: overwrites a tensor by that of the first replica; None: all replicas have the same weights anyway.
    """
    held = HeldModel()
    placement = layout.program.placement
    for stage in placement.stages_of(device):
        first, last = layout.layers[stage]
        module = build_stage(
            description,
            first,
            last,
            is_first=stage == 0,
            is_last=stage == placement.stages - 1,
            dtype=parameter_dtype,
            compute_dtype=compute_dtype,
            torch_device=torch_device,
        )
        fill_parameters(module, description, seed)
        held.stages[stage] = module
        if broadcast is not None:
            for tensor in (*module.parameters(), *(buffer for _, buffer in persistent_buffers(module))):
                broadcast(tensor.detach())
        if sharding is None:
            held.parameters[stage] = StageParameters(module, compute_dtype)
            for name, parameter in held.parameters[stage]:
                held.shards[name] = ParameterShard(parameter, None, tuple(parameter.shape), saved_here=True)
        else:
            layers = [
                module.get_submodule(f"{description.structure.layers_name}.{index}") for index in range(first, last)
            ]
            held.sharded[stage] = sharding.shard(module, layers, compute_dtype, f"stage {stage}")
            for name, parameter, start, shape in held.sharded[stage]:
                held.shards[name] = ParameterShard(parameter, start, tuple(shape), saved_here=True, mesh=sharding.mesh)
        if activations is not None:
            held.checkpointing.hooks = activations.pack, activations.unpack
        experts = split_experts(module, held.weight_gradients)
        held.unsplit += [name for name in split_layers(module, held.weight_gradients) if name not in experts]
        for index in range(first, last):
            layer = module.get_submodule(f"{description.structure.layers_name}.{index}")
            if compile_layers:
                compile_layer(layer, held.weight_gradients, checkpointing[index], held.checkpointing, torch_device)
            else:
                checkpoint_layer(layer, checkpointing[index], held.checkpointing, torch_device)
            if activations is not None and index in kept_layers:
                keep_on_device(layer, activations)
        for name, buffer in persistent_buffers(module):
            shared = nn.Parameter(buffer, requires_grad=False)
            layers_own = name.startswith(f"{description.structure.layers_name}.")  # all stages have the others
            held.buffers[name] = ParameterShard(
                shared, None, tuple(buffer.shape), saved_here=layers_own or stage == placement.stages - 1
            )

    def matrix(name: str, shard: Shard, *, saved_here: bool = True) -> Matrix | None:
        """Return the rows of a vocabulary matrix on this device; None if the whole matrix is on another one."""
        if not shard.rows and not layout.sharded:
            return None
        rows = fill_rows(description, name, shard.start, shard.stop, seed).to(torch_device, parameter_dtype)
        if broadcast is not None:
            broadcast(rows)
        parameter = nn.Parameter(rows, requires_grad=_is_trained(description, name))
        shape = (description.vocabulary_size, *parameter.shape[1:])
        if sharding is None:
            found = Matrix(parameter, compute_dtype)
            start = shard.start if layout.sharded and layout.program.devices > 1 else None
        else:
            found = ShardedMatrix(parameter, compute_dtype, sharding, name)
            start = shard.start + found.start
        mesh = row_mesh if layout.sharded else None if sharding is None else sharding.mesh
        held.shards[name] = ParameterShard(found.parameter, start, shape, saved_here=saved_here, mesh=mesh)
        held.matrices.append(found)
        return found

    if any(part.kind is Kind.I for item in layout.program.order.rows[device] if item for part in parts_of(item)):
        report_unsplit(held.unsplit)

    embedding_shard, head_shard = layout.embedding_shards[device], layout.head_shards[device]
    embedding = matrix(description.embedding_name, embedding_shard)
    if not description.tied:
        head = matrix(description.head_name, head_shard)
    elif embedding_shard == head_shard:
        head = embedding
    else:  # two devices hold the same matrix; the first one saves it
        head = matrix(description.embedding_name, head_shard, saved_here=False) if head_shard.rows else None
        held.tied_copy = embedding or head
    bias = matrix(description.head_bias_name, head_shard) if description.head_bias_name else None
    held.embedding_matrix = embedding
    held.head_matrices = tuple(one for one in (head, bias) if one is not None)
    if head is not None:
        held.output = OutputShard(head, bias, head_shard, options, one_barrier=layout.program.barriers == 1)
    if layout.sharded:
        held.embedding = EmbeddingShard(embedding, layout.embedding_shards, device, description.padding_index)
    elif embedding is not None:
        held.embedding = EmbeddingShard(embedding, (embedding_shard,), 0, description.padding_index)
    return held


def _is_trained(description: Description, name: str) -> bool:
    """Return whether a parameter is trainable. Only live models have frozen parameters."""
    model = description.skeleton if description.model is None else description.model
    return model.get_parameter(name).requires_grad
