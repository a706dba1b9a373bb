"""In a context, code that asks for fp32 computes in fp64, on the thread that is in it."""

from __future__ import annotations

import threading

import torch
from families import tiny_config, whole_model
from torch import nn

from evenpipe.model.comparison import contains_cast
from evenpipe.model.fp64 import InFp64


def test_what_asks_for_fp32_gets_fp64() -> None:
    wide = torch.rand(2, dtype=torch.float64)
    with InFp64():
        results = [
            wide.float(),
            wide.to(torch.float32),
            wide.to(dtype=torch.float),
            wide.type(torch.float32),
            torch.softmax(wide, 0, dtype=torch.float32),
            nn.functional.softmax(wide, dim=0, dtype=torch.float32),
            torch.zeros(2, dtype=torch.float32),
            nn.Linear(2, 2, dtype=torch.float32).weight,
        ]
        assert wide.to(torch.bfloat16).dtype == torch.bfloat16
    assert {one.dtype for one in results} == {torch.float64}
    assert wide.float().dtype == torch.float32


def test_it_holds_for_one_thread_and_can_be_nested() -> None:
    seen = []
    with InFp64():
        with InFp64():
            pass
        thread = threading.Thread(target=lambda: seen.append((InFp64.is_entered(), torch.ones(1).float().dtype)))
        thread.start()
        thread.join()
        assert InFp64.is_entered()
    assert not InFp64.is_entered()
    assert seen == [(False, torch.float32)]


def test_a_family_that_always_computes_its_norms_in_fp32_does_not() -> None:
    tokens = torch.arange(6).view(2, 3)
    model = whole_model(tiny_config("gemma2"))
    assert contains_cast(model(input_ids=tokens, use_cache=False).logits.sum())
    with InFp64():
        assert not contains_cast(model(input_ids=tokens, use_cache=False).logits.sum())
