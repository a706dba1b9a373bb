"""Does the simulator predict iterations that others have measured?

    python benchmarks/published_profile.py [--output FILE.json]

The authors of vocabulary parallelism (arXiv 2411.05288) publish pass times per device and the iteration time of a 4B
model on 8 A100 for five ways to treat the vocabulary and four vocabularies: 20 rows, in
tests/simulate/data/published_profile_2k.json. Each row's pass times go into the simulator with the order of that way.
Printed are

    measured    milliseconds per iteration
    simulated   the simulated step, and `step_ms` for what passes do not contain
    error       of the simulated figure
    held out    its error with `step_ms` fitted to the rows of the other four ways only
    plain       busiest device x microbatches + what one microbatch takes on the others + `step_ms`, and its error

One set of constants holds for all rows:

    hop_ms      one hop between devices: the median of the 12 rows that report it. X, dX and embedding rows are as large
                as a hop (2048 x 3072 in fp16, 12.6 MB) and take as long; the statistics (24 kB) take nothing.
    step_ms     fitted, by least squares of the relative error: time per iteration outside of all passes (optimizer,
                logging). With 128 microbatches in every row it cannot be told from 1/128 of it per microbatch on the
                busiest device (launches, blocking transfers).

S takes 2/3 of S + T with one barrier (two of three products), 1/3 with two; overlapped collectives need no slowdown,
as the pass times were taken while they ran.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from provenance import write

from evenpipe.schedule import Costs, plan_order
from evenpipe.simulate import simulate

DATA = Path(__file__).resolve().parent.parent / "tests/simulate/data/published_profile_2k.json"
S_SHARE = {"vocab-1": 1 / 3, "vocab-2": 2 / 3}
MICROSECONDS = 1e-3  # in milliseconds


@dataclass(frozen=True)
class Row:
    """One published row and what is predicted for it, in milliseconds; `simulated` and `plain` without `step_ms`."""

    method: str
    vocabulary: int
    measured: float
    simulated: float
    plain: float


def costs_of(row: dict[str, Any], hop_ms: float) -> Costs:
    """The pass times of one row, in milliseconds."""

    def milliseconds(field: str, share: float = 1.0) -> list[float]:
        return [time * share * MICROSECONDS for time in row[field]]

    share = S_SHARE.get(row["method"], 1 / 2)
    return Costs(
        F=milliseconds("forward_us"),
        B=milliseconds("backward_us"),
        S=milliseconds("output_S_plus_T_us", share),
        T=milliseconds("output_S_plus_T_us", 1 - share),
        E=milliseconds("input_forward_us"),
        G=milliseconds("input_gradient_us"),
        p2p=hop_ms,
        collectives={"broadcast": hop_ms, "reduce": hop_ms, "embedding": hop_ms},
    )


def hop_of(profile: dict[str, Any]) -> float:
    """The median of the reported hops, in milliseconds."""
    return statistics.median(row["p2p_us"] for row in profile["rows"] if row["p2p_us"]) * MICROSECONDS


def predict(profile: dict[str, Any], hop_ms: float) -> list[Row]:
    """Every row of the profile."""
    devices, microbatches = profile["devices"], profile["microbatches"]
    rows = []
    for row in profile["rows"]:
        costs = costs_of(row, hop_ms)
        simulation = simulate(plan_order("1f1b", devices, microbatches, row["method"], costs), costs)
        busy = simulation.timeline.busy
        busiest = max(range(devices), key=busy.__getitem__)
        ramp = sum(
            (row["forward_us"][device] + row["backward_us"][device]) * MICROSECONDS + 2 * hop_ms
            for device in range(devices)
            if device != busiest
        )
        rows.append(
            Row(row["method"], row["vocabulary"], row["iteration_ms"], simulation.makespan, busy[busiest] + ramp)
        )
    return rows


def fit_step(rows: list[Row]) -> float:
    """The time per iteration that makes the relative errors of the simulated figures least, in squares."""
    return sum((row.measured - row.simulated) / row.measured**2 for row in rows) / sum(
        1 / row.measured**2 for row in rows
    )


def held_out_step(rows: list[Row], method: str) -> float:
    """The same without the rows of one method."""
    return fit_step([row for row in rows if row.method != method])


def error(predicted: float, measured: float) -> float:
    """In percent."""
    return 100 * (predicted / measured - 1)


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the figures as JSON here")
    arguments = parser.parse_args()
    profile = json.loads(DATA.read_text(encoding="utf-8"))
    hop_ms = hop_of(profile)
    rows = predict(profile, hop_ms)
    step_ms = fit_step(rows)
    print(f"hop_ms = {hop_ms:.3f}, step_ms = {step_ms:.1f}\n")
    print(f"{'method':<14}{'vocabulary':>10}{'measured':>10}{'simulated':>11}{'error':>9}{'held out':>10}{'plain':>10}")
    figures = []
    for row in rows:
        errors = {
            "error_percent": error(row.simulated + step_ms, row.measured),
            "held_out_error_percent": error(row.simulated + held_out_step(rows, row.method), row.measured),
            "plain_error_percent": error(row.plain + step_ms, row.measured),
        }
        figures.append({**asdict(row), **errors})
        print(
            f"{row.method:<14}{row.vocabulary:>10}{row.measured:>10.1f}{row.simulated + step_ms:>11.1f}"
            f"{errors['error_percent']:>+8.2f}%{errors['held_out_error_percent']:>+9.2f}%"
            f"{row.plain + step_ms:>10.1f}{errors['plain_error_percent']:>+8.2f}%"
        )
    if arguments.output:
        result = {"source": profile["source"], "hop_ms": hop_ms, "step_ms": step_ms, "rows": figures}
        write(arguments.output, result)


if __name__ == "__main__":
    main()
