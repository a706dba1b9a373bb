"""Where a transformers causal language model can be cut, found by asking the model rather than by reading names.

A model is *probed*: its own forward runs once on two tiny sequences, with every layer replaced by a function that
records what it receives and returns a fresh random tensor. That shows

1. whether each layer is called once, in order, with exactly what the one before returned;
2. in which form layers return (a tensor, or a tuple whose first entry is the tensor);
3. which parameters outside the layers act before them (they belong to the first stage) and which after (the last);
4. whether anything else crosses a boundary: hidden states or trainable tensors passed to layers sideways.

A model that fails is refused with a sentence. The probe runs on the CPU in fp64 and holds no weights: one number
stands for each parameter, and who acts where is read from the autograd graph.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from evenpipe.errors import InputError
from evenpipe.model.rules import restore_buffers

PROBE_BATCH, PROBE_SEQUENCE = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Names and forms that the cut needs. Module and parameter names are those of the whole model."""

    layers_name: str
    """The `nn.ModuleList` of transformer layers, e.g. `model.layers`."""
    embedding_module: str
    head_module: str
    layer_argument: str = "hidden_states"
    """Name of a layer's first argument, for families that pass the hidden states by keyword."""
    returns: int = 0
    """0: layers return a tensor; k > 0: a tuple of k entries, hidden states first."""
    first_parameters: tuple[str, ...] = ()
    """Parameters outside the layers that act before them (learned positions), without the embedding matrix."""
    last_parameters: tuple[str, ...] = ()
    """Parameters outside the layers that act after them (the final norm), without the head."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text below a heading that it may have, to be quoted in a sentence of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):  # "Validation error for field 'hidden_size':"
        lines = [lines[1].removeprefix("TypeError: ").removeprefix("ValueError: ")]
    return (lines or [type(error).__name__])[0].rstrip(".")


def uncuttable(architecture: str, reason: str) -> InputError:
    """The error for a model that cannot be cut exactly."""
    return InputError(f"{architecture} cannot be cut into stages: {reason}.")


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
    raise uncuttable(type(model).__name__, f"its {type(wanted).__name__} is not one of its own modules")


def layers_of(model: nn.Module, layers_name: str) -> nn.ModuleList:
    layers = model.get_submodule(layers_name)
    assert isinstance(layers, nn.ModuleList)
    return layers


def embedding_of(model: nn.Module, embedding_module: str) -> nn.Embedding:
    embedding = model.get_submodule(embedding_module)
    assert isinstance(embedding, nn.Embedding)
    return embedding


def find_layers(model: PreTrainedModel) -> str:
    """Name of the list of transformer layers: by structure first, by the pipeline plan second."""
    base = model.base_model
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [(name, module) for name, module in base.named_modules() if isinstance(module, nn.ModuleList)]
    found = [name for name, module in lists if len(module) == count or (count is None and len(module))]
    outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if len(outermost) > 1:
        plan = getattr(base, "_pp_plan", None) or getattr(model.config, "base_model_pp_plan", None) or {}
        outermost = [name for name in outermost if name in plan]
    if len(outermost) != 1:
        shapes = ", ".join(f"{name} ({len(module)})" for name, module in lists[:6]) or "none"
        wanted = f"it needs exactly one list of layers, {count} long (num_hidden_layers)"
        raise uncuttable(type(model).__name__, f"{wanted}, and its module lists are {shapes}")
    prefix = module_name(model, base)
    return f"{prefix}.{outermost[0]}" if prefix else outermost[0]


def identity_forward(argument: str, returns: int, transform: Callable[[torch.Tensor], torch.Tensor] | None = None):
    """The forward of a layer that lives elsewhere: hands its hidden states on, in the form that real layers use."""

    def forward(*args, **kwargs):
        hidden = args[0] if args else kwargs[argument]
        if transform is not None:
            hidden = transform(hidden)
        return (hidden, *(None,) * (returns - 1)) if returns else hidden

    return forward


def stand_in(shape: torch.Size, dtype: torch.dtype, torch_device: str | torch.device = "cpu") -> torch.Tensor:
    """Zeros that take no memory, for what acts on thrown-away results."""
    return torch.zeros((), dtype=dtype, device=torch_device).expand(shape)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, buffer) of those that belong into a checkpoint, such as the bias that corrects a router's scores."""
    for prefix, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def strip(module: nn.Module) -> None:
    """Takes all parameters and buffers out of a module; plain attributes such as `attention_type` stay readable."""
    for child in module.modules():
        child._parameters.update(dict.fromkeys(child._parameters))
        child._buffers.update(dict.fromkeys(child._buffers))


