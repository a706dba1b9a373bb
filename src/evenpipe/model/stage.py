"""Consecutive layers of a transformers model as one module from hidden states to hidden states.

The cut is *inject and capture*: the model's own forward runs with its full-length list of layers. Layers of other
stages return their input, the received hidden states replace the first local layer's input, and the last local layer's
output is captured. Masks, positions and rotary tables are thus the model's own.

            embedding  ->  before  ->  0 .. first-1   first .. last-1   last .. L-1  ->  after  ->  head
    runs on stand-in       stand-in    stand-in     ^ real tensors    ^ stand-in        stand-in    stub
                                               inject               capture

The forward's operations before and after the layers run on a stand-in without a graph, and their results are discarded,
except on the stage that owns them: the first stage owns the embedding's arithmetic and the operations before the
layers, the last stage the operations after them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from evenpipe.errors import InputError
from evenpipe.model.copies import copies
from evenpipe.model.description import Description
from evenpipe.model.edge import EdgeTensor, hidden_of_width
from evenpipe.model.modules import ModuleStage, Part
from evenpipe.model.packed_rows import nothing_packed
from evenpipe.model.placement import TensorPlacement
from evenpipe.model.router_loss import OPTION, router_modules
from evenpipe.model.rules import marked
from evenpipe.model.structure import (
    PassedTensor,
    Structure,
    call_embedded,
    embed_rows,
    embedding_of,
    identity_forward,
    layers_of,
    open_ends,
    outer_parameters,
    stand_in,
    uncuttable,
)


@dataclass(slots=True)
class Relay:
    """Carries the tensors of a call between `Stage.forward` and the hooks in the model; empty between calls."""

    hidden: PassedTensor
    """Where layers take and return the hidden states."""
    extras: tuple[PassedTensor, ...]
    """As `Structure.extras`."""
    received: tuple[torch.Tensor, ...] = ()
    stand_in: torch.Tensor | None = None
    result: tuple[torch.Tensor, ...] = ()
    router_logits: list[torch.Tensor] | None = None

    def clear(self) -> None:
        self.received = self.result = ()
        self.stand_in = self.router_logits = None

    def inject(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Replace a layer's hidden states, and the tensors that come with them, by the received tensors."""
        for slot, tensor in zip((self.hidden, *self.extras), self.received, strict=False):
            args, kwargs = slot.replaced(args, kwargs, tensor)
        return args, kwargs

    def capture_input(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Take a layer's hidden states as the result, and replace them by the stand-in."""
        self.result = (args[0] if args else kwargs[self.hidden.argument],)
        return self.hidden.replaced(args, kwargs, self.stand_in)

    def capture_output(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Take a layer's output as the result, and replace its hidden states by the stand-in."""
        if isinstance(output, (tuple, list)):
            self.result = (output[0], *(output[extra.entry] for extra in self.extras))
            return type(output)((self.stand_in, *output[1:]))
        self.result = (output,)
        return self.stand_in

    def record_router(self, index: int, module: nn.Module, args: tuple, output: Any) -> None:
        """Append entry `index` of a router's output."""
        if self.router_logits is None:  # not requested, or a layer's forward runs again in the backward
            return
        logits = output[index] if isinstance(output, tuple) else output
        if logits is not None:
            self.router_logits.append(logits)

    def take_head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Take the head's input as the result if there is none yet."""
        self.result = self.result or (hidden,)
        return hidden.detach()[..., :1]


class Stage(nn.Module):
    """Layers [first, last) of a model. Built by `build_stage`.

    Parameters have their Hugging Face names (`model.layers.5.self_attn.q_proj.weight`). The vocabulary matrices are not
    included: they are sharded over all devices.
    """

    def __init__(self, description: Description, spec: Part):
        super().__init__()
        self.first, self.last, self.is_first, self.is_last = spec.first, spec.last, spec.is_first, spec.is_last
        structure = description.structure
        self.held, self.tensor_ranks = spec.held, spec.tensor_ranks
        self.incoming = description.edge(spec.first, spec.compute_dtype, outer=spec.is_first)
        self.outgoing = description.edge(spec.last, spec.compute_dtype, outer=spec.is_last)
        self._hidden = structure.handed_on[0].computed_in(spec.compute_dtype)
        self._embedded = hidden_of_width(description.hidden_size).computed_in(spec.compute_dtype)
        self.layer_argument = structure.layer_argument
        relay = self._relay = Relay(PassedTensor(0, 0, structure.layer_argument), structure.extras)
        layer_range = range(spec.first, spec.last)
        model = copies(description, spec.dtype).of(layer_range)
        self._compute_dtype = spec.compute_dtype
        self.fp32_parameters = copies(description, spec.compute_dtype).fp32_parameters
        """Names of parameters, also of other stages, that stay in fp32 in a model of the computing dtype."""
        if wide := self.fp32_parameters.intersection(description.vocabulary_names):
            raise InputError(
                f"compute_dtype = {spec.compute_dtype}: transformers keeps {min(wide)} of {description.architecture} in"
                " fp32, and both vocabulary layers compute in the dtype of the layers; compute in torch.float32."
            )
        open_ends(model, structure, relay.take_head_input, dtype=spec.compute_dtype, torch_device=spec.torch_device)
        _materialise(model, description, spec)
        _place_hooks(layers_of(model, structure.layers_name), structure, spec, relay)
        if description.router_loss is not None:
            for module, index in router_modules(model, structure.layers_name, layer_range):
                module.register_forward_hook(partial(relay.record_router, index))

        self._whole = (model,)  # a tuple, so that only its children are registered, and names have no prefix
        for name, child in model.named_children():
            self.add_module(name, child)
        if outer := [name for name, parameter in model._parameters.items() if parameter is not None]:
            raise uncuttable(description.architecture, f"its parameter {outer[0]} is outside of its modules")
        self._embedding = (embedding_of(model, structure.embedding_module),)
        self._layers = (layers_of(model, structure.layers_name),)
        self._taken = {name: description.takes(name) for name in ("position_ids", "attention_mask")}
        # The model's own forward sees only this stage's routers, so it must not compute a loss.
        self._options = {} if description.router_loss is None else {OPTION: False}
        self._writes_to_input, self._wants_token = structure.writes_to_input, structure.wants_token
        self._result_checked = False
        self.finish: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Applied to the result."""
        self.train()

    @property
    def whole(self) -> PreTrainedModel:
        """The transformers model whose forward runs, with only this stage's parameters."""
        return self._whole[0]

    @property
    def layers(self) -> nn.ModuleList:
        """All layers of the model; those of other stages return their input."""
        return self._layers[0]

    def placement_of(self, name: str, shape: torch.Size) -> TensorPlacement:
        """Return the placement of this stage's shard of a parameter; `shape`: of the full parameter."""
        return self.held.get(name) or TensorPlacement(tuple(shape))

    def computing_dtypes(self) -> dict[nn.Parameter, torch.dtype]:
        """Return the dtype in which products read each parameter."""
        return {
            parameter: parameter.dtype if name in self.fp32_parameters else self._compute_dtype
            for name, parameter in self.named_parameters()
        }

    def train(self, mode: bool = True) -> Stage:
        """Set training or evaluation mode, also for the model around the modules."""
        self.whole.training = mode
        return super().train(mode)

    def forward(
        self,
        *inputs: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        router_logits: list[torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Compute the tensors of `outgoing` from those of `incoming`: hidden states [batch, sequence, hidden_size], and
        in some families others.

        Between stages, each tensor rank has its own rows, [batch, sequence / ranks, hidden_size]; the first stage gets
        all rows. The other arguments are for all tokens.

        Args:
            inputs: the previous stage's result. On the first stage: the unscaled rows of the embedding matrix at the
                token ids (scaling is done here, under autograd).
            position_ids: [batch, sequence], or None for 0, 1, 2, ...
            attention_mask: [batch, sequence], 1 for tokens and 0 for padding on the right, or None.
            router_logits: for a model with a router loss: a list to which the logits [tokens, experts] of the local
                layers' routers are appended, in the order of the layers.

        Returns: the last local layer's output, a tensor or a tuple of them; on the last stage the output layer's input
            (after the norm).

        Raises:
            InputError: the model's forward does not take an argument; or, on the first call, the result is not what
                `outgoing` says.
        """
        if self.first == self.last and not self.is_first and not self.is_last:
            return inputs if len(inputs) > 1 else inputs[0]
        arguments: dict[str, torch.Tensor] = {}
        for name, value in (("position_ids", position_ids), ("attention_mask", attention_mask)):
            if value is None:
                continue
            if not self._taken[name]:
                raise InputError(f"{name} were given, and {type(self.whole).__name__} takes none.")
            arguments[name] = value
        relay = self._relay
        try:
            sequences, tokens = self.incoming.tensors[0].microbatch(inputs[0])
            if not (self.is_first and self.is_last):
                relay.stand_in = self.make_stand_in(inputs[0], self._hidden)
            relay.received, relay.router_logits = inputs, router_logits
            if self.is_first:
                embedded = embed_rows(self._embedding[0], inputs[0])
            else:
                assert relay.stand_in is not None
                same = self._embedded == self._hidden
                embedded = relay.stand_in if same else self.make_stand_in(inputs[0], self._embedded)
            if self._writes_to_input:
                embedded = embedded.clone()
            with nothing_packed() if position_ids is None else nullcontext():
                call_embedded(self.whole, self._embedding[0], self._wants_token, embedded, **arguments, **self._options)
            assert relay.result, "the model's forward passed by the last local layer"
            result = relay.result[: len(self.outgoing.tensors)]
            if self.finish is not None:
                result = (self.finish(*result),)
            if not self._result_checked:
                ranks = self.tensor_ranks if self.is_first else 1
                self.outgoing.check(self._name(), result, sequences, tokens // ranks)
                self._result_checked = True
            return result if len(result) > 1 else result[0]
        finally:
            relay.clear()

    def make_stand_in(self, received: torch.Tensor, form: EdgeTensor) -> torch.Tensor:
        """Return a stand-in for the hidden states of other stages, in the form that they have for all tokens."""
        sequences, tokens = self.incoming.tensors[0].microbatch(received)
        rows = 1 if self.is_first else self.tensor_ranks
        return received.new_zeros(form.sizes(sequences, tokens * rows), dtype=form.dtype, requires_grad=False)

    def _name(self) -> str:
        return f"The stage of layers [{self.first}, {self.last}) of {type(self.whole).__name__}"


def build_stage(
    description: Description,
    first: int,
    last: int,
    *,
    is_first: bool,
    is_last: bool,
    dtype: torch.dtype = torch.float32,
    torch_device: str | torch.device = "cpu",
    compute_dtype: torch.dtype | None = None,
    with_memory: bool = True,
    held: Mapping[str, TensorPlacement | None] | None = None,
    tensor_ranks: int = 1,
) -> Stage | ModuleStage:
    """Build only layers [first, last) of a model: all other weights stay on the meta device.

    Parameters are allocated and contain NaN until `fill_parameters` (or `initialize`, `load_parameters`,
    `copy_parameters`). Buffers have their values; rotary tables are fp32 for every `dtype`. Parameters that are
    frozen in a live model (`requires_grad` off) are frozen here.

    Args:
        first, last: a stage may have no layers (first == last).
        is_first: it owns the embedding's arithmetic and all operations before the layers.
        is_last: it owns all operations after the layers, up to the head.
        dtype: dtype of the parameters; those that transformers keeps in fp32 are not narrower.
        compute_dtype: dtype of the forward's hidden states, if the caller replaces the parameters by copies in that
            dtype; None: `dtype`. Stand-ins have this dtype from the start.
        with_memory: False leaves the parameters on the meta device too, for a caller that keeps only shards of them.
        held: placements of the parameters that are sharded, by name; None: this process holds nothing of the parameter.
        tensor_ranks: number of processes that share every layer, each with its own rows of the tokens between blocks.

    Raises:
        InputError: the range is not within the model, or does not reach the end of the model that the stage should own.
    """
    count = description.layers
    if not 0 <= first <= last <= count:
        raise InputError(f"layers [{first}, {last}) are not within the {count} layers of {description.architecture}.")
    if (is_first and first != 0) or (is_last and last != count):
        end = "first" if is_first and first != 0 else "last"
        raise InputError(f"layers [{first}, {last}) of {count} cannot be the {end} stage: it has to reach that end.")
    build = ModuleStage if description.config is None else Stage
    spec = Part(
        first=first,
        last=last,
        is_first=is_first,
        is_last=is_last,
        dtype=dtype,
        compute_dtype=compute_dtype or dtype,
        torch_device=torch_device,
        with_memory=with_memory,
        held=held or {},
        tensor_ranks=tensor_ranks,
    )
    return build(description, spec)


def _materialise(model: PreTrainedModel, description: Description, spec: Part) -> None:
    """Allocate the stage's own parameters, and replace the others by stand-ins without storage.

    All get the given dtypes: some families build their routers in fp32 even in an fp64 model. Only those that
    transformers keeps in fp32 in a narrower model stay in fp32 here.
    """
    structure, computed = description.structure, copies(description, spec.compute_dtype)
    live = {} if description.model is None else dict(description.model.named_parameters(remove_duplicate=False))
    owned = {
        *(structure.first_parameters if spec.is_first else ()),
        *(structure.last_parameters if spec.is_last else ()),
    }
    prefixes = tuple(f"{structure.layers_name}.{index}." for index in range(spec.first, spec.last))
    for owner, attribute, name in outer_parameters(model):
        meta = owner.get_parameter(attribute)
        dtype, compute_dtype = spec.dtype, spec.compute_dtype
        if name in computed.fp32_parameters:
            dtype, compute_dtype = torch.promote_types(dtype, torch.float32), torch.float32
        if name in owned or name.startswith(prefixes):
            placement = spec.held.get(name, TensorPlacement(tuple(meta.shape)))
            if placement is None:
                owner._parameters[attribute] = None
                continue
            device = spec.torch_device if spec.with_memory else "meta"
            value = marked(torch.Size(placement.local_shape), dtype, device)
            is_trained = meta.requires_grad and live.get(name, meta).requires_grad
            owner._parameters[attribute] = nn.Parameter(value, requires_grad=is_trained)
        else:
            del owner._parameters[attribute]
            setattr(owner, attribute, stand_in(meta.shape, compute_dtype, spec.torch_device))
    dtypes = computed.buffer_dtypes if spec.compute_dtype != spec.dtype else {}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                name = f"{prefix}.{key}" if prefix else key
                module._buffers[key] = buffer.to(spec.torch_device, dtypes.get(name, buffer.dtype))


def _place_hooks(layers: nn.ModuleList, structure: Structure, spec: Part, relay: Relay) -> None:
    first, last = spec.first, spec.last
    for index, layer in enumerate(layers):
        if not first <= index < last:
            layer.forward = identity_forward(structure.layer_argument, structure.returns)
    # A stage after the last layer, without layers of its own, receives and captures at the last layer's stand-in.
    receiving = layers[min(first, len(layers) - 1)]
    if not spec.is_first:
        receiving.register_forward_pre_hook(relay.inject, with_kwargs=True)
    if not spec.is_last and first < last:
        layers[last - 1].register_forward_hook(relay.capture_output)
    elif not spec.is_last:
        receiving.register_forward_pre_hook(relay.capture_input, with_kwargs=True)
