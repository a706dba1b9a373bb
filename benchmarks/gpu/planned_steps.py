"""Are steps on one GPU as long, and as large, as the planner says before it has measured anything there?

    python benchmarks/gpu/planned_steps.py [--cases llama-3.1-8b mixtral-8x7b] [--output FILE.json]
    python benchmarks/gpu/planned_steps.py --device cpu --hidden-size 64 --tokens 64    to try it

Layers of known models (`examples/models`), as many as a GPU of 80 GB trains, in a pipeline of one device: fp32
parameters, bf16 products, fused AdamW, nothing compiled. Steps are predicted from the data sheet of --hardware, as
`evenpipe plan` does it. Printed are, of the median of some steps,

    step        seconds, measured and predicted, and the error of the prediction
    F, B        milliseconds of the passes of a microbatch, measured and predicted
    rest        milliseconds behind the last pass, measured and predicted; the prediction has clipping before the
                optimizer, which these steps do not have
    MiB         most bytes of torch's allocator, measured and predicted
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # one case uses the memory of another

import torch
from timing import MIB, Failure, Results, attempt, clean_up, device_of, milliseconds, percent, progress, table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from evenpipe import Pipeline, Recipe, initialise_worker
from evenpipe.costs import costs_of
from evenpipe.costs.hardware import find_hardware
from evenpipe.costs.timed_model import pass_costs
from evenpipe.model import describe
from evenpipe.plan.configuration import Configuration
from evenpipe.plan.evaluation import evaluate
from evenpipe.plan.problem import problem_of_run

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
MICROBATCHES = 4
WARM_UP, STEPS, RECORDED = 2, 5, 2
"""Steps that do not count, that are timed, and of which passes are timed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Some layers of a model."""

    model: str
    layers: int
    tokens: int = 8192
    sequences: int = 1
    vocabulary: int | None = None
    """None: the model's own."""
    checkpointing: str = "none"

    @property
    def name(self) -> str:
        """In one line."""
        again = "" if self.checkpointing == "none" else f", {self.checkpointing}"
        return f"{self.model}, {self.layers} layers, {self.sequences} x {self.tokens}{again}"


CASES = (
    Case(model="llama-3.1-8b", layers=4),
    Case(model="llama-3.1-8b", layers=4, tokens=2048, sequences=4),
    Case(model="llama-3.1-8b", layers=2, tokens=32768),
    Case(model="llama-3.1-8b", layers=4, checkpointing="selective"),
    Case(model="llama-3.1-8b", layers=4, checkpointing="full"),
    Case(model="qwen3-8b", layers=4),
    Case(model="gemma-2-2b", layers=6, tokens=4096),
    Case(model="llama-3.1-70b", layers=2, vocabulary=32768),
    Case(model="mixtral-8x7b", layers=2),
    Case(model="qwen3-235b-a22b", layers=1, vocabulary=32768),
)


def config_of(case: Case, hidden_size: int | None) -> PreTrainedConfig:
    """Of transformers; narrow if a width is given."""
    values = json.loads((MODELS / f"{case.model}.json").read_text(encoding="utf-8"))
    values |= {"num_hidden_layers": case.layers}
    if case.vocabulary is not None:
        values["vocab_size"] = case.vocabulary
    if hidden_size is not None:
        values |= {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "vocab_size": 1024}
    return AutoConfig.for_model(**values)


def predicted(config: PreTrainedConfig, recipe: Recipe, hardware: str) -> dict[str, Any]:
    """Seconds and bytes that a plan names."""
    problem = problem_of_run(describe(config), find_hardware(hardware), recipe)
    found = evaluate(problem, Configuration.of(problem, recipe))
    costs = pass_costs(problem, found.configuration.recipe, found.configuration.placement)
    return {
        "seconds": found.seconds,
        "F": costs.F[0],
        "B": costs.B[0],
        "rest": found.end_seconds,
        "bytes": found.devices[0].peak_bytes,
    }


