"""Finds the units of a block, such as attention heads or MLP columns: parts that do not depend on each other.

No names are read. The block runs on a small model, and for every entry z_j of its last linear layer's input, gradients
tell which outputs of the other linear layers z_j depends on. Entries that share an output belong together; each
connected component is one unit.

    q, k, v -> attention -> z -> o      z_j of head 3 depends on q of head 3, and on k and v of its group
    gate, up -> product -> z -> down    z_j depends on column j of gate and of up

A matrix whose outputs reach every unit (MLA's first projections) precedes them all and is not cut.
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
"""Fraction of the largest gradient below which entries count as independent; for fp32 models: `NOTHING_FP32`."""
NOTHING_FP32 = 1e-5
NUMBERS = 2**24
"""Largest number of gradient elements computed at once."""
DRAWS = 3
"""Number of inputs tried: with each, activations such as ReLU hide some columns."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call of a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> list[int | str]:
        """Keys of the hidden states: the arguments with the shape of the first [batch, tokens, hidden_size] tensor."""
        arguments: dict[int | str, Any] = dict(enumerate(self.args))
        arguments.update(self.kwargs.items())
        candidates = [key for key, value in arguments.items() if is_hidden(value)]
        return [key for key in candidates if arguments[key].shape == arguments[candidates[0]].shape]

    def argument(self, key: int | str) -> Tensor:
        """Return one argument."""
        return self.args[key] if isinstance(key, int) else self.kwargs[key]

    def with_hidden(self, change: Any) -> Call:
        """Return the same call with `change` applied to the hidden states."""
        hidden = self.hidden
        args = tuple(change(value) if index in hidden else value for index, value in enumerate(self.args))
        return Call(args, {key: change(value) if key in hidden else value for key, value in self.kwargs.items()})

    def of(self, block: nn.Module) -> Tensor:
        """Call a block and return its hidden states."""
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
    """Layout of the entries of each linear layer that is cut, and of the last one's input. Within a segment every unit
    has the same number of entries, unit after unit: queries, keys and values of a packed matrix are three segments."""
    parameters: Mapping[str, tuple[int, ...]]
    """The same for other parameters whose entries belong to units, such as attention sinks; along dimension 0."""


class NoUnitsError(Exception):
    """The block has no units that could be cut; the message is the reason."""


def is_hidden(value: Any) -> bool:
    """Return whether an argument can be hidden states."""
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
        call: the arguments with which a small model calls it.
        passed: submodules that do not prevent a cut although they compute with all entries (a norm over all heads);
            they return their input meanwhile.

    Raises:
        NoUnitsError: the block is not a function of linear layers, each used once, or its units differ.
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
            if sum(map(len, of_unit)) == table.shape[1]:  # otherwise several units share an entry: not cut
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
    """Return the last linear layer, and a table [width, entries] for the outputs of each other linear layer and for
    each other parameter: which of their entries each entry of the last layer's input depends on."""
    order: list[str] = []
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):  # a router may be a linear layer that returns more
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
    """Return the gradients of the inputs for each gradient of the output, stacked along a new first dimension; None if
    the output does not depend on an input."""
    gradients = partial(torch.autograd.grad, output, inputs, retain_graph=True, allow_unused=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an operation is not vectorized over gradients
            return gradients(seeds, is_grads_batched=True)
    except RuntimeError:  # an operation does not support batched gradients
        columns = zip(*map(gradients, seeds), strict=True)
        return [None if column[0] is None else torch.stack(column) for column in columns]


def _parts(width: int, tables: Mapping[str, Tensor]) -> list[list[int]]:
    """Return the entries of the last input by unit: entries that share an output of a linear layer are in one unit."""
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
    unit_of_entry = torch.empty(len(table), dtype=torch.int64)
    for number, entries in enumerate(parts):
        unit_of_entry[entries] = number
    reached = unit_of_entry.new_zeros(len(parts), table.shape[1]).index_add_(0, unit_of_entry, table.long())
    columns: list[list[int]] = [[] for _ in parts]
    for number, column in reached.nonzero().tolist():
        columns[number].append(column)
    return columns


def _segments(name: str, of_unit: list[list[int]], length: int) -> tuple[int, ...]:
    """Return the lengths of the segments that contain the entries, which are listed by unit."""
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
