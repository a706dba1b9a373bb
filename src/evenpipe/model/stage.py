"""A run of consecutive layers of a transformers model, as one module from hidden states to hidden states.

The cut is *inject and capture*: the model's own forward runs with its full-length list of layers, those that live elsewhere hand on
what they get, the first local layer's input is replaced by the received hidden states, and the last local layer's output is taken.
Masks, positions and rotary tables are thus the model's own. What the forward does before and after the layers is run on a stand-in and
thrown away, except on the stage that owns it: the first has the embedding's arithmetic and what precedes the layers, the last what follows.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import nn

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.model.initialization import marked
from evenpipe.model.structure import build_skeleton, hollow, identity_forward, outer_parameters


@dataclass
class _Relay:
    """Carries the tensors of one call between `Stage.forward` and the hooks inside the model; empty between calls."""

    received: torch.Tensor | None = None
    stand_in: torch.Tensor | None = None
    result: torch.Tensor | None = None


class Stage(nn.Module):
    """Layers [first, last) of a model. Built by `build_stage`.

    Parameters carry their Hugging Face names (`model.layers.5.self_attn.q_proj.weight`); the vocabulary matrices are not among them.
    """

    def __init__(
        self,
        description: Description,
        first: int,
        last: int,
        *,
        is_first: bool,
        is_last: bool,
        dtype: torch.dtype,
        torch_device: str | torch.device,
    ):
        super().__init__()
        structure = description.structure
        self.first, self.last, self.is_first, self.is_last = first, last, is_first, is_last
        self._relay = relay = _Relay()
        whole = build_skeleton(description.config, dtype, type(description.skeleton))
        hollow(
            whole,
            structure.layers_name,
            structure.embedding_module,
            structure.head_module,
            range(first, last),
            _take_head_input(relay),
        )
        owned = set(structure.first_parameters if is_first else ()) | set(structure.last_parameters if is_last else ())
        layer_prefixes = tuple(f"{structure.layers_name}.{index}." for index in range(first, last))
        for owner, attribute, name in list(outer_parameters(whole)):
            parameter = owner._parameters[attribute]
            if name in owned or name.startswith(layer_prefixes):
                value = marked(parameter, device=torch_device)
                owner._parameters[attribute] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            else:  # acts on what is thrown away: any values do, and this one takes no memory
                del owner._parameters[attribute]
                setattr(
                    owner,
                    attribute,
                    torch.zeros((), dtype=parameter.dtype, device=torch_device).expand(parameter.shape),
                )
        for module in whole.modules():
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else buffer.to(torch_device)
        layers = whole.get_submodule(structure.layers_name)
        self._place_hooks(layers, structure.layer_argument, structure.returns)

        self._whole = (whole,)  # in a tuple: its children, not itself, are this module's, so that names have no prefix
        for name, child in whole.named_children():
            self.add_module(name, child)
        if any(parameter is not None for parameter in whole._parameters.values()):
            raise InputError(
                f"{description.architecture} cannot be cut into stages: it has parameters outside of its modules."
            )
        self._embedding = (whole.get_submodule(structure.embedding_module),)
        self._embedding_is_plain = type(self._embedding[0]).forward is nn.Embedding.forward
        self._accepts_positions = "position_ids" in inspect.signature(type(whole).forward).parameters
        self._architecture = description.architecture
        self.train()

    @property
    def whole(self):
        """The transformers model whose forward runs inside, with this stage's layers only."""
        return self._whole[0]

    def _place_hooks(self, layers: nn.ModuleList, argument: str, returns: int) -> None:
        relay, count = self._relay, len(layers)
        first, last = self.first, self.last
        inject = None if self.is_first else (first if first < last else first - 1 if first == count else None)
        for index, layer in enumerate(layers):
            if not first <= index < last:
                layer.forward = identity_forward(argument, returns)
        if inject is not None:
            layers[inject].register_forward_pre_hook(_inject(relay, argument), with_kwargs=True)
        if not self.is_last and first < last:
            layers[last - 1].register_forward_hook(_capture_output(relay))
        elif not self.is_last and self.is_first:
            layers[first].register_forward_pre_hook(_capture_input(relay, argument), with_kwargs=True)

    def forward(
        self, hidden: torch.Tensor, position_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states in, hidden states out, both [batch, sequence, hidden_size].

        Args:
            hidden: what the stage before returned. On the first stage: the rows of the embedding matrix at the token ids, as they
                are stored (scaling is done here, under autograd).
            position_ids: [batch, sequence], or None for 0, 1, 2, ...
            attention_mask: [batch, sequence], 1 for tokens and 0 for padding on the right, or None.

        Returns: the last local layer's output; on the last stage what the output layer receives (after the final norm).
        """
        if self.first == self.last and not self.is_first and not self.is_last:
            return hidden
        arguments: dict[str, torch.Tensor] = {}
        if position_ids is not None:
            if not self._accepts_positions:
                raise InputError(f"position_ids were given, and {self._architecture} takes none.")
            arguments["position_ids"] = position_ids
        if attention_mask is not None:
            arguments["attention_mask"] = attention_mask
        relay = self._relay
        try:
            relay.stand_in = torch.zeros_like(hidden, requires_grad=False)
            if self.is_first:
                embedded = self._embed(hidden)
            else:
                relay.received, embedded = hidden, relay.stand_in
            self.whole(inputs_embeds=embedded, use_cache=False, **arguments)
            assert relay.result is not None, "the model's forward passed by the last local layer"
            return relay.result
        finally:
            relay.received = relay.stand_in = relay.result = None

    def _embed(self, rows: torch.Tensor) -> torch.Tensor:
        """The embedding module's own forward on a matrix that consists of the fetched rows only."""
        if self._embedding_is_plain:
            return rows
        embedding = self._embedding[0]
        padding, embedding.padding_idx = embedding.padding_idx, None
        embedding.weight = rows.reshape(-1, rows.shape[-1])
        try:
            return embedding(torch.arange(embedding.weight.shape[0], device=rows.device).view(rows.shape[:-1]))
        finally:
            embedding.weight, embedding.padding_idx = None, padding


def build_stage(
    description: Description,
    first: int,
    last: int,
    *,
    is_first: bool,
    is_last: bool,
    dtype: torch.dtype = torch.float32,
    torch_device: str | torch.device = "cpu",
) -> Stage:
    """Builds layers [first, last) of a model and nothing else; all else stays on the meta device.

    Parameters are allocated and hold NaN until `fill_parameters` (or `initialize`, `load_parameters`, `copy_parameters`); buffers have
    their values, rotary tables in fp32 whatever `dtype`.

    Args:
        first, last: a stage may hold no layer at all (first == last).
        is_first: owns the embedding's arithmetic and what precedes the layers. is_last: owns what follows them, up to the head.
        dtype: of the parameters.

    Raises:
        InputError: the range is not within the model, or the ends do not belong to it.
    """
    if not 0 <= first <= last <= description.layers:
        raise InputError(
            f"layers [{first}, {last}) are not within the {description.layers} layers of {description.architecture}."
        )
    if (is_first and first != 0) or (is_last and last != description.layers):
        raise InputError(
            f"layers [{first}, {last}) do not reach the end of the {description.layers} layers that the stage should own."
        )
    return Stage(description, first, last, is_first=is_first, is_last=is_last, dtype=dtype, torch_device=torch_device)


def _hidden(output):
    return output[0] if isinstance(output, tuple) else output


def _inject(relay: _Relay, argument: str):
    def hook(module, args, kwargs):
        if args:
            return (relay.received, *args[1:]), kwargs
        return args, {**kwargs, argument: relay.received}

    return hook


def _capture_output(relay: _Relay):
    def hook(module, args, output):
        relay.result = _hidden(output)
        return (relay.stand_in, *output[1:]) if isinstance(output, tuple) else relay.stand_in

    return hook


def _capture_input(relay: _Relay, argument: str):
    def hook(module, args, kwargs):
        relay.result = args[0] if args else kwargs[argument]
        if args:
            return (relay.stand_in, *args[1:]), kwargs
        return args, {**kwargs, argument: relay.stand_in}

    return hook


def _take_head_input(relay: _Relay):
    def receive(hidden: torch.Tensor) -> torch.Tensor:
        if relay.result is None:
            relay.result = hidden
        return hidden.detach()[..., :1]

    return receive
