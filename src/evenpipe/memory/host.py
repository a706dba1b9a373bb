"""The memory of a device on the host: activations, from O until they are copied back (L)."""

from __future__ import annotations

from collections.abc import Mapping

from evenpipe.memory.bytes import StageBytes
from evenpipe.schedule import Kind, Pass, Program, parts_of


def copied_bytes(stage: StageBytes) -> int:
    """Return the bytes of a copy of one microbatch's activations, if its forward keeps its graph."""
    return stage.input + stage.stored if stage.moved is None else stage.moved


def host_bytes(program: Program, device: int, stages: Mapping[int, StageBytes]) -> int:
    """Return the most bytes in slots of host memory at one moment, without rounding to pages.

    stages: at least those of the device, by number.
    """
    # A forward that has R keeps only its input.
    row = [part for item in program.rows[device] if isinstance(item, Pass) for part in parts_of(item)]
    again = {(part.stage, part.microbatch) for part in row if part.kind is Kind.R}
    held = most = 0
    for part in row:
        if part.kind in (Kind.O, Kind.L):
            assert part.stage is not None
            stage = stages[part.stage]
            size = stage.input if (part.stage, part.microbatch) in again else copied_bytes(stage)
            held += size if part.kind is Kind.O else -size
            most = max(most, held)
    return most
