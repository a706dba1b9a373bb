"""What is run on a machine with an NVIDIA GPU. Each case is a function of the device that returns figures, or raises.

All of them but the last group run on a CPU just as well, which is how they are themselves tested where there is no GPU.
Functions that `launch` runs stand at the top level, and so does all that they need.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from evenpipe import ExpertOptions, NcclOptions, OffloadOptions, Pipeline, initialise_worker, launch, run_training

Figures = dict[str, Any]

VOCABULARY, SEQUENCES, TOKENS = 1003, 12, 32

DOCUMENT = 20
"""Tokens of the first document of a row that holds two."""

FP32_LIMIT = 1e-5
"""Relative Frobenius error per gradient, against transformers in one process."""

BF16_LIMIT = 1.5
"""Times the error of transformers in bf16, both against fp32."""

SHARED = [
    # schedule, vocabulary mode: 4 processes on one GPU
    ("1f1b", "vocab-2"),
    ("1f1b", "first-last"),
    ("zb-h1", "vocab-2"),
    ("zbv", "vocab-2"),
    ("interleaved", "vocab-1"),
]

LAYOUTS: dict[str, dict[str, Any]] = {
    # options of `Pipeline`: 4 processes on one GPU
    "tensor ranks": {"tp": 2, "schedule": "zb-h1"},
    "tensor ranks, rings": {"tp": 2, "tensor_overlap": "ring", "activation_checkpointing": "selective"},
    "context ranks, keys": {"cp": 2, "schedule": "zbv"},
    "context ranks, heads": {"cp": 2, "context_exchange": "heads", "schedule": "zb-h1"},
    "slices": {"slices": 3, "schedule": "zb-h1"},
    "slices, context ranks": {"slices": 2, "cp": 2, "activation_checkpointing": "full"},
    "documents": {"documents": "separate"},
    "sharded replicas": {"dp": 2, "data_parallel": "shard", "schedule": "v-half"},
    "sharded replicas, freed after each pass": {"dp": 2, "data_parallel": "shard", "reshard": True},
    "experts": {"model": "mixtral", "dp": 2, "ep": 2, "schedule": "zb-h1"},
    "experts, columns and arrivals": {
        "model": "mixtral",
        "dp": 2,
        "ep": 2,
        "experts": ExpertOptions(columns=2, arrivals=2),
        "activation_checkpointing": "full",
    },
    "experts on one device": {"model": "mixtral", "schedule": "zb-h1"},
    "tensor ranks of experts": {"model": "mixtral", "tp": 2},
    "offload": {"schedule": "po-f", "offload": OffloadOptions(activations="all")},
    "checkpointing": {"schedule": "interleaved", "activation_checkpointing": "full"},
    "compiled layers": {"compile_layers": True, "schedule": "zb-h1"},
}


USUAL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_local_experts": 4, "sliding_window": None}


def model_of(name: str) -> Any:
    """The same weights wherever it is called: drawn on the host."""
    configs = {
        "llama": lambda: LlamaConfig(**USUAL),
        "mixtral": lambda: MixtralConfig(**USUAL, **EXPERTS, num_experts_per_tok=2),
        # in bf16, where rounding decides between experts of like probability
        "mixtral, every expert": lambda: MixtralConfig(**USUAL, **EXPERTS, num_experts_per_tok=4),
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(configs[name](), dtype=torch.float32)


def batch() -> Tensor:
    return torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))


def positions(separate: bool) -> dict[str, Tensor]:
    """Of two documents in every row, if rows hold several."""
    return {"position_ids": (torch.arange(TOKENS) % DOCUMENT).expand(SEQUENCES, -1)} if separate else {}


@cache
def one_process(name: str, torch_device: str, dtype: torch.dtype, separate: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of transformers, microbatches and processes unheard of; tensors on the host."""
    model = model_of(name).to(torch_device)
    rotary = [(path, buffer.clone()) for path, buffer in model.named_buffers()]
    model.to(dtype)
    for path, buffer in rotary:  # .to() rounds the rotary frequencies too, which no bf16 model of transformers does
        module, _, leaf = path.rpartition(".")
        model.get_submodule(module)._buffers[leaf] = buffer
    documents = batch().to(torch_device).split(DOCUMENT if separate else TOKENS, dim=1)
    logits = [model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float() for ids in documents]
    loss = functional.cross_entropy(torch.cat(logits), torch.cat([ids[:, 1:].flatten() for ids in documents]))
    loss.backward()
    return loss.item(), {
        name: parameter.grad.float().cpu() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest relative Frobenius error over the gradients."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max(
        float(torch.linalg.vector_norm(found[name] - wanted[name]) / torch.linalg.vector_norm(wanted[name]))
        for name in wanted
    )


