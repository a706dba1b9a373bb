"""A checkpoint continues in any layout: each layout of a chain trains one step on what the one before has saved. Losses
and the weights that are exported in the end are those of transformers in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import Case, continue_in_all

REPLICAS = [
    Case("", replicas=2, devices=2, data_parallel="shard", schedule="zbv"),
    Case("", devices=4, mode="vocab-1"),
    Case("", replicas=4, data_parallel="shard"),
    Case("", replicas=2, devices=2, schedule="interleaved"),
    Case("", replicas=2, devices=2, data_parallel="shard", mode="first-last", schedule="zb-h1"),
    Case("", replicas=4, mode="first-last"),
]
TENSOR_RANKS = [
    Case("", devices=2, tensor_ranks=2),
    Case("", devices=4, mode="first-last"),
    Case("", replicas=2, tensor_ranks=2, data_parallel="shard"),
    Case("", devices=2, schedule="zb-h1", mode="redistribute"),
]
PIECES = [
    Case("", context_ranks=2),
    Case("", replicas=2, data_parallel="shard", mode="first-last", slices=2),
    Case("", devices=2, schedule="zb-h1", mode="redistribute", slices=3),
    Case("", devices=2, context_ranks=2, schedule="zbv", exchange="heads", slices=2),
    Case("", replicas=2, context_ranks=2, data_parallel="shard"),
    Case(""),
]
MEMBERS = [
    Case("", replicas=2, devices=2, members=2),
    Case("", replicas=4, members=4, mode="first-last"),
    Case("", replicas=4, members=2, data_parallel="shard"),
    Case("", devices=2, schedule="zbv"),
    Case("", replicas=2, tensor_ranks=2, members=2),
    Case("", replicas=2, data_parallel="shard", members=2, mode="vocab-1"),
    Case(""),
]
CHAINS = {
    "replicas": (REPLICAS, (("llama", False), ("llama", True))),
    "tensor ranks": (
        TENSOR_RANKS,
        (("llama", True), ("phi3", False), ("gpt2", True), ("gpt-neox", False), ("starcoder2", False)),
    ),
    "pieces of sequences": (PIECES, (("llama", True), ("gemma2", False), ("gpt2", True))),
    "shared experts": (MEMBERS, (("mixtral of 5 experts", False), ("gpt-oss", False), ("deepseek-v3", False))),
}
"""Layouts, and the families that go through them; whether these are tied."""


@pytest.mark.parametrize(
    ("name", "family", "tied"), [(name, *family) for name, (_, families) in CHAINS.items() for family in families]
)
@pytest.mark.slow
def test_a_checkpoint_continues_in_any_layout(name: str, family: str, tied: bool, tmp_path: Path) -> None:
    continue_in_all([replace(case, family=family, tied=tied) for case in CHAINS[name][0]], tmp_path)
