"""Latency and bandwidth of transfers, from measurements with two sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evenpipe.schedule import Costs, Link

SMALLEST_SHARE = 0.05
"""A smaller difference between two times, relative to them, is noise: no bandwidth follows from it."""


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of one transfer in the measurement for the costs, and in the other one."""

    larger: float
    smaller: float


def with_links(costs: Costs, smaller: Costs, sizes: dict[str, Size]) -> Costs:
    """Return `costs` with `p2p` and collectives as links if two measurements separate latency from bandwidth.

    other: of the same program with transfers of other sizes. Times that cannot be separated stay durations.
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
    """Return the link that carries size.larger bytes in `time` and size.smaller in `other`, or None."""
    byte_difference, time_difference = size.larger - size.smaller, time - smaller_time
    if byte_difference <= 0 or smaller_time <= 0 or time_difference <= SMALLEST_SHARE * time:
        return None
    bandwidth = byte_difference / time_difference
    latency = time - size.larger / bandwidth
    if latency < 0:  # the smaller one was slower per byte: all of the time is bandwidth
        latency, bandwidth = 0.0, size.larger / time
    return Link(latency=latency, bandwidth=bandwidth, bytes=size.larger)