def measured(config: PreTrainedConfig, recipe: Recipe, tokens: int, device: torch.device) -> dict[str, Any]:
    """The same, of real steps."""
    with device:  # which draws weights fast
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    pipeline = Pipeline(model.to("cpu"), recipe=recipe, compute_dtype=torch.bfloat16, self_check=False)
    del model
    optimizer = torch.optim.AdamW(pipeline.parameters(), fused=True)
    seconds, rest, traces = [], [], []
    for number in range(WARM_UP + STEPS + RECORDED):
        record = number >= WARM_UP + STEPS
        if number == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ids = ids_of(recipe, tokens, config.vocab_size, number)
        begun = now(device)
        result = pipeline.step(ids, record_passes=record)
        stepped = now(device)
        optimizer.step()
        pipeline.zero_grad()
        ended = now(device)
        if record:
            traces.append(pipeline.trace(result, schedule="1f1b", step=number))
        elif number >= WARM_UP:
            seconds.append(ended - begun)
            rest.append(ended - stepped)
        if number == WARM_UP + STEPS - 1:
            most = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    pipeline.close()
    costs = costs_of([trace for trace in traces if trace is not None])
    return {
        "seconds": statistics.median(seconds),
        "F": costs.F[0],
        "B": costs.B[0],
        "rest": statistics.median(rest),
        "bytes": most,
    }


def now(device: torch.device) -> float:
    """When the device has done all that it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def ids_of(recipe: Recipe, tokens: int, vocabulary: int, seed: int) -> Tensor:
    """[sequences of a step, tokens]"""
    generator = torch.Generator().manual_seed(seed)
    sequences = recipe.batch.microbatches * recipe.batch.microbatch_size
    return torch.randint(0, vocabulary, (sequences, tokens), generator=generator)


def compare(case: Case, given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure and predict it."""
    progress(case.name)
    config = config_of(case, given.hidden_size)
    tokens = given.tokens or case.tokens
    recipe = Recipe.of(
        schedule="1f1b",
        vocabulary="first-last",
        microbatches=MICROBATCHES,
        microbatch_size=case.sequences,
        sequence_length=tokens,
        layers_per_stage=(case.layers,),
        activation_checkpointing=case.checkpointing,
    )
    return {
        "case": case.name,
        "predicted": predicted(config, recipe, given.hardware),
        "measured": measured(config, recipe, tokens, device),
    }


def line(case: dict[str, Any]) -> list[str]:
    """Of the table."""
    found, said = case["measured"], case["predicted"]
    cells = [case["case"], f"{found['seconds']:.3f}", f"{said['seconds']:.3f}"]
    cells.append(percent(said["seconds"] / found["seconds"] - 1))
    for name in ("F", "B", "rest"):
        cells += [milliseconds(found[name]), milliseconds(said[name])]
    cells += [f"{found['bytes'] / MIB:.0f}", f"{said['bytes'] / MIB:.0f}"]
    return cells


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for trying it only")
    models = sorted({case.model for case in CASES})
    parser.add_argument("--cases", nargs="+", choices=models, default=models, metavar="MODEL", help="default: all")
    parser.add_argument("--hardware", default="H100-80G", help="whose data sheet predicts (default: H100-80G)")
    for name in ("hidden-size", "tokens"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="other than in the models, to try it")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="all figures")
    given = parser.parse_args()
    device = device_of(given)
    initialise_worker(torch_device=device)
    results, rows = Results(given, device), [["case", "step", "predicted", "error"]]
    for name in ("F", "B", "rest", "MiB"):
        rows[0] += [name, "predicted"]
    for case in (one for one in CASES if one.model in given.cases):
        found = attempt(partial(compare, case, given, device))
        if isinstance(found, Failure):
            print(f"{case.name}: {found.reason}")
            continue
        results.add(found)
        rows.append(line(found))
        clean_up()
    print(f"\n{results.about}\n{table(rows)}")


if __name__ == "__main__":
    main()
