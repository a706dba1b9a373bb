"""The symbols in the formulas for the vocabulary layers, for one shard and one microbatch.

n  tokens of a microbatch      v  those that have a label      o  those whose label this shard owns
h  hidden size                 R  rows of the shard            P  shards
e  bytes of hidden states      a  of accumulators (4, or 8 for fp64)      q  of stored exponentials
k  statistics per token        b  tokens per block of logits   c  tokens whose embedding rows are here
t  tensor ranks that each have a part of X and dX, besides rows of both matrices
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from evenpipe.vocabulary import LossOptions, Shard
from evenpipe.vocabulary.buffers import aligned
from evenpipe.vocabulary.kernels.plain import cached_rows
from evenpipe.vocabulary.output import BLOCK_LOGITS, rows_per_block
from evenpipe.vocabulary.products import SLICE_ROWS, cpu_has_bf16

Machine = Literal["gpu", "cpu", "cpu without bf16"]
""""gpu": products write into their accumulators, Triton's kernels process them, and the allocator reuses memory; "cpu":
bf16 products have bf16 results; "cpu without bf16": they are computed in fp32, piece by piece."""


def this_cpu() -> Machine:
    """Return which machine the processor of this process is."""
    return "cpu" if cpu_has_bf16() else "cpu without bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShape:
    """One model's vocabulary layers and one microbatch."""

    rows: int
    """Rows of the whole embedding and output layer."""
    hidden_size: int
    sequences: int
    """Sequences per microbatch."""
    tokens: int
    """Tokens of one sequence on this GPU."""
    labelled: int | None = None
    """Tokens of a microbatch that have a label; None: all but the last of each sequence."""
    element: int = 2
    """Bytes of hidden states."""
    gradient_element: int = 4
    """Bytes of the gradients of parameters."""
    options: LossOptions = field(default_factory=LossOptions)
    bias: bool = False
    """Whether the output layer has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Letters:
    """Symbols of the formulas; see above."""

    n: int
    v: int
    o: int
    R: int
    P: int
    a: int
    c: int
    start: int
    """First row of the shard."""
    machine: Machine
    shape: VocabularyShape
    t: int = 1

    @classmethod
    def of(
        cls, shape: VocabularyShape, shard: Shard, shards: int, share: float | None, machine: Machine, *, ranks: int = 1
    ) -> Letters:
        n = shape.sequences * shape.tokens
        v = shape.sequences * (shape.tokens - 1) if shape.labelled is None else shape.labelled
        part = shard.tokens / shape.rows if share is None else share
        return cls(
            n=n,
            v=v,
            o=round(v * part) if shard.tokens else 0,
            R=shard.tokens,
            P=shards,
            a=8 if shape.element == 8 else 4,
            c=round(n * part),
            start=shard.start,
            machine=machine,
            shape=shape,
            t=ranks,
        )

    @property
    def h(self) -> int:
        return self.shape.hidden_size

    @property
    def e(self) -> int:
        return self.shape.element

    @property
    def q(self) -> int:
        return self.e

    @property
    def k(self) -> int:
        return self.options.statistics

    @property
    def options(self) -> LossOptions:
        return self.shape.options

    @property
    def fused(self) -> bool:
        """Kernels allocate only their results. Otherwise large tensors of S and T are reused instead of freed."""
        return self.machine == "gpu"

    @property
    def keeps(self) -> bool:
        return self.options.keep == "probabilities"

    @property
    def b(self) -> int:
        """Tokens per block, as in `output.py`."""
        in_place = self.keeps and self.in_place
        block = rows_per_block(self.options, self.R, in_place=in_place, on_gpu=self.fused)
        return max(1, min(block, self.v))

    def distance(self, columns: int) -> int:
        """Elements from one row of a matrix of logits to the next."""
        return aligned(columns) if self.fused else columns

    @property
    def again(self) -> int:
        """Columns of the vocabulary at a time, if T recomputes the logits."""
        return min(self.R, max(256, BLOCK_LOGITS // max(1, self.v) // 256 * 256))

    @property
    def of_logit(self) -> int:
        """Bytes of a logit as the product returns it."""
        return self.e if self.narrow else self.a

    @property
    def in_place(self) -> bool:
        """Exponentials overwrite the logits."""
        return self.of_logit == self.q

    def rooms(self, rows: int, columns: int) -> int:
        """Bytes of the memory for this many logits, besides exponentials that are kept."""
        per_logit = 0 if self.in_place else self.of_logit
        if not self.keeps:
            per_logit += self.q * (2 if self.options.needs_derivative else 1)
        per_cached = 0
        if not self.fused:
            per_cached = self.a * ((self.of_logit != self.a) + (self.options.soft_cap is not None))
        return rows * self.distance(columns) * per_logit + cached_rows(rows, columns) * columns * per_cached

    @property
    def slow(self) -> bool:
        """Products are computed in fp32, in slices of the vocabulary."""
        return self.machine == "cpu without bf16" and self.e != self.a

    @property
    def narrow(self) -> bool:
        """Results of products are bf16 tensors."""
        return self.machine == "cpu" and self.e != self.a

    # --- temporaries of the three products ----------------------------------------------------------------------

    def of_logits(self, tokens: int, columns: int) -> int:
        """X W^T."""
        if not self.slow:
            return 0
        r = min(columns, SLICE_ROWS)
        return self.a * (tokens * self.h + r * self.h + tokens * r)

    def of_hidden(self, tokens: int) -> int:
        """E W."""
        if self.slow:
            r = min(self.R, SLICE_ROWS)
            return self.a * r * (tokens + self.h)
        return tokens * self.h * self.e if self.narrow else 0

    def of_weight(self) -> int:
        """E^T (r X), beside r X itself."""
        r = min(self.R, SLICE_ROWS)
        if self.slow:
            return self.a * self.v * (self.h + r)
        return r * self.h * self.q if self.narrow else 0