# --- pipelines against one process ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A pipeline on processes that share the machine's devices, against transformers in one process on one of them."""

    layout: dict[str, Any]
    """Options of `Pipeline`; "model" is one of `model_of`."""
    processes: int = 4
    compute_dtype: torch.dtype = torch.float32
    on_a_stream: bool = False

    def __call__(self, torch_device: str) -> Figures:
        """Run it alone."""
        (results,) = results_of([self], torch_device)
        return self.figures(results, torch_device)

    @property
    def separate(self) -> bool:
        """Rows hold two documents."""
        return "documents" in self.layout

    def step(self) -> Figures:
        """Runs in every process: two steps, the second of which counts; gradients as numpy."""
        worker = initialise_worker()
        options = {"microbatches": 6, **self.layout}
        if (replicas := options.get("dp", 1)) > 1:
            options["microbatches"] //= replicas
        pipeline = Pipeline(model_of(options.pop("model", "llama")), compute_dtype=self.compute_dtype, **options)
        count = SEQUENCES // replicas
        own = slice(pipeline.replica * count, (pipeline.replica + 1) * count)
        given = {name: value[own] for name, value in positions(self.separate).items()}
        on_a_stream = self.on_a_stream and worker.torch_device.type == "cuda"
        stream = torch.cuda.Stream(worker.torch_device) if on_a_stream else None
        seconds = 0.0
        for _ in range(2):
            pipeline.zero_grad()
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(worker.torch_device))
            begun = time.perf_counter()
            with torch.cuda.stream(stream):  # None: nothing changes
                result = pipeline.step(batch()[own], **given)
                loss = result.loss
            seconds = time.perf_counter() - begun
            if stream is not None:
                torch.cuda.current_stream(worker.torch_device).wait_stream(stream)
        gradients = pipeline.full_gradients()
        pipeline.close()
        return {
            "loss": loss,
            "step_seconds": seconds,
            "gradients": {name: gradient.float().numpy() for name, gradient in gradients.items()},
            "backends": dist.get_backend_config() if dist.is_initialized() else "",
            "torch_device": str(worker.torch_device),
        }

    def figures(self, results: list[Figures], torch_device: str) -> Figures:
        """Compare what the processes found."""
        found = {name: torch.from_numpy(gradient) for name, gradient in results[0]["gradients"].items()}
        model = self.layout.get("model", "llama"), torch_device
        loss, wanted = one_process(*model, torch.float32, self.separate)
        figures: Figures = {
            "gradient_error": worst(found, wanted),
            "loss_error": abs(results[0]["loss"] - loss) / loss,
            "step_seconds": results[0]["step_seconds"],
            "backends": results[0]["backends"],
        }
        assert all(result["loss"] == results[0]["loss"] for result in results)
        if torch_device == "cuda":
            assert all(result["torch_device"].startswith("cuda:") for result in results)
            # More processes than GPUs: NCCL would refuse, so gloo takes over through host memory.
            assert ("nccl" in figures["backends"]) == (self.processes <= torch.cuda.device_count()), figures["backends"]
        if self.compute_dtype == torch.float32:
            assert figures["gradient_error"] <= FP32_LIMIT, figures
            assert figures["loss_error"] <= FP32_LIMIT, figures
        else:
            _, rounded = one_process(*model, self.compute_dtype, self.separate)
            ratios = {
                name: float(torch.linalg.vector_norm(found[name] - wanted[name]))
                / float(torch.linalg.vector_norm(rounded[name] - wanted[name]))
                for name in wanted
            }
            figures["times_the_error_of_one_process"] = max(ratios.values())
            assert figures["times_the_error_of_one_process"] <= BF16_LIMIT, figures
        return figures


