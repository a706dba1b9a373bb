"""How far are predicted steps from those that others have measured?

    python benchmarks/published_steps.py [--output FILE.json]    about ten seconds

Steps of Megatron-LM: Llama-3.1-8B on H100 (4 to 128 of them, 4 to a node) and on A100 (8 to 256), and layers of Llama 3
70B and 405B on 8 B200. tests/memory/published/README.md says where the rows come from; all that ran are here.

Each card has one constant that is fitted to whole steps, the share of the peak that large products reach
(`evenpipe.costs.hardware`). H100 and B200: to every other row, beginning with the first, of H100 with 8 192 tokens and
of B200 ("fitted"); the other half, and the rows with 16 384 tokens, have only been looked at. A100: to the published
profile of tests/costs/test_analytic.py, so to none of these rows. Everything else is measured on kernels, or of a data
sheet.

    fitted, other    mean of the absolute error of predicted seconds over measured ones, of these rows
    mean             with its sign

Not explained are

    A100 with context ranks    although they always share a node (tp x cp <= 8): pipelines of 8 GPUs are off by -3 % on
                               average, those of 16 by -18 %, both the more the more replicas there are, although
                               replicas exchange nothing within a step
    H100, 16 384 tokens        with one sequence per microbatch on 32 and 64 GPUs: -12 %, while up to 16 GPUs, and with
                               two sequences, they are off by -1 to -2 %
    H100, tp x cp = 8          the only rings across nodes, of four GPUs: -17 %. Between two GPUs of two nodes, NCCL
                               sends and receives with 13 GB/s in one report (NVIDIA/nccl, issue 2409), and with 18 or
                               24 of 25 GB/s in another (issue 1272); here they have 20

The scripts of these runs make masks of sequence x sequence elements for every sample in the loader
(`--reset-attention-mask`), which is slow (NVIDIA/Megatron-LM, pull request 1155); whether steps wait for it is not
known.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from provenance import write
from transformers import LlamaConfig

from evenpipe.costs.hardware import KNOWN, Hardware
from evenpipe.model import Description, describe
from evenpipe.plan.configuration import Configuration
from evenpipe.plan.evaluation import timed
from evenpipe.plan.problem import problem_of
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import even_split

PUBLISHED = Path(__file__).resolve().parent.parent / "tests" / "memory" / "published"

BATCH = 1024
"""Sequences per step of the 8B model."""

HARDWARE = {
    "A100-40GB": replace(KNOWN["A100-40G"], across=replace(KNOWN["A100-40G"].across, bandwidth=0.8 * 12.5e9)),
    "H100-94GB": KNOWN["H100-94G"],
    "B200": KNOWN["B200"],
}
"""As known, but ABCI's A has 4 HDR cards for the 8 GPUs of a node; H100-94G is the card of TSUBAME 4.0."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured step."""

    card: str
    model: str
    layers: int
    sequence: int
    gpus: int
    tp: int
    cp: int
    pp: int
    microbatch_size: int
    microbatches: int
    seconds: float

    @property
    def group(self) -> str:
        """Of the table of errors."""
        return f"{self.card}, {self.sequence} tokens" if self.model == "8B" else self.card


@dataclass(frozen=True)
class Width:
    """What models differ in besides layers."""

    hidden_size: int
    mlp: int
    heads: int
    key_value_heads: int


WIDTHS = {
    "8B": Width(4096, 14336, 32, 8),
    "llama3-70b": Width(8192, 28672, 64, 8),
    "llama3-405b": Width(16384, 53248, 128, 16),
}
ROWS = 128256
"""Of the vocabulary; the B200 runs add a token and pad to a multiple of 128 tp."""


def flops_of_8b(sequence: int) -> float:
    """Of a step, as Megatron-LM counts them: all pairs of attention."""
    width = WIDTHS["8B"]
    hidden, shared = width.hidden_size, width.key_value_heads / width.heads
    parts = 1 + shared + sequence / hidden + 1.5 * width.mlp / hidden + ROWS / (2 * 32 * hidden)
    return 12 * BATCH * sequence * 32 * hidden**2 * parts


def rows() -> list[Row]:
    """All rows, in the order of the files."""
    return [*_rows_of_8b(), *_rows_of_b200()]


def _rows_of_8b() -> Iterator[Row]:
    for row in _read("llama-3.1-8b.csv"):
        node = HARDWARE[row["card"]].devices_per_node
        tp, cp, pp, size, sequence = (int(row[key]) for key in ("tp", "cp", "pp", "microbatch_size", "sequence"))
        for nodes in (1, 2, 4, 8, 16, 32):
            speed = row[str(nodes)]
            if speed in ("", "-"):
                continue
            gpus = nodes * node
            yield Row(
                card=row["card"],
                model="8B",
                layers=32,
                sequence=sequence,
                gpus=gpus,
                tp=tp,
                cp=cp,
                pp=pp,
                microbatch_size=size,
                microbatches=BATCH * tp * cp * pp // gpus // size,
                seconds=flops_of_8b(sequence) / (float(speed) * 1e12 * gpus),
            )


