"""How the exchange of experts overlaps with products, chosen by their costs, and how long the passes then take.

For a layer on a member of an expert group, the formulas use:

    C        transfer of all rows, one way      x1, x2   products of F: of arriving rows, of rows sent back
    a        share of local rows                y2, y1   the same for the input's gradient
    J        blocks of columns                  g        the gate
    o        cost of an additional block        w        weight gradients

    t1    all rows have arrived and are multiplied, each part once it is there and earlier parts are done; then g
    last  = t1 + (x2 + C) / J + (J - 1) / J max(x2, C)    the last block is back
    F     = route + max(t1 + x2, last) + (J - 1) o
    I     the same with y2 and y1 and without route; the gate is recomputed while rows arrive
    B     = max(t1 + y1 + w, last) + (J - 1) o             weight gradients overlap with the transfer
    R     = t1                                             sends nothing back, and keeps the layout
    J*    = sqrt(min(x2, C) / o)

Products read the weights once per part of the rows, so more parts pay off as long as they hide more time than that. The
model ignores that transfers occupy multiprocessors. A process that has all experts exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Literal

from evenpipe.declaration import PositiveInt, declare
from evenpipe.words import refused

if TYPE_CHECKING:
    from evenpipe.model.expert_rows import ExpertRows

MOST_COLUMNS, COLUMNS_WITHOUT_COSTS = 8, 4
LEAST_WIDTH = 256
"""Fewest columns of a block that "auto" chooses: narrower products are slow."""
_LEAST_GAIN = 0.02
"""As a fraction of the time until all rows are multiplied: smaller gains do not justify more parts."""
_WHOLE_COLUMNS = 128
"""Block widths are multiples of this, if the number of columns is."""


@dataclass(frozen=True)
class Overlap:
    """How transfers overlap with products."""

    columns: int = 1
    """Number of blocks of columns in which results are sent back."""
    arrivals: int = 1
    """Number of products of arriving rows, each of which reads the matrices. 1: all rows at once; 2: local rows while
    others arrive; more: the rows of each member separately."""


@declare("experts")
class ExpertOptions:
    """Mixtures of experts: what runs beside the exchange of rows between replicas.

    Raises InputError for a value that is not accepted; the sentence names it.
    """

    columns: PositiveInt | Literal["auto"] = "auto"
    """With expert parallelism: blocks of columns in which results are sent, each while the next one is computed.
    "auto": by costs, 4 if they are unknown."""
    arrivals: PositiveInt | Literal["auto"] = "auto"
    """With expert parallelism: groups in which experts process rows. 1: all rows at once; 2: local rows while others
    arrive; the number of replicas of a group: the rows of each replica. "auto": by costs, 2 if they are unknown."""


@dataclass(frozen=True)
class Chosen:
    """How transfers overlap with products, and why."""

    overlap: Overlap
    reason: str
    """In words, for a status line."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The experts of a layer over a group, and a microbatch on a member."""

    tokens: int
    hidden_size: int
    width: int
    """Inner size of an expert."""
    experts: int
    """Experts of the entire layer."""
    choices: int
    """Experts per token."""
    members: int
    """Size of the expert group."""
    gated: bool = True
    """Whether experts have two first matrices."""
    bytes_per_element: int = 2
    skew: float = 1.0
    """Load of the fullest member divided by the mean load."""

    @property
    def routed(self) -> ExpertRows:
        """The rows of its tokens on the side of the experts."""
        from evenpipe.model.expert_rows import ExpertRows  # configurations are checked without torch

        return ExpertRows(
            tokens=self.tokens,
            choices=self.choices,
            experts=self.experts,
            members=self.members,
            skew=self.skew,
        )


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates achieved by a device and its link."""

    flops: float
    """Floating-point operations of products per second."""
    memory: float
    """Bytes read and written per second."""
    link: float
    """Bytes per second that a member sends to the others."""
    latency: float = 15e-6
    """Seconds of an empty transfer."""
    launch: float = 5e-6
    """Seconds of an empty kernel."""
    read: float = 20e-6
    """Seconds that the host waits for counts of rows."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """Seconds of a grouped product over all pairs of a row and one of its experts."""

    operations: float
    pairs: float
    """Reading and writing the pairs."""
    weights: float
    """Reading the matrices."""
    copies: float
    """Copies of rows by pair before it, or of sums by row after it: each row counts once, since it is then cached."""
    placing: float
    """Copying the results for a part of the pairs to their places."""
    launch: float

    def of(self, share: float) -> float:
        """Return the seconds for a share of the pairs."""
        copies = self.copies + (self.placing if share < 1 else 0.0)
        return max(share * self.operations, share * self.pairs + self.weights) + share * copies + self.launch


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of the products, copies and transfers of a layer, without overlap."""

    members: int
    one_way: float
    """C."""
    arrives: Product
    """x1."""
    leaves: Product
    """x2."""
    gradient_arrives: Product
    """y2."""
    gradient_leaves: Product
    """y1."""
    gate: float
    gradient_of_gate: float
    weights: float
    """w: weight gradients of all matrices."""
    rows: float
    """Copies of rows before they are sent and after they are back."""
    route: float
    """Time of F to exchange which member gets which rows."""
    block: float
    """o."""


