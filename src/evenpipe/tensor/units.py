"""Finds the units of a block: the heads of an attention, the columns of an MLP, which do not need each other.

No name is read: the block runs on a small model, and for every entry z_j of its last linear layer's input, gradients
tell which outputs of the other linear layers z_j depends on. Entries that share an output belong together; what is
connected is one unit.

    q, k, v -> attention -> z -> o      z_j of head 3 depends on q of head 3, and on k and v of its group
    gate, up -> product -> z -> down    z_j depends on column j of gate and of up

A matrix whose outputs reach every unit (MLA's first projections) precedes them all, and stays whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evenpipe.model.linear import named_linear
from evenpipe.words import count

NOTHING = 1e-9
"""Share of the largest gradient below which there is no dependence; fp32 models: `NOTHING_FP32`."""
NOTHING_FP32 = 1e-5
NUMBERS = 2**24
"""Most numbers in gradients that are computed at once."""
DRAWS = 3
"""Inputs that are tried: activations such as ReLU hide some columns of each."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call of a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> list[int | str]:
        """Where the hidden states are: the arguments [batch, tokens, hidden_size] of the block's first such shape."""
        arguments: dict[int | str, Any] = dict(enumerate(self.args))
        arguments.update(self.kwargs.items())
        candidates = [key for key, value in arguments.items() if is_hidden(value)]
        return [key for key in candidates if arguments[key].shape == arguments[candidates[0]].shape]

    def argument(self, key: int | str) -> Tensor:
        """Return one argument."""
        return self.args[key] if isinstance(key, int) else self.kwargs[key]

    def with_hidden(self, change: Any) -> Call:
        """Return the same call with `change(tensor)` in place of the hidden states."""
        hidden = self.hidden
        args = tuple(change(value) if index in hidden else value for index, value in enumerate(self.args))
        return Call(args, {key: change(value) if key in hidden else value for key, value in self.kwargs.items()})

    def of(self, block: nn.Module) -> Tensor:
        """Call a block; return its hidden states."""
        result = block(*self.args, **self.kwargs)
        return result[0] if isinstance(result, (tuple, list)) else result


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a block, in the order of the input of its last linear layer."""

    count: int
    output: str
    """Name of the last linear layer."""
    width: int
    """Entries of its input."""
    segments: Mapping[str, tuple[int, ...]]
    """Of each linear layer that is cut, and of the last one's input: how its entries lie. Every segment has as many
    entries of each unit, unit after unit: queries, keys and values of one packed matrix are three segments."""
    parameters: Mapping[str, tuple[int, ...]]
    """The same along the first dimension of other parameters whose entries belong to units, such as attention sinks."""


class NoUnitsError(Exception):
    """The block has none that could be cut; the text is the reason."""


def is_hidden(value: Any) -> bool:
    """Return whether an argument may be hidden states."""
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


@contextmanager
def until_the_end(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks on exit."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def find_units(block: nn.Module, call: Call, *, passed: Collection[nn.Module] = ()) -> Units:
    """Return the units of a block.

    Args:
        call: arguments with which a small model calls it.
        passed: modules inside that keep entries apart as far as a cut is concerned, though they compute with all of
            them (a norm over all heads); meanwhile they return their input.

    Raises:
        NoUnitsError: the block is not a function of linear layers, each used once, or its units are not alike.
    """
    generator = torch.Generator().manual_seed(0)
    reached: dict[str, Tensor] = {}
    with _passing(passed):
        for draw in range(DRAWS):
            drawn_call = call if draw == 0 else call.with_hidden(partial(_noise, generator=generator))
            output, tables = _reached(block, drawn_call, generator)
            reached = {name: tables[name] | reached[name] if name in reached else tables[name] for name in tables}
    width = next(iter(reached.values())).shape[0] if reached else 0
    if not width:
        raise NoUnitsError("it has one linear layer")
    linear = dict(named_linear(block))
    cut = {name: table for name, table in reached.items() if name in linear and not table.all()}
    if not cut:
        raise NoUnitsError("every part of it needs every other one")
    parts = _parts(width, cut)
    if len(parts) == 1:
        raise NoUnitsError("every part of it needs every other one")
    segments = {output: _segments(output, parts, width)}
    for name, table in cut.items():
        of_unit = _reached_by(parts, table)
        segments[name] = _segments(name, of_unit, table.shape[1])
    parameters = {}
    for name, table in reached.items():
        if name not in linear and table.any() and not table.all():
            of_unit = _reached_by(parts, table)
            if sum(map(len, of_unit)) == table.shape[1]:  # else several units use an entry: it stays whole
                parameters[name] = _segments(name, of_unit, table.shape[1])
    return Units(len(parts), output, width, segments, parameters)


def _noise(hidden: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(hidden.shape, dtype=hidden.dtype, generator=generator)


@contextmanager
def _passing(modules: Collection[nn.Module]) -> Iterator[None]:
    try:
        for module in modules:
            module.forward = lambda hidden: hidden  # type: ignore[method-assign]
        yield
    finally:
        for module in modules:
            del module.forward


def _reached(block: nn.Module, call: Call, generator: torch.Generator) -> tuple[str, dict[str, Tensor]]:
    """Return the last linear layer, and for the outputs of the others, and the other parameters, a table [width,
    entries] of what entries of its input depend on."""
    order: list[str] = []
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):  # a router may be one and return more
            order.append(name)
            inputs[name], outputs[name] = args[0], output

    linear = dict(named_linear(block))
    of_linear = tuple(f"{name}." for name in linear)
    hooks = [module.register_forward_hook(partial(record, name)) for name, module in linear.items()]
    with until_the_end(hooks), torch.enable_grad():
        call.of(block)
    if len(set(order)) < 2 or len(order) != len(set(order)):
        raise NoUnitsError(f"it has {count(len(linear), 'linear layer')}, used {count(len(order), 'time')}")
    output = order[-1]
    last = inputs[output]
    sources = {name: outputs[name] for name in order[:-1]}
    sources |= {
        name: tensor for name, tensor in block.named_parameters() if tensor.dim() and not name.startswith(of_linear)
    }
    sources = {name: tensor for name, tensor in sources.items() if tensor.requires_grad}
    weights = torch.randn(last.shape[:-1], dtype=last.dtype, generator=generator)
    threshold = NOTHING if last.dtype == torch.float64 else NOTHING_FP32
    sizes = {name: (tensor.shape[-1] if name in outputs else tensor.shape[0]) for name, tensor in sources.items()}
    tables = {name: torch.zeros(last.shape[-1], size, dtype=last.dtype) for name, size in sizes.items()}
    if last.grad_fn is None:
        raise NoUnitsError("its last linear layer does not depend on the others")
    entries_at_once = max(1, NUMBERS // sum(tensor.numel() for tensor in (last, *sources.values())))
    for entries in torch.arange(last.shape[-1]).split(entries_at_once):
        seeds = last.new_zeros(len(entries), *last.shape)
        seeds[torch.arange(len(entries)), ..., entries] = weights
        for name, gradient in zip(sources, _gradients(last, list(sources.values()), seeds), strict=True):
            if gradient is not None:
                size = gradient.abs()
                size = size.flatten(1, -2) if name in outputs else size.reshape(*size.shape[:2], -1).mT
                tables[name][entries] = size.amax(1)
    return output, {name: table > threshold * table.amax() for name, table in tables.items()}


def _gradients(output: Tensor, inputs: list[Tensor], seeds: Tensor) -> Sequence[Tensor | None]:
    """Return the gradients of inputs for each gradient of the output, along a new first dimension; None: there is no
    dependence."""
    gradients = partial(torch.autograd.grad, output, inputs, retain_graph=True, allow_unused=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an operation takes one gradient after the other
            return gradients(seeds, is_grads_batched=True)
    except RuntimeError:  # an operation does not take several
        columns = zip(*map(gradients, seeds), strict=True)
        return [None if column[0] is None else torch.stack(column) for column in columns]


def _parts(width: int, tables: Mapping[str, Tensor]) -> list[list[int]]:
    """Return the entries of the last input by unit: those that share an output of a linear layer are in one."""
    unit = list(range(width))

    def root(entry: int) -> int:
        while unit[entry] != entry:
            unit[entry] = entry = unit[unit[entry]]
        return entry

    for table in tables.values():
        first: dict[int, int] = {}
        for column, entry in table.T.nonzero().tolist():
            low, high = sorted((root(first.setdefault(column, entry)), root(entry)))
            unit[high] = low
    parts: dict[int, list[int]] = {}
    for entry in range(width):
        parts.setdefault(root(entry), []).append(entry)
    return list(parts.values())


def _reached_by(parts: list[list[int]], table: Tensor) -> list[list[int]]:
    """Return the columns that the rows of each part reach."""
    numbers = torch.empty(len(table), dtype=torch.int64)
    for number, entries in enumerate(parts):
        numbers[entries] = number
    reached = numbers.new_zeros(len(parts), table.shape[1]).index_add_(0, numbers, table.long())
    columns: list[list[int]] = [[] for _ in parts]
    for number, column in reached.nonzero().tolist():
        columns[number].append(column)
    return columns


def _segments(name: str, of_unit: list[list[int]], length: int) -> tuple[int, ...]:
    """Return the lengths of the segments that entries, given by unit, lie in."""
    starts = [entry for index, entry in enumerate(of_unit[0]) if index == 0 or of_unit[0][index - 1] != entry - 1]
    stops = [entry + 1 for index, entry in enumerate(of_unit[0]) if of_unit[0][index + 1 : index + 2] != [entry + 1]]
    widths = [stop - start for start, stop in zip(starts, stops, strict=True)]
    for number, entries in enumerate(of_unit):
        expected = [
            entry
            for start, width in zip(starts, widths, strict=True)
            for entry in range(start + number * width, start + (number + 1) * width)
        ]
        if entries != expected:
            raise NoUnitsError(f"the units of {name} are not alike")
    if sum(widths) * len(of_unit) != length:
        raise NoUnitsError(f"some entries of {name} belong to no unit")
    return tuple(width * len(of_unit) for width in widths)
