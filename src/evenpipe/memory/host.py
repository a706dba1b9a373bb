"""What a device has on the host: activations, from O until they are asked back for (L)."""

from __future__ import annotations

from collections.abc import Mapping

from evenpipe.memory.bytes import StageBytes
from evenpipe.schedule import Kind, Pass, Program, parts_of


def copied_bytes(stage: StageBytes) -> int:
    """What a copy of one microbatch's activations carries, where its forward keeps its graph."""
    return stage.input + stage.stored if stage.moved is None else stage.moved


def host_bytes(program: Program, device: int, stages: Mapping[int, StageBytes]) -> int:
    """The most bytes in slots of the host's memory at one moment, but for their rounding to pages.

    stages: at least those that the device holds, by number.
    """
    # A forward that has R keeps its input only.
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
