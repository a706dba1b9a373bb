"""Names of processes in messages: "process 3", or "process 3 (device 1, tensor rank 1)" if several share a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Pipeline:
    positions: Mapping[int, str]
    """Position of each process, by rank; empty without tensor ranks."""
    is_open: bool = True

    def close(self) -> None:
        self.is_open = False


_pipelines: list[_Pipeline] = []
"""The open pipelines of this process, and those closed since: an exception may close one before it is reported."""


def show_positions(positions: Mapping[int, str]) -> Callable[[], None]:
    """Add these positions by rank, such as "device 1, tensor rank 1", to messages from now on; a process whose
    positions in two pipelines differ gets none. Return a function to call when the pipeline ends: the next pipeline
    then replaces its positions."""
    pipeline = _Pipeline(positions)
    _pipelines[:] = [*(earlier for earlier in _pipelines if earlier.is_open), pipeline]
    return pipeline.close


def position_of(rank: int) -> str:
    """Return the position of a process; empty if it has none."""
    positions = {pipeline.positions[rank] for pipeline in tuple(_pipelines) if rank in pipeline.positions}
    return positions.pop() if len(positions) == 1 else ""


def process(rank: int, pid: int | None = None, position: str | None = None) -> str:
    """Return "process 3", with its position and pid if known: "process 3 (device 1, tensor rank 1, pid 77)".

    position: default: `position_of(rank)`.
    """
    notes = [position_of(rank) if position is None else position, "" if pid is None else f"pid {pid}"]
    known = ", ".join(filter(None, notes))
    return f"process {rank} ({known})" if known else f"process {rank}"


def processes(ranks: Sequence[int]) -> str:
    """Return "process 2" or "processes 0, 1, 3", with positions; at most eight processes."""
    names = ", ".join(process(rank).removeprefix("process ") for rank in ranks[:8])
    omitted = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"process{'' if len(ranks) == 1 else 'es'} {names}{omitted}"
