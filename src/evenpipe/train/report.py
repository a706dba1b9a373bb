"""The short report at the end of a run: a table for the terminal, and report.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenpipe.train.files import write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """What one device did."""

    device: int
    busy: float
    """Share of the training time (0 to 1) spent in passes."""
    peak_memory_bytes: int
    """Highest memory: allocated on a GPU, resident set of the process on CPU."""
    layers: int
    """Transformer layers held."""
    vocabulary_rows: int
    """Rows of the output layer's matrix held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated step of one vocabulary mode, in any unit of time common to both predictions."""

    vocabulary: str
    makespan: float
    busy: tuple[float, ...]
    """Time spent in passes, per device, in the unit of `makespan`."""

    @property
    def imbalance(self) -> float:
        """Busiest device over the mean: 1 when all do the same."""
        return max(self.busy) * len(self.busy) / sum(self.busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A finished run. `steps`, `tokens` and `seconds` count what this start of the run did."""

    steps: int
    tokens: int
    seconds: float
    loss: float
    """Running mean at the end."""
    validation_loss: float | None
    devices: tuple[DeviceReport, ...]
    prediction: Prediction
    """Of the mode that ran."""
    baseline: Prediction
    """Of `first-last` with the same schedule."""

    @property
    def predicted_speedup(self) -> float:
        """Step time of the baseline over that of the mode that ran."""
        return self.baseline.makespan / self.prediction.makespan


def report_text(report: RunReport) -> str:
    """The report for the terminal."""
    speed = report.tokens / report.seconds if report.seconds > 0 else 0.0
    loss = f"loss {report.loss:.3f}"
    if report.validation_loss is not None:
        loss += f", on held-back text {report.validation_loss:.3f}"
    rows = [("device", "busy", "peak memory", "layers", "vocabulary rows")]
    rows += [
        (
            str(device.device),
            f"{100 * device.busy:.1f} %",
            bytes_text(device.peak_memory_bytes),
            str(device.layers),
            f"{device.vocabulary_rows:,}",
        )
        for device in report.devices
    ]
    lines = [
        f"{report.steps:,} steps, {report.tokens:,} tokens in {report.seconds:.1f} s ({speed:,.0f} tokens/s); {loss}",
        *_table(rows),
        *_vocabulary_lines(report),
    ]
    return "\n".join(lines)


def write_report(report: RunReport, path: Path) -> None:
    """Write report.json: the fields of `RunReport`, and the predicted speed-up."""
    content: dict[str, Any] = {**asdict(report), "predicted_speedup": report.predicted_speedup}
    write_json(path, content)


def bytes_text(count: int) -> str:
    """`512 B`, `1.5 GiB`."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _vocabulary_lines(report: RunReport) -> list[str]:
    ran, baseline = report.prediction, report.baseline
    if ran.vocabulary == baseline.vocabulary:
        busiest = f"the busiest device has {baseline.imbalance:.2f} times the mean work"
        return [f"vocabulary {ran.vocabulary}: embedding and output layer on the first and last device; {busiest}"]
    return [
        f"vocabulary {ran.vocabulary}: a step is predicted to be {report.predicted_speedup:.2f} times as fast as with "
        f"{baseline.vocabulary};",
        f"the busiest device has {ran.imbalance:.2f} times the mean work instead of {baseline.imbalance:.2f}",
    ]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
