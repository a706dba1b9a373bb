"""Machines that lose each other, and strangers who want into a run: what `make fault-test` does in network namespaces.

    python tests/faults/run_network.py [WORD ...]

With words, only the scenarios whose names contain one of them. Where no namespaces can be made (that takes root), says
so and does nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "multiprocess")]

import attack_case  # noqa: E402
import network_case  # noqa: E402
from network_program import pipeline_and_batch  # noqa: E402


def main() -> int:
    if (reason := network_case.why_not()) is not None:
        print(f"skipped the network: {reason}")
        return 0
    words = sys.argv[1:]
    bad = 0
    for scenario in network_case.SCENARIOS:
        if _wanted(scenario.name, words):
            report = network_case.play(scenario)
            bad += _show(scenario.name, f"{report.seconds:.1f} s", report.said[-1:], report.complaints)
    attacks = [attack for attack in attack_case.ATTACKS if _wanted(attack.name, words)]
    loss = loss_in_one_process() if attacks else 0.0
    for attack in attacks:
        result = attack_case.play(attack, loss)
        reached = ", ".join(result.reached) or "nothing"
        bad += _show(f"a stranger: {attack.name}", f"reached: {reached}", [result.ending], result.complaints)
    if bad:
        print(f"{bad} scenarios ended badly")
    return 1 if bad else 0


def loss_in_one_process() -> float:
    pipeline, ids = pipeline_and_batch(60.0)
    return pipeline.step(ids).loss


def _wanted(name: str, words: list[str]) -> bool:
    return not words or any(word in name for word in words)


def _show(name: str, figure: str, said: list[str], complaints: list[str]) -> bool:
    print(f"{'FAILED ' if complaints else ''}{name}: {figure}")
    for line in [*said, *complaints]:
        print(f"    {line}", flush=True)
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