class HeadStub(nn.Module):
    """Stands where the output layer was: gives what it receives to `receive` and returns what that answers.

    Its `weight` (some forwards read its dtype, shape and device) is a `stand_in`.
    """

    def __init__(self, receive: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor):
        super().__init__()
        self._receive = receive
        self.weight = weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._receive(hidden)


def replace_head(
    model: nn.Module,
    head_module: str,
    receive: Callable[[torch.Tensor], torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    torch_device: str | torch.device = "cpu",
) -> None:
    """Puts a `HeadStub` in the head's place, its weight in `dtype` (None: the head's own)."""
    parent, _, attribute = head_module.rpartition(".")
    holder = model.get_submodule(parent)
    weight = getattr(holder, attribute).weight
    setattr(holder, attribute, HeadStub(receive, stand_in(weight.shape, dtype or weight.dtype, torch_device)))


def hollow(
    model: PreTrainedModel,
    structure: Structure,
    kept: range,
    receive: Callable[[torch.Tensor], torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    torch_device: str | torch.device = "cpu",
) -> None:
    """Strips the layers outside `kept`, puts a stub in the head's place and takes the embedding's matrix away.

    `dtype` and `torch_device` are those of the stub's weight.

    What remains: meta parameters, and buffers with their values on the CPU. The embedding's `weight` becomes a plain
    attribute, so that `embed_rows` may set it for the duration of a forward.
    """
    for index, layer in enumerate(layers_of(model, structure.layers_name)):
        if index not in kept:
            strip(layer)
    replace_head(model, structure.head_module, receive, dtype=dtype, torch_device=torch_device)
    restore_buffers(model, structure.layers_name)
    embedding = embedding_of(model, structure.embedding_module)
    del embedding._parameters["weight"]
    embedding.__dict__["weight"] = None


def embed_rows(embedding: nn.Embedding, rows: torch.Tensor) -> torch.Tensor:
    """The embedding module's own forward on a matrix that consists of the fetched rows [batch, sequence, h] only.

    Whatever the module does beside the look-up (a scale, a norm) is thus done, without knowing its name.
    """
    if type(embedding).forward is nn.Embedding.forward:
        return rows
    padding, embedding.padding_idx = embedding.padding_idx, None
    embedding.__dict__["weight"] = rows.reshape(-1, rows.shape[-1])
    try:
        return embedding(torch.arange(rows.shape[:-1].numel(), device=rows.device).view(rows.shape[:-1]))
    finally:
        embedding.__dict__["weight"], embedding.padding_idx = None, padding


@contextlib.contextmanager
def meta_matrix(embedding: nn.Embedding) -> Iterator[None]:
    """A matrix without storage in the embedding, for rules that want to draw it."""
    embedding.__dict__["weight"] = torch.empty(embedding.num_embeddings, embedding.embedding_dim, device="meta")
    try:
        yield
    finally:
        embedding.__dict__["weight"] = None


def outer_parameters(model: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """(owner, attribute, full name) of every parameter that is still in a model."""
    return [
        (module, attribute, f"{prefix}.{attribute}" if prefix else attribute)
        for prefix, module in model.named_modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None
    ]


@dataclass
class _Record:
    """What passed by in one forward."""

    received: list[torch.Tensor] = field(default_factory=list)
    returned: list[torch.Tensor] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    sideways: list[str] = field(default_factory=list)
    head_input: torch.Tensor | None = None

    def take_head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        self.head_input = hidden
        return hidden.detach()[..., :1]

    def layer_forward(self, index: int, argument: str, returns: int):
        """A forward for layer `index` that records its arguments and returns something new."""

        def transform(hidden: torch.Tensor) -> torch.Tensor:
            self.order.append(index)
            self.received.append(hidden)
            self.returned.append(torch.rand_like(hidden, requires_grad=True))
            return self.returned[-1]

        identity = identity_forward(argument, returns, transform)

        def forward(*args, **kwargs):
            others: dict[str, Any] = {f"argument {place}": value for place, value in enumerate(args) if place > 0}
            others |= {name: value for name, value in kwargs.items() if args or name != argument}
            for name, value in others.items():
                if any(tensor.requires_grad for tensor in _tensors(value)):
                    self.sideways.append(name)
            return identity(*args, **kwargs)

        return forward


def probe(model: PreTrainedModel, layers_name: str, embedding_module: str, head_module: str) -> Structure:
    """Finds the rest of the structure.

    Args:
        model: a fresh fp64 skeleton. It is used up: afterwards it runs on hidden states with no layers and no weights.

    Raises:
        InputError: the model cannot be cut exactly.
    """
    architecture = type(model).__name__
    known = Structure(layers_name=layers_name, embedding_module=embedding_module, head_module=head_module)
    layers, embedding = layers_of(model, layers_name), embedding_of(model, embedding_module)
    argument = next(iter(inspect.signature(layers[0].forward).parameters))
    shape = (PROBE_BATCH, PROBE_SEQUENCE, embedding.weight.shape[1])
    hollow(model, known, range(0), lambda hidden: hidden)
    outer = _numbers_for_parameters(model)
    rows = torch.rand(shape, dtype=torch.float64, requires_grad=True)

    failure = ""
    for returns in (0, 1, 2):
        record = _Record()
        for index, layer in enumerate(layers):
            layer.forward = record.layer_forward(index, argument, returns)
        replace_head(model, head_module, record.take_head_input)
        try:
            model(inputs_embeds=embed_rows(embedding, rows), use_cache=False)
        except Exception as error:  # whatever the family's code raises on a form that it does not expect
            failure = failure or f"{type(error).__name__}: {first_line(error)}"
            continue
        travelling = [*record.received, record.head_input]
        if all(isinstance(hidden, torch.Tensor) and hidden.shape == shape for hidden in travelling):
            break
        failure = failure or "the hidden states change their shape on the way"
    else:
        raise uncuttable(architecture, f"its forward does not run on layers that stand in ({failure})")
    _check_passage(architecture, record, len(layers))

    assert record.head_input is not None
    leaves_before, leaves_after = _leaves(record.received[0]), _leaves(record.head_input)
    if any(id(hidden) in leaves_after for hidden in [rows, *record.returned[:-1]]):
        raise uncuttable(architecture, "its output uses hidden states other than the last layer's")
    first = tuple(name for name, leaf in outer.items() if id(leaf) in leaves_before)
    last = tuple(name for name, leaf in outer.items() if id(leaf) in leaves_after)
    for name in outer:
        if (name in first) == (name in last):
            where = "both before and after" if name in first else "neither before nor after"
            raise uncuttable(architecture, f"its parameter {name} acts {where} the layers")
    for layer in layers:
        layer.forward = identity_forward(argument, returns)
    return Structure(
        layers_name=layers_name,
        embedding_module=embedding_module,
        head_module=head_module,
        layer_argument=argument,
        returns=returns,
        first_parameters=first,
        last_parameters=last,
    )


def _numbers_for_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Puts one trainable number, seen as a tensor of the right shape, in the place of every parameter left."""
    numbers = {}
    for owner, attribute, name in outer_parameters(model):
        numbers[name] = torch.rand((), dtype=torch.float64, requires_grad=True)
        shape = owner.get_parameter(attribute).shape
        del owner._parameters[attribute]
        setattr(owner, attribute, (numbers[name] + 0.5).expand(shape))
    return numbers


def _check_passage(architecture: str, record: _Record, layers: int) -> None:
    """Every layer once, in order, on exactly what the one before returned, and nothing trainable beside it."""
    if record.order != list(range(layers)):
        raise uncuttable(architecture, f"its forward calls its {layers} layers in the order {record.order[:20]}")
    for index in range(1, layers):
        if not torch.equal(record.received[index], record.returned[index - 1]):
            raise uncuttable(architecture, f"the hidden states change between layers {index - 1} and {index}")
    if record.sideways:
        names = ", ".join(sorted(set(record.sideways)))
        raise uncuttable(architecture, f"its layers receive trainable tensors besides the hidden states ({names})")


def _leaves(output: torch.Tensor) -> set[int]:
    """Identities of the leaf tensors that a result was computed from, read from its graph."""
    if output.is_leaf:
        return {id(output)}
    found, seen, waiting = set(), set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)
