"""The experts of a layer as one autograd function, for every family that uses transformers' experts interface.

Routing weights are applied before the second product, so the process with the experts can sum the pairs of each row,
and the backward needs the same two exchanges as the forward, with the same layout:

    F   x  --dispatch-->  X      pre = X[row] W1     a = gate(pre) w     Z = sum of a W2 by row      --combine-->  out
    B   dy --dispatch-->  dZ     da = dZ[row] W2^T   dpre = gate'(da w)  dX = sum of dpre W1^T       --combine-->  dx
        dw = da . gate(pre)      dW1 = X[row]^T dpre      dW2 = a^T dZ[row]

Only X, pre and w are kept from F to B: the gate is computed again. X, dZ, dpre, a and w are kept from I to W.
"selective" checkpointing keeps X, pre, w and out, so that a repeated forward sends nothing. Transfers overlap with
products (after COMET, arXiv 2502.19811):

    arrivals   the product of arriving rows (W1 in F, W2^T in B) begins with local rows; then all others at once, or
               member by member
    columns    the product that is sent is computed in blocks of columns: each is sent while the next is computed
    weights    in B, weight gradients are computed once the last block is being sent
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from evenpipe.experts.layout import Exchange, Layout
from evenpipe.experts.overlap import Overlap, blocks
from evenpipe.layers.checkpointing import only_saves
from evenpipe.layers.own_operations import own_operation
from evenpipe.layers.weight_gradients import Entry, WeightGradients
from evenpipe.model.products import PLAIN, Groups, Products, fill_grouped, products_of
from evenpipe.words import count
from evenpipe.work import NOTHING, Work

GroupedProduct = Callable[[Tensor, Tensor, Groups], Tensor]
"""[rows, in] times [experts, in, out], with the rows of each expert -> [rows, out]."""


class Listener(Protocol):
    """Notified about the backward of a call."""

    def backward_begins(self) -> None: ...

    def backward_ends(self) -> None: ...


@dataclass(eq=False)
class Call:
    """A call of a layer's experts."""

    experts: Any
    """The module of transformers."""
    layout: Layout
    exchange: Exchange | None
    """None: nothing is exchanged."""
    overlap: Overlap
    queue: WeightGradients | None = None
    """Queue for the weight gradients; None: they are computed in the backward."""
    listener: Listener | None = None
    """Notified about the backward."""
    name: str = "experts"
    """Name of the experts in the model, for messages."""

    @contextmanager
    def within_memory(self) -> Iterator[None]:
        """Add the names of the experts and the number of rows to out-of-memory errors."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            layout = self.layout
            note = (
                f"in {self.name}: {count(layout.rows, 'row')}, {count(layout.pairs, 'pair')} of a row and an expert,"
                f" for {count(layout.tokens, 'token')} of its own"
            )
            if note not in getattr(error, "__notes__", ()):  # weight gradients may be computed within a backward
                error.add_note(note)
            raise

    def matrices(self, name: str) -> Tensor:
        """Return matrices [experts, in, out]."""
        matrices: Tensor = getattr(self.experts, name).detach()
        return matrices if self.experts.is_transposed else matrices.mT

    @property
    def products(self) -> Products:
        """How rows and matrices are multiplied."""
        return products_of(self.experts)

    @property
    def first(self) -> str:
        """Name of the first matrices."""
        return first_of(self.experts)

    def bias(self, name: str) -> Tensor | None:
        """Return the biases [experts, out] of the matrices with this name."""
        return getattr(self.experts, f"{name}_bias").detach() if self.experts.has_bias else None

    def gate(self, first: Tensor) -> Tensor:
        """Return the input of the second matrices, given the output of the first ones."""
        gated: Tensor = self.experts._apply_gate(first) if self.experts.has_gate else self.experts.act_fn(first)
        return gated


def first_of(experts: Any) -> str:
    """Return the name of the first matrices."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def run(call: Call, hidden: Tensor, weights: Tensor) -> Tensor:
    """Run all tokens through their experts, and sum their weighted outputs.

    Parameters get gradients through `weight_gradients.accumulate`, immediately or from the queue; they are not part of
    the autograd graph.

    Args:
        hidden: [tokens, hidden_size].
        weights: [tokens, choices].

    Returns: [tokens, hidden_size].
    """
    anchor = None  # without it, inputs that need no gradient would give no graph
    if any(parameter.requires_grad for parameter in call.experts.parameters(recurse=False)):
        anchor = hidden.new_empty(0, requires_grad=True)  # not a parameter: its hooks would run without a gradient
    with call.within_memory():
        result: Tensor = _Experts.apply(hidden, weights, call, anchor)
    return result


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, call: Call, anchor: Tensor | None) -> Tensor:
        *sent, first, weight = _operation_to_experts(hidden.detach(), weights.detach(), _number(call))
        rows = sent[0] if sent else hidden
        ctx.save_for_backward(rows, first, weight)
        ctx.call, ctx.shape, ctx.dtype = call, weights.shape, weights.dtype
        if only_saves(3):
            return torch.empty_like(hidden)
        output: Tensor = _operation_to_tokens(first, weight, _number(call))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        call: Call = ctx.call
        with call.within_memory():
            return *_Experts._gradients(ctx, call, gradient), None, None

    @staticmethod
    def _gradients(ctx: Any, call: Call, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if call.listener is not None:
            call.listener.backward_begins()
        ctx.call = None  # otherwise all layouts of a stage live until its last backward is done
        layout = call.layout
        rows, first, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        of_rows, arriving = _dispatch(call, gradient.contiguous(), "gradients")
        with torch.enable_grad():  # while the gradients arrive
            leaf = first.requires_grad_()
            gated = call.gate(leaf)
        multiply = call.products.grouped_input_gradient
        of_gated = _arrived_product(call, multiply, of_rows, call.matrices("down_proj").mT, arriving)
        plain = gated.detach()
        of_weight = (of_gated * plain).sum(1, dtype=_wide(plain.dtype))
        bias = call.bias("down_proj")
        if bias is not None:
            of_weight += (of_rows[layout.row] * bias[layout.expert]).sum(1, dtype=_wide(plain.dtype))
        (of_first,) = torch.autograd.grad(gated, leaf, _weighted(of_gated, weight))
        del gated, leaf, of_gated
        sum_of_weights = _start_weights(call, of_weight, ctx.shape, ctx.dtype) if ctx.needs_input_grad[1] else None
        leaving = None
        if ctx.needs_input_grad[0]:
            leaving = _start_leaving(call, multiply, of_first, call.matrices(call.first).mT)
        entry = _entry(call, rows, of_rows, of_first, gated=plain, weight=weight)
        if call.queue is not None:
            call.queue.add(entry)
        else:
            entry.compute()
        of_hidden = None if leaving is None else _arrived(call, leaving)
        if call.listener is not None:
            call.listener.backward_ends()
        return of_hidden, None if sum_of_weights is None else sum_of_weights()


def _entry(call: Call, rows: Tensor, of_rows: Tensor, of_first: Tensor, *, gated: Tensor, weight: Tensor) -> Entry:
    """Return the entry that computes the weight gradients; it holds detached tensors only."""
    layout, experts = call.layout, call.experts
    names = [name for name in _parameters(experts) if getattr(experts, name).requires_grad]

    @call.within_memory()
    def gradients() -> tuple[Tensor, ...]:
        by_name: dict[str, Tensor] = {}
        output = of_rows[layout.row]
        multiply = partial(call.products.grouped_weight_gradient, transposed=experts.is_transposed)
        for name, left, right in (
            (call.first, rows[layout.row] if call.first in names else None, of_first),
            ("down_proj", _weighted(gated, weight) if "down_proj" in names else None, output),
        ):
            if left is not None:
                by_name[name] = multiply(right, left, layout.groups)
        biases = {f"{call.first}_bias": of_first, "down_proj_bias": output}
        chosen = [name for name in biases if name in names]
        if chosen:
            every = torch.arange(len(layout.groups.ends), device=layout.expert.device)
            one_hot = (layout.expert == every[:, None]).to(gated.dtype)
            for name in chosen:
                by_pair = one_hot if name != "down_proj_bias" else one_hot * weight.to(one_hot.dtype)
                by_name[name] = by_pair @ biases[name]
        return tuple(by_name[name] for name in names)

    return Entry(tuple(getattr(experts, name) for name in names), gradients)


def _parameters(experts: Any) -> list[str]:
    names = [first_of(experts), "down_proj"]
    return [*names, *(f"{name}_bias" for name in names)] if experts.has_bias else names


# --- from tokens to experts --------------------------------------------------------------------------------------


def _to_experts(call: Call, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return X [rows, hidden_size], the output of the first matrices [pairs, out], and weights [pairs]."""
    layout = call.layout
    rows, arriving = _dispatch(call, hidden, "rows")
    sent_weights = weights.detach() if layout.token_of_row is None else weights.detach()[layout.token_of_row]
    sent_weights = sent_weights if layout.present is None else torch.where(layout.present, sent_weights, 0)
    row_weights, pending = sent_weights, NOTHING
    if call.exchange is not None:
        row_weights = sent_weights.new_empty(layout.rows, sent_weights.shape[1])
        row_weights[: layout.local_rows] = sent_weights[: layout.local_rows]
        pending = call.exchange.start(
            row_weights[layout.local_rows :], sent_weights[layout.local_rows :], layout.received, layout.sent, "weights"
        )
    first = _arrived_product(call, call.products.grouped_output, rows, call.matrices(call.first), arriving)
    bias = call.bias(call.first)
    if bias is not None:
        first += bias[layout.expert]
    pending.wait()
    return rows, first, row_weights[layout.row, layout.slot]


def _dispatch(call: Call, tokens: Tensor, label: str) -> tuple[Tensor, list[Work]]:
    """Return rows [rows, ...] on the side of the experts, and the pending transfers, one for each part of the rows."""
    layout = call.layout
    if call.exchange is None:
        return tokens.detach(), []
    assert layout.token_of_row is not None
    tokens, local_rows = tokens.detach(), layout.local_rows
    leaving = tokens[layout.token_of_row[local_rows:]]
    expert_rows = tokens.new_empty(layout.rows, *tokens.shape[1:])
    if call.overlap.arrivals > 2:
        pending = [
            _start_exchange(call, expert_rows[local_rows:], leaving, distance, label)
            for distance in range(1, call.exchange.size)
        ]
    else:
        pending = [call.exchange.start(expert_rows[local_rows:], leaving, layout.received, layout.sent, label)]
    # Overlaps with sending the other rows.
    torch.index_select(tokens, 0, layout.token_of_row[:local_rows], out=expert_rows[:local_rows])
    return expert_rows, pending


def _start_exchange(call: Call, output: Tensor, leaving: Tensor, distance: int, label: str) -> Work:
    """Send rows to the member `distance` ranks ahead only, and receive those of the member `distance` ranks behind."""
    layout, exchange = call.layout, call.exchange
    assert exchange is not None
    sender, taker = (exchange.rank - distance) % exchange.size, (exchange.rank + distance) % exchange.size
    received, sent = [0] * exchange.size, [0] * exchange.size
    received[sender], sent[taker] = layout.received[sender], layout.sent[taker]
    return exchange.start(
        output[sum(layout.received[:sender]) :][: received[sender]],
        leaving[sum(layout.sent[:taker]) :][: sent[taker]],
        received,
        sent,
        label,
    )


def _arrived_product(
    call: Call, multiply: GroupedProduct, rows: Tensor, matrices: Tensor, arriving: list[Work]
) -> Tensor:
    """Return [pairs, out]: rows, some of which are still arriving, times [experts, in, out]."""
    layout, exchange = call.layout, call.exchange
    if exchange is None or call.overlap.arrivals == 1:
        for pending in arriving:
            pending.wait()
        return multiply(rows[layout.row], matrices, layout.groups)
    arrivals = layout.own_first
    if call.overlap.arrivals > 2:
        local, *remote = layout.by_sender
        arrivals = [
            local,
            *(remote[(exchange.rank - distance) % exchange.size] for distance in range(1, exchange.size)),
        ]
    result = rows.new_empty(layout.pairs, matrices.shape[2])
    for arrival, pending in zip(arrivals, (NOTHING, *arriving), strict=True):
        pending.wait()
        if rows.is_cpu and call.products is PLAIN:
            fill_grouped(result, arrival.indices, rows[layout.row[arrival.indices]], matrices, arrival.groups)
        else:
            result[arrival.indices] = multiply(rows[layout.row[arrival.indices]], matrices, arrival.groups)
    return result


# --- from experts to tokens --------------------------------------------------------------------------------------


def _to_tokens(call: Call, gated: Tensor, weight: Tensor) -> Tensor:
    """Return the output [tokens, hidden_size], given weighted results of the gate [pairs, in]."""
    bias, expert = call.bias("down_proj"), call.layout.expert

    def add(products: Tensor, columns: slice) -> Tensor:
        return (
            products if bias is None else products.addcmul_(bias[expert, columns], weight[:, None].to(products.dtype))
        )

    leaving = _start_leaving(call, call.products.grouped_output, gated, call.matrices("down_proj"), add)
    return _arrived(call, leaving)


def _start_weights(call: Call, of_weight: Tensor, shape: torch.Size, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Start sending gradients of weights [pairs] back; the returned function waits and returns [tokens, choices]."""
    layout = call.layout
    of_rows = of_weight.new_zeros(layout.rows, shape[1])
    of_rows[layout.row, layout.slot] = of_weight
    if call.exchange is None:
        assert layout.present is not None
        result = torch.where(layout.present, of_rows, 0).to(dtype)
        return lambda: result
    returned = of_rows.new_empty(sum(layout.sent), shape[1])
    pending = call.exchange.start(
        returned, of_rows[layout.local_rows :], layout.sent, layout.received, "gradients of weights"
    )

    def wait() -> Tensor:
        pending.wait()
        return layout.by_token.sum(torch.cat([of_rows[: layout.local_rows], returned])).to(dtype)

    return wait


class _Leaving(NamedTuple):
    """A block of columns that is being sent back."""

    columns: slice
    sums: Tensor
    """[rows, columns]: those of local rows come first."""
    returned: Tensor
    """[local + sent rows, columns]: the sums that come back, in the order of `token_of_row`."""
    pending: Work


def _start_leaving(
    call: Call,
    multiply: GroupedProduct,
    pairs: Tensor,
    matrices: Tensor,
    add: Callable[[Tensor, slice], Tensor] | None = None,
) -> list[_Leaving]:
    """Multiply [pairs, in] by [experts, in, out], sum by row, and send the sums back, in blocks of columns.

    add: maps a block of products, and its columns, to the block that is summed.
    """
    layout, leaving = call.layout, []
    for columns in blocks(matrices.shape[2], call.overlap.columns if call.exchange else 1):
        products = multiply(pairs, matrices[:, :, columns], layout.groups)
        sums = layout.by_row.sum(products if add is None else add(products, columns))
        returned, pending = sums, NOTHING
        if call.exchange is not None:
            local_rows = layout.local_rows
            returned = sums.new_empty(local_rows + sum(layout.sent), sums.shape[1])
            pending = call.exchange.start(
                returned[local_rows:], sums[local_rows:], layout.sent, layout.received, "sums"
            )
            returned[:local_rows] = sums[:local_rows]
        leaving.append(_Leaving(columns, sums, returned, pending))
    return leaving


def _arrived(call: Call, leaving: list[_Leaving]) -> Tensor:
    """Return [tokens, out]: the sums of all rows of each token."""
    if call.exchange is None:
        (only,) = leaving
        return only.sums
    result = leaving[0].sums.new_empty(call.layout.tokens, leaving[-1].columns.stop)
    for columns, _, returned, pending in leaving:
        pending.wait()
        result[:, columns] = call.layout.by_token.sum(returned)
    return result


def _weighted(gated: Tensor, weight: Tensor) -> Tensor:
    """Return [pairs, in] times [pairs], rounded once."""
    return torch.mul(gated, weight[:, None], out=torch.empty_like(gated))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# --- as operations of torch --------------------------------------------------------------------------------------


_calls: WeakValueDictionary[int, Call] = WeakValueDictionary()
"""By the number that identifies them in the arguments of an operation."""


def _number(call: Call) -> int:
    _calls[id(call)] = call
    return id(call)


def _computed_to_experts(hidden: Tensor, weights: Tensor, number: int) -> list[Tensor]:
    """Return the result of `_to_experts`, without X if it is the same as the hidden states."""
    call = _calls[number]
    rows, first, weight = _to_experts(call, hidden, weights)
    return [first, weight] if call.exchange is None else [rows, first, weight]


def _computed_to_tokens(first: Tensor, weight: Tensor, number: int) -> Tensor:
    call = _calls[number]
    return _to_tokens(call, _weighted(call.gate(first), weight), weight)


_operation_to_experts = own_operation(
    "to_experts(Tensor hidden, Tensor weights, int call) -> Tensor[]", _computed_to_experts
)
_operation_to_tokens = own_operation("to_tokens(Tensor first, Tensor weight, int call) -> Tensor", _computed_to_tokens)
