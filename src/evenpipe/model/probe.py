"""Finds where a transformers causal language model can be cut, by running the model rather than by reading names.

A model is *probed*: its own forward runs once on two tiny sequences, with every layer replaced by a function that
records its input and returns a new random tensor. That shows

1. whether each layer is called once, in order, with exactly the result of the previous one;
2. the form of a layer's result (a tensor, or a tuple whose first entry is the tensor);
3. which parameters outside the layers act after them (they belong to the last stage); the others belong to the first;
4. whether anything else crosses a boundary: hidden states or trainable tensors that layers receive in other arguments.

A model that fails is refused with a sentence. The probe runs on the CPU in fp64 without weights: one number replaces
each parameter, and the autograd graph shows which ones act where.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from evenpipe.model.graph import graph_nodes
from evenpipe.model.packed_rows import nothing_packed
from evenpipe.model.structure import (
    PROBE_BATCH,
    PROBE_SEQUENCE,
    Structure,
    build_skeleton,
    call_embedded,
    embed_rows,
    embedding_of,
    first_line,
    hollow,
    identity_forward,
    layers_of,
    line_of_model,
    neutral_token,
    outer_parameters,
    replace_head,
    uncuttable,
)


@dataclass
class _Record:
    """The tensors recorded in one forward."""

    received: list[torch.Tensor] = field(default_factory=list)
    returned: list[torch.Tensor] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    sideways: list[str] = field(default_factory=list)
    beside: list[torch.Tensor] = field(default_factory=list)
    """All tensors that layers receive besides the hidden states."""
    head_input: torch.Tensor | None = None

    def take_head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        self.head_input = hidden
        return hidden.detach()[..., :1]

    def layer_forward(self, index: int, arguments: list[str], returns: int, beside: torch.Tensor | None = None):
        """Return a forward for layer `index` that records its arguments and returns a new random tensor."""

        def transform(hidden: torch.Tensor) -> torch.Tensor:
            self.order.append(index)
            self.received.append(hidden)
            self.returned.append(torch.rand_like(hidden, requires_grad=True))
            return self.returned[-1]

        argument = arguments[0]
        identity = identity_forward(argument, returns, transform, beside)

        def forward(*args, **kwargs):
            others: dict[str, Any] = dict(zip(arguments[1:], args[1:], strict=False))
            others |= {name: value for name, value in kwargs.items() if args or name != argument}
            for name, value in others.items():
                tensors = [*_tensors(value)]
                self.beside += tensors
                if any(tensor.requires_grad for tensor in tensors):
                    self.sideways.append(name)
            return identity(*args, **kwargs)

        return forward


def probe(model: PreTrainedModel, layers_name: str, embedding_module: str, head_module: str) -> Structure:
    """Find the rest of the structure.

    Args:
        model: a new fp64 skeleton. It is modified: afterwards it runs on hidden states without layers and weights.

    Raises:
        InputError: the model cannot be cut exactly.
    """
    architecture = type(model).__name__
    known = Structure(layers_name=layers_name, embedding_module=embedding_module, head_module=head_module)
    layers, embedding = layers_of(model, layers_name), embedding_of(model, embedding_module)
    arguments = [*inspect.signature(layers[0].forward).parameters]
    argument = arguments[0]
    shape = (PROBE_BATCH, PROBE_SEQUENCE, embedding.weight.shape[1])
    hollow(model, known, range(0), lambda hidden: hidden)
    outer, shown = _numbers_for_parameters(model)
    rows = torch.rand(shape, dtype=torch.float64, requires_grad=True)

    def run(returns: int, token: int | None, beside: torch.Tensor | None = None) -> tuple[_Record, bool]:
        record = _Record()
        for index, layer in enumerate(layers):
            layer.forward = record.layer_forward(index, arguments, returns, beside)
        replace_head(model, head_module, record.take_head_input)
        embedded = embed_rows(embedding, rows).clone()  # some families write to their input
        call_embedded(model, embedding, token, embedded)
        return record, embedded._version > 0

    failure, neutral = "", neutral_token(model.config, embedding.padding_idx)
    for wants_token, returns in itertools.product((None, neutral), (0, 1, 2, 3)):
        try:
            record, writes_to_input = run(returns, wants_token)
        except Exception as error:  # families raise many types on a form that they do not expect
            failure = failure or (
                "its forward needs more of what other devices hold than the hidden states that layers hand on: it stops"
                f" at {line_of_model(error)} ({type(error).__name__}: {first_line(error)})"
            )
            continue
        if record.received and isinstance(record.received[0], torch.Tensor) and record.received[0].shape != shape:
            raise uncuttable(
                architecture,
                f"for {PROBE_BATCH} sequences of {PROBE_SEQUENCE} tokens its layers receive a tensor of the shape"
                f" {tuple(record.received[0].shape)}, and between stages only hidden states as wide as the embedding,"
                f" [batch, sequence, {shape[-1]}], travel",
            )
        travelling = [*record.received, record.head_input]
        if all(isinstance(hidden, torch.Tensor) and hidden.shape == shape for hidden in travelling):
            break
        failure = failure or "the hidden states change their shape on the way"
    else:
        raise uncuttable(architecture, failure)
    _check_passage(model, record, len(layers))
    if returns > 1:  # attention weights, or another input of the next layer
        with contextlib.suppress(Exception):
            beside = torch.rand((), dtype=torch.float64, requires_grad=True)
            record.sideways += run(returns, wants_token, beside)[0].sideways
        if record.sideways and _returns_two_tensors(model, layers_name):
            raise uncuttable(
                architecture,
                f"its layers hand a second tensor on to each other ({_named(model, record)}),"
                " and between stages only the hidden states travel",
            )

    assert record.head_input is not None
    leaves_before, leaves_after = _leaves(record.received[0]), _leaves(record.head_input)
    if any(id(hidden) in leaves_after for hidden in [rows, *record.returned[:-1]]):
        raise uncuttable(architecture, "its output uses hidden states other than the last layer's")
    last = tuple(name for name, leaf in outer.items() if id(leaf) in leaves_after)
    for name in last:
        if id(outer[name]) in leaves_before:
            raise uncuttable(architecture, f"its parameter {name} acts both before and after the layers")
    # Parameters that are not used for text (an image tower) get no gradient, and belong to the first stage.
    first = tuple(name for name in outer if name not in last)
    silent = [name for name in first if id(outer[name]) not in leaves_before]
    if silent and (name := _acts_unseen(lambda: run(returns, wants_token)[0], shown, silent)):
        raise uncuttable(architecture, f"its parameter {name} acts on the layers or after them without a gradient")
    model.eval()
    try:
        embedded = run(returns, wants_token)[0].received[0]
    except Exception as error:  # in evaluation RWKV changes the weights of all its layers
        reason = (
            "its forward in evaluation needs more of its layers than the hidden states that they hand on: it stops at"
            f" {line_of_model(error)} ({type(error).__name__}: {first_line(error)})"
        )
        raise uncuttable(architecture, reason) from error
    if wants_token is None:
        with contextlib.suppress(Exception):  # some forwards fail on token ids without the embedding's weights
            asked = run(returns, neutral)[0].received[0]
            wants_token = None if torch.equal(embedded, asked) else neutral
    model.train()
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
        writes_to_input=writes_to_input,
        wants_token=wants_token,
    )


def _numbers_for_parameters(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Replace every remaining parameter by one trainable number, expanded to the right shape.

    Returns: for each parameter, the number, and the number as the model uses it.
    """
    numbers, shown = {}, {}
    for owner, attribute, name in outer_parameters(model):
        numbers[name] = torch.rand((), dtype=torch.float64, requires_grad=True)
        shape = owner.get_parameter(attribute).shape
        del owner._parameters[attribute]
        shown[name] = numbers[name] + 0.5
        setattr(owner, attribute, shown[name].expand(shape))
    return numbers, shown


