"""Lets processes fail in random places of random runs, and checks that all others end soon, name the one that failed
and what they awaited, and that nothing is left behind.

    python tests/faults/run_faults.py --runs 100 --seed 0

A case is drawn from its seed alone (the first from --seed, the next from --seed + 1, ...): one that fails is run again
by --runs 1 --seed THAT. Without --seed three in ten have tensor ranks (seeds from 10,000 on), two in ten context ranks
(from 50,000 on), and two in ten share experts (from 70,000 on).
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "multiprocess")]

from fault_case import FIRST_WITH_CONTEXT_RANKS, FIRST_WITH_EXPERTS, FIRST_WITH_TENSOR_RANKS, draw  # noqa: E402
from fault_run import Verdict, mark, run  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Random faults in random runs.")
    parser.add_argument("--runs", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--seed", type=int, help="of the first run (default 0, 10000 and 50000)")
    parser.add_argument("--started-by", choices=("launch", "torchrun"), help="default: three in four by launch")
    parser.add_argument("--verbose", action="store_true", help="show every run")
    arguments = parser.parse_args()
    mark()
    verdicts = []
    for seed in seeds(arguments.runs, arguments.seed):
        case = draw(seed, arguments.started_by)
        if arguments.verbose:
            print(f"seed {seed}: {case}", flush=True)
        verdict = run(case)
        verdicts.append(verdict)
        if arguments.verbose:
            print(f"  {verdict.place}: {verdict.seconds:.1f} s; {verdict.message[:300]}", flush=True)
        if verdict.complaints:
            print(
                f"FAILED seed {seed}: {case}; at {verdict.place}, {verdict.seconds:.1f} s; it said {verdict.message!r}"
            )
            print("".join(f"    {complaint}\n" for complaint in verdict.complaints), end="", flush=True)
    print(table(verdicts))
    bad = [verdict.case.seed for verdict in verdicts if verdict.complaints]
    if bad:
        print(f"{len(bad)} of {len(verdicts)} runs ended badly; seeds {', '.join(map(str, bad))}")
    return 1 if bad else 0


def seeds(runs: int, first: int | None) -> list[int]:
    """The seeds of so many runs."""
    if first is not None:
        return list(range(first, first + runs))
    tensor, context, experts = 3 * runs // 10, 2 * runs // 10, 2 * runs // 10
    return [
        *range(runs - tensor - context - experts),
        *range(FIRST_WITH_TENSOR_RANKS, FIRST_WITH_TENSOR_RANKS + tensor),
        *range(FIRST_WITH_CONTEXT_RANKS, FIRST_WITH_CONTEXT_RANKS + context),
        *range(FIRST_WITH_EXPERTS, FIRST_WITH_EXPERTS + experts),
    ]


def table(verdicts: list[Verdict]) -> str:
    """By how a process failed: runs, how many ended as they should, and the longest time to the end of all."""
    by_how: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        case = verdict.case
        kinds = [case.how, f"(started by {case.started_by})"]
        kinds += ["(beside one that is stopped)"] * (case.also_stopped is not None)
        kinds += ["(with tensor ranks)"] * (case.tp > 1)
        kinds += ["(with context ranks)"] * (case.cp > 1)
        kinds += ["(with shared experts)"] * (case.ep > 1)
        for kind in kinds:
            by_how[kind].append(verdict)
    lines = [f"{'how a process failed':<30}{'runs':>6}{'as they should':>16}{'longest until all had ended':>30}"]
    for how in sorted(by_how, key=lambda how: (how.startswith("("), how)):
        group = by_how[how]
        good = sum(not verdict.complaints for verdict in group)
        lines.append(f"{how:<30}{len(group):>6}{good:>16}{max(v.seconds for v in group):>28.1f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
