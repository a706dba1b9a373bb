"""Draw docs/memory.svg: the memory of the devices of a pipeline, with the output layer on the last one and spread over
all.

    python tools/memory_picture.py

Llama 3.1 8B on 4 GPUs, as estimated by `evenpipe estimate`. A test draws it again and compares.
"""

from __future__ import annotations

from pathlib import Path

from evenpipe.draw import Bars, bars_svg
from evenpipe.memory.estimate import estimate
from evenpipe.model import describe
from evenpipe.recipe.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "memory.svg"
MODEL = "examples/models/llama-3.1-8b.json"
RUNS = (("1f1b", "first-last"), ("1f1b", "vocab-2"), ("v-half", "vocab-2"))
GPU_MEMORY = 80 * 2**30


def draw() -> str:
    """Return the SVG text."""
    description = describe(ROOT / MODEL)
    groups = []
    for schedule, vocabulary in RUNS:
        found = estimate(
            description,
            Recipe.of(pp=4, sequence_length=4096, microbatches=16, schedule=schedule, vocabulary=vocabulary),
            memory=GPU_MEMORY,
        )
        groups.append(Bars(f"{schedule}, {vocabulary}", tuple(device.terms for device in found.devices)))
    return bars_svg(groups, width=960, limit=GPU_MEMORY)


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
