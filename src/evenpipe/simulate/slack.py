"""Slack: how much later each event of a step could end without making the step longer, and which pass waits for it.

This is the backward pass of the critical path method (Kelley and Walker, 1959) over the simulated run. An event must
end before the latest start of all its successors: the next pass of its device, the transfers and copies issued in
between, the passes that need it, and the next event in its queue.

The order of every queue and all durations are assumed to stay as they were in the run. So slack is exact where nothing
queues and nothing is slowed down. Where transfers queue for a link, copies queue for an engine, or compute is slowed
down by concurrent work, a delay may change an order or a speed, and slack is an estimate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

from evenpipe.schedule import CopyEngine, Kind

from .loop import Loop
from .work import COPIES, Work

ROUNDING = 1e-9
"""Starts that differ by less, relative to the duration of the step, count as equal."""


Slacks = dict[int, tuple[float, int | None]]
"""By number of a pass or transfer, its slack, and the number of the pass that would lengthen the step first; None for
the end of the step."""


def slacks(work: Work, loop: Loop, engine: CopyEngine) -> Slacks:
    """The slack of everything that ran.

    If several passes would lengthen the step first, it names one that needs the event; if none does, the next one of
    its device.
    """
    successors = _successors(work, loop, engine)
    is_transfer, overlapped, start, end = work.numbered.is_transfer, work.overlapped, loop.start, loop.end
    finish = max(end[n] for n in loop.ended if not is_transfer(n) and overlapped.get(n) not in COPIES)
    result: Slacks = {}
    latest: dict[int, float] = {}  # starts
    for n in reversed(loop.ended):
        followers = (*work.waiting.get(n, ()), *successors[n])
        limit = min((latest[follower] for follower in followers), default=finish)
        first = next((follower for follower in followers if latest[follower] <= limit + ROUNDING * finish), None)
        if first is not None and (first in overlapped or is_transfer(first)):
            first = result[first][1]  # on the way to a pass
        result[n] = (limit - end[n], first)
        latest[n] = limit - (end[n] - start[n])
    return result


def _successors(work: Work, loop: Loop, engine: CopyEngine) -> defaultdict[int, list[int]]:
    """By number, the events on the same device or in the same queue that cannot start before its end."""
    successors: defaultdict[int, list[int]] = defaultdict(list)
    for row in work.rows:
        last = None
        for n in row:
            if last is not None:
                successors[last].append(n)
            if n not in work.overlapped and not work.numbered.is_transfer(n):
                last = n
    ends: dict[Hashable, int] = {}  # the last event so far in each queue
    for n in loop.ended:
        for queue in _queues(work, engine, n):
            if queue in ends:
                successors[ends[queue]].append(n)
            ends[queue] = n
    return successors


def _queues(work: Work, engine: CopyEngine, n: int) -> Iterator[Hashable]:
    """The resources that carried this transfer, copy or collective over replicas, and carry only one at a time."""
    numbered, kind = work.numbered, work.overlapped.get(n)
    if numbered.is_transfer(n):
        queue = work.queue[(n + numbered.transfers) // numbered.units]
        if queue >= 0:
            yield queue
    elif kind in COPIES:
        device, loads = numbered.device(n), kind is Kind.L
        yield "stream", device, loads and engine.streams == 2
        if device in engine.link_of:
            yield "link", engine.link_of[device], loads
    elif kind is not None and work.takes[n]:
        yield "replicas", numbered.device(n)
