"""Timelines in the Trace Event format of Chrome, which Perfetto (ui.perfetto.dev) opens.

A device is a process, numbered from 1 because Perfetto uses 0 for the kernel. Its threads are compute, waits (idle
times, by what ended them), communication, copies to and from the host, and collectives over replicas, with as many
threads for each of the last three as run at the same time. Memory is a counter. An arrow leads from each pass to the
pass of another device that uses its result, if the timeline knows the placement of its stages.

Times are whole nanoseconds, the unit of Perfetto, so that consecutive slices do not overlap.

Format: "Trace Event Format", Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, count
from typing import Any

from evenpipe.schedule import Event, Item, Kind, Transfer
from evenpipe.schedule.passes import SHARDING_KINDS

from .panel import Panel, Timelines, lanes, panels_of, parts

_MICROSECONDS = 1e6
_DEFAULT_UNIT_SECONDS = 1e-3
_COMPUTE, _WAITS = 1, 2  # numbers of threads
_THREADS = {"communication": 100, "copies": 200, "replicas": 300}
"""First thread numbers of the categories that overlap with compute."""
_BACKWARD = (Kind.I, Kind.B)


def trace(timelines: Timelines, *, unit_seconds: float | None = None) -> str:
    """Timelines as JSON for Perfetto, one event per line, by time; several become processes below each other.

    unit_seconds: seconds per unit of time; a millisecond if not known.
    """
    panels = panels_of(timelines)
    unit = (unit_seconds or _DEFAULT_UNIT_SECONDS) * _MICROSECONDS
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    first = 1
    numbers = count(1)
    for panel in panels:
        writer = _Writer(panel, first, numbers, unit)
        names += writer.names()
        events += writer.events()
        first += panel.devices
    events.sort(key=lambda event: event["ts"])
    lines = ",\n".join(json.dumps(event, ensure_ascii=False, separators=(",", ":")) for event in (*names, *events))
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


class _Writer:
    """Writes one panel. first: process number of its device 0. numbers: for arrows, shared by all panels."""

    def __init__(self, panel: Panel, first: int, numbers: Iterator[int], unit: float) -> None:
        self.panel, self.first, self.numbers, self.unit = panel, first, numbers, unit
        self.threads = {(device, _COMPUTE): "compute" for device in range(panel.devices)}
        self.threads |= {(device, _WAITS): "waits" for device in range(panel.devices) if panel.waits(device)}
        self.concurrent = list(self._concurrent())

    def names(self) -> Iterator[dict[str, Any]]:
        """Metadata: names of processes and threads, and their order."""
        for device in range(self.panel.devices):
            name = f"{self.panel.name}: device {device}" if self.panel.name else f"device {device}"
            yield self._metadata(device, "process_name", {"name": name})
            yield self._metadata(device, "process_sort_index", {"sort_index": self.first + device})
        for (device, thread), name in sorted(self.threads.items()):
            yield {**self._metadata(device, "thread_name", {"name": name}), "tid": thread}
            yield {**self._metadata(device, "thread_sort_index", {"sort_index": thread}), "tid": thread}

    def events(self) -> Iterator[dict[str, Any]]:
        """Slices, counters and arrows."""
        for row in self.panel.rows:
            for event in row:
                yield self._slice(event, _COMPUTE, "compute")
        for event, thread, category in self.concurrent:
            yield self._slice(event, thread, category)
        for device in range(self.panel.devices):
            for wait in self.panel.waits(device):
                yield self._slice(Event(device, wait.item, wait.start, wait.end), _WAITS, "waits")
        for device in range(self.panel.devices):
            name, field = ("memory", "bytes") if self.panel.knows_bytes else (self.panel.held, "stage activations")
            for time, value in self.panel.curve(device):
                yield {
                    "ph": "C",
                    "name": name,
                    "pid": self.first + device,
                    "ts": self._at(time),
                    "args": {field: value},
                }
        for source, target in _hops(self.panel):
            yield from self._arrow(next(self.numbers), source, target)

    def _concurrent(self) -> Iterator[tuple[Event, int, str]]:
        """The events that overlap with compute, with their threads. Names the threads."""
        for device in range(self.panel.devices):
            for category, base in _THREADS.items():
                row = [event for event in self.panel.concurrent[device] if _category(event.item) == category]
                for event, lane in zip(row, lanes(row), strict=True):
                    self.threads[device, base + lane] = f"{category} {lane + 1}" if lane else category
                    yield event, base + lane, category

    def _slice(self, event: Event, thread: int, category: str) -> dict[str, Any]:
        args: dict[str, Any] = {}
        for field in ("stage", "microbatch"):
            if getattr(event.item, field) is not None:
                args[field] = getattr(event.item, field)
        if event.item.slice:
            args["slice"] = event.item.slice
        exchange = self.panel.timeline.exchange_of(event)
        if exchange:
            args["of which tensor collectives"] = f"{100 * exchange / (event.end - event.start):.1f} %"
        if event.cause is not None:
            args["waited for"] = event.cause.resource
            if event.cause.item is not None:
                args["waited for"] += f": {event.cause.item}"
            if event.cause.device is not None:
                args["waited for"] += f" on device {event.cause.device}"
        if event.slack is not None:
            args["could end later by (µs)"] = round(max(0.0, event.slack.time) * self.unit, 3)
            first = event.slack.item
            args["first to wait"] = (
                "the end of the step" if first is None else f"{first} on device {event.slack.device}"
            )
        start = self._at(event.start)
        return {
            "ph": "X",
            "name": str(event.item),
            "cat": f"{category},{event.item.kind.value}",
            "pid": self.first + event.device,
            "tid": thread,
            "ts": start,
            "dur": round(self._at(event.end) - start, 3),
            "args": args,
        }

    def _arrow(self, number: int, source: Event, target: Event) -> Iterator[dict[str, Any]]:
        common = {"name": "hop", "cat": "hop", "id": number, "tid": _COMPUTE}
        middle = (source.start + source.end) / 2  # inside the slice, so that the arrow is attached to it
        yield {"ph": "s", **common, "pid": self.first + source.device, "ts": self._at(middle)}
        yield {"ph": "f", "bp": "e", **common, "pid": self.first + target.device, "ts": self._at(target.start)}

    def _metadata(self, device: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self.first + device, "ts": 0, "args": args}

    def _at(self, time: float) -> float:
        """Microseconds from the first event on."""
        return round((time - self.panel.origin) * self.unit, 3)


def _category(item: Item) -> str:
    if isinstance(item, Transfer):
        return "communication"
    return "replicas" if item.kind in SHARDING_KINDS else "copies"


def _hops(panel: Panel) -> Iterator[tuple[Event, Event]]:
    """Pairs of passes on two devices whose stages are connected by an edge, in its direction for forwards, against it
    for backwards. Empty if the placement is not known."""
    placement = panel.timeline.placement
    if placement is None:
        return
    runs: dict[tuple[bool, int | None, int | None, int], Event] = {}
    for event in chain.from_iterable(panel.rows):
        for component in parts(event):
            if component.kind is Kind.F or component.kind in _BACKWARD:
                runs[component.kind is Kind.F, component.stage, component.microbatch, component.slice] = event
    for (forward, stage, microbatch, slice_), event in runs.items():
        if stage is None:
            continue
        for neighbour in placement.successors(stage) if forward else placement.predecessors(stage):
            target = runs.get((forward, neighbour, microbatch, slice_))
            if target is not None and target.device != event.device:
                yield event, target
