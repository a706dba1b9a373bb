"""Every model type for which transformers has a causal language model, in two processes against one.

    python tests/families/run_families.py llama gemma2 --verbose
    python tests/families/run_families.py --part 1/8

Each configuration is small and random, in fp64 where the family can do that. Its gradients under 1f1b and zbv are
compared with those of transformers in one process. It is equal, or refused with a sentence; anything else is wrong, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from family_configs import Configuration, configurations  # noqa: E402
from family_run import Outcome, run  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Every model type in two processes against one.")
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th configuration, from the K-th on")
    parser.add_argument("--verbose", action="store_true", help="show whole tracebacks")
    arguments = parser.parse_args()
    chosen = [one for one in configurations() if not arguments.types or one.model_type in arguments.types]
    started, outcomes = time.monotonic(), []
    for outcome in run(part_of(chosen, arguments.part)):
        outcomes.append(outcome)
        print(line(outcome, arguments.verbose), flush=True)
    print(head(outcomes, time.monotonic() - started))
    return 1 if any(outcome.word in ("wrong", "traceback") for outcome in outcomes) else 0


def part_of(chosen: list[Configuration], part: str) -> list[Configuration]:
    number, _, parts = part.partition("/")
    return chosen[int(number) - 1 :: int(parts)]


def line(outcome: Outcome, verbose: bool) -> str:
    name = str(Configuration(outcome.model_type, outcome.variant))
    sentence = outcome.sentence if verbose else outcome.sentence[-600:]
    said = f"{outcome.error:.1e}" if outcome.word == "equal" else sentence
    beside = f" [without the self-check: {outcome.unchecked}]" if outcome.unchecked else ""
    return f"{name:<32} {outcome.word:<10} {outcome.dtype:<8} {outcome.seconds:>5.1f} s  {said}{beside}"


def head(outcomes: list[Outcome], seconds: float) -> str:
    words = Counter(outcome.word for outcome in outcomes)
    counts = ", ".join(f"{count} {word}" for word, count in words.most_common())
    return f"{len(outcomes)} configurations: {counts} ({seconds:.0f} s)"


if __name__ == "__main__":
    sys.exit(main())
