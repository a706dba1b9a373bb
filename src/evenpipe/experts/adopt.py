"""Makes transformers call our function for the experts of a stage.

transformers looks up the function by the name in a config; a stage does not share its configs. A compiled layer is
compiled around the function, since tokens are counted, sent and queued for W outside of graphs. Experts with another
interface run the implementation that the config named before ("eager", "grouped_mm", ...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evenpipe.experts.function import Call, Overlap, run
from evenpipe.experts.layout import Exchange, alone
from evenpipe.experts.layout import spread as layout_of_member
from evenpipe.experts.load import Load
from evenpipe.experts.routing import Routing
from evenpipe.layers.weight_gradients import SplitBackward, WeightGradients
from evenpipe.model import Description
from evenpipe.model.experts import uses_interface
from evenpipe.model.placement import Cut, TensorPlacement

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError:  # a transformers version without the experts interface: all gradients of experts are computed in I
    ALL_EXPERTS_FUNCTIONS = None  # type: ignore[assignment]

IMPLEMENTATION = "evenpipe"
"""Name of the implementation in transformers; never written into a user's config."""


class GroupExchange(Exchange, Protocol):
    """The exchange of all layers of a device."""

    layer: str
    """Name of the experts that are running."""


@dataclass(frozen=True, eq=False)
class Spread:
    """How the experts of every layer are divided among the members of a group."""

    exchange: GroupExchange
    routing: Routing
    overlap: Overlap = field(default_factory=Overlap)


@dataclass(frozen=True, eq=False, slots=True)
class OwnExperts:
    """The `LayerTransform` that lets our function run experts, whose matrices then take part in split backwards."""

    queue: WeightGradients
    spread: Spread | None = None
    """If given, the parameters are those of a member; None: this process holds all experts."""
    load: Load | None = None
    """Counts the choices of tokens."""

    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        if ALL_EXPERTS_FUNCTIONS is None:
            return
        ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = run_experts
        experts: list[tuple[str, Any]] = [
            (name, module) for name, module in model.named_modules() if is_experts(module)
        ]
        for name, module in experts:
            module._adopted = Adopted(name, module.num_experts, self)
            module._weight_gradients = self.queue
        for _, module in experts:  # they share a config
            module.config._experts_implementation = IMPLEMENTATION


@dataclass(frozen=True, eq=False, slots=True)
class Adopted:
    """Data for the experts of a layer."""

    name: str
    count: int
    """Number of experts of all members."""
    by: OwnExperts


def names_of_experts(description: Description) -> dict[str, int]:
    """Return the number of experts of every layer that has any, by their name in the model."""
    return {name: module.num_experts for name, module in description.skeleton.named_modules() if is_experts(module)}


def placements(
    description: Description, index: int, spread: Spread, held: Mapping[str, TensorPlacement | None]
) -> dict[str, TensorPlacement | None]:
    """Return how a member holds the parameters of the experts of a layer, by name in the model.

    held: how tensor ranks hold sharded parameters.
    """
    result: dict[str, TensorPlacement | None] = {}
    cut = Cut(("ep",), spread.exchange.rank, spread.exchange.size)
    prefix = f"{description.structure.layers_name}.{index}"
    for name, module in description.layer(index).named_modules(prefix=prefix):
        if not is_experts(module):
            continue
        for key, parameter in module.named_parameters(prefix=name, recurse=False):
            of_rank = held.get(key, TensorPlacement(tuple(parameter.shape)))
            result[key] = None if of_rank is None else replace(of_rank, cuts=(cut, *of_rank.cuts))
    return result


def split_backwards(module: nn.Module) -> Callable[[], None]:
    """Split the backwards of a module, for the self-check. The returned function runs the W of the last backward."""
    queue = WeightGradients()
    for transform in (OwnExperts(queue), SplitBackward(queue)):
        transform.apply(module, {})
    key = (0, 0)
    queue.begin(key)

    def weight_gradients() -> None:
        queue.under_way = None
        queue.compute(key)
        queue.begin(key)

    return weight_gradients


def is_experts(module: nn.Module) -> bool:
    """Return whether our function can run a module: its forward uses the interface, with no operation between the
    second product and the routing weights."""
    return uses_interface(module) and not getattr(module, "has_post_expert_norm", False)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_experts(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run every token through its experts, and sum their weighted outputs; the signature is that of the interface.

    Args:
        experts: the module of transformers.
        hidden: [tokens, hidden_size].
        top_k_index: [tokens, choices], the experts of each token.
        top_k_weights: [tokens, choices].

    Returns: [tokens, hidden_size].
    """
    adopted: Adopted = experts._adopted
    by = adopted.by
    if by.load is not None:
        by.load.add(adopted.name, top_k_index)
    queue = by.queue if by.queue.takes(hidden) else None
    if by.spread is None:
        layout = alone(top_k_index, adopted.count)
        call = Call(experts, layout, None, Overlap(), queue, name=adopted.name)
    else:
        call = _call_of_member(experts, by.spread, top_k_index, queue)
    return run(call, hidden, top_k_weights)


def _call_of_member(experts: Any, spread: Spread, index: Tensor, queue: WeightGradients | None) -> Call:
    adopted: Adopted = experts._adopted
    member = _Member(adopted.name, spread)
    member.begins()
    layout = spread.routing.layout(adopted.name, lambda: layout_of_member(index, adopted.count, spread.exchange))
    return Call(experts, layout, spread.exchange, spread.overlap, queue, member, adopted.name)


@dataclass(frozen=True)
class _Member:
    """Tells the exchange whose rows are sent, and releases layouts."""

    layer: str
    spread: Spread

    def begins(self) -> None:
        self.spread.exchange.layer = self.layer

    backward_begins = begins

    def backward_ends(self) -> None:
        self.spread.routing.end(self.layer)
