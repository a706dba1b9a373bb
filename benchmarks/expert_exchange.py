"""How much of the exchange of experts goes on beside products: one layer, and a link of a given rate.

    python benchmarks/expert_exchange.py [--processes 2 4] [--rates 200 100 50] [--output FILE.json]

Products, messages and processes are real. Time is the CPU time of a process's thread plus its waits for a link, so that
other load on the machine hardly counts. The link is full duplex, carries what a process sends one message after the
other at so many MB/s, and takes 0.1 ms from end to end; each message tells when it is there. All ways to run the layer
(`expert_layer`) take turns. Printed are medians of the slower process:

    ms        of F, B and I, without finding out who gets which rows, which a forward does first ("layout")
    of none   of the time that the same way takes without a link
    waits     percent of the waits of rows without overlap that are gone
    time      percent of the time that the link costs these in all that is gone: here, what smaller products and more
              messages take counts as not hidden
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import torch
import torch.distributed as dist
from expert_layer import PASSES, ROWS, Gloo, Layer, Settings, Way, ways
from torch import Tensor

from evenpipe import launch
from evenpipe.host.memory import keep_freed_memory

NO_LINK = float("inf")
LATENCY_SECONDS = 1e-4

Figures = dict[str, dict[str, float]]
"""By pass: "seconds" in all, those of "waits", and so on."""


class Link(Gloo):
    """Messages that take their time on a link."""

    bytes_per_second = NO_LINK

    def reset(self) -> None:
        super().reset()
        self._free, self._started = 0.0, time.thread_time()

    def now(self) -> float:
        return time.thread_time() - self._started + self.waited

    def start(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], what: str) -> Due:
        work = self.send(output, rows, received, sent)
        self._free = max(self.now(), self._free) + rows.nbytes / self.bytes_per_second
        senders = [member for member, count in enumerate(received) if count] + [self.rank] * bool(sum(sent))
        has_link = self.bytes_per_second != NO_LINK
        return Due(self, work, self._free + LATENCY_SECONDS, senders if has_link else [], (output, rows))

    def skip(self, started: float) -> None:
        """What the thread has done since that CPU time belongs to the measurement."""
        self._started += time.thread_time() - started


class Due:
    """A transfer that ends at the moment that its message names."""

    def __init__(self, link: Link, work: dist.Work, due: float, senders: list[int], kept: Any) -> None:
        """senders: whose moments count."""
        started = time.thread_time()
        self._link, self._work, self._senders, self._kept = link, work, senders, kept
        self._due = torch.full((link.size,), due, dtype=torch.float64)
        self._there = torch.empty_like(self._due)
        self._stamps = dist.all_to_all_single(self._there, self._due, async_op=True)
        link.skip(started)

    def wait(self) -> None:
        self._work.wait()
        started = time.thread_time()
        self._stamps.wait()
        due = max((float(self._there[member]) for member in self._senders), default=0.0)
        self._link.skip(started)
        self._link.waited += max(0.0, due - self._link.now())


def measure(settings: Settings, rates: list[float]) -> dict[str, Any]:
    """Return, on every process, the figures of each way and rate, seconds of a layout, and bytes sent in F."""
    keep_freed_memory()  # as a pipeline does
    link = Link()
    layer = Layer(settings, link)
    link.reset()
    layout = layer.layout()
    layer.check(ways(link.size, settings.hidden_size), layout)
    seconds: dict[tuple[str, float, str], list[tuple[float, float]]] = defaultdict(list)
    sent = {}
    for number in range(settings.rounds + 1):
        for way in ways(link.size, settings.hidden_size):
            for rate in (NO_LINK, *rates):
                link.bytes_per_second = rate
                for splits in (False, True):
                    forward, backward = layer.start(way, layout, splits=splits)
                    link.reset()
                    output = forward()
                    taken = link.now(), link.waited
                    sent[way.name] = link.bytes
                    if number and not splits:
                        seconds[way.name, rate, "F"].append(taken)
                    link.reset()
                    backward(output)
                    if number:  # the first one warms up
                        seconds[way.name, rate, "I" if splits else "B"].append((link.now(), link.waited))
    link.bytes_per_second = NO_LINK
    layouts = []
    for _ in range(settings.rounds):
        link.reset()
        layer.layout()
        layouts.append(link.now())
    figures = {}
    for (name, rate, one), measured in seconds.items():
        without_link = seconds[name, NO_LINK, one]
        figures[name, rate, one] = {
            "seconds": statistics.median(total for total, _ in measured),
            "waits": statistics.median(waits for _, waits in measured),
            "of_none": statistics.median(a / b for (a, _), (b, _) in zip(measured, without_link, strict=True)),
        }
    return {"figures": figures, "layout": statistics.median(layouts), "bytes": sent}


def slower(found: list[dict[str, Any]], way: Way, rate: float) -> Figures:
    """Return the figures of the slower process in each pass."""
    return {
        name: {
            kind: max(one["figures"][way.name, rate, name][kind] for one in found)
            for kind in ("seconds", "waits", "of_none")
        }
        for name in PASSES
    }


def hidden(way: Figures, rows: Figures, rows_without_link: Figures) -> Figures:
    """Return which parts of the waits, and of the time, that a link costs rows without overlap are gone."""
    found = {}
    for name in PASSES:
        costs = rows[name]["seconds"] - rows_without_link[name]["seconds"]
        rest = way[name]["seconds"] - rows_without_link[name]["seconds"]
        found[name] = {"waits": 1 - way[name]["waits"] / rows[name]["waits"], "time": 1 - rest / costs}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], metavar="N", help="that share the experts")
    parser.add_argument("--rates", type=float, nargs="+", default=[200, 100, 50], metavar="X", help="of the link, MB/s")
    common.add_arguments(parser, Settings)
    given = parser.parse_args()
    settings = common.settings_of(given, Settings)
    results = common.Results(settings, given.output, latency_seconds=LATENCY_SECONDS)
    rates = [1e6 * rate for rate in given.rates]
    for processes in given.processes:
        found = launch(measure, settings, rates, processes=processes, torch_device="cpu")
        layout = max(one["layout"] for one in found)
        print(f"{processes} processes, layout {1e3 * layout:.2f} ms")
        print(f"{'MB/s':>5}{'ms: F':>39}{'B':>7}{'I':>7}{'of none':>10}{'waits':>19}{'time':>17}", flush=True)
        for rate in (NO_LINK, *rates):
            for way in ways(processes, settings.hidden_size):
                figures = slower(found, way, rate)
                text = "".join(f"{1e3 * figures[name]['seconds']:7.1f}" for name in PASSES)
                case: dict[str, Any] = {"processes": processes, "layout_seconds": layout, "way": way.name}
                case |= {"bytes": max(one["bytes"][way.name] for one in found), "passes": figures}
                if rate != NO_LINK:
                    gone = hidden(figures, slower(found, ROWS, rate), slower(found, ROWS, NO_LINK))
                    case |= {"megabytes_per_second": rate / 1e6, "hidden": gone}
                    text += "  " + "".join(f"{figures[name]['of_none']:6.2f}" for name in PASSES)
                    for kind in ("waits", "time"):
                        text += "  " + "".join(f"{100 * gone[name][kind]:5.0f}" for name in PASSES)
                results.add(case)
                print(f"{'none' if rate == NO_LINK else f'{rate / 1e6:g}':>5}  {way.name:30}{text}", flush=True)


if __name__ == "__main__":
    main()