def results_of(cases: list[Comparison], torch_device: str) -> list[list[Figures]]:
    """Run cases one after the other in the same processes, since to start them takes longer than most cases; return for
    each what every process found."""
    (processes,) = {case.processes for case in cases}
    by_process = launch(steps, cases, processes=processes, torch_device=torch_device, preload=("gpu_cases",))
    return [list(results) for results in zip(*by_process, strict=True)]


def steps(cases: list[Comparison]) -> list[Figures]:
    """Runs in every process. Only the first process sends its gradients."""
    found = []
    for case in cases:
        figures = case.step()
        if dist.is_initialized() and dist.get_rank():
            del figures["gradients"]
        found.append(figures)
    return found


def counted(steps: int) -> Figures:
    """Runs in one process: the allocations of the last of some equal steps."""
    initialise_worker()
    pipeline = Pipeline(model_of("llama"), microbatches=6, self_check=False)
    for _ in range(steps):
        pipeline.zero_grad()
        result = pipeline.step(batch(), record_passes=True)
    trace = pipeline.trace(result)
    assert trace is not None
    found = trace.devices[0].allocations
    return {} if found is None else asdict(found)


def allocations(torch_device: str) -> Figures:
    """A trace of a GPU counts what its allocator does, and a step like those before it needs nothing of the driver."""
    (figures,) = launch(counted, 4, processes=1, torch_device=torch_device, preload=("gpu_cases",))
    if torch_device == "cuda":
        assert figures["requests"] > 0, figures
        assert figures["device_allocations"] == figures["device_frees"] == figures["retries"] == 0, figures
    return figures


# --- runs ------------------------------------------------------------------------------------------------------


def resumed(torch_device: str) -> Figures:
    """A deterministic run of two processes is continued from the checkpoint in its middle, and ends with the bits of
    the whole one. In a sequence of 1,024 tokens several blocks of attention add to a gradient."""
    with tempfile.TemporaryDirectory() as name:
        whole, continued = Path(name, "whole"), Path(name, "continued")
        run_training(run_in(whole))
        shutil.copytree(whole, continued)
        shutil.rmtree(continued / "checkpoints" / "step-00000004")
        run_training(run_in(continued))
        lines, weights = zip(*map(result_of, (whole, continued)), strict=True)
    assert lines[0] == lines[1] and weights[0] == weights[1], lines
    return {"losses": [loss for loss, _ in lines[0]]}


def run_in(folder: Path) -> dict[str, Any]:
    """The configuration of a run with a checkpoint after the second of four steps."""
    model = {**USUAL, "num_hidden_layers": 4, "max_position_embeddings": 1024}
    del model["vocab_size"]
    return {
        "model": {"architecture": "llama", "config": model},
        "data": {"corpus": "python-standard-library:json,logging", "sequence_length": 1024},
        "tokenizer": {"vocabulary_size": VOCABULARY},
        "pipeline": {"processes": 2, "schedule": "zbv", "microbatches": 4},
        "training": {"steps": 4, "deterministic": True},
        "checkpoint": {"every_steps": 2},
        "output": {"folder": str(folder), "tensorboard": False},
    }


def result_of(folder: Path) -> tuple[list[tuple[float, float]], bytes]:
    """Loss and norm of the gradients of every step, and the exported weights."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [(row["loss"], row["gradient_norm"]) for row in rows if "loss" in row]
    return steps, (folder / "model" / "model.safetensors").read_bytes()


# --- only with a GPU -----------------------------------------------------------------------------------------


def nccl_operations() -> Figures:
    """NCCL's own operations in a group of one."""
    worker = initialise_worker()
    tensor = torch.full((1000,), 3.0, device=worker.torch_device)
    dist.all_reduce(tensor)
    timeout = timedelta(seconds=60)
    options = NcclOptions(channels=4).of_group(timeout)
    group = dist.new_group([0], timeout=timeout, backend="nccl", pg_options=options, device_id=worker.torch_device)
    used = group._get_backend(worker.torch_device).options
    gathered = [torch.empty_like(tensor)]
    dist.all_gather(gathered, tensor, group=group)
    torch.cuda.synchronize()
    dist.destroy_process_group(group)
    return {
        "value": gathered[0].sum().item(),
        "backends": dist.get_backend_config(),
        "high_priority": used.is_high_priority_stream,
        "channels": used.config.max_ctas,
    }


