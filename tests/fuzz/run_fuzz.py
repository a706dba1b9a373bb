"""Random pipelines, each compared with the same model in one process in fp64: every loss, gradient, norm and weight.

    python tests/fuzz/run_fuzz.py --runs 100 --seed 0
    python tests/fuzz/run_fuzz.py --minutes 60 --seed 1 --json figures.json

A case is drawn from the seed and its number alone: one that is wrong is run again by --seed THAT --only NUMBER. Beside
each pipeline some runs are resumed with other sizes, without a model: every row must be read once per epoch.

A pipeline that is refused (InputError) is counted by the shape of its sentence; anything else that is not right (a
number that is off, an exception, a process that hangs) is wrong, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent / folder)
    for folder in ("fuzz", "model", "multiprocess", "train", "../benchmarks")
]

from families import EXPERTS, FAMILIES, WINDOW  # noqa: E402
from fuzz_case import MODULES, Case  # noqa: E402
from fuzz_run import Verdict, run, shape  # noqa: E402
from rows_of_runs import Start, faults_of_run  # noqa: E402

BLOCK = 64
"""Cases that share the starts of processes."""

RUNS_PER_CASE = 10
"""That are resumed with other batches, replicas and numbers of steps."""

LINES = 12
"""Of what is said about a case that is wrong, unless it runs alone."""

SIDES: dict[str, Callable[[Case], Any]] = {
    "processes": lambda case: case.processes,
    "replicas": lambda case: case.replicas,
    "tensor ranks": lambda case: case.tp,
    "members that share experts": lambda case: case.ep,
    "context ranks": lambda case: case.cp,
    "context exchange": lambda case: case.context_exchange if case.cp > 1 else "one context rank",
    "slices": lambda case: case.slices,
    "family": lambda case: case.model.family,
    "kind of family": lambda case: kind_of_family(case.model.family),
    "schedule": lambda case: case.schedule.name,
    "schedule given as": lambda case: case.schedule.given_as,
    "vocabulary": lambda case: case.vocabulary,
    "data parallel": lambda case: case.data_parallel if case.replicas > 1 else "one replica",
    "checkpointing": lambda case: case.checkpointing if isinstance(case.checkpointing, str) else "by layer",
    "offload": lambda case: offloaded(case.offload),
    "optimizer": lambda case: case.optimizer,
    "communicators": lambda case: case.communicators,
    "frozen": lambda case: case.model.frozen,
    "layers": lambda case: "unusual" if case.model.unusual_layers else "usual",
    "hooks": lambda case: case.hooks,
    "means": lambda case: ", ".join(sorted({step.counts for step in case.steps})),
    "ends of slices": lambda case: case.slice_ends,
    "order of tokens": lambda case: case.token_order,
    "tensor overlap": lambda case: case.tensor_overlap,
    "documents": lambda case: case.documents,
    "gathering": lambda case: str(case.gathering),
    "dtype": lambda case: "bf16" if case.bf16 else "fp64",
    "model given as": lambda case: case.model.given_as,
}
"""By which the figures are told apart."""


def offloaded(options: dict[str, Any] | None) -> str:
    activations = "no options" if options is None else options["activations"]
    return activations if isinstance(activations, str) else "bytes"


def kind_of_family(family: str) -> str:
    if family == MODULES:
        return "plain modules"
    if family in EXPERTS:
        return "experts"
    settings = FAMILIES[family][1]
    if WINDOW.items() <= settings.items():
        return "windows"
    return "grouped heads" if "num_key_value_heads" in settings else "as many keys as heads"


def main() -> int:
    parser = argparse.ArgumentParser(description="Random pipelines against one process.")
    parser.add_argument("--runs", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--minutes", type=float, help="in place of --runs: as many as that takes")
    parser.add_argument("--seed", type=int, default=0, help="of all cases (default 0)")
    parser.add_argument("--first", type=int, default=1000, help="number of the first case (default 1000)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this case alone, shown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where figures are written")
    parser.add_argument("--verbose", action="store_true", help="show every case")
    arguments = parser.parse_args()
    started, verdicts = time.monotonic(), []
    faults: list[str] = []
    for numbers in _blocks(arguments, started):
        faults += (found := faults_of_resumed_runs(arguments.seed, numbers))
        print("".join(f"WRONG: {fault}\n" for fault in found), end="")
        for verdict in run(arguments.seed, numbers):
            verdicts.append(verdict)
            _show(verdict, arguments.verbose or arguments.only is not None)
        if arguments.only is None:
            print(head(verdicts, time.monotonic() - started), flush=True)
        if arguments.json is not None:
            figures = figures_of(verdicts, faults, arguments.seed, time.monotonic() - started)
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(table(verdicts, time.monotonic() - started))
    return 1 if faults or any(verdict.complaints for verdict in verdicts) else 0


def faults_of_resumed_runs(seed: int, numbers: Iterable[int]) -> list[str]:
    """What is wrong with the rows that some resumed runs read, for each number, with what they were."""
    faults = []
    for number in numbers:
        dice = random.Random(f"rows {seed} {number}")
        for _ in range(RUNS_PER_CASE):
            rows, packed, fraction = dice.randint(2, 60), dice.random() < 0.5, dice.choice((0.0, 0.1, 0.2))
            starts = [
                Start(steps=dice.randint(0, 9), replicas=dice.randint(1, 4), rows=dice.randint(1, 6))
                for _ in range(dice.randint(1, 10))
            ]
            found = faults_of_run(rows, starts, fraction=fraction, packed=packed)
            faults += [f"{fault} ({rows} rows, {fraction=}, {packed=}, {starts})" for fault in found]
    return faults


def _blocks(arguments: argparse.Namespace, started: float) -> Iterator[range]:
    if arguments.only is not None:
        yield range(arguments.only, arguments.only + 1)
        return
    for first in itertools.count(arguments.first, BLOCK):
        if arguments.minutes is not None:
            if time.monotonic() - started > 60 * arguments.minutes:
                return
            yield range(first, first + BLOCK)
        elif first < arguments.first + arguments.runs:
            yield range(first, min(first + BLOCK, arguments.first + arguments.runs))
        else:
            return


def _show(verdict: Verdict, always: bool) -> None:
    case = verdict.case
    if verdict.complaints:
        print(f"WRONG: python tests/fuzz/run_fuzz.py --seed {case.seed} --only {case.number}")
    if always or verdict.complaints:
        print(f"{case}\n  {verdict.word}, {verdict.seconds:.1f} s {verdict.refusal}")
    lines = [line for text in verdict.complaints for line in text.splitlines()]
    if len(lines) > LINES and not always:
        lines[LINES:] = [f"and {len(lines) - LINES} lines more"]
    print("".join(f"    {line}\n" for line in lines), end="", flush=True)


def figures_of(verdicts: list[Verdict], faults: list[str], seed: int, seconds: float) -> dict[str, Any]:
    """What is written to a file. faults: of runs that were resumed."""
    from provenance import provenance

    slowest = max(verdicts, key=lambda verdict: verdict.seconds)
    return {
        **provenance(),
        "seed": seed,
        "seconds": round(seconds, 1),
        **_counts(verdicts),
        "resumed runs": {"tried": RUNS_PER_CASE * len(verdicts), "wrong": len(faults)},
        "slowest": {"number": slowest.case.number, "seconds": round(slowest.seconds, 2)},
        "wrong cases": [verdict.case.number for verdict in verdicts if verdict.complaints],
        "refusals": dict(_refusals(verdicts)),
        "by": {
            side: {
                str(value): _counts([verdict for verdict in verdicts if value_of(verdict.case) == value])
                for value in sorted({value_of(verdict.case) for verdict in verdicts}, key=str)
            }
            for side, value_of in SIDES.items()
        },
    }


def _counts(verdicts: list[Verdict]) -> dict[str, int]:
    words = Counter(verdict.word for verdict in verdicts)
    return {"tried": len(verdicts), "refused": words["refused"], "wrong": words["wrong"]}


def _refusals(verdicts: list[Verdict]) -> list[tuple[str, int]]:
    """By the shape of their sentence, the most frequent first."""
    return Counter(shape(verdict.refusal) for verdict in verdicts if verdict.word == "refused").most_common()


def head(verdicts: list[Verdict], seconds: float) -> str:
    slowest = max((verdict.seconds for verdict in verdicts), default=0.0)
    counts = "{tried} pipelines tried, {refused} refused, {wrong} wrong".format(**_counts(verdicts))
    return f"{counts} ({seconds:.0f} s, the slowest {slowest:.1f} s)"


def table(verdicts: list[Verdict], seconds: float) -> str:
    """What came out, and what was refused and why."""
    lines = [head(verdicts, seconds)]
    lines += [f"{count:>6} refused: {sentence[:230]}" for sentence, count in _refusals(verdicts)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
