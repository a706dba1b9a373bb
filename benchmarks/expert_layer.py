"""What benchmarks of the exchange of experts share: one layer, the ways to run it, and the passes of each.

    pairs    one row for each pair of a token and an expert, as most frameworks send them; nothing overlapped
    rows     one row for each token and member that holds any of its experts; nothing overlapped
    others   rows; the products of what leaves cut into columns, those of what arrives begin with own rows, or both

Where nothing is overlapped, B makes the weight gradients after all rows are back, otherwise while they travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import Options, option
from torch import Tensor, nn
from torch.nn import functional

from evenpipe.experts.function import Call, Overlap, run
from evenpipe.experts.layout import Layout, spread
from evenpipe.layers.weight_gradients import WeightGradients

PASSES = ("F", "B", "I")


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """What is measured."""

    experts: int = option(16, "of the layer")
    choices: int = option(4, "experts of a token")
    tokens: int = option(512, "of each process")
    hidden_size: int = option(512, "of the layer")
    width: int = option(256, "of an expert")
    rounds: int = option(7, "of all ways in turn, of which medians are taken")


@dataclass(frozen=True)
class Way:
    """How the layer is run."""

    name: str
    overlap: Overlap | None
    """None: pairs travel."""
    weights_last: bool = False
    """Weight gradients wait for all that leaves."""


PAIRS = Way("pairs, nothing overlapped", None, weights_last=True)
ROWS = Way("rows, nothing overlapped", Overlap(), weights_last=True)


def ways(processes: int, hidden_size: int) -> list[Way]:
    """Return all ways that are compared. Blocks have at least 128 columns."""
    found = [PAIRS, ROWS, Way("4 columns", Overlap(columns=4)), Way("own rows first", Overlap(arrivals=2))]
    found += [
        Way(f"own rows first, {n} columns", Overlap(columns=n, arrivals=2)) for n in (2, 4, 8) if 128 * n <= hidden_size
    ]
    return found + [Way("each member's rows, 4 columns", Overlap(columns=4, arrivals=processes))] * (processes > 2)


class Transfer:
    """A transfer that has been started."""

    def __init__(self, exchange: Gloo, work: dist.Work, *kept: Tensor) -> None:
        self._exchange, self._work, self._kept = exchange, work, kept

    def wait(self) -> None:
        started = time.perf_counter()
        self._work.wait()
        self._exchange.waited += time.perf_counter() - started


class Gloo:
    """The exchange of all processes."""

    def __init__(self) -> None:
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.reset()

    def reset(self) -> None:
        """Start together, at 0."""
        dist.barrier()
        self.waited, self._started = 0.0, time.perf_counter()
        self.bytes = 0
        """That were sent since."""

    def now(self) -> float:
        """Return the seconds since then."""
        return time.perf_counter() - self._started

    def counts(self, own: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        there = torch.empty_like(own)
        dist.all_to_all_single(there, own)
        return own.tolist(), there.tolist()

    def start(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], what: str) -> Any:
        return Transfer(self, self.send(output, rows, received, sent), output, rows)

    def send(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> dist.Work:
        self.bytes += rows.nbytes
        return dist.all_to_all_single(output, rows, list(received), list(sent), async_op=True)


class Experts(nn.Module):
    """Gated experts of one member, as our function reads them from transformers' modules."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self, experts: int, settings: Settings) -> None:
        super().__init__()
        first = torch.randn(experts, 2 * settings.width, settings.hidden_size)
        second = torch.randn(experts, settings.hidden_size, settings.width)
        self.gate_up_proj, self.down_proj = nn.Parameter(first / 20), nn.Parameter(second / 20)

    def _apply_gate(self, first: Tensor) -> Tensor:
        gate, up = first.chunk(2, -1)
        return functional.silu(gate) * up


