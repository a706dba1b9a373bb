"""The tests of the output layer run with every version of the kernels.

Triton's run on a GPU (`make gpu-test`), or interpreted, operation by operation: then every sixteenth test runs with
them too, and with EVENPIPE_TEST_MATRIX=full every one.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import replace

import pytest
import torch
import vocabulary_reference

from evenpipe.vocabulary import output
from evenpipe.vocabulary.kernels import choose
from evenpipe.vocabulary.options import LossOptions

WITH_EVERY_VERSION = {"test_output_gradients", "test_output_numerics", "test_output_split", "test_output_on_gpu"}
EVERY = 1 if os.environ.get("EVENPIPE_TEST_MATRIX") == "full" or torch.cuda.is_available() else 16


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in WITH_EVERY_VERSION:
        metafunc.parametrize("version", ["torch", "triton"], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests by their names, so that the same ones run everywhere."""

    def is_left_out(item: pytest.Item) -> bool:
        calls = getattr(item, "callspec", None)
        interpreted = calls is not None and calls.params.get("version") == "triton"
        return interpreted and zlib.crc32(item.name.encode()) % EVERY != 0

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]


@pytest.fixture(autouse=True)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that "auto" stands for."""
    name = getattr(request, "param", "auto")
    if name == "auto":
        return
    on_gpu = name == "triton" and torch.cuda.is_available()
    if name == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    if on_gpu:
        monkeypatch.setattr(vocabulary_reference, "TORCH_DEVICE", "cuda")

    def chosen(options: LossOptions, like: torch.Tensor) -> object:
        if on_gpu and not like.is_cuda:  # a test that makes its own tensors, on the host
            return choose(options, like)
        return choose(replace(options, kernels=name) if options.kernels == "auto" else options, like)

    monkeypatch.setattr(output, "choose", chosen)
