"""Latency and bandwidth of communicators, and the copy engine to the host."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from evenpipe.errors import InputError
from evenpipe.given import shown

from .cost_values import number, table

REPLICAS = "replicas"
"""The link from a device to its replicas; `Costs.sharding` has the bytes."""
LINKS = ("p2p", "broadcast", "statistics", "reduce", "embedding", REPLICAS)
"""Names that links may have: hops, the collectives of `Costs.collectives`, and replicas."""

_HOP = re.compile(r"[FB]:(0|[1-9][0-9]*)>(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A transfer takes latency + bytes / bandwidth, and its communicator carries one at a time.

    In the link of one communicator, None means the value of its class; otherwise 0 (latency, bytes) or infinite
    (bandwidth).
    """

    latency: float | None = None
    """Time before the first byte arrives."""
    bandwidth: float | None = None
    """Bytes per unit of time, above 0."""
    bytes: float | None = None
    """Size of one transfer."""

    @classmethod
    def from_dict(cls, name: str, values: Any) -> Link:
        """Raises InputError for an unknown key or a bad number."""
        if isinstance(values, Link):
            return values
        given = table(name, values, ("latency", "bandwidth", "bytes"))
        link = cls(**{key: number(f"{name}.{key}", value) for key, value in given.items()})
        if link.bandwidth == 0:
            raise InputError(f"costs: {name}.bandwidth must be above 0, not 0")
        return link

    def over(self, other: Link | None) -> Link:
        """This link, with missing values taken from `other`."""
        if other is None:
            return self
        said = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        return replace(other, **said)

    @property
    def time(self) -> float:
        """The duration of one transfer."""
        return (self.latency or 0.0) + ((self.bytes or 0.0) / self.bandwidth if self.bandwidth else 0.0)


def links_from_dict(values: Any) -> dict[str, Link]:
    """Read the table `links`: per class of `LINKS`, or per hop as in "F:0>1" (forward from device 0 to 1)."""
    if not isinstance(values, Mapping):
        accepted = ", ".join(LINKS)
        raise InputError(f"costs: links must be a table of {accepted}, or hops such as F:0>1, not {shown(values)}")
    table("links", {key: None for key in values if not _HOP.fullmatch(str(key))}, (*LINKS, "F:0>1"))
    links = {key: Link.from_dict(f"links.{key}", value) for key, value in values.items()}
    for key, link in links.items():
        whole = link if key in LINKS else link.over(links.get("p2p"))
        if key == REPLICAS:
            if link.bytes is not None or link.bandwidth is None:
                raise InputError(f"costs: links.{REPLICAS} must have a bandwidth and no bytes; sharding has the bytes")
        elif whole.bandwidth is not None and whole.bytes is None:
            raise InputError(f"costs: links.{key} has a bandwidth but no bytes; give the size of one transfer")
    return links


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEngine:
    """Copies activations to the host (O) and back (L) beside compute.

    Copies of one stream run one after another, in the order in which the device issues them.
    """

    bandwidth: float | None = None
    """Bytes per unit of time and direction; a copy takes bytes / bandwidth unless its time is given. None: no time."""
    streams: int = 1
    """1: both directions take turns. 2: each has its own stream."""
    shared: tuple[tuple[int, ...], ...] = ()
    """Groups of devices that share one link to the host, which carries one copy per direction at a time."""

    @property
    def link_of(self) -> dict[int, int]:
        """The number of the shared link of each device that has one."""
        return {device: number for number, group in enumerate(self.shared) for device in group}

    @classmethod
    def from_dict(cls, values: Any) -> CopyEngine:
        """Raises InputError for an unknown key or a bad value."""
        if isinstance(values, CopyEngine):
            return values
        given = dict(table("engine", values, ("bandwidth", "streams", "shared")))
        if "bandwidth" in given:
            given["bandwidth"] = number("engine.bandwidth", given["bandwidth"])
            if given["bandwidth"] == 0:
                raise InputError("costs: engine.bandwidth must be above 0, not 0")
        if given.get("streams", 1) not in (1, 2) or isinstance(given.get("streams"), bool):
            raise InputError(f"costs: engine.streams must be 1 or 2, not {shown(given['streams'])}")
        if "shared" in given:
            given["shared"] = _groups(given["shared"])
        return cls(**given)


def _groups(values: Any) -> tuple[tuple[int, ...], ...]:
    wanted = "costs: engine.shared must be a list of groups of devices such as [[0, 1], [2, 3]], "
    if not isinstance(values, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in values):
        raise InputError(f"{wanted}not {shown(values)}")
    seen: set[int] = set()
    for group in values:
        for device in group:
            if isinstance(device, bool) or not isinstance(device, int) or device < 0:
                raise InputError(f"{wanted}and {shown(device)} is not a device")
            if device in seen:
                raise InputError(f"{wanted}and device {device} appears twice")
            seen.add(device)
    return tuple(tuple(group) for group in values)
