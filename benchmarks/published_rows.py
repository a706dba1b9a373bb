"""How far are predicted steps and memory from what strangers have measured?

    python benchmarks/published_rows.py [--only SOURCE ...] [--output FILE.json]     minutes

Rows of `benchmarks/published/rows.csv`, each with its source; the models are beside it. One constant of evenpipe
is fitted to rows of them: `LOST_ACROSS_NODES`, to torchtitan's. The ranges are chosen from them, too.

    error    of the predicted seconds of a step over measured ones: mean of its absolute value, mean, worst
    calls    the same after one row of the source was measured: every row in turn calibrates all others of its source
             and card, which are off by the ratio of two errors
    range    rows whose measured seconds are in the range that `evenpipe plan` says
    fits     verdicts of the estimate, of rows that all ran; and the mean error of measured memory

Rows that cannot be predicted are listed with the reason.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from provenance import write

from evenpipe.costs.hardware import find_hardware
from evenpipe.errors import InputError
from evenpipe.memory.estimate import estimate
from evenpipe.memory.model_bytes import ModelBytes
from evenpipe.memory.states import Dtypes
from evenpipe.model import describe
from evenpipe.plan.configuration import Configuration
from evenpipe.plan.evaluation import timed
from evenpipe.plan.measured_steps import spread
from evenpipe.plan.problem import problem_of
from evenpipe.recipe.parallelism import DATA_PARALLEL
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import even_split

KERNELS = {
    "foundry": "fsdp,activation=fused,loss=fused",
    "torchtitan": "fsdp",
    "zero": "megatron,attention=unfused",
}
"""Of sources whose rows say less, by the first word of their group: LLM Foundry's `loss_fn` is a fused cross-entropy,
and the zero-bubble paper's script names no FlashAttention."""

SHORT = 4096
"""Longer sequences of LLM Foundry ran attention in a Triton kernel of then, and stand apart."""

PUBLISHED = Path(__file__).resolve().parent / "published"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What is predicted of a row."""

    number: int
    group: str
    """The source; rows of long sequences are one of their own."""
    measured: float
    """Seconds of a step."""
    predicted: float | None = None
    likely: tuple[float, float] | None = None
    """The range of seconds that `evenpipe plan` says."""
    verdict: str | None = None
    memory: float | None = None
    """Predicted peak over the measured one."""
    refused: str = ""

    @property
    def error(self) -> float:
        assert self.predicted is not None
        return self.predicted / self.measured - 1


def rows() -> list[dict[str, str]]:
    """All rows, as they are in the file."""
    with (PUBLISHED / "rows.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def _model(name: str) -> ModelBytes:
    return ModelBytes(describe(PUBLISHED / "models" / f"{name}.json"))


def recipe_of(row: dict[str, str], layers: int) -> Recipe:
    """The recipe of a row. Raises InputError for what evenpipe has no word for."""
    schedule, _, in_flight = row["schedule"].partition(":")
    options: dict[str, Any] = {"max_in_flight": int(in_flight) * int(row["pp"])} if in_flight else {}
    if schedule == "interleaved":
        options["stages_per_device"] = int(row["stages_per_device"])
    if row["layers_per_stage"]:
        split = tuple(map(int, row["layers_per_stage"].split(",")))
    else:
        split = even_split(layers, int(row["pp"]) * int(row["stages_per_device"]))
    checkpointing: Any = row["checkpointing"]
    if checkpointing == "every-second-full":
        checkpointing = ("full", "none") * (layers // 2)
    zero = int(row["zero"]) if int(row["dp"]) * int(row["cp"]) > 1 else 0
    return Recipe.of(
        **{name: int(row[name]) for name in ("dp", "tp", "pp", "cp", "ep", "microbatches")},
        microbatch_size=int(row["microbatch"]),
        data_parallel=DATA_PARALLEL[zero],
        sequence_length=int(row["sequence"]),
        schedule=schedule,
        schedule_options=options,
        activation_checkpointing=checkpointing,
        context_exchange=row["exchange"],
        tensor_overlap="ring" if "TP comm overlap" in row["note"] else "none",
        vocabulary="first-last",
        layers_per_stage=split,
    )


def predicted(row: dict[str, str]) -> Result:
    """The seconds of a row's step, by the functions with which plans are timed, and its memory."""
    kernels = KERNELS.get(row["group"].partition("-")[0], row["kernels"])
    if "no p2p overlap" in row["note"]:
        kernels += ",transfers=between"
    group = f"{row['group']}, long" if int(row["sequence"]) > SHORT and "foundry" in row["group"] else row["group"]
    said: dict[str, Any] = {"number": int(row["id"]), "group": group, "measured": float(row["measured_step_s"])}
    source, hardware = _model(row["model"]), find_hardware(row["gpu"])
    dtypes = Dtypes(gradients=row["gradient_dtype"], masters=row["master_dtype"])
    try:
        recipe = recipe_of(row, source.description.layers)
        problem = problem_of(
            source.description,
            hardware,
            gpus=int(row["gpus"]),
            sequence=int(row["sequence"]),
            sequences_per_step=int(row["global_batch"]),
            kernels=kernels,
            dtypes=dtypes,
        )
        memory = estimate(source, recipe, kernels=kernels, dtypes=dtypes, hardware=hardware)
        configuration = Configuration.of(problem, recipe)
        seconds = timed(problem, configuration).seconds
    except InputError as error:
        return Result(**said, refused=str(error))
    factors = spread(problem, configuration, measured=False)
    peak = float(row["measured_mem_gib"]) if row["measured_mem_gib"] else None
    return Result(
        **said,
        predicted=seconds,
        likely=None if factors is None else (factors[0] * seconds, factors[1] * seconds),
        verdict=memory.verdict,
        memory=None if peak is None else max(one.peak_allocated for one in memory.devices) / 2**30 / peak,
    )


