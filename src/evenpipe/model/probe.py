"""Finds where a transformers causal language model can be cut, by running the model rather than by reading names.

A model is *probed*: its own forward runs once on two tiny sequences, with every layer replaced by a function that
records its input and returns a new random tensor. That shows

1. whether each layer is called once, in order, with exactly the result of the previous one;
2. the form of a layer's result (a tensor, or a tuple whose first entry is the tensor);
3. which parameters outside the layers act after them (they belong to the last stage); the others belong to the first;
4. whether anything else crosses a boundary: hidden states or trainable tensors that layers receive as other arguments.

A model that fails is refused with a one-sentence reason. The probe runs on the CPU in fp64 without weights: a scalar
replaces each parameter, and the autograd graph shows which parameters act where.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from evenpipe.errors import InputError
from evenpipe.model.edge import SEQUENCES, TOKENS, EdgeTensor, hidden_of_width
from evenpipe.model.families import adapt
from evenpipe.model.graph import graph_nodes
from evenpipe.model.packed_rows import nothing_packed
from evenpipe.model.spec import ModelSpec
from evenpipe.model.structure import (
    PROBE_BATCH,
    PROBE_SEQUENCE,
    PassedTensor,
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
from evenpipe.words import count, nearest, refused, unknown

SIZES = (PROBE_BATCH, PROBE_SEQUENCE), (5, 7)
"""(sequences, tokens) twice, to tell which sizes of a shape depend on them."""


@dataclass
class _Record:
    """The tensors recorded in one forward."""

    received: list[torch.Tensor] = field(default_factory=list)
    returned: list[torch.Tensor] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    sideways: list[str] = field(default_factory=list)
    extras: list[torch.Tensor] = field(default_factory=list)
    """All tensors that layers receive besides the hidden states."""
    head_input: torch.Tensor | None = None
    writes_to_input: bool = False

    def take_head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        self.head_input = hidden
        return hidden.detach()[..., :1]

    def layer_forward(self, index: int, arguments: list[str], returns: int, extras: Sequence[torch.Tensor | None]):
        """Return a forward for layer `index` that records its arguments and returns a new random tensor."""

        def transform(hidden: torch.Tensor) -> torch.Tensor:
            self.order.append(index)
            self.received.append(hidden)
            self.returned.append(torch.rand_like(hidden, requires_grad=True))
            return self.returned[-1]

        argument = arguments[0]
        identity = identity_forward(argument, returns, transform, extras)

        def forward(*args, **kwargs):
            extra_arguments: dict[str, Any] = dict(zip(arguments[1:], args[1:], strict=False))
            extra_arguments |= {name: value for name, value in kwargs.items() if args or name != argument}
            for name, value in extra_arguments.items():
                tensors = [*_tensors(value)]
                self.extras += tensors
                if any(tensor.requires_grad for tensor in tensors):
                    self.sideways.append(name)
            return identity(*args, **kwargs)

        return forward


class _Probe:
    """A hollow model whose layers record their inputs."""

    def __init__(
        self, model: PreTrainedModel, layers_name: str, embedding_module: str, head_module: str, answers: ModelSpec
    ):
        self.model, self.answers = model, answers
        self.layers, self.embedding = layers_of(model, layers_name), embedding_of(model, embedding_module)
        self.arguments = [*inspect.signature(self.layers[0].forward).parameters]
        if (argument := answers.layer_argument) is not None:
            if argument not in self.arguments:
                raise unknown("spec.layer_argument", argument, self.arguments)
            self.arguments.sort(key=lambda name: name != argument)
        hidden = hidden_of_width(self.embedding.embedding_dim)
        self.known = Structure(
            layers_name=layers_name,
            embedding_module=embedding_module,
            head_module=head_module,
            layer_argument=self.arguments[0],
            entering=hidden,
            handed_on=(hidden,),
        )
        hollow(model, self.known, lambda hidden: hidden)
        self.numbers, self.shown = _numbers_for_parameters(model)
        self.rows = self._rows_of(*SIZES[0])
        self.neutral_token = neutral_token(model.config, self.embedding.padding_idx)

    def _rows_of(self, sequences: int, tokens: int) -> torch.Tensor:
        return torch.rand(sequences, tokens, self.embedding.embedding_dim, dtype=torch.float64, requires_grad=True)

    def run(
        self,
        form: Structure,
        extras: Sequence[torch.Tensor | None] = (),
        rows: torch.Tensor | None = None,
    ) -> _Record:
        """Return the record of a forward in which layers return, and the model requires, what `form` says.

        extras: the first tensors that layers return besides the hidden states.
        """
        record = _Record()
        for index, layer in enumerate(self.layers):
            layer.forward = record.layer_forward(index, self.arguments, form.returns, extras)
        replace_head(self.model, form.head_module, record.take_head_input)
        rows = self.rows if rows is None else rows
        embedded = embed_rows(self.embedding, rows).clone()  # some families write to their input
        call_embedded(self.model, self.embedding, form.wants_token, embedded)
        record.writes_to_input = embedded._version > 0
        return record

    def first_that_runs(self) -> tuple[_Record, Structure]:
        """Try the forms of a layer's result, without token ids and with them."""
        failure, answers = "", self.answers
        tokens = (None, self.neutral_token) if answers.wants_token is None else (answers.wants_token,)
        forms = (0, 1, 2, 3) if answers.returns is None else (answers.returns,)
        for token, returns in itertools.product(tokens, forms):
            form = replace(self.known, returns=returns, wants_token=token)
            try:
                record = self.run(form)
            except Exception as error:  # families raise many types on a form that they do not expect
                failure = failure or (
                    "its forward needs more of what other devices hold than the hidden states that layers hand on: it"
                    f" stops at {_where(error)}"
                )
                continue
            received, head_input = record.received, record.head_input
            if (
                all(isinstance(hidden, torch.Tensor) and hidden.shape == received[0].shape for hidden in received)
                and isinstance(head_input, torch.Tensor)
                and head_input.shape == self.rows.shape
            ):
                if received and received[0].shape != self.rows.shape:
                    hidden = self._hidden_between(form, received[0])
                    form = replace(form, entering=hidden, handed_on=(hidden,))
                if received and received[0].dtype != self.rows.dtype:
                    form = replace(form, entering=replace(form.entering, dtype=received[0].dtype))
                return record, replace(form, writes_to_input=record.writes_to_input)
            failure = failure or "the hidden states change their shape on the way"
        raise self.refused(failure)

    def _hidden_between(self, form: Structure, received: torch.Tensor) -> EdgeTensor:
        """Return the form of hidden states whose shape differs from that of the embedded tokens."""
        longer = self.run(form, rows=self._rows_of(*SIZES[1])).received[0]
        return EdgeTensor("hidden", self._shape_of("hidden states", received, longer))

    def _shape_of(self, tensor_name: str, *tensors: torch.Tensor) -> tuple[int | str, ...]:
        """Return the shape of a tensor that layers pass on, from such a tensor for each of `SIZES`."""
        named = dict(zip(zip(*SIZES, strict=True), (SEQUENCES, TOKENS), strict=True))
        sizes = [*zip(*(tensor.shape for tensor in tensors), strict=False)]
        shape = tuple(named.get(pair, pair[0] if pair[0] == pair[1] else "") for pair in sizes)
        if tensors[0].dim() != tensors[1].dim() or "" in shape or not {SEQUENCES, TOKENS} <= {*shape}:
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
            batches = " and ".join(f"{sequences} sequences of {tokens} tokens" for sequences, tokens in SIZES)
            raise self.refused(
                f"for {batches} its layers hand on {tensor_name} of the shapes {shapes}, and not token by token"
            )
        return shape

    def check_passage(self, record: _Record, form: Structure) -> Structure:
        """Check that every layer runs once, in order, on exactly the previous result, and that its only other trainable
        inputs are tensors that the previous layer also returned. Return the form with these tensors."""
        layers = len(self.layers)
        if record.order != list(range(layers)):
            raise self.refused(f"its forward calls its {count(layers, 'layer')} in the order {record.order[:20]}")
        for index in range(1, layers):
            if not torch.equal(record.received[index], record.returned[index - 1]):
                raise self.refused(f"the hidden states change between layers {index - 1} and {index}")
        if record.sideways:
            raise self.refused(
                f"its layers receive trainable tensors besides the hidden states ({_named(self.model, record)}), and"
                " between stages only the hidden states travel"
            )
        passed: list[PassedTensor] = []
        for entry in range(1, form.returns):  # attention weights, or another input of the next layer
            extra = torch.rand((), dtype=torch.float64, requires_grad=True)
            with contextlib.suppress(Exception):
                takers = set(self.run(form, (*(None,) * (entry - 1), extra)).sideways)
                passed += [PassedTensor(entry, self.arguments.index(name), name) for name in sorted(takers)]
        return form if not passed else self._with_extras(form, passed)

    def _with_extras(self, form: Structure, passed: list[PassedTensor]) -> Structure:
        """Add to a form the floating-point tensors that layers pass on besides the hidden states. The self-check shows
        whether integers (the tokens chosen for attention) matter to the next layer."""
        config = copy.deepcopy(self.model.config)
        config._experts_implementation = "batched_mm"  # runs on the meta device in all dtypes

        def output(dtype: torch.dtype, sizes: tuple[int, int]) -> Sequence[Any]:
            model = build_skeleton(config, dtype, type(self.model))
            adapt(model, self.answers)
            returned = output_of_first_layer(model, form.layers_name, sizes)
            if not isinstance(returned, (tuple, list)):
                names = ", ".join(extra.argument for extra in passed)
                raise self.refused(f"its layers hand on something unknown besides the hidden states ({names})")
            return returned

        narrow = output(torch.bfloat16, SIZES[0])
        floating = [extra for extra in passed if any(map(torch.is_floating_point, _tensors(narrow[extra.entry])))]
        if not floating:
            return form
        longer, wide = output(torch.bfloat16, SIZES[1]), output(torch.float64, SIZES[0])
        handed_on = []
        for name, entry in (("hidden", 0), *((extra.argument, extra.entry) for extra in floating)):
            shape, dtype = self._shape_of(name, narrow[entry], longer[entry]), narrow[entry].dtype
            if dtype == torch.bfloat16:
                handed_on.append(EdgeTensor(name, shape))
            else:
                handed_on.append(EdgeTensor(name, shape, dtype, widens=wide[entry].dtype != dtype))
        return replace(form, handed_on=tuple(handed_on), extras=tuple(floating))

    def outer_parameters(self, record: _Record, form: Structure) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the parameters outside the layers that belong to the first and to the last stage."""
        assert record.head_input is not None
        before_layers, after_layers = _leaves(record.received[0]), _leaves(record.head_input)
        if any(id(hidden) in after_layers for hidden in [self.rows, *record.returned[:-1]]):
            raise self.refused("its output uses hidden states other than the last layer's")
        if (last := self.answers.last_parameters) is not None:
            for name in last:
                if name not in self.numbers:
                    accepted = f"names of parameters outside the layers{nearest(name, self.numbers)}"
                    raise refused("spec.last_parameters", last, accepted)
            return tuple(name for name in self.numbers if name not in last), last
        last = tuple(name for name, leaf in self.numbers.items() if id(leaf) in after_layers)
        for name in last:
            if id(self.numbers[name]) in before_layers:
                raise self.refused(f"its parameter {name} acts both before and after the layers")
        # Parameters that are not used for text (an image tower) get no gradient, and belong to the first stage.
        first = tuple(name for name in self.numbers if name not in last)
        silent = [name for name in first if id(self.numbers[name]) not in before_layers]
        if silent and (name := _acts_unseen(lambda: self.run(form), self.shown, silent)):
            raise self.refused(f"its parameter {name} acts on the layers or after them without a gradient")
        return first, last

    def token_in_evaluation(self, form: Structure) -> int | None:
        """Return `Structure.wants_token`, which training does not show for all families."""
        self.model.eval()
        try:
            embedded = self.run(form).received[0]
        except Exception as error:  # in evaluation RWKV changes the weights of all its layers
            raise self.refused(
                "its forward in evaluation needs more of its layers than the hidden states that they hand on: it stops"
                f" at {_where(error)}"
            ) from error
        token = form.wants_token
        if token is None:
            with contextlib.suppress(Exception):  # some forwards fail on token ids without the embedding's weights
                from_token_ids = self.run(replace(form, wants_token=self.neutral_token)).received[0]
                token = None if torch.equal(embedded, from_token_ids) else self.neutral_token
        self.model.train()
        return token

    def refused(self, reason: str) -> InputError:
        return uncuttable(type(self.model).__name__, reason)


def probe(
    model: PreTrainedModel, layers_name: str, embedding_module: str, head_module: str, answers: ModelSpec
) -> Structure:
    """Find whatever `answers` does not give of the structure.

    Args:
        model: a new fp64 skeleton. It is modified: it then runs on hidden states without layers or weights.

    Raises:
        InputError: the model cannot be cut exactly.
    """
    hollowed = _Probe(model, layers_name, embedding_module, head_module, answers)
    record, form = hollowed.first_that_runs()
    form = hollowed.check_passage(record, form)
    first, last = hollowed.outer_parameters(record, form)
    wants_token = hollowed.token_in_evaluation(form)
    for layer in hollowed.layers:
        layer.forward = identity_forward(form.layer_argument, form.returns)
    return replace(form, first_parameters=first, last_parameters=last, wants_token=wants_token)


def _where(error: Exception) -> str:
    return f"{line_of_model(error)} ({type(error).__name__}: {first_line(error)})"


def _numbers_for_parameters(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Replace every remaining parameter by a trainable scalar, expanded to the right shape.

    Returns: for each parameter, the scalar, and the scalar as the model uses it.
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
    """Return the first of these parameters that affects more than the first layer's hidden states; empty if none does.

    names: parameters without a gradient (tables read under `no_grad`).
    """

    def outputs() -> list[torch.Tensor]:
        torch.default_generator.manual_seed(0)
        record = run()
        assert record.head_input is not None
        return [*record.extras, record.head_input.detach()]

    def differs(changed: list[str]) -> bool:
        original = outputs()
        with torch.no_grad():
            for name in changed:
                shown[name].add_(1.0)
        perturbed = outputs()
        return len(original) != len(perturbed) or not all(map(torch.equal, original, perturbed))

    return next((name for name in names if differs([name])), "") if differs(names) else ""


def output_of_first_layer(
    model: PreTrainedModel, layers_name: str, sizes: tuple[int, int] = (PROBE_BATCH, PROBE_SEQUENCE)
) -> Any:
    """Return the first layer's output in a skeleton; None if it does not run there.

    sizes: sequences and tokens.
    """
    outputs = []

    def stop(module: nn.Module, args: tuple, output: Any) -> None:
        outputs.append(output)
        raise StopIteration("the other layers are like it")

    layers_of(model, layers_name)[0].register_forward_hook(stop)
    token_ids = torch.zeros(sizes, dtype=torch.int64, device="meta")
    with torch.no_grad(), nothing_packed(), contextlib.suppress(Exception):
        model(input_ids=token_ids, use_cache=False)
    return outputs[0] if outputs else None


def _named(model: PreTrainedModel, record: _Record) -> str:
    """Return the arguments, besides the hidden states, that carry trainable tensors, and related config settings."""
    names = sorted(set(record.sideways))
    settings = vars(model.config.get_text_config()).items()
    related = [
        f"{name} = {value}"
        for name, value in settings
        if value and any(argument.rstrip("s") in name for argument in names)
    ]
    return ", ".join(names) + (f"; see {', '.join(related)} in its config" if related else "")


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
