"""Options that several commands have, each described once, and how values are read."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from evenpipe.cli.declarations import Count
from evenpipe.errors import InputError
from evenpipe.given import plain
from evenpipe.words import refused, show

if TYPE_CHECKING:
    from evenpipe.compare.cases import Case
    from evenpipe.model import Description
    from evenpipe.schedule import Costs
    from evenpipe.schedule.placement import Edge

SEQUENCE = 4096
"""Default tokens per sequence, if the model accepts that many."""
MOST_GPUS = 100_000
"""Largest accepted number of GPUs; this many can already be arranged in thousands of ways."""
Gpus = Annotated[int, typer.Option(min=1, max=MOST_GPUS)]
LARGEST = 10_000_000
"""Largest devices x microbatches x stages per device x slices: some thirty million passes, an hour of simulation."""
BALANCED = "balanced"
"""Default of --vocabulary in every command, as of `pipeline.vocabulary`."""
MODES = "first-last, redistribute, interlaced, vocab-1, vocab-2 or balanced (= vocab-2)"

COMMON = f"""
--model MODEL              hub name, folder or config.json
--gpus N                   number of GPUs
--hardware NAME|FILE.toml  A100-40G, A100-80G, H100-80G, H100-94G, H100-96G (at 500 W), H100-NVL, H200, B200, GB200,
                           GB300, or a file of evenpipe profile --hardware
--gpu-memory SIZE          memory of each GPU, such as 80GiB; default: that of --hardware
--sequence TOKENS          length of a sequence; default: {SEQUENCE}, or the longest
--kernels NAME             transformers (as evenpipe train runs it), compiled (the same with compile_layers), fused,
                           megatron, transformer-engine or fsdp, and changes to it, as in
                           megatron,attention=unfused
--skew S                   with ep: tokens of the busiest expert rank over the mean; 1 if routers choose evenly, up to 2
                           early in training

--schedule NAME|FILE.csv   name of a schedule, or file with an order or program
--compare NAME,...         several schedules side by side, after --schedule if there is one; all: every name
--devices P                devices of the pipeline; default for a file: as in the file
--microbatches M           microbatches of the step; default for a file: as in the file
--slices N                 slices of equal time that every sequence is cut into
--stages-per-device V      stages per device, for schedules that leave a choice
--group-size G             microbatches that a device takes in turn (some schedules)
--max-in-flight K[,K...]    maximum number of stage activations on a device: one number, or one per device
--edges S>T,...            edges between the stages of a file, as in '0>1,0>2,1>3,2>3'; default: a chain
--vocabulary MODE,...      {MODES}, one or several; default: {BALANCED}; for a file: as it stands
--offload CHOICE           activations for the host: scheduled (as the order says), free (all that lower the peak
                           without costing time), all (enough to reach the lowest possible peak), a number (enough to
                           stay below that many bytes, with the sizes of --costs), none
--data-parallel            several replicas: they sum gradients, or also share parameters and gather them; default: one
--reshard                  with shard: free parameters between passes, and gather them again
--prefetch N               with shard: gather parameters this many stages ahead; default: all at the start; 1 with
                           --reshard
--costs FILE               TOML or JSON file with times and bytes; default: equal times
--json                     print one JSON object and nothing else
"""
"""Descriptions for docstrings that do not have them."""

COSTS_HELP = """
Costs: a TOML or JSON file with times in one unit: F, B (or I and W) per stage; S, C, T, E, G per device; p2p,
collectives, bytes, ... A number applies to all stages or devices, a list has one number for each. Without a file:
F = I = W = 1 (B = 2) for all stages of a device, S = T = 0.4 per device, all other times 0.

A step is the same work in every schedule. F, B, I, W and bytes of a file describe a stage of the *first* schedule: with
twice as many stages per device, each stage has half. A list can be merged (8 stages into 4) but not divided: give it
for the schedule with the most stages. The vocabulary layers are part of every step: S, C, T, E and G are passes, or
without sharding work of the first and last stage: S + C + T of all devices in three equal parts with F, I and W of the
last stage, E with F and G with W of the first stage."""


def written(name: str) -> str:
    """The option, as the user writes it, for a parameter name."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def words(name: str, text: str, expected: str = "one value, or several separated by commas") -> tuple[str, ...]:
    """The values of an option. Raises InputError if it has none."""
    values = tuple(word.strip() for word in text.split(",") if word.strip())
    if not values:
        raise refused(written(name), text, expected)
    return values


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """The numbers of an option. Raises InputError for anything else."""
    try:
        return tuple(int(word) for word in words(name, text))
    except ValueError:
        raise refused(written(name), text, "one or several whole numbers such as 1,2,4") from None


def limits(name: str, text: str | None) -> float | list[float] | None:
    """One limit, or several separated by commas. Raises InputError."""
    if text is None:
        return None
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        raise refused(written(name), text, "a number, or one per device such as 8,8,6,4") from None
    for value in values:
        check_positive(written(name), value)
    return values[0] if len(values) == 1 else values


def check_positive(name: str, value: float) -> None:
    """Raise InputError for a number that is not above 0 and finite."""
    if not 0 < value < math.inf:
        raise InputError(f"{name} is {value:g}; it must be a finite number above 0")


def bytes_of(gpu_memory: str | None) -> int | None:
    """The bytes of `--gpu-memory`. Raises InputError for anything else than a size."""
    from evenpipe.sizes import parse_size

    return None if gpu_memory is None else parse_size(gpu_memory, "--gpu-memory")


