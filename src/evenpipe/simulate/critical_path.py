"""The critical path: the chain of passes, transfers and copies that determines the length of the step.

From the pass that ends last back to the start, each member of the chain starts the moment its predecessor ends, because
of it: it waited for its device, its inputs, a communicator, a link or a copy engine. So the chain has no gap, and its
durations add up to the makespan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evenpipe.schedule import Event, Transfer
from evenpipe.schedule.passes import REDUCING_KINDS

from .loop import START, Loop
from .timeline import event_of
from .work import Work


@dataclass(frozen=True)
class CriticalPath:
    """`steps` from the start to the end of the step. A collective is on the device that issued it last."""

    steps: tuple[Event, ...]

    @cached_property
    def by_kind(self) -> dict[str, float]:
        """Return the time on the path per kind of pass or transfer."""
        return self._sums([step.item.kind.value for step in self.steps])

    @cached_property
    def by_device(self) -> dict[int, float]:
        """Return the time on the path per device."""
        return self._sums([step.device for step in self.steps])

    @cached_property
    def by_resource(self) -> dict[str, float]:
        """Return the time on the path per resource that the next step waited for: "device" while a pass ran before
        another of the same device, "transfer" while inputs were on their way, and so on; "end" for the last pass."""
        waits = [step.cause.resource for step in self.steps[1:] if step.cause is not None]
        return self._sums([*waits, "end"])

    def _sums(self, keys: list[Any]) -> dict[Any, float]:
        sums: dict[Any, float] = {}
        for key, step in zip(keys, self.steps, strict=True):
            sums[key] = sums.get(key, 0.0) + step.end - step.start
        return sums

    def to_dict(self, devices: int) -> dict[str, Any]:
        """Return the sums, and the number of steps."""
        return {
            "steps": len(self.steps),
            "by_kind": self.by_kind,
            "by_device": [self.by_device.get(device, 0.0) for device in range(devices)],
            "by_resource": self.by_resource,
        }


def critical_path(work: Work, loop: Loop, slices: int) -> CriticalPath:
    """Return the path to the pass, or sum over replicas, that ends last; if there are several, on the lowest device.
    slices: of a sequence."""
    ends = (n for n, item in enumerate(work.items) if n not in work.beside or item.kind in REDUCING_KINDS)
    chain = [max(ends, key=lambda n: (loop.end[n], -n))]
    while loop.why[chain[-1]] != START:
        chain.append(loop.who[chain[-1]])
    steps: list[Event] = []
    for n in chain:
        # A transfer is shown as issued by the device that waited for it, and so is a transfer that it waited for.
        device = work.device_of[n] if n >= 0 else steps[-1].device
        issued = {k: _transfer(work, ~k, device, slices) for k in (n, loop.who[n]) if k < 0}
        steps.append(event_of(work, loop, issued, n, device))
    return CriticalPath(tuple(reversed(steps)))


def _transfer(work: Work, k: int, device: int, slices: int) -> Transfer:
    return work.transfers.route[k].transfer(device, *divmod(work.transfers.unit[k], slices))
