"""`evenpipe estimate --model MODEL [--dp --tp --pp --cp ...] [--json]`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from evenpipe.cli.model_argument import add_skew, read_model
from evenpipe.cli.printing import say, say_json
from evenpipe.cli.schedule_arguments import add_json, add_offload, add_options, offload, options, refuse_too_large
from evenpipe.cli.values import check_output, memory, whole_numbers
from evenpipe.errors import InputError
from evenpipe.given import write_text

if TYPE_CHECKING:
    from evenpipe.costs.hardware import Hardware
    from evenpipe.memory.estimate import Estimate
    from evenpipe.memory.paper import PaperEstimate
    from evenpipe.memory.states import Dtypes
    from evenpipe.model import Description
    from evenpipe.recipe.recipe import Recipe

SEQUENCE = 4096
"""Default tokens per sequence, if the model takes as many."""

AXES = {
    "dp": "replicas (default: 1)",
    "ep": "replicas that share the experts of a layer (default: 1)",
    "tp": "tensor parallelism (default: 1)",
    "cp": "context parallelism (default: 1)",
    "pp": "devices of a pipeline (default: 1)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the layout, the schedule, the kernels and the GPU."""
    parser.add_argument("--model", metavar="MODEL", required=True, help="hub name, folder or config.json")
    _add_layout(parser.add_argument_group("layout: GPUs = dp x tp x cp x pp"))
    _add_batch(parser.add_argument_group("batch and schedule"))
    _add_what_runs(parser.add_argument_group("what runs"))
    card = parser.add_argument_group("the card")
    card.add_argument("--gpu-memory", metavar="SIZE", help="memory of one GPU, such as 80GiB")
    card.add_argument(
        "--hardware", metavar="NAME|FILE.toml", help="A100-40G, A100-80G, H100-80G, H200, B200, or a measured file"
    )
    card.add_argument("--strict", action="store_true", help="exit with 1 if it is at risk, too")
    parser.add_argument(
        "--compare-to-paper", action="store_true", help="also print the estimate by the formula of arXiv 2411.06465"
    )
    parser.add_argument("-o", "--output", metavar="FILE.svg", help="also draw the memory of each device")
    add_json(parser)
    parser.epilog = (
        "Estimates the peak memory of every device from the config. Tensors are counted one by one along the\n"
        "schedule; the memory of the driver, communicators and the allocator is a range.\n\n"
        "fits: even at the upper end of that range. does not fit: not even at the lower end. at risk:\n"
        "between them.\n\n"
        "exit codes: 0 it fits, is at risk, or no GPU is given; 1 it does not fit, or with --strict is at risk;\n"
        "2 the input is wrong"
    )


def _add_layout(layout: argparse._ArgumentGroup) -> None:
    for name, words in AXES.items():
        layout.add_argument(f"--{name}", metavar="N", type=int, default=1, help=words)
    layout.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        default=0,
        help="shard over dp x cp: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters",
    )
    layout.add_argument(
        "--no-sequence-parallel", action="store_true", help="with tp, keep norms and residuals whole on every GPU"
    )
    layout.add_argument(
        "--context-exchange",
        choices=("keys", "heads"),
        default="keys",
        help="context parallelism exchanges keys and values, or heads for tokens (default: %(default)s)",
    )
    add_skew(layout)
    layout.add_argument("--layers-per-stage", metavar="N,N,...", help="one per stage (default: an even split)")


def _add_batch(batch: argparse._ArgumentGroup) -> None:
    batch.add_argument("--sequence", metavar="TOKENS", type=int, help=f"length of a sequence (default: {SEQUENCE})")
    batch.add_argument("--microbatch-size", metavar="N", type=int, default=1, help="sequences (default: 1)")
    batch.add_argument(
        "--slices", metavar="N", type=int, default=1, help="parts in which a sequence flows through the pipeline"
    )
    batch.add_argument("--microbatches", metavar="M", type=int, help="of a step and replica (default: 4 per device)")
    batch.add_argument("--schedule", metavar="NAME|FILE.csv", default="1f1b", help="default: %(default)s")
    add_options(batch)
    batch.add_argument(
        "--vocabulary",
        metavar="MODE",
        default="balanced",
        help="first-last, redistribute, interlaced, vocab-1, vocab-2 or balanced (= vocab-2, the default)",
    )
    add_offload(batch)


