"""Do estimates, plans and explanations of the example models stay what they were?

    python benchmarks/golden.py [--only estimates plans explanations] [--models NAME ...]
    python benchmarks/golden.py --write      write them anew: only when figures are meant to change, and the commit
                                             says why

Estimates are of random layouts, schedules, vocabulary modes and kernels of every model in `examples/models`; a draw
that is refused is drawn again. Plans are those of unrestricted searches on `GPUS`, and explanations are of the same
problems. Compared are the bytes of every device, the verdicts, and the names and times of plans.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from evenpipe.costs.hardware import find_hardware
from evenpipe.errors import InputError
from evenpipe.memory.estimate import Estimate, estimate
from evenpipe.memory.model_bytes import ModelBytes
from evenpipe.memory.states import Dtypes
from evenpipe.model import describe
from evenpipe.plan.configuration_search import search_configurations
from evenpipe.plan.explanation import explain
from evenpipe.plan.problem import Problem, problem_of
from evenpipe.plan.ranking import Ranking
from evenpipe.recipe.offload import OffloadOptions
from evenpipe.recipe.parallelism import DATA_PARALLEL
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import SCHEDULES, VocabularyMode

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "examples" / "models"
GOLDEN = ROOT / "benchmarks" / "golden"
CASES = 24
"""Estimates of each model."""
MEMORY = 80 * 2**30
CLOSE = 1e-4
"""Relative difference of bytes that is reported apart from larger ones."""
GPUS = {
    **dict.fromkeys(("gemma-2-2b", "llama-3.1-8b", "nemotron-h-8b", "olmo-3-7b", "qwen3-8b"), 8),
    **dict.fromkeys(("gemma-3-27b", "granite-4.0-h-small", "mixtral-8x7b"), 32),
    **dict.fromkeys(("glm-4.5-air", "gpt-oss-120b", "llama-3.1-70b", "llama-4-scout"), 64),
    **dict.fromkeys(("deepseek-v3", "kimi-k2", "llama-3.1-405b", "qwen3-235b-a22b"), 256),
}
SEQUENCE, SEQUENCES_PER_GPU = 4096, 8

DRAWN: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2, 2, 4, 4, 8),
    "tp": (1, 1, 1, 2, 4, 8),
    "cp": (1, 1, 1, 2, 4),
    "dp": (1, 1, 2, 4, 8),
    "ep": (1, 1, 2, 4, 8),
    "data_parallel": DATA_PARALLEL,
    "context_exchange": ("keys", "heads"),
    "sequence_parallel": (True, True, True, False),
    "microbatch_size": (1, 1, 2, 3, 4),
    "sequence_length": (2048, 4096, 8192),
    "slices": (1, 1, 1, 1, 2),
    "schedule": tuple(SCHEDULES),
    "vocabulary": tuple(VocabularyMode),
    "activation_checkpointing": ("none", "none", "selective", "full"),
    "offload": ("scheduled", "scheduled", "scheduled", "free", "all"),
    "kernels": (*("transformers",) * 4, "fused", "megatron", "transformer-engine"),
    "optimizer": ("adamw", "adamw", "muon", "adafactor", "sgd"),
    "gradients": ("fp32", "fp32", "bf16"),
    "skew": (1.0, 1.0, 1.5),
}
"""Options of an estimate, and what each is drawn from."""
OF_ESTIMATE = ("kernels", "optimizer", "skew")

_models: dict[str, ModelBytes] = {}


def model_bytes(model: str) -> ModelBytes:
    """What all estimates of a model share."""
    if model not in _models:
        _models.clear()
        _models[model] = ModelBytes(describe(MODELS / f"{model}.json"))
    return _models[model]


def estimated(model: str, options: dict[str, Any]) -> Estimate:
    """The estimate of drawn options; errors as `estimate`."""
    given = dict(options)
    others = {name: given.pop(name) for name in OF_ESTIMATE}
    dtypes = Dtypes(gradients=given.pop("gradients"))
    recipe = Recipe.of(**{**given, "offload": OffloadOptions(activations=given["offload"])})
    return estimate(model_bytes(model), recipe, dtypes=dtypes, memory=MEMORY, **others)


def figures_of(result: Estimate) -> dict[str, Any]:
    """What is compared of an estimate."""
    return {
        "layers": list(result.layers_per_stage),
        "verdict": result.verdict,
        "devices": [
            {
                "peak": one.peak_allocated,
                "most": round(one.process.process.high),
                "host": one.host,
                "event": one.binding_event,
                "terms": list(one.terms.values()),
            }
            for one in result.devices
        ],
    }


def drawn_estimates(model: str, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same cases, and as many more draws that are not refused as make `CASES`."""
    dice = random.Random(model)
    cases = [case for case in repeated_estimates(model, before) if "refused" not in case]
    while len(cases) < CASES:
        options = {name: dice.choice(values) for name, values in DRAWN.items()}
        if any(case["options"] == options for case in cases):
            continue
        try:
            cases.append({"options": options, **figures_of(estimated(model, options))})
        except InputError:
            continue
    return cases


