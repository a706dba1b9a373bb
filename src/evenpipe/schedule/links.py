"""Latency and bandwidth of communicators, and the copy engine to the host."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated

from annotated_types import Ge, Le

from evenpipe.declaration import Accepts, Declared, ListOf, NonNegativeInt, declare, unknown_key
from evenpipe.errors import InputError
from evenpipe.words import refused

from .cost_values import Rate, Time

REPLICAS = "replicas"
"""The link from a device to its replicas; `Costs.sharding` has the bytes."""
OneOrTwo = Annotated[int, Ge(1), Le(2), Accepts("1 or 2")]
LINKS = ("p2p", "broadcast", "statistics", "reduce", "embedding", REPLICAS)
"""Names that links may have: hops, the collectives of `Costs.collectives`, and replicas."""

_HOP = re.compile(r"[FB]:(0|[1-9][0-9]*)>(0|[1-9][0-9]*)")


@declare("link")
class Link:
    """A transfer takes latency + bytes / bandwidth, and its communicator carries one at a time.

    In the link of a communicator, None means the value of its class; otherwise 0 (latency, bytes) or infinite
    (bandwidth).
    """

    latency: Time | None = None
    """Time before the first byte arrives."""
    bandwidth: Rate | None = None
    """Bytes per unit of time, above 0."""
    bytes: Time | None = None
    """Size of a transfer."""

    def over(self, default: Link | None) -> Link:
        """This link, with missing values taken from `default`."""
        if default is None:
            return self
        overrides = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        return replace(default, **overrides)

    @property
    def time(self) -> float:
        """The duration of a transfer."""
        return (self.latency or 0.0) + ((self.bytes or 0.0) / self.bandwidth if self.bandwidth else 0.0)


def check_links(links: Mapping[str, Link]) -> None:
    """Raise InputError for a key that is neither in `LINKS` nor a hop such as "F:0>1" (forward from device 0 to 1),
    and for a link without a size or bandwidth that it needs."""
    for key, link in links.items():
        if key not in LINKS and not _HOP.fullmatch(key):
            raise unknown_key("costs.links", key, (*LINKS, "F:0>1"))
        effective = link if key in LINKS else link.over(links.get("p2p"))
        if key == REPLICAS:
            if link.bytes is not None or link.bandwidth is None:
                raise InputError(f"costs.links.{REPLICAS} must have a bandwidth and no bytes; sharding has the bytes")
        elif effective.bandwidth is not None and effective.bytes is None:
            raise InputError(f"costs.links.{key} has a bandwidth but no bytes; give the size of one transfer")


@declare("costs.engine")
class CopyEngine(Declared):
    """Copies activations to the host (O) and back (L) beside compute.

    Copies of a stream run one after another, in the order in which the device issues them.
    """

    bandwidth: Rate | None = None
    """Bytes per unit of time and direction; a copy takes bytes / bandwidth unless its time is given. None: no time."""
    streams: OneOrTwo = 1
    """1: both directions take turns. 2: each has its own stream."""
    shared: ListOf[ListOf[NonNegativeInt]] = ()
    """Groups of devices that share one link to the host, which carries one copy per direction at a time."""

    @property
    def link_of(self) -> dict[int, int]:
        """The number of the shared link of each device that has one."""
        return {device: number for number, group in enumerate(self.shared) for device in group}

    def check(self) -> None:
        devices = [device for group in self.shared for device in group]
        if len(set(devices)) < len(devices):
            raise refused("costs.engine.shared", self.shared, "groups of different devices, such as [[0, 1], [2, 3]]")
