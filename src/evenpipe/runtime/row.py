"""The row of a program as its device executes it: everything that is known before the first step, looked up once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evenpipe.schedule import Item, Kind, Pass, Program, Transfer, TransferKind, parts_of
from evenpipe.schedule.passes import BACKWARD_KINDS, SHAPES
from evenpipe.schedule.releases import releases


@dataclass(frozen=True, slots=True)
class Step:
    """One item of a row."""

    item: Item
    run: Callable[[Any], None]
    """Called with the item."""
    text: str
    arrived: tuple[Transfer, ...]
    """Transfers that this device has sent and that have certainly arrived when a pass has its inputs."""


class Row:
    """One device's row of a program."""

    def __init__(
        self,
        program: Program,
        device: int,
        passes: Mapping[Kind, Callable[[Pass], None]],
        transfers: Mapping[TransferKind, Callable[[Transfer], None]],
    ) -> None:
        """`passes` and `transfers`: the handler of each kind."""
        self.program = program
        self.last_stage = program.placement.stages - 1
        self.gradients = not program.forward_only
        self.split: set[tuple[int | None, int | None]] = set()
        """Stage and microbatch of split backwards (I and W)."""
        self.recomputed: set[tuple[int | None, int | None]] = set()
        """Those with R."""
        self.offloaded: set[tuple[int | None, int | None]] = set()
        """Those with O, D and L."""
        arrived = releases(program, device)
        steps: list[Step] = []
        for position, item in enumerate(program.rows[device]):
            if isinstance(item, Transfer):
                assert _fits(item, program), item
                steps.append(Step(item, transfers[item.kind], str(item), ()))
            elif item is not None:
                steps.append(Step(item, passes[item.kind], str(item), arrived.get(position, ())))
                for part in parts_of(item):
                    assert _fits(part, program), item
                    if part.kind is Kind.I:
                        self.split.add((part.stage, part.microbatch))
                    elif part.kind is Kind.R:
                        self.recomputed.add((part.stage, part.microbatch))
                    elif part.kind is Kind.O:
                        self.offloaded.add((part.stage, part.microbatch))
        self.steps = tuple(steps)

    def moves_graph(self, key: tuple[int, int]) -> bool:
        """Return whether the tensors that F saves go to the host. With R only the stage's input does."""
        return key in self.offloaded and key not in self.recomputed


def _fits(item: Item, program: Program) -> bool:
    """Return whether an item has a microbatch and a whole sequence, as the walker assumes, and belongs to training only
    in a training program. All other faults of a program make the walker fail."""
    i = item.microbatch
    shaped = (item.stage is not None, i is not None) == SHAPES[item.kind] and not item.slice
    there = i is None or 0 <= i < program.microbatches
    return shaped and there and not (program.forward_only and item.kind in BACKWARD_KINDS)