def _acts_unseen(run: Callable[[], _Record], shown: dict[str, torch.Tensor], names: list[str]) -> str:
    """Return the first of these parameters, which get no gradient (tables read under `no_grad`), that affects more than
    the first layer's hidden states; empty if there is none."""

    def found() -> list[torch.Tensor]:
        torch.default_generator.manual_seed(0)
        record = run()
        assert record.head_input is not None
        return [*record.beside, record.head_input.detach()]

    def differs(changed: list[str]) -> bool:
        before = found()
        with torch.no_grad():
            for name in changed:
                shown[name].add_(1.0)
        after = found()
        return len(before) != len(after) or not all(map(torch.equal, before, after))

    return next((name for name in names if differs([name])), "") if differs(names) else ""


def _returns_two_tensors(model: PreTrainedModel, layers_name: str) -> bool:
    """Return whether layers return a floating-point tensor besides the hidden states, True if that is unknown. The
    self-check finds out whether integers (the tokens chosen for attention) matter to the next layer."""
    returned = output_of_first_layer(model.config, type(model), layers_name, torch.float32)
    return not isinstance(returned, (tuple, list)) or any(one.is_floating_point() for one in _tensors(returned[1:]))


def output_of_first_layer(
    config: PreTrainedConfig, model_class: type[PreTrainedModel], layers_name: str, dtype: torch.dtype
) -> Any:
    """Return the first layer's output on the meta device for a model in `dtype`; None if it does not run there."""
    model, found = build_skeleton(config, dtype, model_class), []

    def stop(module: nn.Module, args: tuple, output: Any) -> None:
        found.append(output)
        raise StopIteration("the other layers are like it")

    layers_of(model, layers_name)[0].register_forward_hook(stop)
    token_ids = torch.zeros(PROBE_BATCH, PROBE_SEQUENCE, dtype=torch.int64, device="meta")
    with torch.no_grad(), nothing_packed(), contextlib.suppress(Exception):
        model(input_ids=token_ids, use_cache=False)
    return found[0] if found else None


def _named(model: PreTrainedModel, record: _Record) -> str:
    """Return the arguments in which layers receive more than hidden states, and related settings of the config."""
    names = sorted(set(record.sideways))
    settings = vars(model.config.get_text_config()).items()
    said = [f"{name} = {value}" for name, value in settings if value and any(one.rstrip("s") in name for one in names)]
    return ", ".join(names) + (f"; see {', '.join(said)} in its config" if said else "")


def _check_passage(model: PreTrainedModel, record: _Record, layers: int) -> None:
    """Check that every layer runs once, in order, on exactly the previous result, without other trainable inputs."""
    architecture = type(model).__name__
    if record.order != list(range(layers)):
        raise uncuttable(architecture, f"its forward calls its {layers} layers in the order {record.order[:20]}")
    for index in range(1, layers):
        if not torch.equal(record.received[index], record.returned[index - 1]):
            raise uncuttable(architecture, f"the hidden states change between layers {index - 1} and {index}")
    if record.sideways:
        raise uncuttable(
            architecture,
            f"its layers receive trainable tensors besides the hidden states ({_named(model, record)}), and between"
            " stages only the hidden states travel",
        )


def _leaves(output: torch.Tensor) -> set[int]:
    """Return the ids of the leaf tensors in a result's graph."""
    if output.is_leaf:
        return {id(output)}
    return {id(node.variable) for node in graph_nodes(output) if hasattr(node, "variable")}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)
