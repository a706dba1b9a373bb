"""Does a run on a GPU take the memory that `evenpipe estimate` says? Bytes of torch's allocator beside the estimate.

    python benchmarks/gpu/memory.py [--cases slices experts] [--output FILE.json]    about two minutes
    python benchmarks/gpu/memory.py --device cpu --layers 4 --hidden-size 64 --tokens 64 --vocabulary 1024    to try it

The processes of a run share one GPU and talk through host memory, which does not change how many tensors each has. One
training step (forward, backward, clipping, fused AdamW) settles the run; the next two count. Of every device:

    allocated   `torch.cuda.max_memory_allocated` of the steps that count, of the process that has most
    reserved    `torch.cuda.max_memory_reserved`
    error       of the estimate against the one measured

Parameters, gradients and moments are fp32, products bf16. On a CPU there are only estimates.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from timing import MIB, Failure, Results, attempt, clean_up, device_of, percent, progress, table
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from evenpipe import OffloadOptions, Pipeline, Recipe, initialise_worker, launch
from evenpipe.memory.estimate import estimate
from evenpipe.model import describe

MICROBATCHES = 8
STEPS = 2
"""That count."""

CASES: dict[str, dict[str, Any]] = {
    "one device": {"pp": 1},
    "1f1b": {"pp": 4},
    "1f1b, first-last": {"pp": 4, "vocabulary": "first-last"},
    "zb-h1": {"pp": 4, "schedule": "zb-h1"},
    "zbv": {"pp": 4, "schedule": "zbv"},
    "v-half, vocab-1": {"pp": 4, "schedule": "v-half", "vocabulary": "vocab-1"},
    "full checkpointing": {"pp": 4, "activation_checkpointing": "full"},
    "selective checkpointing": {"pp": 4, "activation_checkpointing": "selective"},
    "offload": {"pp": 4, "schedule": "po-f", "offload": OffloadOptions(activations="all")},
    "sharded replicas": {"pp": 2, "dp": 2, "data_parallel": "shard"},
    "tensor ranks": {"pp": 2, "tp": 2},
    "context ranks": {"pp": 2, "cp": 2},
    "slices": {"pp": 4, "slices": 4},
    "experts": {"pp": 2, "dp": 2, "ep": 2},
}
"""Options of `Recipe.of`."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Llama, or a Mixtral of 8 experts as wide as its MLP over 4."""

    layers: int
    hidden_size: int
    tokens: int
    vocabulary: int

    def config(self, experts: bool) -> PreTrainedConfig:
        """Of transformers."""
        values: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": max(4, self.hidden_size // 128),
            "num_key_value_heads": 4,
            "max_position_embeddings": self.tokens,
            "tie_word_embeddings": False,
        }
        width = 11 * self.hidden_size // 4
        if experts:
            more = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
            return AutoConfig.for_model("mixtral", **values, **more, intermediate_size=width // 4)
        return AutoConfig.for_model("llama", **values, intermediate_size=width)


def run_all(model: Model, cases: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """In every process, one case after the other."""
    found = []
    for options in cases:
        found.append(run(model, options))
        clean_up()
    return found


def run(model: Model, options: dict[str, Any]) -> tuple[int, int, int]:
    """In every process: its device, and most bytes that the allocator has given out and has reserved."""
    worker = initialise_worker()
    pipeline = Pipeline(
        model.config("ep" in options),
        recipe=recipe_of(model, options),
        compute_dtype=torch.bfloat16,
        self_check=False,
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), fused=True)
    on_gpu = worker.torch_device.type == "cuda"
    for number in range(1 + STEPS):
        if number == 1 and on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        pipeline.step(ids_of(model, seed=number * pipeline.replicas + pipeline.replica))
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        pipeline.zero_grad()
    pipeline.close()
    if not on_gpu:
        return pipeline.device, 0, 0
    return pipeline.device, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def recipe_of(model: Model, options: dict[str, Any]) -> Recipe:
    """The same for the run and the estimate."""
    return Recipe.of(microbatches=MICROBATCHES, sequence_length=model.tokens, **options)


def ids_of(model: Model, seed: int) -> Tensor:
    """[microbatches, tokens]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.vocabulary, (MICROBATCHES, model.tokens), generator=generator)


def processes_of(name: str) -> int:
    """Of a case."""
    return math.prod(CASES[name].get(axis, 1) for axis in ("pp", "dp", "tp", "cp"))


def measure(names: list[str], model: Model, torch_device: str) -> list[dict[str, Any]]:
    """Of cases with as many processes, which they share: to start them takes longer than most cases."""
    cases, processes = [CASES[name] for name in names], processes_of(names[0])
    found = launch(run_all, model, cases, processes=processes, torch_device=torch_device, preload=("memory",))
    return [
        {"case": name, "devices": list(compare(model, CASES[name], of_case))}
        for name, of_case in zip(names, zip(*found, strict=True), strict=True)
    ]


def compare(model: Model, options: dict[str, Any], found: Sequence[tuple[int, int, int]]) -> Iterator[dict[str, int]]:
    """Every device, measured and estimated."""
    for one in estimate(describe(model.config("ep" in options)), recipe_of(model, options)).devices:
        yield {
            "device": one.device,
            "allocated": max(allocated for device, allocated, _ in found if device == one.device),
            "reserved": max(reserved for device, _, reserved in found if device == one.device),
            "estimated": one.peak_allocated,
            "estimated_reserved": one.peak_reserved,
        }


def error(estimated: int, measured: int) -> str:
    """For the table."""
    return percent(estimated / measured - 1) if measured else "-"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for trying it only")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="default: all")
    for name, default in (("layers", 16), ("hidden-size", 1024), ("tokens", 2048), ("vocabulary", 65536)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="of the model, or of a sequence")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="all figures")
    given = parser.parse_args()
    device = device_of(given)
    model = Model(layers=given.layers, hidden_size=given.hidden_size, tokens=given.tokens, vocabulary=given.vocabulary)
    results = Results(given, device)
    rows = [["case", "device", "allocated MiB", "estimated", "error", "reserved MiB", "estimated", "error"]]
    for processes, names in itertools.groupby(sorted(given.cases, key=processes_of), processes_of):
        together = list(names)
        progress(f"{processes} processes: {', '.join(together)}")
        cases = attempt(partial(measure, together, model, given.device))
        if isinstance(cases, Failure):
            raise SystemExit(cases.reason)
        for case in cases:
            results.add(case)
            for one in case["devices"]:
                rows.append([case["case"], str(one["device"])])
                for kind, estimated in (("allocated", "estimated"), ("reserved", "estimated_reserved")):
                    measured, expected = one[kind], one[estimated]
                    rows[-1] += [f"{measured / MIB:.1f}", f"{expected / MIB:.1f}", error(expected, measured)]
    print(f"\n{results.about}\n{table(rows)}")


if __name__ == "__main__":
    main()
