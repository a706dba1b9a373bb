"""How long does every pass of a model take on this GPU? Writes cost files for `evenpipe simulate --costs`.

    python benchmarks/gpu/pass_times.py --costs FOLDER [--models 4B Llama-3-8B ...] [--tokens 2048 4096]
                                        [--output FILE.json]
    python benchmarks/gpu/pass_times.py --device cpu --models tiny --tokens 32 --costs FOLDER    to try it

F, B, I and W are those of a few real layers in a pipeline of one device, as `evenpipe profile` measures them, with
backwards whole and split; per layer, and times the layers of a stage in the cost files. S, C, T, E and G are those of
one of p devices by themselves (see shards.py). For every model, number of tokens, vocabulary, number of devices (and 1:
whole vocabulary layers) and both modes there is a cost file. It has one stage per device and nothing of transfers,
since there is one GPU:

    evenpipe simulate --schedule 1f1b --devices 8 --microbatches 32 --vocabulary vocab-2 --costs FILE.toml

Printed are milliseconds, of one layer and of the vocabulary passes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from models import DEFAULT, MODELS, TOKENS, Model, costs_name
from passes import MODES, pass_seconds, random_batches, random_weight
from timing import Results, arguments, device_of, milliseconds, table

from evenpipe.costs import write_costs
from evenpipe.runtime import launch
from evenpipe.schedule import Costs, even_split
from evenpipe.train.config import Config, DataConfig, ModelConfig, PipelineConfig, TokenizerConfig
from evenpipe.train.profile import measure as measure_passes
from evenpipe.train.profile import profile_of
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
    found = launch(measure_passes, config, steps, given.warm_up, ("split",), processes=1, torch_device=given.device)[0]
    costs = profile_of([found]).costs
    seconds = {}
    for kind in STAGE_PASSES:
        times = getattr(costs, kind)
        assert isinstance(times, tuple)
        seconds[kind] = sum(times) / given.layers
    return seconds


def vocabulary_seconds(
    model: Model, tokens: int, vocabulary: int, given: argparse.Namespace, device: torch.device
) -> Iterator[tuple[int, str, dict[str, float]]]:
    """Devices, mode, and seconds of S, C, T, E and G of one of them."""
    weight = random_weight(vocabulary, model.hidden_size, torch.bfloat16, device)
    batches = random_batches(BATCHES, tokens, weight)
    options = LossOptions(kernels=given.kernels)
    for devices in sorted({1, *(size for sizes in model.devices.values() for size in sizes)}):
        for mode in MODES:
            yield devices, mode, pass_seconds(weight, devices, mode, options, batches, given=given)


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
    """Case by case; each writes its cost file. about: machine and versions."""
    layer = layer_seconds(model, tokens, given)
    for rows in model.vocabularies:
        for devices, mode, seconds in vocabulary_seconds(model, tokens, rows, given, device):
            name = costs_name(model.name, tokens, rows, devices, mode)
            case = {"model": model.name, "tokens": tokens, "vocabulary": rows, "devices": devices, "mode": mode}
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
    given = parser.parse_args()
    device = device_of(given)
    given.costs.mkdir(parents=True, exist_ok=True)
    results = Results(given, device)
    for name in given.models:
        cases = []
        for tokens in given.tokens:
            for case in measure(MODELS[name], tokens, given, device, results.about):
                results.add(case)
                cases.append(case)
        print(f"\n{table([HEADER, *map(line, cases)])}", flush=True)
    print(f"wrote {len(results.cases)} cost files to {given.costs}")


if __name__ == "__main__":
    main()
