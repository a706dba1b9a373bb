"""Latency and bandwidth of transfers, from measurements with two sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evenpipe.schedule import Costs, Link

SMALLEST_SHARE = 0.05
"""A smaller relative difference between two times is noise and says nothing about bandwidth."""


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a transfer in the measurement of the costs, and in a second one with smaller transfers."""

    larger: float
    smaller: float


def with_links(costs: Costs, smaller: Costs, sizes: dict[str, Size]) -> Costs:
    """Return `costs` with `p2p` and collectives as links where two measurements separate latency from bandwidth.

    smaller: costs of the same program with smaller transfers. Times that cannot be separated stay durations.
    """
    links: dict[str, Link] = {}
    durations = {"p2p": costs.p2p, **costs.collectives}
    for name, size in sizes.items():
        time = durations.get(name, 0.0)
        link = link_of(time, smaller.p2p if name == "p2p" else smaller.collectives.get(name, 0.0), size)
        if link is not None:
            links[name] = link
            del durations[name]
    return replace(costs, p2p=durations.pop("p2p", 0.0), collectives=durations, links=links)


def link_of(time: float, smaller_time: float, size: Size) -> Link | None:
    """Return the link that carries size.larger bytes in `time` and size.smaller in `smaller_time`, or None."""
    byte_difference, time_difference = size.larger - size.smaller, time - smaller_time
    if byte_difference <= 0 or smaller_time <= 0 or time_difference <= SMALLEST_SHARE * time:
        return None
    bandwidth = byte_difference / time_difference
    latency = time - size.larger / bandwidth
    if latency < 0:  # the smaller transfer took longer per byte: attribute all of the time to bandwidth
        latency, bandwidth = 0.0, size.larger / time
    return Link(latency=latency, bandwidth=bandwidth, bytes=size.larger)
