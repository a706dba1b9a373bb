"""Where a transformers causal language model can be cut, found by asking the model rather than by reading names.

A model is *probed*: its own forward runs once on two tiny sequences, with every layer replaced by a function that records what it
receives and returns a fresh random tensor. That shows

1. whether each layer is called once, in order, with exactly what the one before returned (otherwise it cannot be cut there),
2. in which form layers return (a tensor, or a tuple whose first entry is the tensor),
3. which parameters outside the layers are used before them (they belong to the first stage) and which after (the last stage),
4. whether anything else crosses a boundary: hidden states or trainable tensors passed to layers sideways.

Parameters outside layers, embedding and head are small (norms, learned positions), so the probe is real tensors on the CPU, in fp64.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from evenpipe.errors import InputError
from evenpipe.model.initialization import restore_buffers

PROBE_BATCH, PROBE_SEQUENCE = 2, 3


@dataclass(frozen=True, slots=True)
class Structure:
    """Names and forms that the cut needs. Module and parameter names are those of the whole model."""

    layers_name: str
    """The `nn.ModuleList` of transformer layers, e.g. `model.layers`."""
    embedding_module: str
    head_module: str
    layer_argument: str
    """Name of a layer's first argument, for families that pass hidden states by keyword."""
    returns: int
    """0: layers return a tensor; k > 0: a tuple of k entries, hidden states first."""
    first_parameters: tuple[str, ...]
    """Parameters outside the layers that act before the first one (e.g. learned positions); the embedding is not among them."""
    last_parameters: tuple[str, ...]
    """Parameters outside the layers that act after the last one (e.g. the final norm); the head is not among them."""