def calibrated(found: list[Result]) -> list[float]:
    """The errors of rows, each after every other one of its group was measured."""
    return [(1 + one.error) / (1 + other.error) - 1 for one in found for other in found if one is not other]


def lines(found: list[Result]) -> Iterator[str]:
    """The table, and what is missing."""
    yield f"{'rows':22} number  |error|    mean   worst  calls  range  does not fit  at risk  memory"
    for group in dict.fromkeys(one.group for one in found):
        ones = [one for one in found if one.group == group and one.predicted is not None]
        if not ones:
            continue
        errors, verdicts = [one.error for one in ones], Counter(one.verdict for one in ones)
        inside = [one.likely is None or one.likely[0] <= one.measured <= one.likely[1] for one in ones]
        memory = [one.memory - 1 for one in ones if one.memory is not None]
        yield (
            f"{group:22} {len(ones):6}  {_mean(errors):7.1%}  {statistics.mean(errors):+6.1%}"
            f"  {max(errors, key=abs):+6.1%}  {_mean(calibrated(ones)):5.1%}  {statistics.mean(inside):5.0%}"
            f"  {verdicts['does not fit']:12}  {verdicts['at risk']:7}"
            f"  {statistics.mean(memory) if memory else 0:+6.1%}"
        )
    refused = Counter((one.group, one.refused) for one in found if one.refused)
    for (group, why), number in refused.items():
        yield f"{number} of {group}: {why}"


def _mean(errors: list[float]) -> float:
    return statistics.mean(map(abs, errors)) if errors else 0.0


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = sorted({row["group"] for row in rows()})
    parser.add_argument("--only", nargs="+", choices=groups, default=groups, metavar="SOURCE", help=", ".join(groups))
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="all figures")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    wanted = sorted((row for row in rows() if row["group"] in given.only), key=lambda row: (row["group"], row["model"]))
    with ProcessPoolExecutor(given.workers) as pool:
        found = list(pool.map(predicted, wanted, chunksize=4))
    print(*lines(found), sep="\n")
    if given.output:
        write(given.output, {"rows": [asdict(row) for row in found]})


if __name__ == "__main__":
    main()
