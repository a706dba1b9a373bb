"""Examines a machine: its hardware and software, the correctness of gradients along every axis, and its speed.

Each check runs in a separate process, which starts any others it needs, and has a time limit. A check that fails, exits
or hangs becomes a row of the page, and the others still run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from evenpipe.communication.communicator import ALL_GATHER
from evenpipe.costs.hardware import hardware_from_dict
from evenpipe.errors import InputError, RunError
from evenpipe.plan.configuration_search import cores
from evenpipe.processes.launcher import launch
from evenpipe.processes.worker import initialise_worker
from evenpipe.words import count

EXACT = 1e-9
"""Largest relative error of a correct gradient in fp64."""
END_SECONDS = 10.0
"""Time between asking a check to end and killing it."""
SILENCE_SECONDS = 30.0
COLLECTIVE_BYTES = (64 * 2**10, 4 * 2**20, 64 * 2**20)
LOG_LINES = 20
ROUNDS, WARM_UP, STEPS = 5, 2, 5
PACKAGES = ("evenpipe", "torch", "transformers", "triton", "peft", "numpy")
VARIABLES = ("NCCL_", "TORCH_NCCL_", "PYTORCH_", "CUDA_", "OMP_", "GLOO_")
"""Name prefixes of the environment variables to show."""
MODES = ("first-last", "redistribute", "vocab-2")
PRODUCTS, COLLECTIVES = "products, memory and messages", "collectives"
"""Names of the checks in "transfers"."""


@dataclass(frozen=True, slots=True)
class Check:
    """One independent examination of the machine."""

    section: str
    """"machine", "gradients", "transfers", "steps" or "predictions"."""
    name: str
    run: Callable[[], dict[str, Any]]
    """Picklable; returns JSON values. The page shows its exceptions."""
    seconds: float = 120.0
    """Time limit."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a check."""

    section: str
    name: str
    seconds: float
    values: Mapping[str, Any]
    """The values it returned; empty if it failed."""
    fault: str = ""
    """What is wrong, in one line."""
    log: str = ""
    """The last lines it printed, if something is wrong."""


def examine(checks: Sequence[Check], say: Callable[[str], None] = lambda text: None) -> list[Outcome]:
    """Run checks in sequence. say: called with a line when each one starts."""
    outcomes = []
    for number, check in enumerate(checks, 1):
        say(f"{number} of {len(checks)}: {check.section}, {check.name}")
        outcomes.append(_examined(check))
    return outcomes


def doctor(processes: int, say: Callable[[str], None] = lambda text: None) -> list[Outcome]:
    """Examine this machine with `processes` processes, each on a separate device if there are enough. say: as for
    `examine`."""
    outcomes = examine(checks_for(processes), say)
    hardware = next((outcome.values for outcome in outcomes if outcome.name == PRODUCTS and not outcome.fault), None)
    if hardware is None:
        return outcomes
    predict = Check("predictions", "steps", partial(predicted_steps, processes, dict(hardware)))
    return [*outcomes, *examine([predict], say)]


def checks_for(processes: int) -> list[Check]:
    """Return all checks for this number of processes."""
    checks = [Check("machine", "versions and links", partial(about_machine, processes), seconds=60.0)]
    for name, family, options in axes_of(processes):
        checks.append(Check("gradients", name, partial(check_gradients, family, options, processes)))
    checks.append(Check("transfers", PRODUCTS, partial(measured_hardware, processes)))
    if processes > 1:
        checks.append(Check("transfers", COLLECTIVES, partial(measured_collectives, processes)))
    for name, options in steps_of(processes):
        checks.append(Check("steps", name, partial(measured_step, options, processes)))
    return checks


# --- one check --------------------------------------------------------------------------------------------------------


def _examined(check: Check) -> Outcome:
    with tempfile.NamedTemporaryFile(prefix="evenpipe-doctor-") as printed:
        outcome = _outcome(check, printed.name)
        lines = printed.read().decode(errors="replace").splitlines()
    return replace(outcome, log="\n".join(lines[-LOG_LINES:])) if outcome.fault else outcome


