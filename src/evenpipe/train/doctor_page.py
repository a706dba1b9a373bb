"""The page of `evenpipe doctor`: Markdown for people, to be pasted into an issue, and JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from evenpipe.train.doctor import COLLECTIVES, PRODUCTS, Outcome
from evenpipe.train.report import bytes_text
from evenpipe.words import count

MICRO, GIGA, TERA = 1e-6, 1e9, 1e12


def page_values(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return all outcomes as JSON values."""
    faulty = [f"{outcome.section}: {outcome.name}" for outcome in outcomes if outcome.fault]
    return {"parts": len(outcomes), "faulty": faulty, "outcomes": [asdict(outcome) for outcome in outcomes]}


def page_text(outcomes: Sequence[Outcome]) -> str:
    """Return the page in Markdown."""
    by_section: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_section.setdefault(outcome.section, []).append(outcome)
    faulty = [outcome for outcome in outcomes if outcome.fault]
    verdict = "no faults" if not faulty else count(len(faulty), "fault")
    lines = ["# evenpipe doctor", "", f"{count(len(outcomes), 'part')}, {verdict}", ""]
    for outcome in faulty:
        lines += [f"- **{outcome.section}, {outcome.name}**: {_line(outcome.fault)}", ""]
        if outcome.log:
            lines += [f"  {line}" for line in ("```", *outcome.log.splitlines(), "```")] + [""]
    predictions = next((outcome.values for outcome in by_section.get("predictions", ()) if not outcome.fault), {})
    for section, write in (
        ("machine", _machine),
        ("gradients", _gradients),
        ("transfers", _transfers),
        ("steps", lambda timed: _steps(timed, predictions)),
    ):
        if section in by_section:
            lines += [f"## {section.capitalize()}", "", *write(by_section[section]), ""]
    return "\n".join(lines)


def _machine(outcomes: Sequence[Outcome]) -> Iterable[str]:
    values = {name: value for outcome in outcomes for name, value in outcome.values.items()}
    topology, settings, advice = (values.pop(name, None) for name in ("topology", "environment", "advice"))
    yield from table(("", ""), values.items())
    if settings:
        yield from ("", "Environment: " + ", ".join(f"`{name}={value}`" for name, value in settings.items()))
    if topology:
        yield from ("", "```", *str(topology).splitlines(), "```")
    if advice:
        yield from ("", "To change:", "", *(f"- {sentence}" for sentence in advice))


def _gradients(outcomes: Sequence[Outcome]) -> Iterable[str]:
    yield from ("Relative to transformers in one process.", "")
    yield from table(
        ("pipeline", "largest error of a gradient, fp64", "seconds"),
        [(outcome.name, _figure(outcome, "error", "{:.0e}"), f"{outcome.seconds:.0f}") for outcome in outcomes],
    )


def _transfers(outcomes: Sequence[Outcome]) -> Iterable[str]:
    values = {outcome.name: outcome.values for outcome in outcomes if not outcome.fault}
    if (machine := values.get(PRODUCTS)) is not None:
        wire = machine["inside"]
        yield from table(
            ("", ""),
            [
                *(
                    (f"products in {dtype}", f"{peak / TERA:.3g} TFLOP/s")
                    for dtype, peak in machine["peak_flops"].items()
                ),
                ("memory", f"{machine['memory_bandwidth'] / GIGA:.4g} GB/s"),
                ("copies to and from the host", f"{machine['host_bandwidth'] / GIGA:.4g} GB/s"),
                ("smallest operation", f"{machine['operation_seconds'] / MICRO:.3g} us"),
                ("slowdown while all devices compute", f"{machine['contention']:.2f}"),
                ("latency of a hop", f"{wire['latency_seconds'] / MICRO:.3g} us"),
                ("bandwidth of a hop", f"{wire['bandwidth'] / GIGA:.3g} GB/s"),
            ],
        )
        yield ""
    if (collectives := values.get(COLLECTIVES)) is not None:
        sizes = list(next(iter(collectives.values())))
        yield from table(
            ("collective", *(bytes_text(int(size)) for size in sizes)),
            [(name, *(f"{took[size] * 1e3:.3g} ms" for size in sizes)) for name, took in collectives.items()],
        )


def _steps(outcomes: Sequence[Outcome], predictions: Mapping[str, float]) -> Iterable[str]:
    rows = []
    for outcome in outcomes:
        predicted = predictions.get(outcome.name)
        rows.append(
            (
                outcome.name,
                _figure(outcome, "seconds", "{:.3f} s"),
                "-" if outcome.fault else f"{outcome.values['tokens'] / outcome.values['seconds']:.0f}",
                "-" if predicted is None else f"{predicted:.3f} s",
                "-" if predicted is None or outcome.fault else f"{predicted / outcome.values['seconds']:.2f}",
            )
        )
    yield from table(("step", "measured", "tokens/s", "predicted", "predicted / measured"), rows)


def _figure(outcome: Outcome, name: str, form: str) -> str:
    value = outcome.values.get(name)
    text = "-" if value is None else form.format(value)
    return f"**{text}, fault**" if outcome.fault else text


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterable[str]:
    """Yield the lines of a table in Markdown."""
    yield _row(head)
    yield _row(["---"] * len(head))
    yield from map(_row, rows)


def _row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(_line(str(cell)).replace('|', chr(92) + '|') for cell in cells)} |"


def _line(text: str) -> str:
    return " ".join(text.split())
