"""How messages call a process: "process 3", and if several share a device "process 3 (device 1, tensor rank 1)"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Pipeline:
    places: Mapping[int, str]
    """Of the processes, by rank; empty without tensor ranks."""
    is_open: bool = True

    def close(self) -> None:
        self.is_open = False


_pipelines: list[_Pipeline] = []
"""The open ones of this process, and those closed since: an exception may close them before it is reported."""


def call_by_place(places: Mapping[int, str]) -> Callable[[], None]:
    """From now on messages add these places, such as "device 1, tensor rank 1", by rank; to a process with different
    places in two pipelines none. Return a function for the end of their pipeline: the next one then replaces them."""
    pipeline = _Pipeline(places)
    _pipelines[:] = [*(one for one in _pipelines if one.is_open), pipeline]
    return pipeline.close


def place_of(rank: int) -> str:
    """Return the place of a process; empty if it has none."""
    found = {one.places[rank] for one in tuple(_pipelines) if rank in one.places}
    return found.pop() if len(found) == 1 else ""


def process(rank: int, pid: int | None = None, place: str | None = None) -> str:
    """Return "process 3", with its place and its pid if they are known: "process 3 (device 1, tensor rank 1, pid 77)".

    place: default: `place_of(rank)`.
    """
    notes = [place_of(rank) if place is None else place, "" if pid is None else f"pid {pid}"]
    known = ", ".join(filter(None, notes))
    return f"process {rank} ({known})" if known else f"process {rank}"


def processes(ranks: Sequence[int]) -> str:
    """Return "process 2" or "processes 0, 1, 3", with places; at most eight of them."""
    names = ", ".join(process(rank).removeprefix("process ") for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"process{'' if len(ranks) == 1 else 'es'} {names}{more}"