def _outcome(check: Check, log: str) -> Outcome:
    context = multiprocessing.get_context("spawn")  # a fork would share this process's GPU state
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(check.run, sender, log))
    started = time.monotonic()
    process.start()
    sender.close()
    session = process.pid
    assert session is not None
    values: dict[str, Any] = {}
    try:
        if receiver.poll(check.seconds):
            values, fault = receiver.recv()
        else:
            fault = f"not done after {check.seconds:.0f} s"
            process.terminate()  # the launcher then ends its processes
    except EOFError:
        process.join(END_SECONDS)
        fault = f"its process ended with exit code {process.exitcode}"
    finally:  # also on Ctrl-C
        seconds = time.monotonic() - started
        process.join(END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it and all its child processes have ended
            os.killpg(session, signal.SIGKILL)
        process.kill()  # if it has not created its session yet
        process.join()
    return Outcome(check.section, check.name, seconds, values, fault or str(values.get("fault", "")))


def _run(work: Callable[[], dict[str, Any]], sender: Connection, log: str) -> None:
    os.setsid()  # so that it and its child processes can be killed together
    with Path(log).open("ab") as printed:
        for number in (1, 2):
            os.dup2(printed.fileno(), number)
    try:
        sender.send((work(), ""))
    except (InputError, RunError) as error:
        sender.send(({}, str(error)))
    except BaseException as error:
        sender.send(({}, f"{type(error).__name__}: {error}"))
        raise
    finally:
        sender.close()


# --- the machine ------------------------------------------------------------------------------------------------------


def about_machine(processes: int) -> dict[str, Any]:
    """Return versions, devices, links, environment settings and recommended changes."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    values: dict[str, Any] = {
        "python": platform.python_version(),
        **versions,
        "system": platform.platform(),
        "processor": f"{platform.processor() or platform.machine()}, {count(cores(), 'core')}",
        "processes": processes,
    }
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        values |= {
            "gpus": ", ".join(f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in devices),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "topology": _output_of("nvidia-smi", "topo", "-m"),
        }
    return {**values, "environment": settings, "advice": list(_advice(processes, settings, versions))}


def _output_of(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _advice(processes: int, settings: Mapping[str, str], versions: Mapping[str, str]) -> Iterator[str]:
    """Yield recommended changes, one sentence each."""
    if not torch.cuda.is_available():
        if processes > cores():
            turns = f"{processes} processes take turns on {count(cores(), 'core')}"
            yield f"{turns}: times say little about {processes} devices"
        return
    if processes > (gpus := torch.cuda.device_count()):
        yield f"{processes} processes share {count(gpus, 'GPU')}: transfers go through the host, which is slow"
    allocation = settings.get("PYTORCH_CUDA_ALLOC_CONF", "") + settings.get("PYTORCH_ALLOC_CONF", "")
    if allocation and "expandable_segments:True" not in allocation:
        yield "add expandable_segments:True to PYTORCH_CUDA_ALLOC_CONF: sizes that change leave unused gaps otherwise"
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING"):
        if settings.get(name, "0") not in ("", "0"):
            yield f"unset {name}, unless it is there for a reason: it makes transfers or kernels slower"
    if "triton" not in versions:
        yield "install triton: without it the output layer runs operations of torch"


# --- gradients --------------------------------------------------------------------------------------------------------


def axes_of(processes: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (name, family, pipeline options) of the gradient checks that fit this number of processes."""
    pipelines: list[dict[str, Any]] = [
        {"schedule": "1f1b", "vocabulary": "vocab-2"},
        {"schedule": "zbv", "vocabulary": "vocab-1"},
        {"schedule": "interleaved", "vocabulary": "redistribute"},
        {"schedule": "zb-h1", "slices": 2},
    ]
    cases = [("llama", {"pp": processes, **pipeline}) for pipeline in pipelines]
    if processes > 1:
        cases += [
            ("llama", {"dp": processes}),
            ("llama", {"dp": processes, "data_parallel": "shard"}),
            ("llama", {"tp": processes}),
            ("llama", {"cp": processes}),
            ("mixtral", {"dp": processes, "ep": processes}),
        ]
    if processes % 2 == 0 and processes > 2:
        half = processes // 2
        cases += [
            ("llama", {"pp": half, "tp": 2, "schedule": "zb-h1"}),
            ("llama", {"pp": half, "cp": 2, "schedule": "1f1b"}),
            ("mixtral", {"pp": half, "dp": 2, "ep": 2, "schedule": "zbv"}),
        ]
    return [
        (", ".join([family, *(f"{name} {value}" for name, value in options.items())]), family, options)
        for family, options in cases
    ]


def check_gradients(family: str, options: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Compare a step of a small model with transformers in one process. Returns the largest relative error of a
    gradient in fp64 and the name of its parameter, with a "fault" if the error is too large."""
    return dict(launch(_gradients, family, dict(options), processes=processes, silence_seconds=SILENCE_SECONDS)[0])


def small_model(family: str, processes: int) -> Any:
    """Return an fp64 model that every case of `axes_of` can split among `processes` processes; identical in each."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    heads = max(4, processes)
    settings: dict[str, Any] = {
        "vocab_size": 211,
        "hidden_size": 16 * heads,
        "intermediate_size": 24 * heads,
        "num_hidden_layers": max(4, 2 * processes),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 64 * processes,
    }
    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**settings)).double()
    config = MixtralConfig(**settings, num_local_experts=2 * processes)
    config._experts_implementation = "eager"  # the others do not support fp64
    return MixtralForCausalLM(config).double()


