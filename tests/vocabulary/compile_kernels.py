"""Compile every kernel for a Hopper GPU, which needs none: what the interpreter accepts a compiler may not.

    python tests/vocabulary/compile_kernels.py          prints a line per kernel; exit status 1 where one fails

Triton must not be told to interpret, so this is a program of its own (test_triton_kernels.py runs it).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from evenpipe.vocabulary.kernels import rows

HOPPER = GPUTarget("cuda", 90, 32)
WHOLE = {"columns", "width", "first_column", "tokens", "shards", "vocabulary", "ignore_index", "hidden_size", "entries"}
INDICES = {"target_columns", "labels", "valid", "entry_rows", "entry_columns"}
STRIDES = {"logits_stride", "exponentials_stride"}
STORED = {"exponentials", "derivative", "bias", "weight", "hidden", "scaled"}
"""In the dtype of the model; all else is in that of the accumulators."""


def types_of(kernel: Any, stored: str, wide: str, compiled: dict[str, Any]) -> dict[str, str]:
    """Triton's names of the arguments' types."""

    def type_of(name: str) -> str:
        if name in compiled:
            return "constexpr"
        if name in WHOLE or name.endswith("_stride"):
            return "i32"
        return f"*{'i64' if name in INDICES else stored if name in STORED else wide}"

    return {name: type_of(name) for name in kernel.arg_names}


def variants() -> Iterator[tuple[Any, dict[str, Any], int]]:
    """Every kernel, and of what it is compiled for every value, nothing and everything: not all combinations."""
    for bias, cap, numbers, derivative in ((False, 0.0, 3, False), (True, 5.0, 5, True), (True, 0.0, 5, False)):
        common = {"SCALE": 0.7, "CAP": cap, "HAS_BIAS": bias, "STORES_DERIVATIVE": derivative, "SIZE": 1024}
        sums = {"NUMBERS": numbers + derivative, "ENTROPY": derivative}
        once = {"AGAIN": False, **sums, "SMOOTHS": numbers == 5, "STORES": bias}
        again = {"AGAIN": True, "NUMBERS": 1, "ENTROPY": False, "SMOOTHS": False, "STORES": True}
        yield from ((rows.exponentials_of_rows, common | more, 16) for more in (once, again))
        of_loss = {"SCALE": 0.7, "CAP": cap, "Z_LOSS": 1e-4 if bias else 0.0, **sums, "SIZE": 128}
        yield rows.combine_rows, {**of_loss, "SMOOTHING": 0.1 if numbers == 5 else 0.0}, 4
    for valid, derivative, constant in ((False, False, True), (True, True, False), (True, False, False)):
        names = {"HAS_VALID": valid, "HAS_DERIVATIVE": derivative, "HAS_CONSTANT": constant, "SIZE": 1024}
        yield rows.hidden_gradient_of_rows, names, 4
        yield rows.scaled_rows, {"HAS_VALID": valid, "OF_DERIVATIVE": derivative, "SIZE": 1024}, 4
        yield (
            rows.add_label_rows,
            {"HAS_VALID": valid, "HAS_WEIGHT": True, "HAS_BIAS": derivative, "ENTRIES": 8, "SIZE": 512},
            4,
        )


def reads_whole_vectors() -> bool:
    """Logits whose rows begin at whole vectors are read in vectors, however many columns there are."""
    kernel = rows.exponentials_of_rows
    compiled = {"SCALE": 1.0, "CAP": 0.0, "HAS_BIAS": False, "STORES_DERIVATIVE": False, "SIZE": 4096, "AGAIN": False}
    compiled |= {"NUMBERS": 3, "SMOOTHS": False, "ENTROPY": False, "STORES": True, "derivative": None, "bias": None}
    types = types_of(kernel, "bf16", "fp32", compiled)
    by_16 = [types[name].startswith("*") or name in {"width", *STRIDES} for name in kernel.arg_names]
    divisible = {(place,): [["tt.divisibility", 16]] for place, is_so in enumerate(by_16) if is_so}
    source = ASTSource(kernel, types, constexprs=compiled, attrs=divisible)
    assembly = triton.compile(source, target=HOPPER, options={"num_warps": 16}).asm["ptx"]
    return "ld.global.v4.b32" in assembly and "ld.global.b32" not in assembly


def main() -> None:
    failed = 0
    for kernel, compiled, warps in variants():
        for stored, wide in (("bf16", "fp32"), ("fp64", "fp64")):
            source = ASTSource(kernel, types_of(kernel, stored, wide, compiled), constexprs=compiled)
            said = "compiled"
            try:
                triton.compile(source, target=HOPPER, options={"num_warps": warps})
            except Exception as error:
                failed += 1
                said = f"FAILED: {type(error).__name__}: {error}"
            given = " ".join(f"{name}={value}" for name, value in compiled.items())
            print(f"{kernel.__name__} {stored} {given}: {said}", flush=True)
    vectors = reads_whole_vectors()
    failed += not vectors
    print(f"logits in vectors: {'compiled' if vectors else 'FAILED'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
