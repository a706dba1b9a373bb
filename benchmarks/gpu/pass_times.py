"""How long does every pass of a model take on this GPU? Writes cost files for `evenpipe simulate --costs`.

    python benchmarks/gpu/pass_times.py --costs FOLDER --models 4B 7B [--tokens 2048 4096] [--output FILE.json]
    python benchmarks/gpu/pass_times.py --device cpu --models tiny --tokens 32 --costs FOLDER    to try it

All models, which are the default, are about 200 cases. Where a command may not take long, run one for each of
--models 4B 7B, 10B 21B, 30B, and Llama-3-8B Llama-3-70B Qwen3-8B; --costs may be the same folder, --output not.

F, B, I and W are those of a few real layers in a pipeline of one device, as `evenpipe profile` measures them, with
backwards whole and split; per layer, and times the layers of a stage in the cost files. S, C, T, E and G are those of
one of p devices by themselves (see shards.py). For every model, number of tokens, vocabulary, number of devices (and 1:
whole vocabulary layers) and both modes there is a cost file. It has one stage per device and nothing of transfers,
since there is one GPU:

    evenpipe simulate --schedule 1f1b --devices 8 --microbatches 32 --vocabulary vocab-2 --costs FILE.toml

Printed are milliseconds, of one layer and of the vocabulary passes. Labels are drawn as in text, where the device that
is measured, the first, is the busiest: a pipeline is as fast as that. A case of which a pass fails has no cost file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # shards of all sizes share the memory

import torch
from models import DEFAULT, MODELS, TOKENS, Model, costs_name
from passes import LABELS, MODES, pass_seconds, random_batches, random_weight
from timing import (
    Failure,
    Results,
    arguments,
    attempt,
    attempts,
    clean_up,
    device_of,
    milliseconds,
    progress,
    table,
)

from evenpipe import launch
from evenpipe.costs import write_costs
from evenpipe.schedule import Costs, even_split
from evenpipe.train.config import Config
from evenpipe.train.input_sections import DataConfig, ModelConfig, TokenizerConfig
from evenpipe.train.pipeline_sections import PipelineConfig
from evenpipe.train.profile import measure_config, profile_of
from evenpipe.vocabulary import LossOptions

ROWS = 1024
"""Of the vocabulary while layers are measured: its passes are not taken from there."""
MICROBATCHES = 4
BATCHES = 3
STAGE_PASSES = ("F", "B", "I", "W")


def layer_seconds(model: Model, tokens: int, given: argparse.Namespace) -> dict[str, float]:
    """F, B, I and W of one layer."""
    shape = model.config(ROWS, tokens, given.layers).to_diff_dict()
    config = Config(
        model=ModelConfig(architecture=shape.pop("model_type"), config=shape, self_check=False),
        data=DataConfig(corpus="python-standard-library", sequence_length=tokens),
        tokenizer=TokenizerConfig(vocabulary_size=ROWS),
        pipeline=PipelineConfig(processes=1, microbatches=MICROBATCHES, compile_layers=given.compile),
    )
    steps = max(1, given.repetitions // MICROBATCHES)
    clean_up()  # another process needs the memory
    found = launch(measure_config, config, steps, given.warm_up, ("split",), processes=1, torch_device=given.device)[0]
    costs = profile_of([found]).costs
    seconds = {}
    for kind in STAGE_PASSES:
        times = getattr(costs, kind)
        assert isinstance(times, tuple)
        seconds[kind] = sum(times) / given.layers
    return seconds


def vocabulary_seconds(
    model: Model, tokens: int, vocabulary: int, given: argparse.Namespace, device: torch.device
) -> Iterator[tuple[int, str, dict[str, float] | Failure]]:
    """Devices, mode, and seconds of S, C (0 with two barriers), T, E and G of one of them; or why one is not known."""
    weight = random_weight(vocabulary, model.hidden_size, torch.bfloat16, device)
    batches = random_batches(BATCHES, tokens, weight, drawn=given.labels)
    options = LossOptions(kernels=given.kernels)
    for devices in sorted({1, *(size for sizes in model.devices.values() for size in sizes)}):
        for mode in MODES:
            found = attempt(partial(pass_seconds, weight, devices, mode, options, batches, given=given))
            if isinstance(found, Failure):
                yield devices, mode, found
                continue
            timings, failures = found
            reasons = "; ".join(f"{kind}: {failure.reason}" for kind, failure in failures.items())
            seconds = {"C": 0.0, **{kind: timing.seconds for kind, timing in timings.items()}}
            yield devices, mode, Failure(reasons) if reasons else seconds


def costs_of(layer: dict[str, float], vocabulary: dict[str, Any], layers: int, devices: int) -> Costs:
    """Of a pipeline with one stage per device."""
    split = even_split(layers, devices)
    even = len(set(split)) == 1
    times: dict[str, Any] = {
        kind: seconds * split[0] if even else tuple(seconds * count for count in split)
        for kind, seconds in layer.items()
    }
    return Costs(**times, **vocabulary)


def measure(
    model: Model, tokens: int, given: argparse.Namespace, device: torch.device, about: str
) -> Iterator[dict[str, Any]]:
    """Case by case; each writes its cost file, or says why there is none. about: machine and versions."""
    layer = layer_seconds(model, tokens, given)
    for rows in model.vocabularies:
        for devices, mode, seconds in vocabulary_seconds(model, tokens, rows, given, device):
            name = costs_name(model.name, tokens, rows, devices, mode)
            case = {"model": model.name, "tokens": tokens, "vocabulary": rows, "devices": devices, "mode": mode}
            if isinstance(seconds, Failure):
                yield {**case, "reason": seconds.reason}
                continue
            notes = [
                f"Seconds per microbatch of one sequence of {tokens} tokens, {model.name} with {rows} rows on {devices}"
                f" devices, {mode}, measured on {about}.",
                "Transfers take no time here: passes were measured on a single device.",
            ]
            write_costs(costs_of(layer, seconds, model.layers, devices), given.costs / name, notes)
            yield {**case, "layer_seconds": layer, "vocabulary_seconds": seconds, "file": name}


VOCABULARY_PASSES = ("S", "C", "T", "E", "G")
HEADER = ["model", "tokens", *STAGE_PASSES, "rows", "p", "mode", *VOCABULARY_PASSES]


def line(case: dict[str, Any]) -> list[str]:
    """Of the table."""
    return [
        case["model"],
        str(case["tokens"]),
        *(milliseconds(case["layer_seconds"][kind]) for kind in STAGE_PASSES),
        str(case["vocabulary"]),
        str(case["devices"]),
        case["mode"],
        *(milliseconds(case["vocabulary_seconds"][kind]) for kind in VOCABULARY_PASSES),
    ]


def main() -> None:
    assert __doc__ is not None
    parser = arguments(__doc__)
    parser.add_argument("--costs", type=Path, required=True, metavar="FOLDER", help="for the cost files")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(DEFAULT))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="N", help="of a microbatch")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="that are measured (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="layers go through torch.compile")
    parser.add_argument("--kernels", choices=("auto", "torch", "triton"), default="auto", help="of S and T")
    parser.add_argument("--labels", choices=LABELS, default="text", help="how they are drawn (default: %(default)s)")
    given = parser.parse_args()
    device = device_of(given)
    given.costs.mkdir(parents=True, exist_ok=True)
    results = Results(given, device)
    written = 0
    for name in given.models:
        cases = []
        for tokens in given.tokens:
            progress(f"{name}, {tokens} tokens: layers, then the vocabulary")
            for found in attempts(measure(MODELS[name], tokens, given, device, results.about)):
                failed = {"model": name, "tokens": tokens}
                case = {**failed, "reason": found.reason} if isinstance(found, Failure) else found
                results.add(case)
                if "reason" in case:
                    progress(f"did not run: {', '.join(f'{key} {value}' for key, value in case.items())}")
                else:
                    cases.append(case)
                    progress("  ".join(line(case)))
        print(f"\n{table([HEADER, *map(line, cases)])}", flush=True)
        written += len(cases)
    print(f"wrote {written} cost files to {given.costs}")


if __name__ == "__main__":
    main()
