"""How much does a balanced vocabulary gain, on this machine?

    python benchmarks/balance.py [--ratios 2 8 20] [--repetitions 5] [--output FILE.json]

For each ratio (cost of the output layer over that of one transformer layer) the same model runs one training step after
the other, in turn, as `first-last`, `redistribute`, `interlaced`, `vocab-1`, `vocab-2`, and in torch's own
`Schedule1F1B`: same processes, same weights, same data, one thread each. Printed are medians:

    step        seconds of a step, the slowest process
    vs first    how many times as fast as first-last
    vs torch    how many times as fast as torch's Schedule1F1B
    predicted   seconds that the simulated order takes, with pass times measured in one process beforehand
    ideal       the same as `vs first` for a pipeline without ramp and communication
    vs redist.  how many times as fast as redistribute
    busy        processor time inside passes of each device, and by how much the busiest exceeds the idlest
    peak        highest resident memory of each process, in a run of its own

Ideal counts the busiest device's work only, layers and output layer. Everything runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from passes import measure_costs
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from transformers import LlamaConfig

import evenpipe
from evenpipe.model import build_stage, describe, fill_parameters, fill_rows, layer_flops
from evenpipe.runtime import Pipeline, launch
from evenpipe.schedule import plan_order, time_order

MODES = ("first-last", "redistribute", "interlaced", "vocab-1", "vocab-2")
TORCH = "torch 1F1B"


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    processes: int
    layers: int
    hidden_size: int
    tokens: int
    """Per microbatch, one sequence."""
    microbatches: int
    repetitions: int
    warm_up: int


def model_config(settings: Settings, ratio: float) -> LlamaConfig:
    """A Llama whose output layer costs `ratio` times one of its layers, in FLOPs."""
    width = settings.hidden_size
    config = LlamaConfig(
        vocab_size=64,  # until it is known how many make the ratio
        hidden_size=width,
        intermediate_size=int(2.75 * width) // 64 * 64,
        num_hidden_layers=settings.layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=settings.tokens,
        tie_word_embeddings=False,
    )
    layer = layer_flops(describe(config), settings.tokens)[0]
    config.vocab_size = round(ratio * layer / (2 * width) / 64) * 64
    return config


# --- torch's own schedule on the same model --------------------------------------------------------------


class TorchStage(nn.Module):
    """An even share of the layers, with the embedding on the first stage and the output layer on the last."""

    def __init__(self, config: LlamaConfig, device: int, devices: int) -> None:
        super().__init__()
        description = describe(config)
        layers = config.num_hidden_layers
        first, last = layers * device // devices, layers * (device + 1) // devices
        self.stage = build_stage(
            description,
            first,
            last,
            is_first=device == 0,
            is_last=device == devices - 1,
            dtype=torch.float32,
            torch_device="cpu",
        )
        fill_parameters(self.stage, description, 0)
        rows, width = config.vocab_size, config.hidden_size
        self.embedding = nn.Embedding(rows, width) if device == 0 else None
        self.head = nn.Linear(width, rows, bias=False) if device == devices - 1 else None
        with torch.no_grad():
            for module, name in ((self.embedding, description.embedding_name), (self.head, description.head_name)):
                if module is not None:
                    module.weight.copy_(fill_rows(description, name, 0, rows, 0))

    def forward(self, value: Tensor) -> Tensor:
        hidden = value if self.embedding is None else self.embedding(value)
        hidden = self.stage(hidden)
        return hidden if self.head is None else self.head(hidden)


class TorchPipeline:
    """torch.distributed.pipelining with Schedule1F1B."""

    def __init__(self, config: LlamaConfig, settings: Settings) -> None:
        device, devices = dist.get_rank(), dist.get_world_size()
        self._first, self._last = device == 0, device == devices - 1
        self._module = TorchStage(config, device, devices)
        stage = PipelineStage(self._module, device, devices, torch.device("cpu"))

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

        self._schedule = Schedule1F1B(stage, settings.microbatches, loss_fn=loss)

    def step(self, ids: Tensor) -> float | None:
        losses: list[Tensor] = []
        arguments = (ids,) if self._first else ()
        target = {"target": ids, "losses": losses} if self._last else {}
        self._schedule.step(*arguments, **target)
        return torch.stack(losses).mean().item() if losses else None

    def zero_grad(self) -> None:
        self._module.zero_grad()


# --- measuring -------------------------------------------------------------------------------------------


def build(mode: str, config: LlamaConfig, settings: Settings) -> Pipeline | TorchPipeline:
    if mode == TORCH:
        return TorchPipeline(config, settings)
    return Pipeline(config, vocabulary=mode, microbatches=settings.microbatches, self_check=False)


def batch(config: LlamaConfig, settings: Settings) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (settings.microbatches, settings.tokens)
    return torch.randint(0, config.vocab_size, shape, generator=generator)


def measure_steps(config: LlamaConfig, settings: Settings) -> dict[str, dict[str, list[Any]]]:
    """Interleaved steps of all arms in one set of processes: seconds, busy seconds and the loss of every step."""
    names = (TORCH, *MODES)
    arms = {name: build(name, config, settings) for name in names}
    ids = batch(config, settings)
    result: dict[str, dict[str, list[Any]]] = {name: {"seconds": [], "busy": [], "loss": []} for name in names}
    for repetition in range(settings.warm_up + settings.repetitions):
        for name, arm in arms.items():
            arm.zero_grad()
            dist.barrier()
            started = time.perf_counter()
            done = arm.step(ids)
            dist.barrier()
            seconds = time.perf_counter() - started
            if repetition < settings.warm_up:
                continue
            figures = result[name]
            figures["seconds"].append(seconds)
            if isinstance(arm, Pipeline):
                figures["busy"].append(done.record.busy)
                figures["loss"].append(done.loss)
            else:
                figures["loss"].append(done)
    return result


def measure_memory(mode: str, config: LlamaConfig, settings: Settings) -> int:
    """Highest resident memory of this process, in bytes, over building and two steps of one arm."""
    arm = build(mode, config, settings)
    ids = batch(config, settings)
    for _ in range(2):
        arm.step(ids)
        arm.zero_grad()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(status["VmHWM"].split()[0]) * 1024


def predict(config: LlamaConfig, settings: Settings) -> dict[str, tuple[float, dict[str, Any]]]:
    """Seconds of a step in the event model, by mode, from pass times measured in this process; and those times."""
    predictions = {}
    for mode in MODES:
        costs = measure_costs(
            config,
            mode,
            devices=settings.processes,
            input_ids=batch(config, settings),
            microbatches=settings.microbatches,
            repetitions=settings.repetitions,
        )
        order = plan_order("1f1b", settings.processes, settings.microbatches, mode, costs)
        times = {kind: getattr(costs, kind) for kind in "FBSCTEG" if getattr(costs, kind)}
        predictions[mode] = (time_order(order, costs).makespan, times)
    return predictions


def ideal(ratio: float, mode: str, settings: Settings) -> float:
    """Work of the busiest device per microbatch, in layers."""
    layers, devices = settings.layers, settings.processes
    if mode in ("first-last", TORCH):
        return -(-layers // devices) + ratio
    if mode == "redistribute":
        return min(max(-(-(layers - last) // max(1, devices - 1)), last + ratio) for last in range(layers + 1))
    return (layers + ratio) / devices


def run_ratio(ratio: float, settings: Settings, *, memory: bool) -> dict[str, Any]:
    config = model_config(settings, ratio)
    predictions = launch(predict, config, settings, processes=1, torch_device="cpu")[0]
    measured = launch(measure_steps, config, settings, processes=settings.processes, torch_device="cpu")
    arms: dict[str, dict[str, Any]] = {}
    for name in (*MODES, TORCH):
        steps = [max(step) for step in zip(*(one[name]["seconds"] for one in measured), strict=True)]
        arm: dict[str, Any] = {
            "step_seconds": statistics.median(steps),
            "steps": steps,
            "losses": [loss for one in measured for loss in one[name]["loss"] if loss is not None][:1],
            "ideal": ideal(ratio, "first-last", settings) / ideal(ratio, name, settings),
        }
        if name != TORCH:
            arm["busy_seconds"] = [statistics.median(one[name]["busy"]) for one in measured]
            arm["predicted_seconds"], arm["pass_seconds"] = predictions[name]
        if memory:
            arm["peak_bytes"] = launch(
                measure_memory, name, config, settings, processes=settings.processes, torch_device="cpu"
            )
        arms[name] = arm
    for arm in arms.values():
        for peer, key in (("first-last", "vs_first_last"), (TORCH, "vs_torch"), ("redistribute", "vs_redistribute")):
            pairs = zip(arms[peer]["steps"], arm["steps"], strict=True)
            arm[key] = statistics.median(one / other for one, other in pairs)
    return {"ratio": ratio, "vocabulary": config.vocab_size, "arms": arms}


def print_ratio(found: dict[str, Any]) -> None:
    print(f"\noutput layer = {found['ratio']:g} transformer layers (vocabulary {found['vocabulary']:,})")
    header = ("", "step s", "predicted", "vs first", "ideal", "vs redist.", "vs torch", "busy s", "spread", "peak MiB")
    print("{:<13}{:>8}{:>11}{:>10}{:>8}{:>12}{:>10}{:>16}{:>8}{:>16}".format(*header))
    for name, arm in found["arms"].items():
        busy = arm.get("busy_seconds", [])
        predicted = arm.get("predicted_seconds")
        print(
            f"{name:<13}{arm['step_seconds']:>8.2f}"
            f"{'' if predicted is None else f'{predicted:.2f}':>11}"
            f"{arm['vs_first_last']:>10.2f}{arm['ideal']:>8.2f}{arm['vs_redistribute']:>12.2f}{arm['vs_torch']:>10.2f}"
            f"{' '.join(f'{value:.2f}' for value in busy):>16}"
            f"{f'{100 * (max(busy) / min(busy) - 1):.1f}%' if busy else '':>8}"
            f"{' '.join(f'{value / 2**20:.0f}' for value in arm.get('peak_bytes', [])):>16}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratios", type=float, nargs="+", default=[2.0, 8.0, 20.0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a microbatch")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--no-memory", action="store_true", help="leave out the runs that measure peak memory")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    given = parser.parse_args()
    settings = Settings(
        processes=given.processes,
        layers=given.layers,
        hidden_size=given.hidden_size,
        tokens=given.tokens,
        microbatches=given.microbatches,
        repetitions=given.repetitions,
        warm_up=given.warm_up,
    )
    results = {
        "settings": asdict(settings),
        "torch": torch.__version__,
        "evenpipe": evenpipe.__version__,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "ratios": [],
    }
    for ratio in given.ratios:
        found = run_ratio(ratio, settings, memory=not given.no_memory)
        results["ratios"].append(found)
        print_ratio(found)
        if given.output is not None:
            given.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
