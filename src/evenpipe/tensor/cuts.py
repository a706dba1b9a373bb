"""How a block of a layer is cut over tensor ranks, determined on a small model and applied at any size.

A cut is accepted only if the results of all ranks add up to the result of the uncut block, so a wrong guess (a count
that should have been divided, a residual inside the block) is detected before training.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from evenpipe.model.copies import copied
from evenpipe.model.linear import is_linear, is_transposed, named_linear, terms_of
from evenpipe.model.placement import Cut, TensorPlacement
from evenpipe.model.structure import first_line
from evenpipe.tensor.exchange import own_rows
from evenpipe.tensor.local import make_local
from evenpipe.tensor.norms import norms_inside
from evenpipe.tensor.threads import in_threads, thread_exchanges
from evenpipe.tensor.units import Call, NoUnitsError, find_units, until_the_end
from evenpipe.words import count

COUNTS = re.compile(r"(^|_)(num|n)_?(\w+_)?(kv|heads?|query_groups)$|^\w+_heads$")
"""Names of integers in modules and configs that count heads: a rank's block has the rank's counts."""
SHARES = re.compile(r"(key_value|kv)_groups$|^n_rep$")
"""Names of the number of query heads for each head of keys and values."""
SIZES = re.compile(
    r"^(split_size|all_head_size|embed_dim|hidden_size|d_model|inner_dim|intermediate_size)$"
    r"|(kv|key|value|query|conv)_(dim|size)$"
)
"""Names of integers that are the number of heads times their size."""
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative error of the sum over ranks, by dtype; `CLOSE_FP32` if the block rounds to fp32."""
CLOSE_FP32 = 1e-6