def _add_what_runs(what: argparse._ArgumentGroup) -> None:
    what.add_argument(
        "--kernels",
        metavar="NAME",
        default="transformers",
        help="transformers (as evenpipe train runs it, the default), fused, megatron, transformer-engine",
    )
    what.add_argument("--checkpointing", metavar="CHOICE", default="none", help="none (default), selective or full")
    what.add_argument(
        "--compute-dtype", choices=("bf16", "fp16", "fp32"), help="default: bf16, and fp32 on the hardware of a CPU"
    )
    what.add_argument("--gradient-dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    what.add_argument("--master-dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    what.add_argument("--moment-dtype", choices=("fp32", "bf16", "fp16", "fp8"), default="fp32")
    what.add_argument(
        "--optimizer",
        choices=("adamw", "muon", "adafactor", "sgd"),
        default="adamw",
        help="optimizer whose state is counted (default: %(default)s); sgd with momentum",
    )
    what.add_argument(
        "--offload-optimizer",
        metavar="SHARE",
        type=float,
        default=0.0,
        help="share of the optimizer state in host memory",
    )
    what.add_argument(
        "--foreach-optimizer", action="store_true", help="the optimizer copies all parameters during its step"
    )
    what.add_argument(
        "--traced",
        action="store_true",
        help="run the stages on tensors without storage instead of using closed forms",
    )


def run(arguments: argparse.Namespace) -> int:
    """Estimate and print."""
    from evenpipe.costs.hardware import find_hardware
    from evenpipe.memory import estimate_report
    from evenpipe.memory.estimate import estimate

    if arguments.output is not None:
        check_output(Path(arguments.output), ".svg", "the picture")
    memory_bytes = memory(arguments)
    hardware = None if arguments.hardware is None else find_hardware(arguments.hardware)
    arguments.devices = arguments.pp
    refuse_too_large(arguments)
    dtypes = _dtypes(arguments, hardware)
    description = read_model(arguments.model)
    recipe = _recipe(arguments, description.maximum_length)
    split = None if hardware is None else _split_of_run(arguments, description, recipe, hardware, dtypes.compute)
    found = estimate(
        description,
        recipe if split is None else replace(recipe, layers_per_stage=split),
        kernels=arguments.kernels,
        dtypes=dtypes,
        hardware=hardware,
        memory=memory_bytes,
        optimizer=arguments.optimizer,
        offloaded=arguments.offload_optimizer,
        foreach=arguments.foreach_optimizer,
        traced=arguments.traced,
        skew=arguments.skew,
    )
    found = replace(found, schedule=arguments.schedule)
    paper = _paper(description, found) if arguments.compare_to_paper else None
    if arguments.output is not None:
        _draw(found, arguments)
    if arguments.json:
        values = {"model": arguments.model, **found.to_dict()}
        if paper is not None:
            values["paper"] = {"states": paper.states, "activations": paper.activations, "total": paper.total}
        say_json(values)
    else:
        say(estimate_report.text(description, found, paper))
        if arguments.output is not None:
            say(f"wrote {arguments.output}")
    bad = ("does not fit", "at risk") if arguments.strict else ("does not fit",)
    return 1 if found.verdict in bad else 0


def _recipe(arguments: argparse.Namespace, longest: int | None) -> Recipe:
    """The recipe of the arguments; `longest`: most tokens of a sequence in the model."""
    from evenpipe.recipe.given_schedule import MICROBATCHES_PER_DEVICE
    from evenpipe.recipe.offload import OffloadOptions
    from evenpipe.recipe.parallelism import DATA_PARALLEL
    from evenpipe.recipe.recipe import Recipe
    from evenpipe.schedule import generate

    split, sequence = arguments.layers_per_stage, arguments.sequence
    if sequence is None:
        sequence = min(SEQUENCE, longest or SEQUENCE)
    elif sequence < 1:
        raise InputError(f"sequence is {sequence}, expected a whole number of at least 1")
    schedule, given = arguments.schedule, options(arguments)
    if schedule.endswith(".csv"):  # its passes; transfers are placed anew
        count = arguments.microbatches or MICROBATCHES_PER_DEVICE * arguments.pp
        schedule, given = generate(schedule, arguments.pp, count, **given), {}
    alike = (*AXES, "context_exchange", "microbatches", "microbatch_size", "slices", "vocabulary")
    return Recipe.of(
        **{name: getattr(arguments, name) for name in alike},
        checkpointing=arguments.checkpointing,
        data_parallel=DATA_PARALLEL[arguments.zero],
        sequence_parallel=not arguments.no_sequence_parallel,
        sequence_length=sequence,
        schedule=schedule,
        schedule_options=given,
        offload=OffloadOptions(activations=offload(arguments)),
        layers_per_stage=None if split is None else whole_numbers("layers-per-stage", split),
    )


def _split_of_run(
    arguments: argparse.Namespace, description: Description, recipe: Recipe, hardware: Hardware, dtype: str
) -> tuple[int, ...] | None:
    """The layers of each stage if a run takes others on this GPU than those that its times suggest."""
    from evenpipe.costs.hardware import known_gpu
    from evenpipe.plan.problem import EVENPIPE, problem_of_run
    from evenpipe.plan.splits import split_that_fits

    ours = arguments.kernels == EVENPIPE and arguments.optimizer == "adamw"
    if known_gpu(hardware.name) is None or not ours or recipe.vocabulary != "redistribute":
        return None
    others = {"memory_bytes": memory(arguments), "dtype": dtype, "skew": arguments.skew}
    problem = problem_of_run(description, hardware, recipe, **others)
    return split_that_fits(problem, recipe, arguments.offload_optimizer)


def _dtypes(arguments: argparse.Namespace, hardware: Hardware | None) -> Dtypes:
    from evenpipe.memory.states import Dtypes

    return Dtypes(
        compute=arguments.compute_dtype or ("fp32" if hardware and hardware.torch_device == "cpu" else "bf16"),
        gradients=arguments.gradient_dtype,
        masters=arguments.master_dtype,
        moments=arguments.moment_dtype,
    )


def _paper(description: Description, found: Estimate) -> PaperEstimate:
    from evenpipe.memory.paper import paper_estimate, paper_shape
    from evenpipe.memory.states import ELEMENT_BYTES

    return paper_estimate(
        paper_shape(description),
        found.recipe.parallelism,
        sequence=found.settings.sequence,
        microbatch_size=found.settings.microbatch_size,
        stages_per_device=max(len(device.stages) for device in found.devices),
        gradient_bytes=ELEMENT_BYTES[found.settings.dtypes.gradients],
    )


def _draw(found: Estimate, arguments: argparse.Namespace) -> None:
    from evenpipe.draw import Bars, bars_svg

    bars = Bars(f"{found.schedule}, {found.recipe.vocabulary}", tuple(device.terms for device in found.devices))
    text = bars_svg([bars], title=f"Memory of every device: {arguments.model}", limit=found.memory)
    write_text(arguments.output, text)