def _gradients(family: str, options: dict[str, Any]) -> dict[str, Any]:
    from evenpipe.model import gradient_errors
    from evenpipe.model.fp64 import InFp64
    from evenpipe.runtime.pipeline import Pipeline

    worker = initialise_worker()
    model = small_model(family, worker.world_size)
    replicas = options.get("dp", 1)
    ids = torch.randint(0, model.config.vocab_size, (4 * replicas, 8 * worker.world_size))
    with InFp64():
        arguments = {"microbatches": 4, "parameter_dtype": torch.float64, "self_check": False, **options}
        with contextlib.closing(Pipeline(model, **arguments)) as pipeline:
            loss = pipeline.step(ids.chunk(replicas)[pipeline.replica]).loss
            gradients = pipeline.full_gradients()
        if worker.rank:
            return {}
        model.to(worker.torch_device)
        logits = model(input_ids=ids.to(worker.torch_device), use_cache=False).logits[:, :-1]
        expected = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten().to(logits.device))
        expected.backward()
    expected_gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
    errors = gradient_errors({name: gradients[name].cpu() for name in expected_gradients}, expected_gradients)
    worst = max(errors, key=errors.__getitem__)
    actual_loss, expected_loss = float(loss), float(expected.detach())
    values = {"error": errors[worst], "parameter": worst, "loss": actual_loss, "expected loss": expected_loss}
    if not errors[worst] <= EXACT:
        values["fault"] = f"the gradient of {worst} is off by {errors[worst]:.1e}; expected at most {EXACT:.0e}"
    elif not abs(actual_loss / expected_loss - 1) <= EXACT:
        values["fault"] = f"the loss is {actual_loss:.9g}; expected {expected_loss:.9g}"
    return values


# --- transfers --------------------------------------------------------------------------------------------------------


def measured_hardware(processes: int) -> dict[str, Any]:
    """Return the measurements of `evenpipe profile --hardware`."""
    from evenpipe.train.hardware_profile import profile_hardware

    return profile_hardware(processes).to_dict()


def measured_collectives(processes: int) -> dict[str, Any]:
    """Return seconds of collectives over all processes, by name and bytes."""
    return dict(launch(_collectives, processes=processes, silence_seconds=SILENCE_SECONDS)[0])