@dataclass(frozen=True, slots=True)
class Split:
    """How one parameter of a small block is cut: along a dimension, with each segment cut in the same way."""

    dimension: int
    segments: tuple[int, ...]
    width: int
    """Entries of the input of the last linear layer, to which `segments` are compared."""

    def at(self, length: int, width: int) -> tuple[int, ...]:
        """Return the segments of a dimension of `length` in a larger block, whose last input has `width` entries.

        A segment as long as the last input remains so (queries); the others share the rest equally (keys and values).
        """
        if len(self.segments) == 1:
            return (length,)
        fixed = [segment == self.width for segment in self.segments]
        free, remaining = fixed.count(False), length - width * sum(fixed)
        if remaining < 0 or (remaining % free if free else remaining):
            raise NoUnitsError(f"a matrix of {count(length, 'entry')} has no segments like those of the small model")
        return tuple(width if is_fixed else remaining // free for is_fixed in fixed)


@dataclass(frozen=True, slots=True)
class Group:
    """Units of a block, or of a module inside it, such as experts that all tokens use."""

    name: str
    """Name of the module; empty: the entire block."""
    count: int
    columns: bool
    """Whether units are single columns: one for each entry of the last input."""
    counters: tuple[tuple[str, str], ...]
    """(module, attribute of it or its config) that may hold the number of units; empty for columns."""
    output: str
    """Name of the last linear layer's weight in the block."""
    splits: Mapping[str, Split]
    """By name of the parameter in the block."""


@dataclass(frozen=True, slots=True)
class BlockCut:
    """What each rank holds and computes of a block that is cut."""

    groups: tuple[Group, ...]
    biases: tuple[str, ...] = ()
    """Biases added to the sum over ranks, so only the first rank holds them."""
    counts: tuple[tuple[str, str], ...] = ()
    """(module, integer attribute) whose value is divided by the number of ranks."""
    settings: tuple[tuple[str, str], ...] = ()
    """The same for the modules' configs."""
    norms: tuple[str, ...] = ()
    """Norms over all heads: their mean of squares is summed over ranks."""
    shares: tuple[tuple[str, str], ...] = ()
    """(module, attribute): query heads per head of keys and values, if a rank holds only part of such a group."""
    sums_at: str | None = None
    """Linear layer whose outputs are summed over ranks; None: the outputs of the block are."""


# --- finding ------------------------------------------------------------------------------------------------------


def find_cut(block: nn.Module, call: Call, *, repeats: bool = False) -> BlockCut:
    """Return how a small block can be cut over two ranks.

    Args:
        repeats: over more ranks than it has heads of keys and values, if possible; it has at most two then.

    Raises:
        NoUnitsError: it cannot be cut; the message is the reason.
    """
    with torch.no_grad():
        expected = call.of(block)
    reason = ""
    for cut in _candidates(block, call):
        first = cut.groups[0]
        ranks = 2 * first.count if repeats and not first.columns and first.count <= 2 else 2
        for counted in _with_counts(block, cut, ranks):
            for ends in (counted, replace(counted, sums_at=None)) if counted.sums_at else (counted,):
                try:
                    error = _error_of_parts(block, call, ends, ranks, expected)
                except NoUnitsError as failure:
                    reason = reason or str(failure)
                    continue
                except Exception as failure:  # many types: the block may not run on local sizes
                    reason = reason or f"a part of it does not run: {type(failure).__name__}: {first_line(failure)}"
                    continue
                if error <= max(CLOSE[expected.dtype], CLOSE_FP32):
                    return ends
                reason = f"its parts do not add up to the whole, by {error:.1g}"
    raise NoUnitsError(reason or "it has no parts")


def _candidates(block: nn.Module, call: Call) -> Iterator[BlockCut]:
    """Yield possible cuts of a block, without counts, the likeliest first."""
    reasons = []
    norms = norms_inside(block, call)
    for passed in ({}, norms) if norms else ({},):
        try:
            yield _of_units(block, "", call, passed)
        except NoUnitsError as reason:
            reasons.append(str(reason))
    groups: list[BlockCut] = []
    calls = calls_of_children(block, call)
    for name, module in block.named_modules():
        if not name or any(name.startswith(f"{cut.groups[0].name}.") for cut in groups):
            continue
        if is_experts(module):
            groups.append(_of_experts(name, module))
        elif name in calls:
            try:
                groups.append(_of_units(module, name, calls[name], {}))
            except NoUnitsError as reason:
                reasons.append(f"{name}: {reason}")
    if groups:
        biases = tuple(itertools.chain.from_iterable(cut.biases for cut in groups))
        yield BlockCut(tuple(cut.groups[0] for cut in groups), biases)
    if reasons:
        raise NoUnitsError(reasons[0])


def _of_units(module: nn.Module, name: str, call: Call, norms: Mapping[str, str | None]) -> BlockCut:
    """Return the cut of a module by its units, without counts.

    Args:
        name: name of the module in the block; empty: the block itself.
        norms: norms that may be over all heads; see `norms_inside`.
    """
    units = find_units(module, call, passed=[module.get_submodule(norm) for norm in norms])
    prefix = f"{name}." if name else ""
    splits, biases = {}, []
    for linear, segments in units.segments.items():
        layer = module.get_submodule(linear)
        is_last = linear == units.output
        splits[f"{prefix}{linear}.weight"] = Split(int(is_last != is_transposed(layer)), segments, units.width)
        if layer.bias is not None:
            if is_last:
                biases.append(f"{prefix}{linear}.bias")
            else:
                splits[f"{prefix}{linear}.bias"] = Split(0, segments, units.width)
        for key, term in terms_of(layer).items():
            for inner in term.inputs if is_last else term.outputs:
                dimension = int(is_last != is_transposed(term.get_submodule(inner)))
                splits[f"{prefix}{linear}.{key}.{inner}.weight"] = Split(dimension, segments, units.width)
    for parameter, segments in units.parameters.items():
        splits[f"{prefix}{parameter}"] = Split(0, segments, units.width)
    summed = []
    for norm, normed in norms.items():
        width = module.get_parameter(f"{norm}.weight").shape[0]
        of_norm = units.segments.get(normed or units.output, ())
        if sum(of_norm) == width:
            summed.append(norm)
            splits[f"{prefix}{norm}.weight"] = Split(0, of_norm, units.width)
    output = f"{prefix}{units.output}"
    columns_only = units.count == units.width
    counters = () if columns_only else tuple(_counters(module, prefix, units.count))
    group = Group(name, units.count, columns_only, counters, f"{output}.weight", splits)
    return BlockCut((group,), tuple(biases), norms=tuple(summed), sums_at=None if name else output)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds experts that use transformers' experts interface."""
    down = module._parameters.get("down_proj")
    return down is not None and down.dim() == 3 and hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def _of_experts(name: str, experts: Any) -> BlockCut:
    """Return the cut of experts [experts, ..., ...] by their inner columns."""
    inner = 1 if experts.is_transposed else 2
    width = experts.down_proj.shape[inner]
    first, twice = ("gate_up_proj", 2) if experts.has_gate else ("up_proj", 1)
    segments = (width,) * twice if experts.is_concatenated else (twice * width,)
    splits = {
        f"{name}.{first}": Split(3 - inner, segments, width),
        f"{name}.down_proj": Split(inner, (width,), width),
    }
    biases: tuple[str, ...] = ()
    if experts.has_bias:
        splits[f"{name}.{first}_bias"] = Split(1, segments, width)
        biases = (f"{name}.down_proj_bias",)
    return BlockCut((Group(name, width, True, (), f"{name}.down_proj", splits),), biases)


def _counters(module: nn.Module, prefix: str, count: int) -> Iterator[tuple[str, str]]:
    for name, inner in module.named_modules():
        for held in (vars(inner), _config_of(inner)):
            yield from ((f"{prefix}{name}".rstrip("."), key) for key in _counted(held, (COUNTS,)) if held[key] == count)


def calls_of_children(module: nn.Module, call: Call) -> dict[str, Call]:
    """Return the first call of each submodule whose first argument is hidden states, during a call of the module."""
    calls: dict[str, Call] = {}

    def record(name: str):
        def hook(inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
                calls.setdefault(name, Call(args, kwargs))

        return hook

    of_linear = tuple(f"{name}." for name, _ in named_linear(module))
    hooks = [
        inner.register_forward_pre_hook(record(name), with_kwargs=True)
        for name, inner in module.named_modules()
        if name and not name.startswith(of_linear) and len([*named_linear(inner)]) > 1
    ]
    with until_the_end(hooks), torch.no_grad():
        call.of(module)
    return calls


def _config_of(module: nn.Module) -> dict[str, Any]:
    config = vars(module).get("config")
    return vars(config) if isinstance(config, PreTrainedConfig) else {}


def _with_counts(block: nn.Module, cut: BlockCut, ranks: int) -> Iterator[BlockCut]:
    """Yield the cut with more and more integers divided by the number of ranks."""
    modules = [(name, module) for name, module in block.named_modules() if not is_linear(module)]

    def named(patterns: tuple[re.Pattern[str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple((name, key) for name, module in modules for key in _counted(vars(module), patterns))

    def configured(patterns: tuple[re.Pattern[str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple((name, key) for name, module in modules for key in _counted(_config_of(module), patterns))

    repeats = ranks > cut.groups[0].count
    cut = replace(cut, shares=named((SHARES,)) if repeats else ())
    yield cut
    for patterns in ((COUNTS,), (COUNTS, SIZES)):
        counts, settings = named(patterns), configured(patterns)
        for chosen in dict.fromkeys(((counts, settings), (counts, ()), ((), settings))):
            if any(chosen):
                yield replace(cut, counts=chosen[0], settings=chosen[1])


def _counted(held: Mapping[str, Any], patterns: tuple[re.Pattern[str], ...]) -> list[str]:
    """Return the names of positive integers that match a pattern."""
    numbers = [name for name, value in held.items() if type(value) is int and value > 0]
    return [name for name in numbers if any(pattern.search(name) for pattern in patterns)]


def _error_of_parts(block: nn.Module, call: Call, cut: BlockCut, ranks: int, reference: Tensor) -> float:
    """Return the relative error of the concatenated results of all ranks, compared with `reference`."""

    exchanges = thread_exchanges(ranks)
    parts = []
    with torch.no_grad():
        for exchange in exchanges:
            local = copied(block)
            for name, placement in placements_of(block, cut, exchange.rank, ranks).items():
                owner, _, leaf = name.rpartition(".")
                parameter = None if placement is None else nn.Parameter(placement.of(block.get_parameter(name)))
                local.get_submodule(owner)._parameters[leaf] = parameter
            make_local(local, cut, exchange, call.hidden, groups=cut.groups[0].count)
            parts.append(local)

        def run(rank: int) -> Tensor:
            local_call = call.with_hidden(lambda hidden: own_rows(hidden, exchanges[rank]))
            return local_call.of(parts[rank]).reshape(-1, reference.shape[-1])

        result = torch.cat(in_threads(exchanges, run))
    expected = reference.reshape(-1, reference.shape[-1])
    return float((result - expected).norm() / expected.norm())


# --- at any size --------------------------------------------------------------------------------------------------


def placements_of(block: nn.Module, cut: BlockCut, rank: int, ranks: int) -> dict[str, TensorPlacement | None]:
    """Return how a rank holds the parameters of an uncut block that differ between ranks, by name; None: it does not
    hold them.

    Raises:
        NoUnitsError: the units cannot be divided among the ranks.
    """
    placements: dict[str, TensorPlacement | None] = dict.fromkeys(cut.biases) if rank else {}
    for group in cut.groups:
        output = group.splits[group.output]
        width = block.get_parameter(group.output).shape[output.dimension]
        count = count_of(block, group)
        if count % ranks and (group.columns or ranks % count or not _repeat(block, cut, count, ranks)):
            units = f"{count} {'columns' if group.columns else 'heads of keys and values'}"
            raise NoUnitsError(f"{ranks} ranks cannot share {units}")
        for name, split in group.splits.items():
            shape = tuple(block.get_parameter(name).shape)
            segments = split.at(shape[split.dimension], width)
            placements[name] = _placement(shape, split, segments, count, (rank, ranks))
    return placements


def _repeat(block: nn.Module, cut: BlockCut, count: int, ranks: int) -> bool:
    """Return whether, with more ranks than heads of keys and values, each rank gets complete query heads."""
    shares = [getattr(block.get_submodule(name), attribute) for name, attribute in cut.shares]
    return bool(shares) and all(count * share % ranks == 0 for share in shares)


def _placement(
    shape: tuple[int, ...], split: Split, segments: tuple[int, ...], count: int, rank_and_count: tuple[int, int]
) -> TensorPlacement:
    """Return a rank's shard of a parameter; rank_and_count: (rank, ranks)."""
    rank, ranks = rank_and_count
    shard, shards, copied = rank, ranks, False
    repeated = [bool(segment % split.width) for segment in split.segments]  # heads of keys and values
    if ranks > count and any(repeated):
        if not all(repeated):
            raise NoUnitsError("heads of keys and values are fewer than ranks, and in one matrix with the queries")
        shard, shards, copied = rank * count // ranks, count, bool(rank * count % ranks)
    lengths = segments if len(segments) > 1 else ()
    if any(segment % shards for segment in segments):
        raise NoUnitsError(f"{ranks} ranks cannot share {segments} entries")
    cut = Cut(("tp",), shard, shards, split.dimension, lengths)
    return TensorPlacement(shape, (cut,), frozenset(("tp",) if copied else ()))


def count_of(block: nn.Module, group: Group) -> int:
    """Return the number of units of a block of any size.

    Raises:
        NoUnitsError: no counter holds it.
    """
    if group.columns:
        return block.get_parameter(group.output).shape[group.splits[group.output].dimension]
    counts = set()
    for name, attribute in group.counters:
        module = block.get_submodule(name)
        for held in (vars(module), _config_of(module)):
            if isinstance(held.get(attribute), int):
                counts.add(held[attribute])
    if not counts:
        raise NoUnitsError("nothing says how many heads it has")
    return math.gcd(*counts)
