"""The exchange of experts over TCP: one layer over machines that are network namespaces, with links of a given rate.

    sudo python benchmarks/expert_network.py [--machines 2] [--megabits 400] [--output FILE.json]

Makes the namespaces, a bridge between them, and a limit (`tc`, a token bucket) on what each of them sends; removes all
at the end. One process per machine, gloo. Times are those of a clock, so other load counts in full. All ways to run the
layer (`expert_layer`) take turns. Printed are medians of the slower process: ms of F, B and I, and in brackets how much
of it they wait.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import expert_layer
import torch
import torch.distributed as dist
from common import option
from expert_layer import PASSES, Gloo, Layer, ways

from evenpipe.host.memory import keep_freed_memory

NETWORK = "10.231.78"
CARD, PORT = "cable", 29517
BURST, LATENCY = "128kb", "400ms"
"""Of the token bucket: what may leave at once, and how long what waits may become."""


@dataclass(frozen=True, kw_only=True)
class Settings(expert_layer.Settings):
    """What is measured."""

    tokens: int = option(1024, "of each process")
    machines: int = option(2, "with one process each, which share the experts")
    megabits: int = option(400, "per second that each machine can send")


# --- on each machine ---------------------------------------------------------------------------------------------


def measure(settings: Settings, rank: int) -> dict[str, Any]:
    """Return the median seconds of each way and pass, and how many of these are waits."""
    keep_freed_memory()  # as a pipeline does
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address(0)}:{PORT}", rank=rank, world_size=settings.machines)
    exchange = Gloo()
    layer = Layer(settings, exchange)
    layout = layer.layout()
    layer.check(ways(exchange.size, settings.hidden_size), layout)
    taken: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    sent = {}
    for number in range(settings.rounds + 1):
        for way in ways(exchange.size, settings.hidden_size):
            for splits in (False, True):
                forward, backward = layer.start(way, layout, splits=splits)
                exchange.reset()
                output = forward()
                of_forward = exchange.now(), exchange.waited
                sent[way.name] = exchange.bytes
                exchange.reset()
                backward(output)
                if number:  # the first one warms up
                    taken[way.name]["I" if splits else "B"].append((exchange.now(), exchange.waited))
                    if not splits:
                        taken[way.name]["F"].append(of_forward)
    dist.barrier()
    dist.destroy_process_group()
    return {
        name: {"bytes": sent[name]}
        | {
            one: dict(zip(("seconds", "waits"), map(statistics.median, zip(*passes[one], strict=True)), strict=True))
            for one in PASSES
        }
        for name, passes in taken.items()
    }


# --- the machines ------------------------------------------------------------------------------------------------


def address(machine: int) -> str:
    """Return the address of a machine."""
    return f"{NETWORK}.{machine + 1}"


def run(*command: str) -> None:
    """Run a command that has to succeed."""
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def network(machines: int, megabits: int) -> Iterator[list[str]]:
    """Give the names of namespaces that are joined by a bridge, in a namespace too; remove all at the end."""
    switch, *names = [f"evenpipe-experts-{os.getpid()}-{one}" for one in ("switch", *range(machines))]
    try:
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for machine, name in enumerate(names):
            run("ip", "netns", "add", name)
            peer = f"port{machine}"
            run("ip", "-n", name, "link", "add", CARD, "type", "veth", "peer", peer, "netns", switch)
            run("ip", "-n", switch, "link", "set", peer, "master", "bridge", "up")
            run("ip", "-n", name, "address", "add", f"{address(machine)}/24", "dev", CARD)
            for card in ("lo", CARD):
                run("ip", "-n", name, "link", "set", card, "up")
            limit = ["tbf", "rate", f"{megabits}mbit", "burst", BURST, "latency", LATENCY]
            run("tc", "-n", name, "qdisc", "add", "dev", CARD, "root", *limit)
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def measured(settings: Settings, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what each machine measures."""
    own = {
        "GLOO_SOCKET_IFNAME": CARD,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{machine}.json" for machine in range(len(names))]
        try:
            for machine, name in enumerate(names):
                task = json.dumps({"settings": asdict(settings), "rank": machine, "output": str(files[machine])})
                command = ["ip", "netns", "exec", name, sys.executable, __file__, "--machine", task]
                started.append(subprocess.Popen(command, env=os.environ | own))
            while any(process.poll() is None for process in started):
                if any(process.returncode for process in started):
                    break
                time.sleep(0.1)
            if failed := [machine for machine, process in enumerate(started) if process.returncode]:
                raise SystemExit(f"machine {failed[0]} failed")
        finally:
            for process in started:
                process.kill()
                process.wait()
        return [json.loads(file.read_text()) for file in files]


def main() -> None:
    if sys.argv[1:2] == ["--machine"]:
        task = json.loads(sys.argv[2])
        Path(task["output"]).write_text(json.dumps(measure(Settings(**task["settings"]), task["rank"])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_arguments(parser, Settings)
    given = parser.parse_args()
    settings = common.settings_of(given, Settings)
    results = common.Results(settings, given.output)
    try:
        with network(settings.machines, settings.megabits) as names:
            found = measured(settings, names)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise SystemExit(f"the network cannot be made here (it takes root, ip and tc): {reason.strip()}") from None
    print(f"{'':32}{'F':>8}{'B':>16}{'I':>16}")
    for way in ways(settings.machines, settings.hidden_size):
        passes = {
            name: {kind: max(one[way.name][name][kind] for one in found) for kind in ("seconds", "waits")}
            for name in PASSES
        }
        results.add({"way": way.name, "bytes": max(one[way.name]["bytes"] for one in found), "passes": passes})
        columns = [f"{1e3 * one['seconds']:8.0f} ({1e3 * one['waits']:4.0f})" for one in passes.values()]
        print(f"{way.name:32}{'  '.join(columns)}", flush=True)


if __name__ == "__main__":
    main()