def _collectives() -> dict[str, Any]:
    worker = initialise_worker()
    by_nccl = "nccl" in dist.get_backend_config()
    device = worker.torch_device if by_nccl else torch.device("cpu")
    seconds: dict[str, Any] = {}
    for size in COLLECTIVE_BYTES:
        full = torch.zeros(size // 4 // worker.world_size * worker.world_size, device=device)
        shard = full.chunk(worker.world_size)[worker.rank].clone()
        for name, work in (
            ("all-reduce", partial(dist.all_reduce, full)),
            ("all-gather", partial(ALL_GATHER, full, shard)),
            ("broadcast", partial(dist.broadcast, full, 0)),
        ):
            seconds.setdefault(name, {})[str(size)] = _median_seconds(work, device)
    return seconds


def _median_seconds(work: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(WARM_UP + ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UP:])


# --- steps ------------------------------------------------------------------------------------------------------------


def steps_of(processes: int) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, pipeline options) of the timed steps, which all use the same batch."""
    steps = [(f"pp {processes}, 1f1b, {mode}", {"pp": processes, "vocabulary": mode}) for mode in MODES]
    if processes > 1:
        steps.append((f"dp {processes}, shard", {"dp": processes, "data_parallel": "shard"}))
    return steps


def measured_step(options: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Return the median seconds of a step, and its tokens: two sequences per process."""
    return dict(launch(_step, dict(options), processes=processes)[0])


def timed_config(processes: int, *, on_gpu: bool) -> tuple[Any, int]:
    """Return the config and the sequence length of the timed model, whose output layer costs as much as a few
    layers."""
    from transformers import LlamaConfig

    width, rows, tokens = (2048, 131072, 4096) if on_gpu else (128, 8192, 128)
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2 * processes,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=tokens,
    )
    return config, tokens


def _step(options: dict[str, Any]) -> dict[str, Any]:
    from evenpipe.runtime.pipeline import Pipeline

    worker = initialise_worker()
    on_gpu = worker.torch_device.type == "cuda"
    config, tokens = timed_config(worker.world_size, on_gpu=on_gpu)
    replicas = options.get("dp", 1)
    microbatches = 2 * worker.world_size // replicas
    arguments = {"microbatches": microbatches, "compute_dtype": torch.bfloat16 if on_gpu else torch.float32, **options}
    ids = torch.randint(0, config.vocab_size, (microbatches, tokens), generator=torch.Generator().manual_seed(1))
    seconds = []
    with contextlib.closing(Pipeline(config, self_check=False, seed=0, **arguments)) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-4)
        for _ in range(WARM_UP + STEPS):
            started = time.perf_counter()
            pipeline.step(ids)
            optimizer.step()
            optimizer.zero_grad()
            if on_gpu:
                torch.cuda.synchronize(worker.torch_device)
            seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds[WARM_UP:]), "tokens": microbatches * replicas * tokens}


# --- predictions ------------------------------------------------------------------------------------------------------


def predicted_steps(processes: int, hardware: Mapping[str, Any]) -> dict[str, Any]:
    """Return the predicted seconds of every step of `steps_of` on measured hardware, by name."""
    from evenpipe.model import describe
    from evenpipe.plan.configuration import Configuration
    from evenpipe.plan.evaluation import evaluate
    from evenpipe.plan.problem import problem_of_run
    from evenpipe.recipe.layout import layers_per_stage, runnable_order
    from evenpipe.recipe.recipe import Recipe

    machine = hardware_from_dict(dict(hardware))
    on_gpu = machine.torch_device == "cuda"
    config, tokens = timed_config(processes, on_gpu=on_gpu)
    description, predicted = describe(config), {}
    for name, options in steps_of(processes):
        recipe = Recipe.of(
            schedule="1f1b",
            microbatches=2 * processes // options.get("dp", 1),
            microbatch_size=1,
            sequence_length=tokens,
            **options,
        )
        problem = problem_of_run(description, machine, recipe, dtype="bf16" if on_gpu else "fp32")
        split = layers_per_stage(recipe, problem.model_costs, runnable_order(recipe))
        recipe = replace(recipe, layers_per_stage=split)
        predicted[name] = evaluate(problem, Configuration.of(problem, recipe)).seconds
    return predicted