class Layer:
    """One layer on a member, its tokens and the gradient of its output."""

    def __init__(self, settings: Settings, exchange: Gloo) -> None:
        torch.manual_seed(exchange.rank)
        self.exchange, self._count = exchange, settings.experts
        self.experts = Experts(settings.experts // exchange.size, settings)
        self._weights, self._index = torch.rand(settings.tokens, settings.experts).topk(settings.choices)
        self._hidden, self._gradient = torch.randn(2, settings.tokens, settings.hidden_size)
        self._queue = WeightGradients()
        self._pairs = _PairLayout(self._index, self.experts.down_proj.shape[0], exchange)

    def layout(self) -> Layout:
        """Return what a forward finds out first."""
        return spread(self._index, self._count, self.exchange)

    def start(self, way: Way, layout: Layout, *, splits: bool) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
        """Return F, and the backward of its result: I if it `splits`, else B."""
        hidden, weights = self._hidden.clone().requires_grad_(), self._weights.clone().requires_grad_()
        self.experts.zero_grad()
        queued = way.overlap is not None and (splits or way.weights_last)
        if queued:
            self._queue.clear()
            self._queue.begin((0, 0))

        def forward() -> Tensor:
            if way.overlap is None:
                return pairs(self.experts, self._pairs, hidden, weights, self.exchange)
            call = Call(self.experts, layout, self.exchange, way.overlap, self._queue if queued else None)
            return run(call, hidden, weights)

        def backward(output: Tensor) -> None:
            output.backward(self._gradient)
            if queued and not splits:
                self._queue.compute((0, 0))

        for parameter in self.experts.parameters():
            parameter.requires_grad_(not (splits and way.overlap is None))
        self._given = hidden, weights
        return forward, backward

    def check(self, every: Sequence[Way], layout: Layout) -> None:
        """Run all ways once: outputs and all gradients must be the same."""
        expected: list[Tensor] = []
        for way in every:
            forward, backward = self.start(way, layout, splits=False)
            output = forward()
            backward(output)
            gradients = [one.grad for one in (*self._given, *self.experts.parameters())]
            found = [output.detach(), *(one.clone() for one in gradients if one is not None)]
            expected = expected or found
            assert len(found) == 5, "a gradient is missing"
            for one, other in zip(found, expected, strict=True):
                assert (one - other).abs().max() <= 1e-5 * other.abs().max(), f"{way.name}: another result"


# --- one row per pair --------------------------------------------------------------------------------------------


class _PairLayout:
    """The pairs of a member's tokens, those that stay first, then by expert; and of all pairs that it multiplies."""

    def __init__(self, index: Tensor, local: int, exchange: Gloo) -> None:
        chosen, order = torch.sort(index.reshape(-1), stable=True)
        stays = chosen // local == exchange.rank
        self.order = torch.cat([order[stays], order[~stays]])
        self.token = self.order // index.shape[1]
        self.own = int(stays.sum())
        members = torch.arange(exchange.size)
        told, known = exchange.counts(((chosen // local)[~stays] == members[:, None]).sum(1, keepdim=True))
        self.sent, self.received = [n for (n,) in told], [n for (n,) in known]
        expert = chosen % local
        there = expert.new_empty(sum(self.received))
        exchange.start(there, expert[~stays], self.received, self.sent, "choices").wait()
        sorted_expert, self.by_expert = torch.sort(torch.cat([expert[stays], there]), stable=True)
        self.as_arrived = torch.argsort(self.by_expert)
        self.ends = torch.searchsorted(sorted_expert, torch.arange(local), right=True, out_int32=True)


class _Exchanged(torch.autograd.Function):
    """Rows to where others need them; their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Gloo, own: int, counts: tuple[list[int], list[int]]) -> Tensor:
        """counts: received and sent."""
        received, sent = counts
        ctx.back = exchange, own, (sent, received)
        there = rows.new_empty(own + sum(received), rows.shape[1])
        there[:own] = rows[:own]
        exchange.start(there[own:], rows[own:].contiguous(), received, sent, "rows").wait()
        return there

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _Exchanged.apply(gradient, *ctx.back), None, None, None


def pairs(experts: Experts, layout: _PairLayout, hidden: Tensor, weights: Tensor, exchange: Gloo) -> Tensor:
    """Run the layer with one row per pair, whose weights are applied when it is back."""
    there = _Exchanged.apply(hidden[layout.token], exchange, layout.own, (layout.received, layout.sent))
    first = functional.grouped_mm(there[layout.by_expert], experts.gate_up_proj.mT, offs=layout.ends)
    second = functional.grouped_mm(experts._apply_gate(first), experts.down_proj.mT, offs=layout.ends)
    back = _Exchanged.apply(second[layout.as_arrived], exchange, layout.own, (layout.sent, layout.received))
    weighted = back * weights.reshape(-1, 1)[layout.order]
    return torch.zeros_like(hidden).index_add(0, layout.token, weighted)
