"""Speeds of hardware that follow from measured steps."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from llamas import llama

from evenpipe.costs.hardware import KNOWN, Wire
from evenpipe.errors import InputError
from evenpipe.plan.measured_steps import MeasuredStep, fitted, measured_steps
from evenpipe.plan.problem import Problem, problem_of
from evenpipe.recipe.recipe import Recipe

GIVEN = KNOWN["H100-80G"]
OTHER = replace(
    GIVEN,
    peak_flops={dtype: 0.85 * peak for dtype, peak in GIVEN.peak_flops.items()},
    inside=Wire(latency_seconds=GIVEN.inside.latency_seconds, bandwidth=GIVEN.inside.bandwidth / 2),
)
"""A machine of the same name."""


def problem(**changes: object) -> Problem:
    """Tensor ranks of these kernels exchange rows beside nothing."""
    sizes = {"gpus": 8, "sequence": 8192, "sequences_per_step": 64, "kernels": "megatron", **changes}
    return problem_of(llama(), GIVEN, **sizes)


def no_run(path: str) -> Recipe:
    raise AssertionError(path)


def steps(given: Problem, *layouts: str) -> list[MeasuredStep]:
    """Steps as the other machine takes them."""
    read = [one for layout in layouts for one in measured_steps(given, f"{layout}: 1 s", no_run)]
    return [replace(one, seconds=one.predicted(given, OTHER)) for one in read]


def test_measured_steps_settle_what_they_say_something_about() -> None:
    """One step of compute settles products, one of tensor ranks their exchange; a third layout is predicted by both."""
    given = problem()
    plain, tensor, other = steps(given, "pp8 1f1b 1 x 64", "dp2·tp4 1f1b 2 x 16", "tp2·pp4 zbv vocab-2 1 x 64")
    before = other.predicted(given, GIVEN) / other.seconds - 1
    assert before < -0.1
    one, two = fitted(given, [plain]), fitted(given, [plain, tensor])
    assert abs(other.predicted(given, one.hardware) / other.seconds - 1) < 0.06
    assert abs(other.predicted(given, two.hardware) / other.seconds - 1) < 0.02
    assert max(map(abs, two.errors)) < 0.01
    assert two.factors["products and attention"] == pytest.approx(0.85, abs=0.03)
    assert two.factors["transfers between GPUs"] == pytest.approx(0.5, abs=0.15)
    assert "transfers between GPUs" in two.text and "slower" in two.text
    assert fitted(given, [replace(plain, seconds=plain.predicted(given, GIVEN))]).text.startswith("as assumed")


def test_steps_are_read_in_several_forms(tmp_path: Path) -> None:
    given = problem()
    (first,) = measured_steps(given, "dp4·pp2 zero-3 interleaved/4 vocab-1 selective 2 x 8: 8 400 ms", no_run)
    assert first.seconds == 8.4 and first.recipe.options == {"stages_per_device": 4}
    sizes = first.recipe.parallelism
    assert (sizes.dp, sizes.pp, sizes.zero, first.recipe.vocabulary) == (4, 2, 3, "vocab-1")
    assert (first.recipe.batch.microbatch_size, first.recipe.microbatches, first.recipe.activation_checkpointing) == (
        2,
        8,
        "selective",
    )
    (whole,) = measured_steps(given, "dp8 zero-3 microbatch 2: 52,000 tokens/s", no_run)
    (each,) = measured_steps(given, "dp8 zero-3 microbatch 2: 6500 tokens/s/GPU", no_run)
    assert whole.seconds == each.seconds == pytest.approx(64 * 8192 / 52000)
    (hybrid,) = measured_steps(given, "dp8 zero-3/4 microbatch 2: 8 s", no_run)
    assert (hybrid.recipe.parallelism.zero, hybrid.recipe.parallelism.dp_shard) == (3, 4)
    file = tmp_path / "steps.txt"
    file.write_text("dp8 microbatch 4: 9 s\n\nrun.toml: 8.5 s\n", encoding="utf-8")
    _, run = measured_steps(given, str(file), lambda path: Recipe.of(pp=8, sequence_length=8192))
    assert run.recipe.devices == 8 and run.seconds == 8.5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dp8: 3", '--measured is "dp8: 3"; it must be a layout as a plan is called'),
        ("dp8", '--measured is "dp8"; it must be'),
        (": 3 s", "--measured is"),
        ("dp8: 0 s", "a time or a speed above 0"),
        ("dp8 zero-9: 3 s", '--measured: dp8 zero-9: 3 s: a word is "zero-9"; it must be an axis (dp8)'),
        ("dp8 zero-3: 100 s", "dp8 zero-3: 100 s: that is 100.00 s per step, but 7."),
        ("pp64: 1 s", "64 with 64 stages, but the model has 32 layers"),
        ("run.toml: 1 s", "sequence_length is 4096; it must be that of the plan, 8192"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        fitted(problem(), measured_steps(problem(), text, lambda path: Recipe.of(sequence_length=4096)))
