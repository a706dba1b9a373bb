"""Time of collectives: rings over the devices of one axis, inside a node and across nodes.

A ring of n devices moves (n - 1) / n of the bytes past each of them per gathering or scattering, and begins with one
latency for each doubling of n (NCCL's tree for small messages). If members of an axis share a node, the rings that
leave it use the network cards of all of them, up to the bandwidth inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .hardware import Hardware, Wire


@dataclass(frozen=True, slots=True)
class Axis:
    """`size` devices that communicate with each other: every `stride`-th one of the machine."""

    size: int
    stride: int = 1

    def inside_node(self, hardware: Hardware) -> bool:
        """Return whether all of them share a node."""
        return self.size * self.stride <= hardware.devices_per_node

    def wire(self, hardware: Hardware) -> Wire:
        """Return the wire that limits a ring over them."""
        if self.inside_node(hardware):
            return hardware.inside
        local = max(1, min(self.size, hardware.devices_per_node // self.stride))
        bandwidth = min(hardware.inside.bandwidth, hardware.across.bandwidth * local)
        return Wire(latency_seconds=hardware.across.latency_seconds, bandwidth=bandwidth)

    def hop_seconds(self, hardware: Hardware, size: float) -> float:
        """Return the time from one of them to the next, for the slowest hop."""
        if self.size == 1:
            return 0.0
        return (hardware.inside if self.inside_node(hardware) else hardware.across).seconds(size)

    def gather_seconds(self, hardware: Hardware, size: float) -> float:
        """Return the time of an all-gather or reduce-scatter; `size`: bytes of the whole tensor."""
        return self._ring(hardware, size * (self.size - 1) / self.size)

    def broadcast_seconds(self, hardware: Hardware, size: float) -> float:
        """Return the time of a broadcast of `size` bytes, or a reduce to one device: a chain through all of them."""
        return self._ring(hardware, size)

    def _ring(self, hardware: Hardware, moved: float) -> float:
        if self.size == 1:
            return 0.0
        wire = self.wire(hardware)
        return wire.latency_seconds * math.ceil(math.log2(self.size)) + moved / wire.bandwidth


@dataclass(frozen=True, slots=True)
class Axes:
    """The four axes of parallelism, in the order in which devices are numbered (Megatron's): tensor, context, data,
    pipeline. So tensor parallelism has the shortest distances, and hops between stages the longest."""

    tensor: Axis
    context: Axis
    replicas: Axis
    """Data and context: devices with the same parameters, over which gradients are summed."""
    pipeline: Axis

    @classmethod
    def of(cls, *, dp: int, tp: int, cp: int, pp: int) -> Axes:
        """Return axes of these sizes."""
        return cls(Axis(tp), Axis(cp, tp), Axis(dp * cp, tp), Axis(pp, dp * tp * cp))