def build_skeleton(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    model_class: type[PreTrainedModel] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The whole model on the meta device: every shape and name, no storage. `config` is not touched."""
    config = copy.deepcopy(config)
    with torch.device("meta"):
        if model_class is not None:
            return model_class._from_config(config, dtype=dtype)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def module_name(model: nn.Module, wanted: nn.Module) -> str:
    """The dotted name of a module inside `model`."""
    for name, module in model.named_modules():
        if module is wanted:
            return name
    raise InputError(f"{type(model).__name__} uses a {type(wanted).__name__} that is not one of its own modules.")


def find_layers(model: PreTrainedModel) -> str:
    """Name of the list of transformer layers: by structure first, by the pipeline plan second."""
    architecture, base = type(model).__name__, model.base_model
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [(name, module) for name, module in base.named_modules() if isinstance(module, nn.ModuleList)]
    found = [name for name, module in lists if len(module) == count and count]
    outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found if other != name)]
    if len(outermost) > 1:
        plan = getattr(base, "_pp_plan", None) or getattr(model.config, "base_model_pp_plan", None) or {}
        outermost = [name for name in outermost if name in plan]
    if len(outermost) != 1:
        shapes = ", ".join(f"{name} ({len(module)})" for name, module in lists) or "none"
        raise InputError(
            f"{architecture} cannot be cut into stages: it needs exactly one list of {count} layers (num_hidden_layers), "
            f"and its module lists are: {shapes}."
        )
    prefix = module_name(model, base)
    return f"{prefix}.{outermost[0]}" if prefix else outermost[0]


def identity_forward(argument: str, returns: int, transform: Callable[[torch.Tensor], torch.Tensor] | None = None):
    """The forward of a layer that lives elsewhere: hands its hidden states on, in the form that the real ones return."""

    def forward(*args, **kwargs):
        hidden = args[0] if args else kwargs[argument]
        if transform is not None:
            hidden = transform(hidden)
        return (hidden, *(None,) * (returns - 1)) if returns else hidden

    return forward


def strip(module: nn.Module) -> None:
    """Takes all parameters and buffers out of a module; plain attributes such as `attention_type` stay readable."""
    for child in module.modules():
        for name in child._parameters:
            child._parameters[name] = None
        for name in child._buffers:
            child._buffers[name] = None


class HeadStub(nn.Module):
    """Stands where the output layer was: gives what it receives to `receive` and returns what that answers."""

    def __init__(self, receive: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self._receive = receive

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._receive(hidden)


def replace_head(model: PreTrainedModel, head_module: str, receive: Callable[[torch.Tensor], torch.Tensor]) -> None:
    parent, _, attribute = head_module.rpartition(".")
    setattr(model.get_submodule(parent), attribute, HeadStub(receive))


def take_weight_away(embedding: nn.Embedding) -> None:
    """The embedding module without its matrix: `weight` becomes a plain attribute that a forward may set for its duration."""
    del embedding._parameters["weight"]
    embedding.weight = None


def outer_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """(owner, attribute, full name) of every parameter that is still in a model whose layers were stripped."""
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield module, attribute, f"{prefix}.{attribute}" if prefix else attribute


def hollow(
    model: PreTrainedModel,
    layers_name: str,
    embedding_module: str,
    head_module: str,
    kept: range,
    receive: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Strips the layers outside `kept`, puts a stub in the head's place and takes the embedding's matrix away.

    What remains: meta parameters, and buffers with their values on the CPU.
    """
    for index, layer in enumerate(model.get_submodule(layers_name)):
        if index not in kept:
            strip(layer)
    replace_head(model, head_module, receive)
    restore_buffers(model, layers_name)
    take_weight_away(model.get_submodule(embedding_module))


@dataclass
class _Record:
    received: list[torch.Tensor]
    returned: list[torch.Tensor]
    order: list[int]
    sideways: list[str]
    head_input: torch.Tensor | None = None


def probe(
    model: PreTrainedModel, layers_name: str, embedding_module: str, head_module: str, hidden_size: int
) -> Structure:
    """Finds the rest of the structure. `model` is a fresh fp64 skeleton and is used up."""
    architecture = type(model).__name__
    layers = model.get_submodule(layers_name)
    argument = next(name for name in inspect.signature(layers[0].forward).parameters)
    record = _Record([], [], [], [])

    def head(hidden: torch.Tensor) -> torch.Tensor:
        record.head_input = hidden
        return hidden.detach()[..., :1]

    hollow(model, layers_name, embedding_module, head_module, range(0), head)
    outer = {}
    for owner, attribute, name in list(outer_parameters(model)):
        outer[name] = nn.Parameter(torch.rand(getattr(owner, attribute).shape, dtype=torch.float64) + 0.5)
        owner._parameters[attribute] = outer[name]
    embedded = torch.rand(PROBE_BATCH, PROBE_SEQUENCE, hidden_size, dtype=torch.float64, requires_grad=True)

    failure: str = ""
    for returns in (0, 1, 2):
        record.received, record.returned, record.order, record.sideways = [], [], [], []
        record.head_input = None
        for index, layer in enumerate(layers):
            layer.forward = _recording_forward(record, index, argument, returns)
        try:
            model(inputs_embeds=embedded, use_cache=False)
        except Exception as error:  # whatever the family's code raises on a form that it does not expect
            failure = failure or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        if (
            record.head_input is not None
            and record.head_input.shape == embedded.shape
            and all(isinstance(x, torch.Tensor) and x.shape == embedded.shape for x in record.received)
        ):
            break
        failure = failure or "hidden states change their shape on the way"
    else:
        raise InputError(
            f"{architecture} cannot be cut into stages: its forward does not run on layers that stand in ({failure})."
        )

    if record.order != list(range(len(layers))):
        raise InputError(
            f"{architecture} cannot be cut into stages: it calls its {len(layers)} layers in the order {record.order[:20]}."
        )
    for index in range(1, len(layers)):
        if not torch.equal(record.received[index], record.returned[index - 1]):
            raise InputError(
                f"{architecture} cannot be cut into stages: it changes the hidden states between layers {index - 1} and {index}."
            )
    if record.sideways:
        raise InputError(
            f"{architecture} cannot be cut into stages: its layers receive trainable tensors besides the hidden states "
            f"({', '.join(sorted(set(record.sideways)))})."
        )
    names = list(outer)
    others = [embedded, *record.returned[:-1]]
    before = torch.autograd.grad(record.received[0].sum(), [*outer.values()], allow_unused=True, retain_graph=True)
    after = torch.autograd.grad(record.head_input.sum(), [*outer.values(), *others], allow_unused=True)
    if any(gradient is not None for gradient in after[len(names) :]):
        raise InputError(
            f"{architecture} cannot be cut into stages: its output uses hidden states other than the last layer's."
        )
    first = tuple(name for name, gradient in zip(names, before, strict=True) if gradient is not None)
    last = tuple(name for name, gradient in zip(names, after, strict=False) if gradient is not None)
    both, neither = sorted(set(first) & set(last)), sorted(set(names) - set(first) - set(last))
    if both or neither:
        what = (
            f"{both[0]} acts both before and after the layers"
            if both
            else f"{neither[0]} acts neither before nor after the layers"
        )
        raise InputError(f"{architecture} cannot be cut into stages: its parameter {what}.")
    return Structure(layers_name, embedding_module, head_module, argument, returns, first, last)


def _recording_forward(record: _Record, index: int, argument: str, returns: int):
    def transform(hidden: torch.Tensor) -> torch.Tensor:
        record.order.append(index)
        record.received.append(hidden)
        record.returned.append(torch.rand_like(hidden, requires_grad=True))
        return record.returned[-1]

    identity = identity_forward(argument, returns, transform)

    def forward(*args, **kwargs):
        named = {
            **{f"argument {i}": x for i, x in enumerate(args) if i},
            **{k: x for k, x in kwargs.items() if args or k != argument},
        }
        record.sideways += [name for name, value in named.items() if any(x.requires_grad for x in _tensors(value))]
        return identity(*args, **kwargs)

    return forward


def _tensors(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)
