"""What activations on the host cost on one NVIDIA GPU, with layers of real models.

    python benchmarks/offload_gpu.py --shapes 8B --tokens 4096 8192 16384 [--output FILE.json]

Where a command may not take long, run one for each of --shapes 8B --tokens 4096 8192 16384, --shapes 8B --tokens 32768,
--shapes 70B --tokens 4096 8192, --shapes 70B --tokens 16384, and --shapes 70B --tokens 32768, each with a file of its
own. Without options all of it runs.

One device runs the order of the first of four: four forwards, then backward and forward in turn. So an activation lies
idle while others compute, as in a pipeline, and copies have that long. For layers of Llama-3-8B and 70B at 4k to 32k
tokens, with everything kept, with every second microbatch on the host, and with all:

    k           time of both copies of an activation over that of its forward and backward (arXiv 2503.01328)
    overhead    median step over that with everything kept, less 1; the three run in turns
    copies      GB/s that copies reached beside compute, and those of a plain copy alone, of as many bytes or 1 GiB
    peak        torch.cuda.max_memory_allocated less parameters, and the same from the estimator

A case that does not fit with everything kept runs with fewer layers, or is left out and named; so is one that fails.
Without a GPU nothing
runs, and it is said so; `--device cpu --shapes tiny` runs a small one there, so that this program can be tried.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # cases come close to what a GPU holds

import torch
from provenance import write
from torch import Tensor
from transformers import LlamaConfig

from evenpipe import Pipeline, Recipe, initialise_worker, launch
from evenpipe.costs import costs_of
from evenpipe.costs.hardware import KNOWN, Hardware, find_hardware
from evenpipe.memory.device import copied_bytes
from evenpipe.memory.estimate import Estimate, estimate
from evenpipe.memory.model_bytes import ModelBytes
from evenpipe.model import describe
from evenpipe.schedule import Kind, Order, Pass, Placement, plan_program
from evenpipe.schedule.trace import Trace

SHAPES: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 2, "num_key_value_heads": 2},
}
TOKENS = (4096, 8192, 16384, 32768)
LAYERS = (4, 2, 1)
AHEAD, MICROBATCHES = 4, 12
ROWS = 1024
"""Of the vocabulary: its layers are to weigh nothing."""
LEAST_TURNS = 3
PLAIN_BYTES = 2**30
"""At most, of a plain copy: pinned memory is rounded up to a power of two, and copies of activations need theirs."""
ARMS = {"kept": 0.0, "half": 0.5, "all": 1.0}
"""Which part of the microbatches goes to the host."""


def order() -> Order:
    """Of one device: as the first of a pipeline of `AHEAD` runs it."""
    forwards, backwards = ([Pass(kind, 0, number) for number in range(MICROBATCHES)] for kind in (Kind.F, Kind.B))
    row = forwards[:AHEAD]
    for number, backward in enumerate(backwards):
        row += [backward, *forwards[AHEAD + number : AHEAD + number + 1]]
    return Order(Placement.linear(1), MICROBATCHES, (tuple(row),))


def with_copies(share: float) -> Order:
    """As many of the microbatches as `share` says, evenly, go to the host behind their forwards; their memory is given
    back two passes later, and they come back a pass before their backwards."""
    plain = order()
    row = list(plain.passes(0))
    turns = []
    for number in range(MICROBATCHES):
        if int((number + 1) * share) > int(number * share):
            made, used = (row.index(Pass(kind, 0, number)) for kind in (Kind.F, Kind.B))
            turns += [(made + 1, Kind.O, number), (min(made + 3, used - 1), Kind.D, number), (used - 1, Kind.L, number)]
    for place, kind, number in sorted(turns, key=lambda turn: (turn[0], "DOL".index(turn[1].value)), reverse=True):
        row.insert(place, Pass(kind, 0, number))
    return replace(plain, rows=(tuple(row),))


@dataclass(frozen=True)
class Case:
    """What is measured. copied: bytes of one microbatch's activations."""

    shape: str
    layers: int
    tokens: int
    copied: int = 0

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            **SHAPES[self.shape],
            num_hidden_layers=self.layers,
            vocab_size=ROWS,
            max_position_embeddings=self.tokens,
            tie_word_embeddings=False,
        )


