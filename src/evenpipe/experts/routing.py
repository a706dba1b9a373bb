"""What the experts of a device know about the passes of a step: the current pass, and where its tokens went in F."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from evenpipe.experts.layout import Layout


class Running(Protocol):
    """The current pass."""

    step: int
    """Counts steps and evaluations."""
    stage_unit: tuple[int, int] | None
    """Stage and unit of the pass; None: no backward follows."""


class Routing:
    """The layouts of forwards whose backward has not run yet, by stage, unit and layer.

    A repeated forward (R, or a checkpointed layer in its backward) uses the layout of F: all members of a group then
    agree on what is sent, even if a recomputed router rounds differently.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self._step = 0
        self._layouts: dict[tuple[tuple[int, int], str], Layout] = {}

    def __len__(self) -> int:
        return len(self._layouts)

    def layout(self, layer: str, make: Callable[[], Layout]) -> Layout:
        """Return the layout of a layer's experts in this pass: that of F, if it has run."""
        if self._running.step != self._step:  # remains of a failed step
            self._layouts.clear()
            self._step = self._running.step
        stage_and_unit = self._running.stage_unit
        if stage_and_unit is None:
            return make()
        if (stage_and_unit, layer) not in self._layouts:
            self._layouts[stage_and_unit, layer] = make()
        return self._layouts[stage_and_unit, layer]

    def end(self, layer: str) -> None:
        """Release a layer's layout, in its backward, which is the last to need it."""
        assert self._running.stage_unit is not None
        del self._layouts[self._running.stage_unit, layer]
