"""Runs cases in processes that serve many of them, and says how each one ended."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch.distributed as dist
import transformers
from families import EXPERTS, FAMILIES
from fuzz_case import Case, draw

from evenpipe.errors import InputError, RunError
from evenpipe.processes.launcher import launch, prepare_launch

LIMIT_SECONDS = 1500.0
"""Of one case, all its processes and waits; a case takes less than a second where nothing else runs."""

SAME_BITS = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
"""Environment in which torch and MKL sum in the same order on every x86 processor."""

HERE = Path(__file__).resolve().parent


def _modules() -> tuple[str, ...]:
    """What the fork server imports."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    classes = {class_name: kind for kind, class_name in CONFIG_MAPPING_NAMES.items()}
    kinds = {
        transformers.models.auto.configuration_auto.model_type_to_module_name(classes[one])
        for one, _ in (FAMILIES | EXPERTS).values()
    }
    return (
        "evenpipe.runtime.pipeline",
        "torch.distributed.pipelining",
        "fuzz_run",
        "fuzz_play",
        *(f"transformers.models.{kind}.modeling_{kind}" for kind in sorted(kinds)),
    )


@dataclass(frozen=True)
class Verdict:
    """How a case ended."""

    case: Case
    refusal: str
    """The sentence of the InputError; empty where the case ran."""
    complaints: Sequence[str]
    """What was wrong."""
    seconds: float
    hashes: dict[str, str] = field(default_factory=dict)
    """Of the programs, and of the bits of all that was seen, of a case that ran."""

    @property
    def word(self) -> str:
        return "wrong" if self.complaints else "refused" if self.refusal else "right"


def run(seed: int, numbers: Sequence[int], damage: str = "") -> Iterator[Verdict]:
    """The verdicts on some cases of a seed, in turn of their numbers of processes.

    damage: what is to be found. "a gradient": the first process scales one gradient of every step by 1 + 1e-6.
        "case 7": an exception in that case.
    """
    cases = [draw(seed, number) for number in numbers]
    by_processes: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_processes[case.processes].append(case)
    for processes in sorted(by_processes):
        left = by_processes[processes]
        while left:
            yield from (verdicts := _serve(processes, left, damage))
            done = {verdict.case.number for verdict in verdicts}
            left = [case for case in left if case.number not in done]


def _serve(processes: int, cases: Sequence[Case], damage: str) -> list[Verdict]:
    """As many of the cases as one launch gets through: all, or those up to the one that ends it."""
    with tempfile.TemporaryDirectory(prefix="evenpipe-fuzz-") as name:
        folder = Path(name)
        with mock.patch.dict(os.environ, PYTHONPATH=_path(), **SAME_BITS):
            prepare_launch(*_modules())
        started, failure = time.perf_counter(), ""
        try:
            launch(
                serve,
                cases[0].seed,
                [case.number for case in cases],
                folder,
                damage,
                processes=processes,
                torch_device="cpu",
                silence_seconds=300.0,
                preload=_modules(),
            )
        except (InputError, RunError) as error:
            failure = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        verdicts = [
            Verdict(case, **json.loads(file.read_text()))
            for case in cases
            if (file := folder / f"outcome-{case.number}").exists()
        ]
        if failure:
            case = cases[len(verdicts)] if len(verdicts) < len(cases) else cases[-1]
            stacks = "".join(file.read_text() for file in sorted(folder.glob("stacks-*")))
            verdicts = [
                *verdicts[: len(cases) - 1],
                Verdict(case, "", (failure, *([stacks] if stacks else [])), time.perf_counter() - started),
            ]
        return verdicts


def _path() -> str:
    return os.pathsep.join(
        dict.fromkeys(
            [str(HERE), *(str(HERE.parent / one) for one in ("model", "multiprocess")), *filter(None, sys.path)]
        )
    )


# --- a process that serves --------------------------------------------------------------------------------------------


def serve(seed: int, numbers: Sequence[int], folder: Path, damage: str) -> None:
    """Runs cases one after the other; the first process writes down how each one ended. The first exception other than
    an InputError ends it."""
    from fuzz_pipeline import gathered, is_first
    from fuzz_play import outcome_of

    from evenpipe.host.offload import Activations

    Activations.smallest_bytes = 1  # the tensors of these models are too small to be worth a copy
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("evenpipe").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if damage == "a gradient":
        _damage_gradients()
    rank = dist.get_rank() if dist.is_initialized() else 0
    with (folder / f"stacks-{rank}").open("w") as stacks:
        for number in numbers:
            faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True, file=stacks)
            started = time.perf_counter()
            refusal, complaints, hashes = "", [], {}
            if damage == f"case {number}":
                raise ValueError("this case is damaged")
            try:
                complaints, hashes = outcome_of(draw(seed, number), folder / f"case-{number}")
            except InputError as error:
                refusal = str(error)
            refusals = gathered(refusal)
            if any(refusals) and not all(refusals):
                complaints = [f"only some processes refuse it: {refusals}"]
            if is_first():
                # Others say only that one of them has refused it.
                refusal = min(refusals, key=lambda sentence: sentence.endswith("see its error"))
                seconds = time.perf_counter() - started
                outcome = {"refusal": refusal, "complaints": complaints, "seconds": seconds, "hashes": hashes}
                (folder / "part").write_text(json.dumps(outcome))
                (folder / "part").rename(folder / f"outcome-{number}")
        faulthandler.cancel_dump_traceback_later()


def _damage_gradients() -> None:
    from evenpipe import Pipeline

    step = Pipeline.step

    def damaged(self: Pipeline, *arguments, **named):
        result = step(self, *arguments, **named)
        gradients = [one.grad for one in self.parameters() if one.grad is not None]
        if self.device == self.replica == 0 and gradients:
            gradients[0].mul_(1 + 1e-6)
        return result

    Pipeline.step = damaged  # type: ignore[method-assign]


def shape(sentence: str) -> str:
    """A sentence without its numbers, lists and quoted values, so that refusals of one kind are counted together."""
    sentence = re.sub(r"\[[^\]]*\]|\([^)]*\)", "[..]", sentence)
    sentence = re.sub(r"'[^']*'|\"[^\"]*\"", "'..'", sentence)
    return re.sub(r"\d+(\.\d+)?", "N", sentence)
