"""The tests of the output layer run with every version of the kernels.

Triton's run on a GPU (`make gpu-test`), or interpreted, operation by operation: of those `--quick` runs a few.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import vocabulary_reference
from sampling import chance_of, choose

from evenpipe.vocabulary import kernels, output
from evenpipe.vocabulary.options import LossOptions

WITH_EVERY_VERSION = {"test_output_gradients", "test_output_numerics"}
ON_GPU = torch.cuda.is_available()
INTERPRETED = 2
"""Tests of interpreted kernels that `--quick` runs, with one combination each."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in WITH_EVERY_VERSION:
        metafunc.parametrize("version", ["torch", "triton"], indirect=True)


def is_interpreted(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and item.callspec.params.get("version") == "triton" and not ON_GPU


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before the choice of `tests/sampling.py`, which counts what there is of each test."""
    interpreted = [item for item in items if is_interpreted(item)]
    if not (config.option.quick and interpreted):
        return
    small = [item for item in interpreted if item.originalname != "test_gradients_on_every_device"]
    kept = choose(small, INTERPRETED, chance_of(config, interpreted[0]))
    left_out = set(interpreted).difference(kept)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def combinations(request: pytest.FixtureRequest, sample: Callable[..., Any]) -> Callable[..., list[tuple[Any, ...]]]:
    """All combinations of values; with `--quick` every pair of values, and one where kernels are interpreted."""
    count = 1 if is_interpreted(request.node) else None
    return lambda *values: sample(itertools.product(*values), count)


@pytest.fixture(autouse=True)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that "auto" stands for."""
    name = getattr(request, "param", "auto")
    if name == "auto":
        return
    on_gpu = name == "triton" and ON_GPU
    if name == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    if on_gpu:
        monkeypatch.setattr(vocabulary_reference, "TORCH_DEVICE", "cuda")

    def chosen(options: LossOptions, like: torch.Tensor) -> object:
        if on_gpu and not like.is_cuda:  # a test that makes its own tensors, on the host
            return kernels.choose(options, like)
        return kernels.choose(replace(options, kernels=name) if options.kernels == "auto" else options, like)

    monkeypatch.setattr(output, "choose", chosen)
