"""How much the processes that share every sequence communicate in each attention layer, and which way moves less.

keys     F gathers keys and values; the backward gathers them again and sums their gradients, since every process has
         a share of all of them. With slices, the gathered keys and values are kept, and the backward only sums
heads    F exchanges queries, keys and values so that a process has some heads of all tokens, and exchanges the result
         back; the backward exchanges their gradients in reverse. Key heads fewer than processes are repeated
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from evenpipe.model.description import Description
from evenpipe.model.flops import Attention, attention_of


class Moved(NamedTuple):
    """Tensors that a layer gathers, sums or exchanges: for each, the elements per local token of a process."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


def moved(attention: Attention, exchange: str, *, ranks: int, tensor_ranks: int, keys_held: bool = False) -> Moved:
    """Return the tensors that a layer moves.

    Args:
        exchange: "keys" or "heads".
        ranks: number of processes that share a sequence.
        tensor_ranks: number of processes among which the heads are already split.
        keys_held: the keys of the forward are still held in the backward, since later slices attend to them.
    """
    query, value = attention.query_size, attention.value_size
    of_keys = attention.key_value_size / (query + value) / tensor_ranks
    if exchange == "keys":
        gathered = of_keys * query, of_keys * value
        return Moved(gathered, gathered if keys_held else 2 * gathered)
    of_queries, of_keys = attention.heads / tensor_ranks, max(of_keys, ranks)
    each = of_queries * query, of_keys * query, of_keys * value, of_queries * value
    return Moved(each, each)


def received(attention: Attention, exchange: str, *, ranks: int, tensor_ranks: int, keys_held: bool = False) -> float:
    """Return the elements that a process receives for each of its tokens, forward and backward; arguments as for
    `moved`."""
    elements = moved(attention, exchange, ranks=ranks, tensor_ranks=tensor_ranks, keys_held=keys_held)
    of_each = ranks - 1 if exchange == "keys" else (ranks - 1) / ranks
    return of_each * sum((*elements.forward, *elements.backward))


def heads_divide(attention: Attention, *, ranks: int, tensor_ranks: int) -> bool:
    """Return whether the processes can share the heads; True if there are no heads."""
    heads, sizes = attention.heads, attention.query_size + attention.value_size
    of_keys, left = divmod(attention.key_value_size // sizes if heads else 0, tensor_ranks)
    if left or heads % (tensor_ranks * ranks):
        return False
    return not heads or of_keys % ranks == 0 or ranks % of_keys == 0


def heads_can_be_shared(description: Description, *, ranks: int, tensor_ranks: int) -> bool:
    """Return whether the processes can share the heads of every layer."""
    layers = (attention_of(description, index) for index in range(description.layers))
    return all(heads_divide(layer, ranks=ranks, tensor_ranks=tensor_ranks) for layer in layers)


class Choice(NamedTuple):
    """ "keys" or "heads", and why, for a status line."""

    exchange: Literal["keys", "heads"]
    reason: str


def choose(
    description: Description, requested: Literal["auto", "keys", "heads"], *, ranks: int, tensor_ranks: int, slices: int
) -> Choice:
    """Return how context ranks exchange: as `requested`, or with "auto" the way that moves less."""
    if requested != "auto":
        return Choice(requested, "as given")
    sizes = {"ranks": ranks, "tensor_ranks": tensor_ranks}
    if not heads_can_be_shared(description, **sizes):
        return Choice("keys", f"{ranks} context ranks cannot share the heads")
    layers = [attention_of(description, index) for index in range(description.layers)]
    keys, heads = (
        sum(received(layer, way, **sizes, keys_held=slices > 1) for layer in layers if layer.heads)
        for way in ("keys", "heads")
    )
    if not keys or keys <= heads:
        return Choice("keys", f"heads for tokens would move {heads / keys:.2f} times as much" if keys else "no heads")
    return Choice("heads", f"gathered keys would move {keys / heads:.2f} times as much")
