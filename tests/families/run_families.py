"""Compares two processes with one for every model type for which transformers has a causal language model.

    python tests/families/run_families.py llama gemma2 --verbose
    python tests/families/run_families.py --part 1/8 --record

Each configuration is small and random, in fp64 if the family can run in it. Its gradients under 1f1b and zbv, those of
two tensor ranks, of two context ranks and of two slices are compared with transformers' in one process. They are equal,
or the
configuration is refused with a sentence; any other outcome is an error, and the exit code is 1. `--record` adds the
outcomes to benchmarks/results/families.json, which keeps other outcomes of the same version of transformers, and writes
docs/families.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "tools"), str(ROOT / "benchmarks")]

import families_page  # noqa: E402
from family_configs import Configuration, configurations  # noqa: E402
from family_run import Outcome, run  # noqa: E402
from provenance import write  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Every model type in two processes against one.")
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th configuration, from the K-th on")
    parser.add_argument("--record", action="store_true", help="keep the outcomes, and write docs/families.md")
    parser.add_argument("--verbose", action="store_true", help="show whole tracebacks")
    arguments = parser.parse_args()
    chosen = [one for one in configurations() if not arguments.types or one.model_type in arguments.types]
    started, outcomes = time.monotonic(), []
    for outcome in run(part_of(chosen, arguments.part)):
        outcomes.append(outcome)
        print(line(outcome, arguments.verbose), flush=True)
        if arguments.record:
            record(outcomes)
    print(head(outcomes, time.monotonic() - started))
    wrong = {"wrong", "traceback"}
    return 1 if any({outcome.word, outcome.tensor, outcome.pieces} & wrong for outcome in outcomes) else 0


def part_of(chosen: list[Configuration], part: str) -> list[Configuration]:
    number, _, parts = part.partition("/")
    return chosen[int(number) - 1 :: int(parts)]


def record(outcomes: Sequence[Outcome]) -> None:
    """Replace older outcomes of the same configurations."""
    kept: list[dict[str, Any]] = []
    if families_page.RESULTS.exists():
        before = json.loads(families_page.RESULTS.read_text())
        if before["transformers"] == transformers.__version__:
            known = set(configurations())
            new = {(outcome.model_type, outcome.variant) for outcome in outcomes}
            names = [(row, Configuration(row["model_type"], row["variant"])) for row in before["configurations"]]
            kept = [row for row, one in names if one in known and (one.model_type, one.variant) not in new]
    rows = sorted([*kept, *map(asdict, outcomes)], key=lambda row: (row["model_type"], row["variant"]))
    write(families_page.RESULTS, {"configurations": rows})
    families_page.FILE.write_text(families_page.draw(), encoding="utf-8")


def line(outcome: Outcome, verbose: bool) -> str:
    name = str(Configuration(outcome.model_type, outcome.variant))
    sentence = outcome.sentence if verbose else outcome.sentence[-600:]
    said = f"{outcome.error:.1e}" if outcome.word == "equal" else sentence
    if outcome.tensor:
        ranks = f"{outcome.tensor_error:.1e} {outcome.tensor_sentence}" if outcome.tensor == "equal" else ""
        said += f"; tensor ranks: {outcome.tensor} {ranks or outcome.tensor_sentence}".rstrip()
    if outcome.pieces:
        pieces = f"{outcome.pieces_error:.1e}" if outcome.pieces == "equal" else outcome.pieces_sentence
        said += f"; pieces: {outcome.pieces} {pieces}"
    return f"{name:<32} {outcome.word:<10} {outcome.dtype:<8} {outcome.seconds:>5.1f} s  {said}"


def head(outcomes: list[Outcome], seconds: float) -> str:
    words = Counter(outcome.word for outcome in outcomes)
    counts = ", ".join(f"{count} {word}" for word, count in words.most_common())
    others = {
        "over tensor ranks": Counter(outcome.tensor for outcome in outcomes if outcome.tensor),
        "in pieces": Counter(outcome.pieces for outcome in outcomes if outcome.pieces),
    }
    for what, found in others.items():
        counts += f"; {what}: {', '.join(f'{count} {word}' for word, count in found.most_common())}"
    return f"{len(outcomes)} configurations: {counts} ({seconds:.0f} s)"


if __name__ == "__main__":
    sys.exit(main())