@dataclass(frozen=True)
class Times:
    """Seconds of the passes of a layer."""

    F: float
    B: float
    I: float
    W: float
    R: float


def work_of(layer: Layer, rates: Rates) -> Work:
    """Return the times of products, copies and transfers."""
    h, f, f1 = layer.hidden_size, layer.width, layer.width * (2 if layer.gated else 1)
    routed, travels = layer.routed, layer.members > 1
    rows, pairs, held = routed.rows, routed.pairs, routed.local

    def moved(elements: float) -> float:
        return layer.bytes_per_element * elements / rates.memory

    def product(into: int, out: int, copied: float) -> Product:
        return Product(
            operations=2 * pairs * into * out / rates.flops,
            pairs=moved(pairs * (into + out)),
            weights=moved(held * into * out),
            copies=moved(copied),
            placing=moved(2 * pairs * out),
            launch=2 * rates.launch,
        )

    def outer(into: int, out: int) -> float:
        operations = 2 * pairs * into * out / rates.flops
        return max(operations, moved(pairs * (into + out) + 2 * held * into * out)) + rates.launch

    return Work(
        members=layer.members,
        one_way=routed.traffic(h, layer.bytes_per_element) / rates.link + rates.latency if travels else 0.0,
        arrives=product(h, f1, (rows + pairs) * h),
        leaves=product(f, h, (pairs + rows) * h),
        gradient_arrives=product(h, f, (rows + pairs) * h),
        gradient_leaves=product(f1, h, (pairs + rows) * h),
        gate=moved(pairs * (f1 + f)) + 2 * rates.launch,
        gradient_of_gate=moved(pairs * (2 * f1 + f)) + 2 * rates.launch,
        weights=2 * moved((rows + pairs) * h) + outer(f1, h) + outer(f, h),
        rows=moved(2 * rows * h) + rates.launch if travels else 0.0,
        route=2 * rates.latency + rates.read if travels else 0.0,
        block=rates.latency + 2 * rates.launch,
    )


def times(work: Work, overlap: Overlap) -> Times:
    """Return how long the passes take."""
    arrived = work.rows + _arrived(work, work.arrives, overlap.arrivals, delay=0.0) + work.gate
    gradient_arrived = work.rows + _arrived(work, work.gradient_arrives, overlap.arrivals, delay=work.gate)
    gradient_arrived += work.gradient_of_gate
    end = (overlap.columns - 1) * work.block + work.rows / overlap.columns
    leaves, gradient = work.leaves.of(1), work.gradient_leaves.of(1)
    last = _last(work, gradient_arrived, gradient, overlap.columns)
    return Times(
        F=work.route + _last(work, arrived, leaves, overlap.columns) + end,
        B=max(gradient_arrived + gradient + work.weights, last) + end,
        I=last + end,
        W=work.weights,
        R=arrived,
    )


