"""The critical path: the chain of passes, transfers and copies that determines the length of the step.

From the pass that ends last back to the start, each member of the chain starts exactly when its predecessor ends,
because it waited for it: for its device, its inputs, a communicator, a link or a copy engine. So the chain has no gaps,
and its durations add up to the makespan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evenpipe.schedule import Event, Kind
from evenpipe.schedule.passes import REDUCING_KINDS

from .loop import START, Loop
from .timeline import cause_of
from .work import Work


@dataclass(frozen=True)
class CriticalPath:
    """`steps` from the start to the end of the step. A collective is on the device that issued it last."""

    steps: tuple[Event, ...]

    @cached_property
    def by_kind(self) -> dict[str, float]:
        """The time on the path per kind of pass or transfer."""
        return self._sums([step.item.kind.value for step in self.steps])

    @cached_property
    def by_device(self) -> dict[int, float]:
        """The time on the path per device."""
        return self._sums([step.device for step in self.steps])

    @cached_property
    def by_resource(self) -> dict[str, float]:
        """The time on the path per resource that the next event waited for: "device" while an earlier pass of the same
        device ran, "transfer" while inputs were in flight, and so on; "end" for the last pass."""
        waits = [step.cause.resource for step in self.steps[1:] if step.cause is not None]
        return self._sums([*waits, "end"])

    def _sums(self, keys: list[Any]) -> dict[Any, float]:
        sums: dict[Any, float] = {}
        for key, step in zip(keys, self.steps, strict=True):
            sums[key] = sums.get(key, 0.0) + step.end - step.start
        return sums

    def to_dict(self, devices: int) -> dict[str, Any]:
        """The sums, and the number of steps."""
        return {
            "steps": len(self.steps),
            "by_kind": self.by_kind,
            "by_device": [self.by_device.get(device, 0.0) for device in range(devices)],
            "by_resource": self.by_resource,
        }


def critical_path(work: Work, loop: Loop) -> CriticalPath:
    """The path to the pass or gradient reduction that ends last; if there are several, on the lowest device."""
    numbered = work.numbered

    def is_of_step(n: int) -> bool:
        return not numbered.is_transfer(n) and work.overlapped.get(n, Kind.REDUCE_GRAD) in REDUCING_KINDS

    end = loop.end[next(filter(is_of_step, reversed(loop.ended)))]
    chain = [next(n for row in work.rows for n in row if loop.end[n] == end and is_of_step(n))]
    while loop.why[chain[-1]] != START:
        chain.append(loop.who[chain[-1]])
    steps: list[Event] = []
    for n in chain:
        # A transfer is shown on the device that waited for it, and so is a transfer that this transfer waited for.
        device = steps[-1].device if numbered.is_transfer(n) else numbered.device(n)
        event = Event(device, numbered.item(n, device), loop.start[n], loop.end[n], cause_of(work, loop, n, device))
        steps.append(event)
    return CriticalPath(tuple(reversed(steps)))
