"""Builds a pipeline from plain modules: an embedding, layers called as `layer(hidden)`, a norm and a head."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from evenpipe.errors import InputError
from evenpipe.model.description import Description, check_ends, check_sharing
from evenpipe.model.edge import EdgeSpec, EdgeTensor, hidden_of_width
from evenpipe.model.live import check_wrappers
from evenpipe.model.placement import TensorPlacement
from evenpipe.model.structure import Structure, embed_rows, uncuttable


class _Whole(nn.Module):
    """The user's modules, named like the prefixes of their parameters."""

    def __init__(self, embedding: nn.Embedding, layers: Sequence[nn.Module], norm: nn.Module | None, head: nn.Linear):
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = norm if norm is not None else nn.Identity()
        self.head = head


def describe_modules(
    embedding: nn.Embedding,
    layers: Sequence[nn.Module],
    norm: nn.Module | None,
    head: nn.Linear,
    extras: Sequence[EdgeTensor] = (),
) -> Description:
    """Describe a model of plain modules; the stages copy their weights.

    Parameters are named `embedding.weight`, `layers.N. ...`, `norm. ...`, `head.weight`, `head.bias`. The model is tied
    when embedding and head share one weight.

    Args:
        layers: each is called with the hidden states [batch, sequence, hidden_size] and returns the same shape.
        norm: called on the last layer's output, before the head; None: no norm.
        extras: the tensors that layers pass on besides the hidden states, as `edge_tensors` of `Pipeline.from_modules`.
    """
    check_ends("the model", embedding, head)
    if len(list(embedding.parameters())) > 1:
        raise uncuttable("the model", "its embedding holds parameters besides its matrix")
    if not layers:
        raise InputError("layers = [] holds no layer: at least one is needed.")
    model = _Whole(embedding, layers, norm, head)
    hidden = hidden_of_width(embedding.embedding_dim)
    check_wrappers(model)
    check_sharing("the model", model, embedding, head, layers="layers")
    return Description(
        config=None,
        architecture="the model",
        structure=Structure(
            layers_name="layers",
            embedding_module="embedding",
            head_module="head",
            entering=hidden,
            handed_on=(hidden, *extras),
        ),
        skeleton=model,
        model=model,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a model that forms a stage, and the form of its tensors: see `build_stage`."""

    first: int
    last: int
    is_first: bool
    is_last: bool
    dtype: torch.dtype
    compute_dtype: torch.dtype
    torch_device: str | torch.device
    with_memory: bool = True
    """Whether parameters have memory; otherwise they are on the meta device."""
    held: Mapping[str, TensorPlacement | None] = field(default_factory=dict)
    """Placements of parameters that tensor ranks share, by name; None: another rank holds the parameter."""
    tensor_ranks: int = 1
    """Number of processes that share every layer, each with its own rows of the tokens."""


class ModuleStage(nn.Module):
    """Layers [first, last) of a model of plain modules, with the interface of `Stage`."""

    fp32_parameters: frozenset[str] = frozenset()
    """Their parameters all follow the computing dtype."""

    def __init__(self, description: Description, spec: Part):
        super().__init__()
        self.first, self.last, self.is_first, self.is_last = spec.first, spec.last, spec.is_first, spec.is_last
        dtype = spec.compute_dtype
        self.incoming = description.edge(spec.first, dtype, outer=spec.is_first)
        self.outgoing = description.edge(spec.last, dtype, outer=spec.is_last)
        self._returned = EdgeSpec(tuple(tensor.computed_in(dtype) for tensor in description.structure.handed_on))
        model = description.skeleton
        self.layers = nn.ModuleDict(
            {str(index): copy.deepcopy(model.layers[index]) for index in range(spec.first, spec.last)}
        )
        if spec.is_last:
            self.norm = copy.deepcopy(model.norm)
        self._embedding: tuple[nn.Embedding, ...] = ()
        if spec.is_first:
            self._embedding = (_without_weight(model.embedding).to(spec.torch_device),)
        for child in (*self.layers.values(), *([self.norm] if spec.is_last else [])):
            _place(child, spec)  # one at a time, so that without memory only one is on the device
        self._returns_checked = False
        self.train()

    def placement_of(self, name: str, shape: torch.Size) -> TensorPlacement:
        """Return the placement of an uncut tensor of that shape."""
        return TensorPlacement(tuple(shape))

    def forward(
        self,
        *inputs: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Compute the tensors of `outgoing` from those of `incoming`. See `Stage.forward`.

        Raises:
            InputError: position ids or a mask were given; or, in the first calls, a module does not return what the
                model's layers pass on.
        """
        for name, value in (("position_ids", position_ids), ("attention_mask", attention_mask)):
            if value is not None:
                raise InputError(f"{name} were given, and a model of plain modules takes hidden states only.")
        sizes, tensors = inputs[0].shape[:2], inputs
        if self.is_first:
            tensors = self._checked("The embedding", embed_rows(self._embedding[0], tensors[0]), self.incoming, sizes)
        for index, layer in self.layers.items():
            tensors = self._checked(f"Layer {index}", layer(*tensors), self._returned, sizes)
        if self.is_last:
            tensors = self._checked("The norm", self.norm(tensors[0]), self.outgoing, sizes)
        self._returns_checked |= torch.is_grad_enabled()  # without it, nothing shows whether tensors have a gradient
        return tensors if len(self.outgoing.tensors) > 1 else tensors[0]

    def _checked(self, returner: str, returned: Any, form: EdgeSpec, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return what a module returned, as a tuple."""
        tensors = returned if len(form.tensors) > 1 and isinstance(returned, tuple) else (returned,)
        if not self._returns_checked:
            form.check(returner, tensors, *sizes)
        return tensors


def _place(module: nn.Module, spec: Part) -> None:
    """Move a module to the device and dtype of its stage."""
    module.to(spec.torch_device)
    for parameter in module.parameters():  # not buffers: rounding them may change results
        parameter.data = parameter.data.to(spec.dtype)
    if not spec.with_memory:
        on_meta = {
            parameter: nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            for parameter in module.parameters()
        }
        for inner in module.modules():
            parameters = inner._parameters
            parameters.update(
                {key: on_meta[parameter] for key, parameter in parameters.items() if parameter is not None}
            )


def _without_weight(embedding: nn.Embedding) -> nn.Embedding:
    """Return a copy of the embedding module without its matrix."""
    small = copy.copy(embedding)
    small._parameters = {}
    small._buffers = dict(embedding._buffers)
    small.__dict__["weight"] = None
    return small
