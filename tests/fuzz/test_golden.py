"""Fifty random pipelines whose programs, losses, gradients and weights must keep every bit while the code changes.

    python tests/fuzz/test_golden.py    writes golden.json anew: only when results are meant to change, and the commit
                                        says why

`golden.json` has for each case its number under `SEED`, its text, and the hashes of `fuzz_play.outcome_of`. Programs
are the same everywhere; the bits of losses, gradients and weights are those of a kind of processor.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FILE = Path(__file__).with_name("golden.json")
SEED, CASES = 22, 50

if __name__ == "__main__":
    sys.path[:0] = [
        str(Path(__file__).resolve().parent.parent / folder) for folder in ("fuzz", "model", "multiprocess")
    ]

from fuzz_case import draw  # noqa: E402
from fuzz_run import run  # noqa: E402

from evenpipe.runtime.trace import machine  # noqa: E402


def golden() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def processor() -> str:
    """Its name and the instructions that torch uses: some clouds give processors of all generations one name."""
    return f"{machine(torch.device('cpu'))['machine']}, {torch.backends.cpu.get_cpu_capability()}"


def test_cases_are_still_drawn_alike() -> None:
    assert [str(draw(SEED, one["number"])) for one in golden()] == [one["case"] for one in golden()]


@pytest.mark.slow
def test_every_bit_is_as_before(own_fork_server) -> None:
    wanted = {one["number"]: one for one in golden()}
    verdicts = list(run(SEED, list(wanted)))
    assert not [(str(one.case), one.refusal, one.complaints) for one in verdicts if one.word != "right"]
    programs = [one.case.number for one in verdicts if one.hashes["programs"] != wanted[one.case.number]["programs"]]
    assert not programs, f"the cases {programs} have other programs than in {FILE.name}"
    bits = [
        one.case.number
        for one in verdicts
        if wanted[one.case.number]["seen"].get(processor(), one.hashes["seen"]) != one.hashes["seen"]
    ]
    assert not bits, f"the cases {bits} have other bits than in {FILE.name}"


def write() -> None:
    """Take the first cases that run and compile no layer (compiled code is of the processor's own making). The bits of
    other processors stay where those of this one are as before."""
    before = {one["number"]: one["seen"] for one in golden()}
    numbers = [number for number in range(3 * CASES) if not draw(SEED, number).compile_layers]
    verdicts = {one.case.number: one for one in run(SEED, numbers) if one.word == "right"}
    chosen = [verdicts[number] for number in sorted(verdicts)[:CASES]]
    entries = []
    for one in chosen:
        seen = before.get(one.case.number, {})
        if seen.get(processor()) != one.hashes["seen"]:
            seen = {processor(): one.hashes["seen"]}
        entries.append({"number": one.case.number, "case": str(one.case)} | one.hashes | {"seen": seen})
    FILE.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    print(f"{len(entries)} cases written to {FILE.name}")


if __name__ == "__main__":
    write()