def estimated(case: Case, given: Order, hardware: Hardware) -> Estimate:
    """Without an optimizer, which does not run here."""
    return estimate(
        describe(case.config),
        Recipe.of(sequence_length=case.tokens, microbatches=MICROBATCHES, schedule=given, vocabulary="first-last"),
        hardware=hardware,
        offloaded=1.0,
    )


def copy_of(case: Case, plan: Estimate) -> int:
    """Return the bytes of one microbatch's activations that are copied."""
    source = ModelBytes(describe(case.config))
    return copied_bytes(source, source.planned(plan.recipe), plan.settings)[0]


class Arm:
    """One order on a pipeline that all arms share, so that its state is there once; and what was measured of it."""

    def __init__(self, pipeline: Pipeline, given: Order, ids: Tensor) -> None:
        self.order, self._pipeline, self._ids = given, pipeline, ids
        _, program = plan_program(given, 1, MICROBATCHES, "first-last")
        self._layout = replace(pipeline.layout, program=program)
        self.seconds: list[float] = []
        self.traces: list[Trace] = []

    def step(self, *, traced: bool = False) -> None:
        """Gradients are made anew in every step, as the estimate assumes."""
        pipeline = self._pipeline
        pipeline.layout = self._layout
        pipeline.zero_grad()
        synchronise(pipeline.torch_device)
        started = time.perf_counter()
        result = pipeline.step(self._ids, record_passes=traced)
        synchronise(pipeline.torch_device)
        if traced:
            trace = pipeline.trace(result)
            assert trace is not None
            self.traces.append(trace)
        else:
            self.seconds.append(time.perf_counter() - started)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plain_copy(size: int, device: torch.device) -> float:
    """Bytes per second to the host and back, each alone, of so many bytes or PLAIN_BYTES."""
    size = min(size, PLAIN_BYTES)
    here = torch.empty(size, dtype=torch.uint8, device=device)
    there = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    rates = []
    for to, source in ((there, here), (here, there)):
        for _ in range(2):
            synchronise(device)
            started = time.perf_counter()
            to.copy_(source, non_blocking=True)
            synchronise(device)
            rate = size / (time.perf_counter() - started)
        rates.append(rate)
    del here, there, to, source
    if device.type == "cuda":
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # pinned memory, which torch keeps otherwise
    return 2 / sum(1 / rate for rate in rates)


def measure(case: Case, hardware: Hardware, turns: int, seconds: float) -> list[dict[str, Any]]:
    """On the only process, one entry per arm. seconds: that all turns may take, if there were LEAST_TURNS."""
    device, copied = initialise_worker().torch_device, case.copied
    bandwidth = plain_copy(copied, device)
    pipeline = Pipeline(
        case.config,
        schedule=with_copies(1.0),  # so that there is what copies
        vocabulary="first-last",
        sequence_length=case.tokens,
        self_check=False,
    )
    ids = torch.randint(0, ROWS, (MICROBATCHES, case.tokens), generator=torch.Generator().manual_seed(0))
    kept = Arm(pipeline, order(), ids)
    kept.step()
    kept.step(traced=True)
    costs = costs_of(kept.traces)
    forward, backward = costs.F, costs.B
    assert isinstance(forward, tuple) and isinstance(backward, tuple)
    k = 2 * copied / bandwidth / (forward[0] + backward[0])
    arms = {name: Arm(pipeline, with_copies(share), ids) if share else kept for name, share in ARMS.items()}
    found: list[dict[str, Any]] = []
    for name, arm in arms.items():
        arm.step()
        peak = None
        if device.type == "cuda":
            pipeline.zero_grad()
            state = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            arm.step()
            peak = torch.cuda.max_memory_allocated(device) - state
        arm.step(traced=True)
        found.append({"arm": name, "peak_above": peak})
    for arm in arms.values():
        arm.seconds.clear()
    for turn in range(turns):
        if turn >= LEAST_TURNS and sum(sum(arm.seconds) for arm in arms.values()) > seconds:
            break
        for arm in arms.values():
            arm.step()
    usual = statistics.median(kept.seconds)
    for one, arm in zip(found, arms.values(), strict=True):
        copies = [copy.end - copy.start for copy in arm.traces[-1].devices[0].copies]
        step = statistics.median(arm.seconds)
        moved = sum(item is not None and item.kind is Kind.O for item in arm.order.rows[0])
        plan = estimated(case, arm.order, hardware).devices[0]
        state = plan.terms["parameters"] + plan.terms["optimizer"]
        one |= {
            "k": k,
            "moved": moved / MICROBATCHES,
            "seconds": step,
            "overhead": step / usual - 1,
            "plain_copy_bytes_per_second": bandwidth,
            "copy_bytes_per_second": copied * len(copies) / sum(copies) if copies else None,
            "predicted_above": plan.memory.peak - state,
            "steps": arm.seconds,
        }
    return found