def check_output(path: Path | None, suffix: str) -> None:
    """Raise InputError if the file of `--output` cannot be written, or could not be read again by its name."""
    if path is None:
        return
    if path.suffix != suffix:
        raise InputError(f"--output is {show(str(path))}; it must end in {suffix}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"'{plain(path)}' cannot be written: there is no folder '{plain(path.parent)}'")


def belongs_to_configuration(option: str, model: str) -> InputError:
    """The error about an option given with a configuration file, which already contains that value."""
    name = option.replace("_", "-")
    return InputError(f"--{name} is for models given by name, folder or config.json, but {plain(model)} has its own")


def read_model(text: str) -> Description:
    """The model of `--model` without weights, and without the quantisation of a source that has one. Raises
    InputError if it is not a causal language model."""
    from evenpipe.model import describe
    from evenpipe.model.config import read_config

    if Path(text).suffix == ".json" and not Path(text).is_file():
        raise InputError(f"the model is '{plain(text)}', but there is no such file")
    config = read_config(text)
    if not getattr(config, "quantization_config", None):
        return describe(text)
    del config.quantization_config
    note = "the weights of this model are quantised, and are taken as if they were not: those cannot be trained"
    print(f"evenpipe: {note}", file=sys.stderr)
    return describe(config)


def read_costs(path: str | None) -> Costs | None:
    """The costs in the file of `--costs`, None without it. Raises InputError if they are not valid."""
    from evenpipe.schedule.files import read_costs

    return None if path is None else read_costs(path)


def read_edges(text: str | None) -> tuple[Edge, ...]:
    """The value of `--edges`. Raises InputError if it is not valid."""
    from evenpipe.schedule.placement import edges_of_text

    return () if text is None else edges_of_text(text)


def read_offload(text: str) -> str | float:
    """The value of `--offload`. Raises InputError if it is not valid."""
    from evenpipe.schedule.planning import check_offload

    value: str | float = text
    with contextlib.suppress(ValueError):
        value = float(text)
    return check_offload(value)


def options_of_generators(stages_per_device: int | None, group_size: int | None, limit: str | None) -> dict[str, Any]:
    """The options of generators that are set."""
    options: dict[str, Any] = {"stages_per_device": stages_per_device, "group_size": group_size}
    options["max_in_flight"] = limits("max_in_flight", limit)
    return {name: value for name, value in options.items() if value is not None}


def refuse_too_large(*sizes: int | None) -> None:
    """Raise InputError for a size that would take hours, such as a mistyped number."""
    size = math.prod(value or 1 for value in sizes)
    if size > LARGEST:
        raise InputError(
            f"devices x microbatches x stages per device x slices is {size}, too many to simulate; it must be at most"
            f" {LARGEST}"
        )


# --- schedules side by side


def schedules_help() -> str:
    """Help text with one line per schedule."""
    from evenpipe.schedule.generators import SCHEDULES
    from evenpipe.schedule.registry import describe

    lines = [f"  {name:12s}{describe(name)}" for name in SCHEDULES]
    return "\n".join(["schedules:", *lines])


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOptions:
    """Which schedules, at which size and with which costs."""

    schedule: str | None = None
    compare: str | None = None
    devices: Count | None = None
    microbatches: Count | None = None
    stages_per_device: Count | None = None
    group_size: Count | None = None
    max_in_flight: str | None = None
    slices: Count | None = None
    edges: str | None = None
    vocabulary: str | None = None
    offload: str = "scheduled"
    data_parallel: Literal["replicate", "shard"] | None = None
    reshard: bool = False
    prefetch: int | None = None
    costs: str | None = None

    def cases(self) -> list[Case]:
        """The cases, planned and simulated. Raises InputError."""
        from evenpipe.compare.cases import plan_cases
        from evenpipe.recipe.parallelism import Parallelism
        from evenpipe.schedule import SCHEDULES

        options = options_of_generators(self.stages_per_device, self.group_size, self.max_in_flight)
        names = [] if self.schedule is None else [self.schedule]
        for name in filter(None, map(str.strip, (self.compare or "").split(","))):
            names += SCHEDULES if name == "all" else [name]
        if not names:
            raise InputError("--schedule is missing; it must be a name or FILE.csv; --compare takes several")
        for name in names:
            _refuse_strange(name, SCHEDULES)
        for option, value in (("--devices", self.devices), ("--microbatches", self.microbatches)):
            if value is None and not any(name.endswith(".csv") for name in names):
                raise InputError(f"{option} is missing; it must be a whole number of at least 1")
        refuse_too_large(self.devices, self.microbatches, self.stages_per_device, self.slices)
        kind, modes = self.data_parallel, self.vocabulary
        replicas = Parallelism(dp=2, data_parallel=kind or "replicate", reshard=self.reshard, prefetch=self.prefetch)
        return plan_cases(
            list(dict.fromkeys(names)),
            devices=self.devices,
            microbatches=self.microbatches,
            vocabularies=() if modes is None else words("vocabulary", modes, f"one or several of {MODES}"),
            costs=read_costs(self.costs),
            options=options,
            offload=read_offload(self.offload),
            slices=self.slices,
            edges=read_edges(self.edges),
            replicas=None if kind is None else replicas,
        )


def _refuse_strange(name: str, schedules: Mapping[str, Any]) -> None:
    """Raise InputError for a value that is neither the name of a schedule nor of a CSV file."""
    from evenpipe.schedule.registry import options_of

    if name in schedules or name.endswith(".csv"):
        return
    if "," in name:
        raise refused("--schedule", name, f"one schedule; --compare {plain(name)} takes several")
    if Path(name).suffix or Path(name).is_file():
        raise refused("--schedule", name, "the name of a schedule, or of a file that ends in .csv")
    options_of(name)  # raises, with the nearest name
