"""How fast does one GPU train a Llama of about 1B parameters with evenpipe, transformers' Trainer and a plain loop?

    python benchmarks/gpu/one_gpu.py [--arms evenpipe loop evenpipe] [--output FILE.json]    some minutes
    python benchmarks/gpu/one_gpu.py --compile [--output FILE.json]                         about twice as many
    python benchmarks/gpu/one_gpu.py --device cpu --layers 2 --hidden-size 128 --vocabulary 1024 --tokens 64 \\
                                     --microbatches 2 --repetitions 2    to try it

Every arm trains the same shape with weights of its own: microbatches of some sequences, their gradients added, clipped
to a norm of 1, one step of fused AdamW. Parameters, gradients and moments are fp32 and products bf16, unless the name
says otherwise:

    evenpipe             `Pipeline` with one device, vocab-2, as `evenpipe train` builds and drives it
    Trainer              transformers' Trainer with bf16=True (autocast); needs accelerate
    loop                 a loop by hand as torchtitan's recipe has it: autocast, and output layer and loss in 8 chunks,
                         whose backward runs at once
    loop, bf16           the same with parameters, gradients and moments in bf16, without autocast

--compile adds each of them with torch.compile: per layer in evenpipe and in loops (with the loss), as a whole in
Trainer. One arm after another is built, timed and given up, since a GPU of 80 GB does not hold all of them. So a
machine that changes its speed meanwhile does not treat them alike: an arm that is named twice in --arms runs twice, and
how far its two figures are apart is what a difference between others has to exceed. Printed are

    step       seconds, median
    tokens/s   of the step
    MFU        model FLOPs (attention without its mask) over time and the peak of the data sheet of --hardware
    MiB        most memory of its tensors in a step, parameters and moments included
    loss       of the last step, to see that all train the same; of Trainer the mean of its last --per-turn steps and
               one before them

What does not run is listed with the reason.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # one arm uses the memory of another

import torch
from timing import (
    LEAST,
    MIB,
    Failure,
    Results,
    arguments,
    attempt,
    clean_up,
    common,
    device_of,
    percent,
    progress,
    table,
)
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from evenpipe import initialise_worker
from evenpipe.costs.hardware import find_hardware
from evenpipe.model import describe, head_flops, layer_flops
from evenpipe.optimizers.held import groups_by_decay
from evenpipe.train.build import build_pipeline
from evenpipe.train.run_sections import OptimizerConfig

CHUNKS = 8
"""Of the tokens, for the output layer of the loop (torchtitan, components/loss.py)."""
CLIP = 1.0
OPTIMIZER = OptimizerConfig()
DECAY = OPTIMIZER.given("weight_decay")
ADAM = {"lr": OPTIMIZER.learning_rate, "betas": OPTIMIZER.given("betas"), "eps": OPTIMIZER.given("epsilon")}


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """As `evenpipe train` makes it: weight decay on matrices only."""
    groups = [{"weight_decay": DECAY, **group} for group in groups_by_decay(parameters) if group["params"]]
    return torch.optim.AdamW(groups, fused=True, **ADAM)


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """What is trained. Every field is an argument of the command line."""

    processes: int = common.option(1, "devices; there is one")
    layers: int = common.option(16, "of the model")
    hidden_size: int = common.option(2048, "of the model; heads have 64, the MLP is 2.75 times as wide")
    tokens: int = common.option(4096, "of a sequence")
    vocabulary: int = common.option(128256, "rows of embedding and output layer")
    sequences: int = common.option(2, "of a microbatch")
    microbatches: int = common.option(4, "of a step")

    @property
    def step_tokens(self) -> int:
        """In all."""
        return self.tokens * self.sequences * self.microbatches


class Arm(ABC):
    """A model in training."""

    loss: float = float("nan")

    @abstractmethod
    def steps(self, batches: list[Tensor]) -> list[float]:
        """One step per batch [sequences of a step, tokens]; the seconds of each."""


class _Stepwise(Arm):
    """An arm that is told each step."""

    device: torch.device

    @abstractmethod
    def step(self, batch: Tensor) -> Any:
        """Returns the loss, which is read later."""

    def steps(self, batches: list[Tensor]) -> list[float]:
        seconds = []
        for batch in batches:
            synchronise(self.device)
            started = time.perf_counter()
            loss = self.step(batch)
            synchronise(self.device)
            seconds.append(time.perf_counter() - started)
        self.loss = float(loss)
        return seconds


class Evenpipe(_Stepwise):
    """As `evenpipe train` does it."""

    def __init__(self, settings: Settings, device: torch.device, compiled: bool) -> None:
        self.device = device
        config = common.configuration(
            settings,
            settings.vocabulary,
            schedule="1f1b",
            vocabulary="vocab-2",
            microbatches=settings.microbatches,
            microbatch_size=settings.sequences,
            compile_layers=compiled,
        )
        self._pipeline = build_pipeline(
            config, settings.vocabulary, 0, device, self_check=False, compute_dtype=torch.bfloat16
        )
        self._optimizer = adamw(self._pipeline.parameters())

    def step(self, batch: Tensor) -> Any:
        result = self._pipeline.step(batch)
        self._pipeline.clip_grad_norm_(CLIP)
        assert self._optimizer is not None
        self._optimizer.step()
        self._pipeline.zero_grad()
        return result.loss


class Loop(_Stepwise):
    """By hand, with the recipe of torchtitan (github.com/pytorch/torchtitan)."""

    def __init__(self, settings: Settings, device: torch.device, compiled: bool, dtype: torch.dtype) -> None:
        self.device, self._settings = device, settings
        self._autocast = dtype == torch.float32
        torch.manual_seed(0)
        with device:
            self._model: Any = LlamaForCausalLM(common.llama(settings, settings.vocabulary))
        self._model.to(dtype).train()
        self._loss: Callable[..., Tensor] = chunk_loss
        if compiled:
            for layer in self._model.model.layers:
                layer.compile()
            self._loss = torch.compile(chunk_loss)
        self._optimizer = adamw(self._model.parameters())

    def step(self, batch: Tensor) -> Any:
        batch = batch.to(self.device, non_blocking=True)
        labels = functional.pad(batch[:, 1:], (0, 1), value=-100)
        share = 1 / (labels != -100).sum()
        losses = []
        for ids, targets in zip(
            batch.split(self._settings.sequences), labels.split(self._settings.sequences), strict=True
        ):
            losses.append(self._microbatch(ids, targets, share))
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP, foreach=True)
        assert self._optimizer is not None
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.stack(losses).sum()

    def _microbatch(self, ids: Tensor, targets: Tensor, share: Tensor) -> Tensor:
        """Forward and backward; hidden states get their gradient chunk by chunk before the layers have theirs."""
        total = torch.zeros((), device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            hidden = self._model.model(ids, use_cache=False).last_hidden_state
            leaf = hidden.detach().requires_grad_()
            for states, labels in zip(leaf.chunk(CHUNKS, dim=1), targets.chunk(CHUNKS, dim=1), strict=True):
                loss = self._loss(states, self._model.lm_head.weight, labels) * share
                loss.backward()
                total += loss.detach()
        hidden.backward(leaf.grad)
        return total


def chunk_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over the labels, from logits in fp32."""
    logits = functional.linear(hidden, weight).float()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Transformers(Arm):
    """transformers' own loop over so many steps; the first of each call, which begins the loop, does not count."""

    def __init__(self, settings: Settings, device: torch.device, compiled: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="evenpipe-trainer-")
        self._settings = settings
        self._stamps = _Stamps(device)
        torch.manual_seed(0)
        with device:
            self._model = LlamaForCausalLM(common.llama(settings, settings.vocabulary))
        self._arguments = partial(
            TrainingArguments,
            output_dir=self._folder.name,
            per_device_train_batch_size=settings.sequences,
            gradient_accumulation_steps=settings.microbatches,
            bf16=True,
            optim="adamw_torch_fused",
            learning_rate=OPTIMIZER.learning_rate,
            weight_decay=DECAY,
            adam_beta1=ADAM["betas"][0],
            adam_beta2=ADAM["betas"][1],
            adam_epsilon=ADAM["eps"],
            max_grad_norm=CLIP,
            lr_scheduler_type="constant",
            torch_compile=compiled,
            use_cpu=device.type == "cpu",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        self._arguments(max_steps=1)  # which says at once what is missing

    def steps(self, batches: list[Tensor]) -> list[float]:
        rows = [{"input_ids": row, "labels": row} for batch in (batches[0], *batches) for row in batch]
        trainer = Trainer(
            model=self._model,
            args=self._arguments(max_steps=len(batches) + 1),
            train_dataset=rows,
            callbacks=[self._stamps],
        )
        trainer.remove_callback(PrinterCallback)
        self._stamps.ends.clear()
        self.loss = trainer.train().training_loss
        ends = self._stamps.ends
        return [after - before for before, after in pairwise(ends)]


class _Stamps(TrainerCallback):
    """When steps end."""

    def __init__(self, device: torch.device) -> None:
        self.ends: list[float] = []
        self._device = device

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronise(self._device)
        self.ends.append(time.perf_counter())


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """Bytes of all tensors."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


ARMS: dict[str, Callable[[Settings, torch.device, bool], Arm]] = {
    "evenpipe": Evenpipe,
    "Trainer": Transformers,
    "loop": partial(Loop, dtype=torch.float32),
    "loop, bf16": partial(Loop, dtype=torch.bfloat16),
}


def run(
    make: Callable[[], Arm], batches: list[Tensor], device: torch.device, given: argparse.Namespace
) -> dict[str, Any]:
    """Builds an arm and times its steps; it is given up on return. `peak_bytes`: the most of its own in a step."""
    others = allocated(device)
    arm = make()
    arm.steps(batches[:1] * given.warm_up)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    steps: list[float] = []
    while len(steps) < LEAST or (len(steps) < given.repetitions and sum(steps) < given.arm_seconds):
        steps += arm.steps(batches)
    peak = torch.cuda.max_memory_allocated(device) - others if device.type == "cuda" else None
    return {"seconds": statistics.median(steps), "steps": steps, "peak_bytes": peak, "loss": arm.loss}


def give_up(device: torch.device) -> None:
    """What libraries and compiled code hold of the arm before, so that the next finds the device as the first did."""
    torch.compiler.reset()
    if device.type == "cuda":
        attempt(torch._C._cuda_clearCublasWorkspaces)
    clean_up()


HEADER = ["", "step s", "tokens/s", "MFU", "MiB", "loss"]


def line(case: dict[str, Any]) -> list[str]:
    """Of the table."""
    peak = case["peak_bytes"]
    return [
        case["name"],
        f"{case['seconds']:.4f}",
        f"{case['tokens_per_second']:,.0f}",
        percent(case["mfu"]),
        "-" if peak is None else f"{peak / MIB:,.0f}",
        f"{case['loss']:.3f}",
    ]


def measure(given: argparse.Namespace, settings: Settings, device: torch.device) -> Iterator[dict[str, Any]]:
    """Arm by arm, those that do not run with the reason."""
    description = describe(common.llama(settings, settings.vocabulary))
    flops = 3 * settings.step_tokens * (sum(layer_flops(description, settings.tokens)) + head_flops(description))
    peak_flops = find_hardware(given.hardware).peak("bf16") if device.type == "cuda" else None
    generator = torch.Generator().manual_seed(0)
    shape = (settings.sequences * settings.microbatches, settings.tokens)
    batches = [torch.randint(0, settings.vocabulary, shape, generator=generator) for _ in range(given.per_turn)]
    names = [(name, name, False) for name in given.arms]
    if given.compile:
        names += [(f"{name}, compiled", name, True) for name in given.arms]
    for title, name, compiled in names:
        found = attempt(partial(run, partial(ARMS[name], settings, device, compiled), batches, device, given))
        give_up(device)
        if isinstance(found, Failure):
            yield {"name": title, "reason": found.reason}
            continue
        step = found["seconds"]
        yield {
            "name": title,
            **found,
            "tokens_per_second": settings.step_tokens / step,
            "mfu": None if peak_flops is None else flops / step / peak_flops,
        }


def main() -> None:
    assert __doc__ is not None
    parser = arguments(__doc__, arm_seconds=60.0)
    for one in fields(Settings)[1:]:
        assert one.default is not MISSING
        flag, text = f"--{one.name.replace('_', '-')}", f"{one.metadata['help']} (default: {one.default})"
        parser.add_argument(flag, type=int, default=one.default, metavar="N", help=text)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--compile", action="store_true", help="each arm with torch.compile too")
    parser.add_argument("--per-turn", type=int, default=4, metavar="N", help="steps at a time, each with its own batch")
    parser.add_argument("--hardware", default="H200", help="its peak is that of the MFU (default: %(default)s)")
    given = parser.parse_args()
    device = device_of(given)
    settings = common.settings_of(argparse.Namespace(**vars(given), processes=1), Settings)
    initialise_worker(torch_device=device)
    results = Results(given, device)
    for case in measure(given, settings, device):
        results.add(case)
        progress("  ".join(line(case)) if "seconds" in case else f"{case['name']} did not run: {case['reason']}")
    cases = results.cases
    print(
        f"{settings.layers} layers of {settings.hidden_size}, {settings.vocabulary} rows; {settings.microbatches}"
        f" microbatches of {settings.sequences} x {settings.tokens} tokens"
    )
    print(table([HEADER, *(line(case) for case in cases if "seconds" in case)]))
    for case in cases:
        if "reason" in case:
            print(f"did not run: {case['name']}: {case['reason']}")


if __name__ == "__main__":
    main()