def line(one: dict[str, Any]) -> str:
    """What was measured of an arm."""
    reached, peak = one["copy_bytes_per_second"] or 0.0, one["peak_above"]
    return (
        f"{one['arm']:4}  {one['moved']:5.0%}  {one['k']:4.2f}"
        f"  {one['overhead']:+8.1%}  {reached / 1e9:6.1f} ({one['plain_copy_bytes_per_second'] / 1e9:.1f})"
        f"  {'-' if peak is None else f'{peak / 2**30:.2f}'} ({one['predicted_above'] / 2**30:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["8B", "70B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--turns", type=int, default=10, help="steps of each (default: %(default)s)")
    text = f"that the turns of a case may take once there were {LEAST_TURNS} (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=60.0, help=text)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--hardware", default="H100-80G", help="of the estimate (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("skipped: torch sees no NVIDIA GPU here")
        return
    hardware = KNOWN[given.hardware] if given.hardware in KNOWN else find_hardware(given.hardware)
    if given.device == "cpu":
        hardware = replace(hardware, torch_device="cpu")
    print("shape  layers  tokens  arm   moved     k  overhead  copies GB/s (plain)  peak above state GiB (predicted)")
    cases_run: list[dict[str, Any]] = []
    for shape in given.shapes:
        for tokens in given.tokens:
            cases = (Case(shape, layers, tokens) for layers in LAYERS)
            plans = ((case, estimated(case, order(), hardware)) for case in cases)
            case, plan = next(((case, plan) for case, plan in plans if plan.verdict == "fits"), (None, None))
            if case is None or plan is None:
                print(f"{shape:5}  {tokens} tokens: left out, one layer does not fit with everything kept", flush=True)
                continue
            case = replace(case, copied=copy_of(case, plan))
            print(f"{shape:5}  {case.layers:6}  {tokens:6}  runs: {case.copied / 2**30:.2f} GiB a copy", flush=True)
            arguments = (measure, case, hardware, given.turns, given.seconds)
            try:
                found = launch(*arguments, processes=1, torch_device=given.device)[0]
            except Exception as error:  # whatever it is, memory mostly: the other cases may run
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                found = [{"reason": reason}]
                print(f"{shape:5}  {case.layers:6}  {tokens:6}  did not run: {reason}", flush=True)
            for one in found:
                cases_run.append({**asdict(case), **one})
                if "reason" not in one:
                    print(f"{shape:5}  {case.layers:6}  {tokens:6}  {line(one)}", flush=True)
            if given.output is not None:
                figures = {"microbatches": MICROBATCHES, "cases": cases_run}
                write(given.output, figures, torch.device(given.device))


if __name__ == "__main__":
    main()
