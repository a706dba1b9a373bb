"""Model FLOP/s, their share of the peak, and peak memory of a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from evenpipe.model import describe, layer_flops, training_flops
from evenpipe.train import throughput
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.throughput import PeakMemory, Throughput

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": False}
LLAMA_MATRICES = 3 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 100
QWEN_MOE = {**LLAMA, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
"""A router, and two of eight experts."""
QWEN_MATRICES = 3 * (32 * 32 * 2 + 2 * 32 * 16 + 32 * 8 + 2 * 3 * 32 * 24) + 32 * 100

MODELS = [
    # model type, sizes, elements of the matrices that a token meets, attended keys of a sequence of 16
    ("llama", LLAMA, LLAMA_MATRICES, 17 / 2),
    ("llama", {**LLAMA, "tie_word_embeddings": True}, LLAMA_MATRICES, 17 / 2),
    ("qwen3_moe", QWEN_MOE, QWEN_MATRICES, 17 / 2),
    ("mistral", {**LLAMA, "sliding_window": 4}, LLAMA_MATRICES, (1 + 2 + 3 + 13 * 4) / 16),
]


def test_flops_of_a_training_step() -> None:
    """6 per token and element of a matrix, and 12 per attended key and element of a query, in each layer."""
    for kind, sizes, matrices, keys in MODELS:
        description = describe(AutoConfig.for_model(kind, **sizes))
        flops = training_flops(description, 16)
        assert flops == pytest.approx(6 * matrices + 12 * 3 * keys * 32, rel=1e-12), kind
        assert flops < 3 * (sum(layer_flops(description, 16)) + 2 * 32 * 100), "masked pairs"


def settings(**model: object):
    return config_from_dict({"model": {"architecture": "llama", **model}, "data": {"files": ["a.txt"]}})


PEAKS = [
    # peak of each process, share of the peak at 100,000 tokens per second, TFLOP/s of each process
    ([989.4e12, 989.4e12], 6e14 / (2 * 989.4e12), 300.0),
    ([989.4e12, 312e12], 6e14 / (989.4e12 + 312e12), 300.0),
    ([989.4e12, 0.0], None, 300.0),
    ([0.0] * 4, None, 150.0),
]


def pipeline_with(peaks: list[float]) -> SimpleNamespace:
    """As far as the throughput of a run on processes with these peaks looks at it."""
    gathered = [[peak] for peak in peaks]
    device = torch.device("cpu")
    return SimpleNamespace(description=None, torch_device=device, gather_numbers=lambda numbers: gathered)


def test_mfu_is_there_if_all_peaks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "training_flops", lambda description, sequence: 6e9)
    for peaks, share, teraflops in PEAKS:
        run = Throughput(pipeline_with(peaks), settings())
        assert run.utilization(1e5) == (None if share is None else pytest.approx(share))
        assert run.teraflops_per_second(1e5) == pytest.approx(teraflops)


CARDS = [
    # name in torch, compute_dtype, precision of fp32 products, peak
    ("NVIDIA H100 80GB HBM3", "auto", "highest", 989.4e12),
    ("NVIDIA H100 80GB HBM3", "float32", "highest", 66.9e12),
    ("NVIDIA H100 80GB HBM3", "float32", "high", 0.0),
    ("NVIDIA A100-SXM4-40GB", "bfloat16", "high", 312e12),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "auto", "highest", 0.0),
    ("NVIDIA GeForce RTX 4090", "auto", "highest", 0.0),
]


def test_the_peak_is_that_of_the_table_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, dtype, precision, peak in CARDS:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        run = settings(compute_dtype=dtype)
        assert throughput._peak_flops(torch.device("cuda"), run) == pytest.approx(peak, rel=1e-12)
        assert throughput._peak_flops(torch.device("cpu"), run) == 0


def test_peak_memory_on_a_gpu_is_that_of_the_steps_of_a_line_and_that_of_the_run(monkeypatch):
    """Building the model takes 90, steps 50 and 60, an evaluation between them 70."""
    peak = [90]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, 10))
    memory, taken = PeakMemory(torch.device("cuda")), []
    memory.restart()
    for step, evaluation in ((50, 70), (60, 0)):
        peak[0] = max(peak[0], step)
        taken.append(memory.take())
        peak[0] = max(peak[0], evaluation)
        memory.restart()
    assert taken == [50, 60]
    assert memory.of_run == 90
