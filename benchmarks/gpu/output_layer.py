"""How fast is the output layer with its loss on one GPU, how much memory does it take, and how exact is it?

    python benchmarks/gpu/output_layer.py --shapes 4096x4096x128256 [--output FILE.json]
    python benchmarks/gpu/output_layer.py --shapes 4096x4096x128256 --arms vocab-2 Liger [--logits random]
    python benchmarks/gpu/output_layer.py --device cpu --shapes 64x128x1024 --repetitions 2    to try it

A shape takes some minutes, most of which go by compiling the kernels of others: where a command may not take long, run
one for each of 4096x4096x128256, 8192x4096x128256, 4096x2048x151936, 4096x5120x262144, 8192x8192x128256 and
16384x4096x32000, which without --shapes follow each other. --arms names what is compared, by any part of its name.

For every shape (tokens x hidden size x vocabulary) our passes of one device, with one barrier (vocab-2) and two
(vocab-1), whose S keeps probabilities or nothing, and whole layers of ours and of others (peers.py), forward and
backward, stand against the three matrix products that none can do without. Printed are

    ms          median of runs that take turns; `S`, `C` and `T` alone, and `S + T`, which is all of them
    rate        that of its matrix products (2 x tokens x hidden size x vocabulary each) over that of the bare ones;
                products that are done again do not count
    MiB         most memory beside inputs and results
    dX, dW      relative error of the gradients of hidden states and weight against fp64, Frobenius norm
    loss        relative error of the mean loss

`confident`: the probability of every label is about 0.99. Labels are drawn as in text, because kernels that add up what
belongs to one label have more to do there than with labels that hardly ever repeat (--labels even). T adds to a
gradient in fp32, as training does; others return dW in the dtype of the weight. What does not run is listed with the
reason.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # arms of all sizes share the memory

import torch
from passes import LABELS, MODES, Batch, Output, output_shard, random_batches, random_weight
from peers import LOSSES, Loss
from timing import (
    DTYPES,
    MIB,
    Arm,
    Failure,
    Results,
    arguments,
    attempt,
    clean_up,
    device_of,
    medians,
    milliseconds,
    peak_bytes,
    percent,
    progress,
    relative_error,
    table,
)
from torch import Tensor

from evenpipe.vocabulary import LossOptions

SHAPES = (
    "4096x4096x128256",
    "8192x4096x128256",
    "4096x2048x151936",
    "4096x5120x262144",
    "8192x8192x128256",
    "16384x4096x32000",
)
"""Llama-3-8B at 4k and 8k, Qwen3-1.7B, a Gemma-3-like one, Llama-3-70B, and a small vocabulary."""
BATCHES = 3
"""Of inputs that take turns."""
ROWS = 512
"""Tokens at a time, of what is computed in fp64."""
BARE = "three products"


@dataclass(frozen=True)
class Exact:
    """In fp64, from the same rounded inputs: the mean loss, dX and dW, and the median probability of the labels."""

    loss: float
    hidden: Tensor
    weight: Tensor
    probability: float

    @classmethod
    def of(cls, batch: Batch, weight: Tensor) -> Exact:
        """Block by block of tokens."""
        wide = weight.double()
        hidden_gradient = torch.zeros(batch.hidden.shape, dtype=torch.float64, device=weight.device)
        weight_gradient = torch.zeros_like(wide)
        total, probabilities = 0.0, []
        for start in range(0, batch.hidden.shape[0], ROWS):
            span = slice(start, start + ROWS)
            rows = (batch.on_device[span] >= 0).nonzero().squeeze(1)
            hidden, labels = batch.hidden[span].double()[rows], batch.on_device[span][rows, None]
            share = batch.weights[span].double()[rows, None]
            likely = torch.log_softmax(hidden @ wide.t(), dim=1)
            own = likely.gather(1, labels)
            total -= float((own * share).sum())
            probabilities.append(own.exp())
            likely.exp_().scatter_add_(1, labels, torch.full_like(own, -1.0)).mul_(share)
            hidden_gradient[span].index_copy_(0, rows, likely @ wide)
            weight_gradient.addmm_(likely.t(), hidden)
        return cls(total, hidden_gradient, weight_gradient, float(torch.cat(probabilities).median()))

    def errors(self, loss: float, hidden: Tensor, weight: Tensor) -> dict[str, float]:
        """Of what something else computed."""
        return {
            "hidden_error": relative_error(hidden, self.hidden),
            "weight_error": relative_error(weight, self.weight),
            "loss_error": abs(loss / self.loss - 1),
        }


@dataclass(frozen=True)
class Candidate:
    """One row of the table, or several. arms: with the number of matrix products of each. gradients: loss, dX and dW
    of the first inputs."""

    arms: dict[str, tuple[Arm, int]]
    gradients: Callable[[], tuple[Tensor, Tensor, Tensor]]


def ours(weight: Tensor, batches: list[Batch], gradient: Tensor, mode: str, options: LossOptions) -> Candidate:
    """Our passes, of a single device. gradient: as of `output_shard`."""
    output: Output = output_shard(weight, 1, mode, options, batches[0], gradient=gradient)
    products = {"S": 2, "C": 0, "T": 1} if output.one_barrier else {"S": 1, "T": 2}
    arms = {name: (arm, products[name]) for name, arm in output.arms(batches).items()}
    whole = Arm(output.all, lambda repetition: batches[repetition % len(batches)])

    def gradients() -> tuple[Tensor, Tensor, Tensor]:
        output.gradient.zero_()
        losses, hidden = output.all(batches[0])
        return (losses * batches[0].weights).sum(), hidden, output.gradient

    return Candidate({**arms, "S + T": (whole, 3)}, gradients)


def with_autograd(weight: Tensor, batches: list[Batch], make: Callable[[], Loss]) -> Candidate:
    """A function whose gradients autograd takes."""
    function = make()
    leaf = weight.detach().requires_grad_()
    leaves = [batch.hidden.detach().requires_grad_() for batch in batches]

    def run(at: int) -> tuple[Tensor, Tensor, Tensor]:
        loss = function(leaves[at], leaf, batches[at].on_device)
        hidden_gradient, weight_gradient = torch.autograd.grad(loss, (leaves[at], leaf))
        return loss.detach(), hidden_gradient, weight_gradient

    return Candidate({"": (Arm(run, lambda repetition: repetition % len(batches)), 3)}, lambda: run(0))


def bare_products(weight: Tensor, batches: list[Batch]) -> Arm:
    """Logits, dX and dW as matrix products alone, into tensors that are there."""
    logits = torch.empty(batches[0].hidden.shape[0], weight.shape[0], dtype=weight.dtype, device=weight.device)
    hidden_gradient, weight_gradient = torch.empty_like(batches[0].hidden), torch.empty_like(weight)

    def run(hidden: Tensor) -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=hidden_gradient)
        torch.mm(logits.t(), hidden, out=weight_gradient)

    return Arm(run, lambda repetition: batches[repetition % len(batches)].hidden)


def candidates(
    weight: Tensor, batches: list[Batch], given: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Candidate]]]:
    """Everything that is compared, by name."""
    gradient = torch.zeros(weight.shape, device=weight.device)
    for kernels in given.kernels:
        for mode in MODES:
            for keep in ("probabilities", "nothing"):
                options = LossOptions(keep=keep, kernels=kernels)
                yield f"{mode}, keeps {keep}, {kernels}", partial(ours, weight, batches, gradient, mode, options)
    for name, make in LOSSES.items():
        yield name, partial(with_autograd, weight, batches, make)


def tried(
    make: Callable[[], Candidate], exact: Exact | Failure, device: torch.device
) -> tuple[Candidate, dict[str, Any]]:
    """With its memory and its errors, where these are known."""
    candidate = make()
    candidate.gradients()  # compiles, tunes
    (loss, hidden, weight), peak = peak_bytes(candidate.gradients, device)
    errors = {} if isinstance(exact, Failure) else exact.errors(float(loss), hidden, weight)
    return candidate, {"peak_bytes": peak, **errors}


def measure(
    shape: str, logits: str, given: argparse.Namespace, device: torch.device, results: Results
) -> list[dict[str, Any]]:
    """All rows of one shape, which go into `results` one by one."""
    tokens, width, vocabulary = map(int, shape.split("x"))
    weight = random_weight(vocabulary, width, DTYPES[given.dtype], device)
    confident = logits == "confident"
    batches = random_batches(BATCHES, tokens, weight, drawn=given.labels, ignored=given.ignored, confident=confident)
    exact = attempt(partial(Exact.of, batches[0], weight))
    common: dict[str, Any] = {"tokens": tokens, "hidden_size": width, "vocabulary": vocabulary, "logits": logits}
    if isinstance(exact, Failure):
        progress(f"no errors without a reference in fp64: {exact.reason}")
    else:
        common["label_probability"] = exact.probability

    arms: dict[str, Arm] = {}
    rows: dict[str, dict[str, Any]] = {}

    def add(title: str, **row: Any) -> None:
        rows[title] = {**common, "name": title, **row}
        results.add(rows[title])

    def bare() -> Arm:
        arm = bare_products(weight, batches)
        arm()  # libraries make their workspaces
        return arm

    products = attempt(bare)
    if isinstance(products, Failure):
        add(BARE, reason=products.reason)
    else:
        arms[BARE] = products
        add(BARE, products=3)
    for name, make in candidates(weight, batches, given):
        if not any(part in name for part in given.arms):
            continue
        found = attempt(partial(tried, make, exact, device))
        if isinstance(found, Failure):
            progress(f"{name} did not run: {found.reason}")
            add(name, reason=found.reason)
            continue
        candidate, figures = found
        progress(
            f"{name}: {', '.join(f'{head} {cell}' for head, cell in zip(HEADER[3:], cells(figures), strict=True))}"
        )
        for part, (arm, count) in candidate.arms.items():
            title = f"{name}: {part}" if part else name
            arms[title] = arm
            add(title, products=count, **(figures if part in ("", "S + T") else {}))
    del exact
    progress(f"{len(arms)} arms take turns")
    timings, failures = medians(arms, device, given)
    rates = {
        title: 2.0 * rows[title]["products"] * tokens * width * vocabulary / timing.seconds
        for title, timing in timings.items()
    }
    for title, timing in timings.items():
        share = rates[title] / rates[BARE] if rates[title] and BARE in rates else None
        results.complete(rows[title], **timing.to_dict(), flops_per_second=rates[title], share=share)
    for title, failure in failures.items():
        results.complete(rows[title], reason=failure.reason)
    return list(rows.values())


HEADER = ["", "ms", "rate", "MiB", "dX", "dW", "loss"]


def cells(row: dict[str, Any]) -> list[str]:
    """Of the table: memory and errors."""
    errors = (row.get(name) for name in ("hidden_error", "weight_error", "loss_error"))
    peak = row.get("peak_bytes")
    return [
        "-" if peak is None else f"{peak / MIB:.0f}",
        *("-" if error is None else f"{error:.1e}" for error in errors),
    ]


def line(row: dict[str, Any]) -> list[str]:
    """Of the table."""
    return [row["name"], milliseconds(row["seconds"]), percent(row["share"]), *cells(row)]


def show(rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """A table of one shape, and what is not in it."""
    first = rows[0]
    rate, probability = first.get("flops_per_second"), first.get("label_probability")
    print(
        f"\n{first['tokens']} tokens x {first['hidden_size']} x {first['vocabulary']} rows, {given.dtype},"
        f" {first['logits']} logits"
        f"{'' if probability is None else f' (probability of a label {probability:.2g})'},"
        f" labels drawn {'as in text' if given.labels == 'text' else 'evenly'},"
        f" {100 * given.ignored:g} % without one; bare products:"
        f" {'-' if rate is None else f'{rate / 1e12:.4g} TFLOP/s'}"
    )
    print(table([HEADER, *(line(row) for row in rows if "seconds" in row)]))
    hosts = [row["name"] for row in rows if row.get("host")]
    if hosts:
        print(f"with time of the host, since they wait for the GPU: {'; '.join(hosts)}")
    for row in rows:
        if "reason" in row:
            print(f"did not run: {row['name']}: {row['reason']}")
    print(end="", flush=True)


def main() -> None:
    assert __doc__ is not None
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="TOKENSxHIDDENxVOCABULARY")
    parser.add_argument("--logits", nargs="+", choices=("random", "confident"), default=["random", "confident"])
    parser.add_argument("--labels", choices=LABELS, default="text", help="how they are drawn (default: %(default)s)")
    parser.add_argument("--ignored", type=float, default=0.0, metavar="SHARE", help="of the tokens, without a label")
    parser.add_argument("--arms", nargs="+", default=[""], metavar="PART", help="of the names of those that are run")
    parser.add_argument("--kernels", nargs="+", choices=("auto", "torch", "triton"), default=["auto"], help="of ours")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="of hidden states and weight")
    given = parser.parse_args()
    device = device_of(given)
    results = Results(given, device)
    for shape in given.shapes:
        for logits in given.logits:
            progress(f"{shape}, {logits} logits")
            rows = attempt(partial(measure, shape, logits, given, device, results))
            if isinstance(rows, Failure):
                results.add({"name": shape, "logits": logits, "reason": rows.reason})
                progress(f"{shape} did not run: {rows.reason}")
            else:
                show(rows, given)
            clean_up()


if __name__ == "__main__":
    main()
