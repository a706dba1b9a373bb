"""Runs some configurations of `make families`, and checks that errors are found and docs/families.md is current."""

from __future__ import annotations

import json
import multiprocessing.forkserver
import re
from collections.abc import Iterator
from functools import partial

import families_page
import pytest
import torch
import transformers
from family_configs import CONFIG_MAPPING, Configuration, configurations
from family_run import DifferentError, Reference, run, worst_error
from run_families import part_of

RESULTS = json.loads(families_page.RESULTS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def own_fork_server() -> Iterator[None]:
    """Stop a running fork server, which has not imported the modules that these configurations need."""
    multiprocessing.forkserver._forkserver._stop()
    yield
    multiprocessing.forkserver._forkserver._stop()


EXPECTED = {
    Configuration("bert"): "equal",  # the head's bias has two names
    Configuration("falcon_h1"): "equal",  # scales only rows that it looks up itself; the model sets buffers of layers
    Configuration("zaya"): "its layers hand a second tensor on to each other",
}


def test_a_few_families_are_equal_or_refused(own_fork_server) -> None:
    outcomes = list(run(list(EXPECTED)))
    for (one, expected), outcome in zip(EXPECTED.items(), outcomes, strict=True):
        assert (outcome.model_type, outcome.variant) == (one.model_type, one.variant)
        if expected == "equal":
            assert outcome.word == outcome.tensor == "equal", outcome
            assert 0.0 < outcome.error < 1e-10 and 0.0 < outcome.tensor_error < 1e-10, outcome
        else:
            assert outcome.word == "refused" and re.search(expected, outcome.sentence), outcome


def test_a_configuration_that_ends_a_process_is_told_and_the_others_go_on(own_fork_server) -> None:
    broken = Configuration("llama", "there is none")
    first, second = run([broken, Configuration("llama")])
    assert first.word == "traceback" and "there is none" in first.sentence
    assert second.word == "equal"


ones = partial(torch.ones, dtype=torch.float64)


class Tied:
    tied, head_name, embedding_name = True, "head", "embedding"


@pytest.mark.parametrize(
    ("loss", "changes", "text"),
    [
        (2.0, {}, None),
        (2.0 + 1e-9, {}, "the loss is"),
        (2.0, {"layer": ones(3) * (1 + 1e-9)}, "the gradient of layer is off by 1.0e-09"),
        (2.0, {"idle": ones(3)}, "the gradient of idle is off by"),
        (2.0, {"other": ones(3)}, r"gradients of \['other'\], which are no parameters"),
        (2.0, {"embedding": None}, "the gradient of embedding is off by 1.0e[+]00"),
        (2.0, {"layer": torch.full((3,), torch.nan)}, "the gradient of layer is off by inf"),
    ],
)
def test_what_is_wrong_is_found(loss, changes, text) -> None:
    """Use a reference that lists the tied matrix under the head's name, with a tower that gets no gradient."""
    expected = {"head": ones(4), "layer": ones(3), "idle": None}
    reference = Reference(None, torch.float64, torch.empty(0), 2.0, expected, 1e-10)
    found = {"embedding": ones(4), "layer": ones(3)} | changes
    found = {name: gradient for name, gradient in found.items() if gradient is not None}
    if text is None:
        assert worst_error(reference, Tied(), loss, found) == 0.0
        return
    with pytest.raises(DifferentError, match=text):
        worst_error(reference, Tied(), loss, found)


def test_every_model_type_has_a_configuration_that_can_be_made() -> None:
    every = configurations()
    assert {one.model_type for one in every} == set(
        transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    assert all(type(one.build()) is CONFIG_MAPPING[one.model_type] for one in every)
    parts = [part_of(every, f"{number}/7") for number in range(1, 8)]
    assert sorted(str(one) for part in parts for one in part) == sorted(map(str, every))


def test_the_page_is_of_the_version_that_is_installed_for_development() -> None:
    constraints = (families_page.ROOT / "constraints.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^transformers==(.*)$", constraints, re.MULTILINE)
    assert RESULTS["transformers"] == version
    assert f"transformers {version} has a causal language model" in families_page.FILE.read_text(encoding="utf-8")
    if transformers.__version__ == version:
        listed = [Configuration(row["model_type"], row["variant"]) for row in RESULTS["configurations"]]
        assert sorted(map(str, listed)) == sorted(map(str, configurations())), "run make families"


def test_nothing_that_is_listed_is_wrong() -> None:
    words = {row[key] for row in RESULTS["configurations"] for key in ("word", "tensor", "pieces")}
    assert words <= {"equal", "refused", ""}
