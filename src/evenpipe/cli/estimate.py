"""`evenpipe estimate --model MODEL [--dp --tp --pp --cp ...] [--json]`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evenpipe.cli.declarations import Count
from evenpipe.cli.options import (
    BALANCED,
    SEQUENCE,
    belongs_to_configuration,
    bytes_of,
    check_output,
    options_of_generators,
    read_model,
    read_offload,
    refuse_too_large,
    whole_numbers,
)
from evenpipe.cli.printing import say, say_json
from evenpipe.given import write_text
from evenpipe.words import refused

if TYPE_CHECKING:
    from evenpipe.costs.hardware import Hardware
    from evenpipe.memory.estimate import Estimate
    from evenpipe.memory.paper import PaperEstimate
    from evenpipe.model import Description
    from evenpipe.recipe.recipe import Recipe
    from evenpipe.train.run_estimate import EstimatedRun


AS_IN_RECIPE = (
    *("dp", "ep", "tp", "cp", "pp", "context_exchange"),
    *("microbatches", "microbatch_size", "slices", "dp_shard", "reshard"),
)
"""Options that the recipe also has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """The layout, the schedule and the batch."""

    dp: Count = 1
    ep: Count = 1
    tp: Count = 1
    cp: Count = 1
    pp: Count = 1
    zero: Literal[0, 1, 2, 3] = 0
    dp_shard: Count | None = None
    reshard: bool = False
    no_sequence_parallel: bool = False
    context_exchange: Literal["keys", "heads"] = "keys"
    layers_per_stage: str | None = None
    sequence: Count | None = None
    microbatch_size: Count = 1
    microbatches: Count | None = None
    slices: Count = 1
    schedule: str = "1f1b"
    stages_per_device: Count | None = None
    group_size: Count | None = None
    max_in_flight: str | None = None
    vocabulary: str | None = None
    offload: str = "scheduled"
    checkpointing: str = "none"

    def recipe(self, model: Description, *, ours: bool) -> Recipe:
        """The recipe. ours: other frameworks share no vocabulary."""
        from evenpipe.recipe.given_schedule import MICROBATCHES_PER_DEVICE
        from evenpipe.recipe.offload import OffloadOptions
        from evenpipe.recipe.parallelism import DATA_PARALLEL
        from evenpipe.recipe.recipe import Recipe
        from evenpipe.schedule import generate

        schedule: Any = self.schedule
        options = options_of_generators(self.stages_per_device, self.group_size, self.max_in_flight)
        if self.schedule.endswith(".csv"):  # only its passes; transfers are placed again
            microbatches = self.microbatches or MICROBATCHES_PER_DEVICE * self.pp
            schedule, options = generate(self.schedule, self.pp, microbatches, **options), {}
        split, longest = self.layers_per_stage, model.maximum_length
        return Recipe.of(
            **{name: getattr(self, name) for name in AS_IN_RECIPE},
            activation_checkpointing=_checkpointing(self.checkpointing, model.layers),
            vocabulary=self.vocabulary or (BALANCED if ours else "first-last"),
            data_parallel=DATA_PARALLEL[self.zero],
            sequence_parallel=not self.no_sequence_parallel,
            sequence_length=self.sequence or min(SEQUENCE, longest or SEQUENCE),
            schedule=schedule,
            schedule_options=options,
            offload=OffloadOptions(activations=read_offload(self.offload)),
            layers_per_stage=None if split is None else whole_numbers("layers_per_stage", split),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """What a process holds of parameters."""

    compute_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    gradient_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    master_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    moment_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    optimizer: Literal["adamw", "muon", "adafactor", "sgd"] = "adamw"
    offload_optimizer: float = 0.0


def run(
    *,
    model: str,
    options: RecipeOptions,
    states: StateOptions,
    skew: float = 1.0,
    kernels: str = "transformers",
    foreach_optimizer: bool = False,
    gpu_memory: str | None = None,
    hardware: str | None = None,
    strict: bool = False,
    compare_to_paper: bool = False,
    output: Path | None = None,
    json_: bool = False,
) -> int:
    """Estimate and print.

    --model MODEL               hub name, folder, config.json, or a configuration of evenpipe train (its model, layout,
                                batch, loss and optimizer)
    --dp N                      replicas
    --ep N                      replicas that share the experts of a layer
    --tp N                      tensor parallelism
    --cp N                      context parallelism
    --pp N                      devices of a pipeline
    --zero                      shard over dp x cp: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters
    --dp-shard N                replicas over which states are sharded; the others hold copies (HSDP); default: all
    --reshard                   with --zero 3, free parameters between passes
    --no-sequence-parallel      with tp, keep norms and residuals whole on every GPU
    --context-exchange          context parallelism exchanges keys and values, or heads for tokens
    --layers-per-stage N,N,...  one per stage; default: an even split
    --microbatch-size N         sequences of a microbatch
    --microbatches M            of a step and replica; default: 4 per device
    --slices N                  slices of every sequence
    --vocabulary MODE           first-last, redistribute, interlaced, vocab-1, vocab-2 or balanced (= vocab-2); default:
                                balanced, or first-last with --kernels of another framework
    --checkpointing CHOICE      none, selective or full; full/N for every Nth layer
    --compute-dtype             default: bf16, and fp32 on the hardware of a CPU
    --gradient-dtype            of the gradients
    --master-dtype              of the weights that the optimizer updates
    --moment-dtype              of the optimizer's moments
    --optimizer                 optimizer whose state is counted; sgd with momentum
    --offload-optimizer SHARE   share of the optimizer state in host memory
    --foreach-optimizer         the optimizer copies all parameters during its step
    --gpu-memory SIZE           memory of one GPU, such as 80GiB; default: that of --hardware, if it is set
    --strict                    also exit with 1 if it is at risk
    --compare-to-paper          also print the estimate by the formula of arXiv 2411.06465
    -o, --output FILE.svg       also draw the memory of each device

    Estimates the peak memory of every device from the config; GPUs = dp x tp x cp x pp. Tensors are counted one by one
    along the schedule; the memory of the driver, communicators and the allocator is a range.

    fits: even at the upper end of that range. does not fit: not even at the lower end. at risk: between them.

    exit codes: 0 it fits, is at risk, or no GPU is given; 1 it does not fit, or with --strict is at risk;
    2 the input is wrong
    """
    from evenpipe.costs.hardware import find_hardware, known_gpu
    from evenpipe.memory import estimate_report
    from evenpipe.memory.estimate import estimate
    from evenpipe.memory.framework import kernels_and_framework
    from evenpipe.memory.kernels import COMPILED
    from evenpipe.memory.model_bytes import ModelBytes
    from evenpipe.plan.problem import EVENPIPE, problem_of_run
    from evenpipe.plan.splits import split_that_fits
    from evenpipe.train.run_estimate import host_remark

    check_output(output, ".svg")
    memory_bytes = bytes_of(gpu_memory)
    machine = None if hardware is None else find_hardware(hardware)
    read = _run_of_configuration if model.endswith(".toml") else _run_of_options
    ours = kernels_and_framework(kernels)[1].is_evenpipe
    trained = read(model, options, states, machine, ours=ours)
    recipe = trained.recipe
    source = ModelBytes(trained.description)
    source.keep_traces()
    if kernels != EVENPIPE:
        trained = replace(trained, kernels=kernels)
    as_run = (
        trained.kernels in {EVENPIPE, COMPILED} and trained.optimizer == "adamw" and recipe.vocabulary == "redistribute"
    )
    if machine is not None and known_gpu(machine.name) and as_run:
        # If the split by time does not fit this GPU, a run uses another split of layers that fits.
        problem = problem_of_run(
            trained.description,
            machine,
            recipe,
            memory_bytes=memory_bytes,
            dtype=trained.dtypes.compute,
            skew=skew,
            loss=trained.loss,
            kernels=trained.kernels,
        )
        problem.once(ModelBytes, lambda: source)
        recipe = replace(
            recipe, layers_per_stage=split_that_fits(problem, recipe, trained.offloaded) or recipe.layers_per_stage
        )
    result = estimate(
        source,
        recipe,
        hardware=machine,
        memory=memory_bytes,
        foreach=foreach_optimizer,
        skew=skew,
        **trained.arguments,
    )
    result = replace(result, schedule=trained.schedule)
    for remark in filter(None, (*trained.remarks, host_remark(result))):
        print(f"evenpipe: {remark}", file=sys.stderr)
    paper = _paper(trained.description, result) if compare_to_paper else None
    if output is not None:
        _draw(result, model, output)
    if json_:
        values = {"model": model, **result.to_dict()}
        if paper is not None:
            values["paper"] = {"states": paper.states, "activations": paper.activations, "total": paper.total}
        say_json(values)
    else:
        say(estimate_report.text(trained.description, result, paper))
        if output is not None:
            say(f"wrote {output}")
    bad = ("does not fit", "at risk") if strict else ("does not fit",)
    return 1 if result.verdict in bad else 0


def _checkpointing(text: str, layers: int) -> str | tuple[str, ...]:
    """Return the choice for all layers or, with /N appended, for every Nth layer, with "none" for the others."""
    choice, slash, every = text.partition("/")
    if not slash:
        return choice
    if not every.isdecimal() or not int(every):
        raise refused("--checkpointing", text, "none, selective or full, or one of them and every which layer: full/2")
    return tuple("none" if number % int(every) else choice for number in range(1, layers + 1))


def _run_of_options(
    model: str, options: RecipeOptions, states: StateOptions, machine: Hardware | None, *, ours: bool
) -> EstimatedRun:
    from evenpipe.memory.states import Dtypes
    from evenpipe.train.run_estimate import EstimatedRun

    refuse_too_large(options.pp, options.microbatches, options.stages_per_device, options.slices)
    dtypes = Dtypes(
        compute=states.compute_dtype or ("fp32" if machine and machine.torch_device == "cpu" else "bf16"),
        gradients=states.gradient_dtype,
        masters=states.master_dtype,
        moments=states.moment_dtype,
    )
    description = read_model(model)
    return EstimatedRun(
        description=description,
        recipe=options.recipe(description, ours=ours),
        schedule=options.schedule,
        dtypes=dtypes,
        optimizer=states.optimizer,
        offloaded=states.offload_optimizer,
    )


def _run_of_configuration(
    model: str, options: RecipeOptions, states: StateOptions, machine: Hardware | None, **_: bool
) -> EstimatedRun:
    from evenpipe.train.config_file import load_config
    from evenpipe.train.run_estimate import estimated_run

    for chosen, defaults in ((options, RecipeOptions()), (states, StateOptions())):
        for field in fields(chosen):
            if getattr(chosen, field.name) != getattr(defaults, field.name):
                raise belongs_to_configuration(field.name, model)
    return estimated_run(load_config(model), machine)


def _paper(description: Description, result: Estimate) -> PaperEstimate:
    from evenpipe.memory.paper import paper_estimate, paper_shape
    from evenpipe.memory.states import ELEMENT_BYTES

    return paper_estimate(
        paper_shape(description),
        result.recipe.parallelism,
        sequence=result.settings.sequence,
        microbatch_size=result.settings.microbatch_size,
        stages_per_device=max(len(device.stages) for device in result.devices),
        gradient_bytes=ELEMENT_BYTES[result.settings.dtypes.gradients],
    )


def _draw(result: Estimate, model: str, output: Path) -> None:
    from evenpipe.draw import Bars, bars_svg

    bars = Bars(f"{result.schedule}, {result.recipe.vocabulary}", tuple(device.terms for device in result.devices))
    write_text(output, bars_svg([bars], title=f"Memory of every device: {model}", limit=result.memory))
