"""What the experts of a device know of the passes of a step: which one runs, and where its tokens went in F."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from evenpipe.experts.layout import Layout


class Running(Protocol):
    """The pass that runs."""

    step: int
    """Counts steps and evaluations."""
    place: tuple[int, int] | None
    """Its stage and unit; None: no backward follows."""


class Routing:
    """The layouts of forwards whose backward is still to come, by stage, unit and layer.

    A repeated forward (R, or a checkpointed layer in its backward) uses that of F: all members of a group then agree on
    what travels, even where a router that is computed again rounds otherwise.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self._step = 0
        self._layouts: dict[tuple[tuple[int, int], str], Layout] = {}

    def __len__(self) -> int:
        return len(self._layouts)

    def layout(self, layer: str, make: Callable[[], Layout]) -> Layout:
        """Return the layout of a layer's experts in this pass: that of F, if there was one."""
        if self._running.step != self._step:  # remains of a failed step
            self._layouts.clear()
            self._step = self._running.step
        stage_and_unit = self._running.place
        if stage_and_unit is None:
            return make()
        if (stage_and_unit, layer) not in self._layouts:
            self._layouts[stage_and_unit, layer] = make()
        return self._layouts[stage_and_unit, layer]

    def end(self, layer: str) -> None:
        """In the backward of a layer, which is the last to need its layout."""
        assert self._running.place is not None
        del self._layouts[self._running.place, layer]