def nccl(torch_device: str) -> Figures:
    """A default group with NCCL is opened eagerly on the process's own device."""
    (figures,) = launch(nccl_operations, processes=1, torch_device=torch_device, preload=("gpu_cases",))
    assert figures["value"] == 3000.0 and "nccl" in figures["backends"], figures
    assert figures["high_priority"] and figures["channels"] == 4, figures
    return figures


def staging(torch_device: str) -> Figures:
    """What is sent is what the GPU computes last, and what arrives is what it reads next, however busy it is."""
    from evenpipe.communication.staging import Staging

    device = torch.device(torch_device, torch.cuda.current_device())
    copies = Staging(device)
    matrix = torch.randn(4096, 4096, device=device) / 64
    value, rounds = torch.ones(4096, 512, device=device), 0
    for rounds in range(1, 21):
        for _ in range(10):
            value = matrix @ value  # queued: the host is far ahead
        value = value / value.abs().max()
        reads, writes = value.clone(), torch.empty_like(value)
        (host, buffer), finish = copies.to_host(reads, writes, None)
        assert host.is_pinned() and buffer.is_pinned()
        buffer.copy_(host)  # what a network would do
        assert finish is not None
        finish()
        assert torch.equal(writes, value), f"round {rounds}"
        del host, buffer, finish  # the memory is free again, though a copy from it may be under way
        (other,), _ = copies.to_host(None, torch.empty_like(value), None)
        other.fill_(float("nan"))
        assert torch.equal(writes, value), f"round {rounds}"
    empty, _ = copies.to_host(torch.empty(0, 8, device=device), None, None)
    assert empty[0].shape == (0, 8)
    return {"rounds": rounds}


def marks(torch_device: str) -> Figures:
    """What the watch reads behind a wait says yes only when the stream has come that far; streams do not hold each
    other up."""
    from evenpipe.communication.arrivals import arrivals_on

    device = torch.device(torch_device, torch.cuda.current_device())
    arrivals, other = arrivals_on(device), torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(500_000_000)  # clock cycles: a quarter of a second
    slow = arrivals.mark()
    with torch.cuda.stream(other):
        quick = arrivals.mark()
    other.synchronize()
    early = slow()
    assert not early, "the streams held each other up"
    assert quick()
    torch.cuda.synchronize(device)
    assert slow()
    rounds = 1000
    begun = time.perf_counter()
    for _ in range(rounds):
        arrivals.mark()
    return {
        "done_before": early,
        "done_after": slow(),
        "mapped": arrivals._copied is None,
        "microseconds": (time.perf_counter() - begun) / rounds * 1e6,
    }


BF16 = {
    "1f1b, vocab-2": {},
    "zbv, vocab-2": {"schedule": "zbv"},
    **{name: LAYOUTS[name] for name in ("tensor ranks", "context ranks, keys", "slices", "documents")},
    "experts": LAYOUTS["experts"] | {"model": "mixtral, every expert"},
}


def of_layouts(layouts: dict[str, dict[str, Any]], dtype: torch.dtype) -> dict[str, Comparison]:
    """Return one case per layout, on 4 processes."""
    kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    return {f"4 processes, {name}, {kind}": Comparison(layout, compute_dtype=dtype) for name, layout in layouts.items()}


SCHEDULES = {f"{schedule}, {mode}": {"schedule": schedule, "vocabulary": mode} for schedule, mode in SHARED}

CASES: dict[str, Callable[[str], Figures]] = {
    "one process": Comparison({}, processes=1),  # with a GPU of its own, NCCL
    **of_layouts(SCHEDULES | LAYOUTS, torch.float32),
    **of_layouts(BF16, torch.bfloat16),
    "I and W on a stream of the caller's": Comparison({"schedule": "zb-h1"}, on_a_stream=True),
    "allocations of a settled step": allocations,
    "a run, continued": resumed,
    "NCCL in a group of one": nccl,
    "copies between GPU and host": staging,
    "marks in a stream": marks,
}

ON_A_CPU_TOO = [name for name in CASES if CASES[name] not in (nccl, staging, marks)]
