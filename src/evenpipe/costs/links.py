"""Latency and bandwidth of transfers, from two measurements of different size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evenpipe.schedule import Costs, Link

SMALLEST_SHARE = 0.05
"""A difference of two times that is a smaller part of them is lost in their noise: no bandwidth follows from it."""


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of one transfer in the measurement that the costs are for, and in the other one."""

    whole: float
    other: float


def with_links(costs: Costs, other: Costs, sizes: dict[str, Size]) -> Costs:
    """`costs` with its `p2p` and collectives as links where two measurements tell latency from bandwidth.

    other: of the same program with transfers of other sizes. What cannot be told apart stays a duration.
    """
    links: dict[str, Link] = {}
    durations = {"p2p": costs.p2p, **costs.collectives}
    for name, size in sizes.items():
        time = durations.get(name, 0.0)
        link = link_of(time, other.p2p if name == "p2p" else other.collectives.get(name, 0.0), size)
        if link is not None:
            links[name] = link
            del durations[name]
    return replace(costs, p2p=durations.pop("p2p", 0.0), collectives=durations, links=links)


def link_of(time: float, other: float, size: Size) -> Link | None:
    """The link that carries size.whole bytes in `time` and size.other in `other`; None where there is none."""
    bytes_more, time_more = size.whole - size.other, time - other
    if bytes_more <= 0 or other <= 0 or time_more <= SMALLEST_SHARE * time:
        return None
    bandwidth = bytes_more / time_more
    latency = time - size.whole / bandwidth
    if latency < 0:  # the smaller one was slower per byte: all of it is bandwidth
        latency, bandwidth = 0.0, size.whole / time
    return Link(latency=latency, bandwidth=bandwidth, bytes=size.whole)