def _arrived(work: Work, product: Product, parts: int, *, delay: float) -> float:
    """Return when all arriving rows are multiplied. delay: seconds of work that comes first."""
    local_share = 1 / work.members
    shares = {1: [], 2: [1 - local_share]}.get(parts, [local_share] * (work.members - 1))
    if not shares:
        return max(work.one_way, delay) + product.of(1)
    now = delay + product.of(local_share)
    for number, share in enumerate(shares, 1):
        now = max(now, work.one_way * number / len(shares)) + product.of(share)
    return now


def _last(work: Work, started: float, product: float, columns: int) -> float:
    """Return when the last block of columns is back, which is after all products."""
    shorter, longer = sorted([product, work.one_way])
    return started + (shorter + longer) / columns + (columns - 1) / columns * longer


def choose(options: ExpertOptions, layer: Layer, rates: Rates | None = None) -> Chosen:
    """Return how the transfers of a layer overlap with products.

    rates: None if unknown.

    Raises:
        InputError: `arrivals` is above 2, but not the number of members.
    """
    if layer.members == 1:
        return Chosen(Overlap(), "nothing travels")
    if options.arrivals != "auto" and options.arrivals > 2 and options.arrivals != layer.members:
        raise refused("experts.arrivals", options.arrivals, f"1, 2 or {layer.members}, the members of an expert group")
    work = None if rates is None else work_of(layer, rates)
    columns, why_columns = _columns(options, layer, work)
    arrivals, why_arrivals = _arrivals(options, work)
    parts = {1: "all rows at once", 2: "own rows first"}.get(arrivals, "each member's rows by themselves")
    text = f"{columns} {'block' if columns == 1 else 'blocks'} of columns ({why_columns}), {parts} ({why_arrivals})"
    return Chosen(Overlap(columns, arrivals), text)


def _columns(options: ExpertOptions, layer: Layer, work: Work | None) -> tuple[int, str]:
    if options.columns != "auto":
        return options.columns, "given"
    columns, why = COLUMNS_WITHOUT_COSTS, "costs are unknown"
    if work is not None:
        product, transfer = work.leaves.of(1), work.one_way
        columns = min(max(round(sqrt(min(product, transfer) / work.block)), 1), MOST_COLUMNS)
        why = f"product {_ms(product)}, transfer {_ms(transfer)}, {_ms(work.block)} for each block"
    limit = max(layer.hidden_size // LEAST_WIDTH, 1)
    return len(list(blocks(layer.hidden_size, min(columns, limit)))), why


def _arrivals(options: ExpertOptions, work: Work | None) -> tuple[int, str]:
    if options.arrivals != "auto":
        return options.arrivals, "given"
    if work is None:
        return 2, "costs are unknown"

    def seconds_of(parts: int) -> float:
        backward = _arrived(work, work.gradient_arrives, parts, delay=work.gate)
        return _arrived(work, work.arrives, parts, delay=0.0) + backward

    by_parts = {parts: seconds_of(parts) for parts in (1, 2, work.members)}
    threshold = (1 + _LEAST_GAIN) * min(by_parts.values())
    best = next(parts for parts, seconds in by_parts.items() if seconds <= threshold)
    listed = ", ".join(f"{parts}: {_ms(seconds)}" for parts, seconds in by_parts.items())
    return best, f"forward and backward by parts, {listed}"


def blocks(width: int, count: int) -> Iterator[slice]:
    """Split columns into at most `count` blocks."""
    size = -(-width // count)
    if width % _WHOLE_COLUMNS == 0:
        size = -(-size // _WHOLE_COLUMNS) * _WHOLE_COLUMNS
    return (slice(start, min(start + size, width)) for start in range(0, width, size))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
