"""The layers of each stage of a run on a known GPU: the first process weighs memory for all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from harness import run_processes
from transformers import LlamaConfig

from evenpipe.train import build
from evenpipe.train.config import Config
from evenpipe.train.config_file import config_from_dict

GIB = 2**30
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8}


def config(**others: object) -> Config:
    """A run on 4 devices. By time, stages have 3, 3, 4 and 0 layers."""
    pipeline = {"processes": 4, "vocabulary": "redistribute", "microbatches": 16, **others}
    return config_from_dict(
        {
            "model": {"architecture": "llama"},
            "data": {"corpus": "python-standard-library", "sequence_length": 4096},
            "pipeline": pipeline,
        }
    )


def split_taken(run: Config, memory: int) -> tuple[int, ...] | None:
    """On a process that believes to have an A100 with so much memory."""
    model = LlamaConfig(
        **SIZES,
        num_hidden_layers=10,
        vocab_size=128256,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.cuda.get_device_name = lambda device: "NVIDIA A100-SXM4-80GB"
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=memory)
    return build._fitting(run, run.recipe(), model, torch.device("cuda")).layers_per_stage


@pytest.mark.parametrize(("memory", "expected"), [(14, (2, 4, 4, 0)), (40, None)])
def test_all_processes_take_a_split_that_fits(memory: int, expected: tuple[int, ...] | None) -> None:
    assert run_processes(split_taken, 4, config(), memory * GIB) == [expected] * 4


def test_a_given_split_stays() -> None:
    run = config(layers_per_stage=[3, 3, 2, 2])
    assert run_processes(split_taken, 4, run, 14 * GIB) == [(3, 3, 2, 2)] * 4
