"""How fast are the matrix products and the attention of real layers on this GPU, and how far from what plans assume?

    python benchmarks/gpu/products.py --hardware H100-80G [--output FILE.json]    about a minute
    python benchmarks/gpu/products.py --device cpu --tokens 64 --widths 128 --repetitions 2    to try it

For hidden sizes, tokens of a microbatch and tensor ranks: products of attention (h x h), of the MLP (h x 3.5 h, and
back), and of a shard of the output layer (h x 32 064), each as F computes it, as I does (for its input) and as W does
(for its weight), in bf16. Then products of experts, one group of rows for each: of 8, 16 and 32 experts with 64 to
2 048 rows each. At last attention of one causal sequence, F and the whole backward B, by each kernel of torch.

    TFLOP/s     median of runs that take turns
    share       of the peak of the data sheet; of attention, FLOPs of the pairs under the mask
    predicted   time by `Hardware.product_seconds`, or that of its memory, over the measured one, less 1
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from timing import Arm, Results, arguments, device_of, medians, percent, progress, table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from evenpipe.costs.hardware import ATTENTION_BACKWARD, KNOWN, Hardware
from evenpipe.model.products import PLAIN, Groups

COPIES = 3
"""Of the operands, which take turns."""
SHARD = 32_064
"""Rows of Llama 3's vocabulary on one of four devices."""
EXPERTS = {"Mixtral-8x7B": (4096, 14336, 8), "DeepSeek-V3": (7168, 2048, 32), "Qwen3-235B": (4096, 1536, 16)}
"""Hidden size, width of an expert, experts of a device."""
EXPERT_ROWS = (64, 256, 512, 1024, 2048)
"""Of an expert."""
HEADS = ((32, 8, 128), (8, 2, 128), (16, 16, 64))
"""Heads of queries, of keys and values, and their size: Llama 3 8B, the same over four tensor ranks, small models."""
LENGTHS = (2048, 4096, 8192, 16384, 32768)
"""Of the sequence."""
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""Which a GPU has for attention without a mask of its own."""


@dataclass(frozen=True)
class Case:
    """A matrix product [rows, inner] x [inner, columns], or one for each of so many experts."""

    name: str
    kind: str
    """"F", "I" or "W"."""
    rows: int
    inner: int
    columns: int
    experts: int = 1

    @property
    def flops(self) -> float:
        """Two for each multiplication and addition."""
        return 2.0 * self.rows * self.inner * self.columns * self.experts

    def arm(self, device: torch.device) -> Arm:
        """The product, as the library computes it."""
        operands = [self._operands(device) for _ in range(COPIES)]
        run = self._dense if self.experts == 1 else self._of_experts(device)
        return Arm(run, lambda repetition: operands[repetition % COPIES])

    def _operands(self, device: torch.device) -> tuple[Tensor, Tensor]:
        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=device)

        if self.kind == "W":  # tokens are the inner dimension, and rows of memory
            inner = self.inner * self.experts
            return drawn(inner, self.rows), drawn(inner, self.columns)
        weight = (self.columns, self.inner) if self.kind == "F" else (self.inner, self.columns)
        matrices = drawn(self.experts, *weight) if self.experts > 1 else drawn(*weight)
        return drawn(self.rows * self.experts, self.inner), matrices

    def _dense(self, operands: tuple[Tensor, Tensor]) -> Tensor:
        left, right = operands
        if self.kind == "W":
            return left.t() @ right
        return left @ (right.t() if self.kind == "F" else right)

    def _of_experts(self, device: torch.device) -> Any:
        each = self.inner if self.kind == "W" else self.rows
        groups = Groups(each * torch.arange(1, self.experts + 1, dtype=torch.int32, device=device))

        def run(operands: tuple[Tensor, Tensor]) -> Tensor:
            left, right = operands
            if self.kind == "W":
                return PLAIN.grouped_weight_gradient(left, right, groups)
            return PLAIN.grouped_output(left, right.transpose(1, 2) if self.kind == "F" else right, groups)

        return run


@dataclass(frozen=True)
class Attention:
    """Of one causal sequence of `rows` tokens."""

    name: str
    kind: str
    """"F", or "B" for the whole backward."""
    rows: int
    heads: tuple[int, int, int]
    kernel: SDPBackend
    inner: int = 0
    columns: int = 0
    experts: int = 1

    @property
    def flops(self) -> float:
        """Two products of all pairs under the mask; five in the backward, which computes the first anew."""
        heads, _, size = self.heads
        return (2 if self.kind == "F" else 5) * 2.0 * heads * size * self.rows * (self.rows + 1) / 2

    def arm(self, device: torch.device) -> Arm:
        """Attention, or its backward, with the chosen kernel."""
        queries, keys, size = self.heads
        several = [
            [
                torch.randn(
                    1, heads, self.rows, size, dtype=torch.bfloat16, device=device, requires_grad=self.kind == "B"
                )
                for heads in (queries, keys, keys)
            ]
            for _ in range(COPIES)
        ]
        if self.kind == "F":
            return Arm(self._forward, lambda repetition: several[repetition % COPIES])
        results = [self._forward(operands) for operands in several]
        gradient = torch.randn_like(results[0])
        return Arm(
            lambda number: torch.autograd.grad(results[number], several[number], gradient, retain_graph=True),
            lambda repetition: repetition % COPIES,
        )

    def _forward(self, operands: list[Tensor]) -> Tensor:
        with sdpa_kernel(self.kernel):
            queries, keys, values = operands
            shared = self.heads[0] > self.heads[1]
            return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=shared)


def dense(tokens: int, width: int, ranks: int) -> Iterator[Case]:
    """All products of a layer and of a shard of the output layer, of one of so many tensor ranks."""
    for name, inner, outer in (
        ("attention", width, width // ranks),
        ("attention, out", width // ranks, width),
        ("MLP, up", width, 7 * width // 2 // ranks),
        ("MLP, down", 7 * width // 2 // ranks, width),
        *([("output layer", width, SHARD)] if ranks == 1 else []),
    ):
        if ranks == 1 and name == "attention, out":
            continue
        yield Case(name, "F", tokens, inner, outer)
        yield Case(name, "I", tokens, outer, inner)
        yield Case(name, "W", outer, tokens, inner)


def of_experts(name: str, rows: int) -> Iterator[Case]:
    """The first product of every expert."""
    width, own, experts = EXPERTS[name]
    yield Case(f"{name}, {rows} rows", "F", rows, width, own, experts)
    yield Case(f"{name}, {rows} rows", "I", rows, own, width, experts)
    yield Case(f"{name}, {rows} rows", "W", own, rows, width, experts)


def attention() -> Iterator[Attention]:
    """Every kernel, shape and length, forward and backward."""
    for length in LENGTHS:
        for heads in HEADS:
            for name, kernel in KERNELS.items():
                for kind in "FB":
                    yield Attention(f"{name}, {heads[0]} heads of {heads[2]}", kind, length, heads, kernel)


def predicted_seconds(case: Case | Attention, hardware: Hardware) -> float:
    """As the planner has it: products of experts are one product, all of whose sizes are large; none is faster than its
    memory. Products of a step are slower than those alone, which the planner knows."""
    if isinstance(case, Attention):
        flash = case.kernel is SDPBackend.FLASH_ATTENTION
        forward = case.flops if case.kind == "F" else case.flops / ATTENTION_BACKWARD
        times = (hardware.with_flash_attention() if flash else hardware).attention_seconds(forward, "bf16")
        return times["FB".index(case.kind)]
    shape = None if case.experts > 1 else (case.rows, case.columns, case.inner)
    numbers = case.rows * case.inner + case.inner * case.columns + case.rows * case.columns
    moved = 2.0 * numbers * case.experts
    return max(hardware.product_seconds(case.flops, "bf16", shape), hardware.streaming_seconds(moved))


def main() -> None:
    assert __doc__ is not None
    parser = arguments(__doc__, arm_seconds=0.2)
    parser.add_argument("--hardware", choices=list(KNOWN), default="H100-80G", help="default: %(default)s")
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192], metavar="N", help="of a microbatch")
    parser.add_argument(
        "--widths", nargs="+", type=int, default=[2048, 3072, 4096, 5120, 8192], metavar="N", help="hidden sizes"
    )
    parser.add_argument("--tensor", nargs="+", type=int, default=[1, 4], metavar="N", help="tensor ranks of the layers")
    given = parser.parse_args()
    device = device_of(given)
    hardware = KNOWN[given.hardware]
    results = Results(given, device)
    rows = [["product", "pass", "rows", "inner", "columns", "TFLOP/s", "share", "predicted"]]
    sets: list[list[Case | Attention]] = [
        list(dense(tokens, width, ranks)) for tokens in given.tokens for width in given.widths for ranks in given.tensor
    ]
    if device.type == "cuda":
        sets += [list(of_experts(name, count)) for name in EXPERTS for count in EXPERT_ROWS]
        sets += [[case] for case in attention()]
    for cases in sets:
        arms = {str(number): case.arm(device) for number, case in enumerate(cases)}
        timings, failures = medians(arms, device, given)
        for number, case in enumerate(cases):
            sizes = [case.name, case.kind, *map(str, (case.rows, case.inner, case.columns))]
            figures: dict[str, Any] = dict(zip(("name", "kind"), sizes, strict=False))
            figures |= {"rows": case.rows, "inner": case.inner, "columns": case.columns, "experts": case.experts}
            if str(number) in failures:
                results.add(figures | {"reason": failures[str(number)].reason})
                rows.append([*sizes, failures[str(number)].reason, "", ""])
                continue
            seconds = timings[str(number)].seconds
            speed, predicted = case.flops / seconds, predicted_seconds(case, hardware)
            results.add(figures | {"seconds": seconds, "predicted_seconds": predicted})
            share = percent(speed / hardware.peak("bf16"))
            rows.append([*sizes, f"{speed / 1e12:.1f}", share, percent(predicted / seconds - 1)])
        progress(cases[0].name)
        del arms
    print(f"\n{results.about}\n{table(rows)}")


if __name__ == "__main__":
    main()