def repeated_estimates(model: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same estimates now."""

    def now(options: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"options": options, **figures_of(estimated(model, options))}
        except InputError as error:
            return {"options": options, "refused": str(error)}

    return [now(case["options"]) for case in cases]


def problem(model: str) -> Problem:
    """What is planned and explained of a model."""
    gpus = GPUS[model]
    description = describe(MODELS / f"{model}.json")
    return problem_of(
        description,
        find_hardware("H100-80G"),
        gpus=gpus,
        sequence=SEQUENCE,
        sequences_per_step=gpus * SEQUENCES_PER_GPU,
    )


def planned(model: str, _before: Any = None) -> dict[str, Any]:
    """The three best plans, and the best of every vocabulary mode."""
    found = search_configurations(problem(model), count=3, each_vocabulary=True, workers=1)
    values = Ranking(found, 3).to_dict()
    return {name: values[name] for name in ("gpus", "plans", "vocabulary", "arranging_gain", "rejected")}


def explained(model: str, _before: Any = None) -> dict[str, Any]:
    """The explanation as JSON."""
    return explain(problem(model), model).to_dict()


# --- comparison ---------------------------------------------------------------------------------------------------


def differences_of_estimates(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> Iterator[str]:
    """A line for every estimate that is not what it was."""
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        if old == new:
            continue
        if "refused" in new:
            yield f"{number} is refused: {new['refused']}"
            continue
        apart = max(
            (abs(a["peak"] / b["peak"] - 1) for a, b in zip(new["devices"], old["devices"], strict=True)), default=0.0
        )
        word = "equal peaks, other terms" if not apart else "close" if apart <= CLOSE else "different"
        verdicts = "" if old["verdict"] == new["verdict"] else f", {old['verdict']} -> {new['verdict']}"
        yield f"{number} {word}, {100 * apart:.4f} %{verdicts}: {old['options']}"


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """A line for every value of nested JSON that is not what it was; times may differ by rounding."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in before.keys() | now.keys():
            yield from differences(before.get(name), now.get(name), f"{where}.{name}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for place, pair in enumerate(zip(before, now, strict=True)):
            yield from differences(*pair, f"{where}[{place}]")
    elif isinstance(before, float) and isinstance(now, float) and abs(before - now) <= 1e-9 * abs(before):
        return
    elif before != now:
        yield f"{where}: {before} -> {now}"


def compared(kind: str, model: str, before: Any) -> list[str]:
    """What is not as before."""
    if kind == "estimates":
        return list(differences_of_estimates(before, repeated_estimates(model, before)))
    now = json.loads(json.dumps(MADE[kind](model, before)))
    return sorted(differences(before, now))


MADE: dict[str, Callable[[str, Any], Any]] = {
    "estimates": drawn_estimates,
    "plans": planned,
    "explanations": explained,
}


def file_of(kind: str) -> Path:
    """Where the figures of a kind are."""
    return GOLDEN / f"{kind}.json"


def main() -> int:
    """Compare or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MADE, default=list(MADE), metavar="KIND", help=", ".join(MADE))
    parser.add_argument("--models", nargs="+", choices=sorted(GPUS), default=sorted(GPUS), metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write figures instead of comparing them")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    changed = 0
    with ProcessPoolExecutor(given.workers) as pool:
        for kind in given.only:
            path = file_of(kind)
            before = json.loads(path.read_text()) if path.exists() else {}
            if given.write:
                old = [before.get(model, []) for model in given.models]
                for model, made in zip(given.models, pool.map(MADE[kind], given.models, old), strict=True):
                    before[model] = made
                    path.write_text(json.dumps(dict(sorted(before.items())), separators=(",", ":")) + "\n")
                    print(f"{kind} of {model} written", flush=True)
                continue
            models = [model for model in given.models if model in before]
            kinds = [kind] * len(models)
            for model, lines in zip(models, pool.map(compared, kinds, models, map(before.get, models)), strict=True):
                changed += len(lines)
                print(f"{kind} of {model}: {len(lines)} differences", *lines, sep="\n  ", flush=True)
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
