"""Time of collectives: rings over the devices of an axis, inside a node and across nodes.

In an all-gather or reduce-scatter over a ring of n devices, (n - 1) / n of the bytes pass through each device, after
log2(n) latencies, rounded up (NCCL's tree for small messages). If members of an axis share a node, rings across nodes
use the network cards of all these members, up to the bandwidth inside the node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from evenpipe.experts.overlap import ExpertOptions

from .hardware import Hardware, Wire


@dataclass(frozen=True, slots=True)
class Axis:
    """`size` devices that communicate with each other: every `stride`-th device of the cluster."""

    size: int
    stride: int = 1

    def inside_node(self, hardware: Hardware) -> bool:
        """Return whether all devices of the axis share a node."""
        return self.size * self.stride <= hardware.devices_per_node

    def local(self, hardware: Hardware) -> int:
        """Return how many devices of the axis share a node."""
        return max(1, min(self.size, hardware.devices_per_node // self.stride))

    def wire(self, hardware: Hardware) -> Wire:
        """Return the wire that limits a ring over the axis."""
        if self.inside_node(hardware):
            return hardware.inside
        bandwidth = min(hardware.inside.bandwidth, hardware.across.bandwidth * self.local(hardware))
        return Wire(latency_seconds=hardware.across.latency_seconds, bandwidth=bandwidth)

    def hop_seconds(self, hardware: Hardware, size: float) -> float:
        """Return the time of the slowest hop between neighbours."""
        if self.size == 1:
            return 0.0
        return (hardware.inside if self.inside_node(hardware) else hardware.across).seconds(size)

    def gather_seconds(self, hardware: Hardware, size: float) -> float:
        """Return the time of an all-gather or reduce-scatter; `size`: bytes of the whole tensor."""
        return self._ring(hardware, size * (self.size - 1) / self.size)

    def broadcast_seconds(self, hardware: Hardware, size: float) -> float:
        """Return the time of a broadcast of `size` bytes, or a reduce to one device: a chain through all of them."""
        return self._ring(hardware, size)

    def exchange_seconds(self, hardware: Hardware, size: float) -> float:
        """Return the time of an all-to-all of `size` bytes per device: inside the node and across nodes at the same
        time, where each device uses its own network card across nodes."""
        if self.size == 1:
            return 0.0
        return self.latency_seconds(hardware) + size * (self.size - 1) / self.size / self.exchange_bandwidth(hardware)

    def exchange_bandwidth(self, hardware: Hardware) -> float:
        """Return the bytes per second that each of several devices sends to the others in an all-to-all."""
        local = self.local(hardware)
        inside, across = (local - 1) / hardware.inside.bandwidth, (self.size - local) / hardware.across.bandwidth
        return (self.size - 1) / max(inside, across)

    def latency_seconds(self, hardware: Hardware) -> float:
        """Return the time of an all-to-all of 0 bytes."""
        wire = hardware.inside if self.inside_node(hardware) else hardware.across
        return wire.latency_seconds * self._doublings

    @property
    def _doublings(self) -> int:
        return math.ceil(math.log2(self.size))

    def _ring(self, hardware: Hardware, moved: float) -> float:
        if self.size == 1:
            return 0.0
        wire = self.wire(hardware)
        return wire.latency_seconds * self._doublings + moved / wire.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """How attention gets the rest of a sequence that is cut over the context axis, into slices, or both."""

    exchange: str = "keys"
    """Between devices of the context axis: "keys"; "heads"; or "ring", the way other frameworks gather keys: from
    neighbour to neighbour, and across nodes over the network card of a device."""
    span: tuple[int, int] | None = None
    """Of a slice: its first token (inclusive) and last (exclusive); None: sequences are not cut into slices."""
    flash: bool = False
    """Attention on pieces is FlashAttention-2, or the model family's own, which the backward recomputes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExperts:
    """How replicas share the experts of a layer."""

    members: Axis = Axis(1)
    """Replicas among which the experts are distributed."""
    replicas: Axis
    """Devices that hold the same experts, over which their gradients are summed."""
    options: ExpertOptions = field(default_factory=ExpertOptions)
    """What overlaps with the exchange of rows."""
    skew: float = 1.0
    """Load of the fullest member, relative to the mean."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of parallelism, in the order in which devices are numbered (Megatron's): tensor, context, data (members
    of an expert group first), pipeline. Tensor ranks are therefore closest to each other, and stages farthest apart."""

    tensor: Axis
    context: Axis
    replicas: Axis
    """Data and context: devices that share the same parameters, over which gradients are summed."""
    copies: Axis
    """Devices that hold further copies of what `replicas` share, over which the sums are all-reduced (HSDP)."""
    pipeline: Axis
    experts: SharedExperts
    pieces: Pieces = Pieces()

    @classmethod
    def of(
        cls,
        *,
        dp: int,
        tp: int,
        cp: int,
        pp: int,
        ep: int = 1,
        dp_shard: int | None = None,
        pieces: Pieces = Pieces(),
        experts: ExpertOptions | None = None,
        skew: float = 1.0,
    ) -> Axes:
        """Return axes of these sizes."""
        shards, copies = (dp_shard or dp) * cp, dp // (dp_shard or dp)
        shared = SharedExperts(
            members=Axis(ep, tp * cp),
            replicas=Axis(shards // ep, tp * ep),  # as if context ranks, too, came after the members
            options=experts or ExpertOptions(),
            skew=skew,
        )
        pipeline = Axis(pp, dp * tp * cp)
        return cls(Axis(tp), Axis(cp, tp), Axis(shards, tp), Axis(copies, shards * tp), pipeline, shared, pieces)