def _rows_of_b200() -> Iterator[Row]:
    for row in _read("b200_steps.csv"):
        numbers = {key: int(row[key]) for key in ("layers", "sequence", "tp", "cp", "pp", "microbatches")}
        seconds = float(row["milliseconds"]) / 1e3
        yield Row(card="B200", model=row["model"], gpus=8, microbatch_size=1, seconds=seconds, **numbers)


def _read(name: str) -> Iterator[dict[str, str]]:
    with (PUBLISHED / name).open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


@lru_cache
def _described(model: str, layers: int, vocabulary: int) -> Description:
    width = WIDTHS[model]
    config = LlamaConfig(
        hidden_size=width.hidden_size,
        intermediate_size=width.mlp,
        num_hidden_layers=layers,
        num_attention_heads=width.heads,
        num_key_value_heads=width.key_value_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
    )
    return describe(config)


def predicted_seconds(row: Row, hardware: Hardware) -> float:
    """Of the step, by the functions with which plans are timed."""
    theirs = row.card == "B200"
    multiple = 128 * row.tp
    vocabulary = -(-(ROWS + 1) // multiple) * multiple if theirs else ROWS
    dp = row.gpus // (row.tp * row.cp * row.pp)
    problem = problem_of(
        _described(row.model, row.layers, vocabulary),
        hardware,
        gpus=row.gpus,
        sequence=row.sequence,
        sequences_per_step=dp * row.microbatch_size * row.microbatches,
        kernels="transformer-engine" if theirs else "megatron",
    )
    recipe = Recipe.of(
        dp=dp,
        tp=row.tp,
        cp=row.cp,
        pp=row.pp,
        tensor_overlap="none",  # no script says otherwise
        data_parallel="shard-optimizer" if dp * row.cp > 1 else "replicate",
        microbatch_size=row.microbatch_size,
        microbatches=row.microbatches,
        context_exchange="heads" if theirs else "keys",
        vocabulary="first-last",
        layers_per_stage=even_split(row.layers, row.pp),
    )
    return timed(problem, Configuration.of(problem, recipe)).seconds


@dataclass(frozen=True, kw_only=True)
class Result:
    """A row with its error."""

    row: Row
    fitted: bool
    predicted: float

    @property
    def error(self) -> float:
        """Of predicted seconds over measured ones."""
        return self.predicted / self.row.seconds - 1


FITTED = ("H100-94GB, 8192 tokens", "B200")
"""Groups of which every other row was fitted to."""


def results(wanted: Callable[[Row], bool] = lambda row: True) -> list[Result]:
    """All rows, or the wanted ones, predicted."""
    seen: dict[str, int] = {}
    found = []
    for row in rows():
        place = seen[row.group] = seen.get(row.group, -1) + 1
        if wanted(row):
            fitted = row.group in FITTED and place % 2 == 0
            predicted = predicted_seconds(row, HARDWARE[row.card])
            found.append(Result(row=row, fitted=fitted, predicted=predicted))
    return found


def groups(found: list[Result]) -> dict[str, list[Result]]:
    """By `Row.group`; of A100 by whether there are context ranks, too."""
    by_name: dict[str, list[Result]] = {}
    for one in found:
        ranks = ("" if one.row.cp == 1 else ", context ranks") if one.row.card.startswith("A100") else ""
        by_name.setdefault(one.row.group + ranks, []).append(one)
    return by_name


def mean_error(found: list[Result]) -> float | None:
    """Mean of absolute errors; None without any."""
    return statistics.mean(abs(one.error) for one in found) if found else None


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="all figures")
    given = parser.parse_args()
    found = results()
    print(f"{'rows':40} number  fitted   other    mean   worst")
    summary = {}
    for name, ones in groups(found).items():
        halves = [mean_error([one for one in ones if one.fitted is half]) for half in (True, False)]
        errors = [one.error for one in ones]
        shown = "  ".join("      " if half is None else f"{half:6.1%}" for half in halves)
        worst = max(errors, key=abs)
        print(f"{name:40} {len(ones):6}  {shown}  {statistics.mean(errors):+6.1%}  {worst:+6.1%}")
        summary[name] = {"rows": len(ones), "fitted": halves[0], "other": halves[1], "mean": statistics.mean(errors)}
    if given.output:
        cases = [{**asdict(one.row), "fitted": one.fitted, "predicted": one.predicted} for one in found]
        write(given.output, {"summary": summary, "cases": cases})


if __name__ == "__main__":
    main()
