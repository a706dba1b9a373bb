"""A stage's forward reads no tensor values, since the host would wait for the GPU; packed rows are still found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import EXPERTS, FAMILIES, GROUPED, build_stages, tiny_config, whole_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evenpipe.model import Stage, build_stage, copy_parameters, describe

CHUNKED = {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 8}


class ValuesRead(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*args, **(kwargs or {}))


def config_of(name: str, **changes: object) -> transformers.PreTrainedConfig:
    """Return a config with grouped experts, as on a GPU, and without rotary tables that grow with the sequence."""
    if name == "llama4_text":
        config = transformers.Llama4TextConfig(**(GROUPED | CHUNKED | changes))
    else:
        config = tiny_config(name, **(({"rope_parameters": None} if name == "phi3" else {}) | changes))
    config._experts_implementation = "grouped_mm" if name in EXPERTS else None
    return config


def values_read(stage: Stage, hidden: Tensor, **arguments: Tensor) -> int:
    with ValuesRead() as values:
        stage(hidden, **arguments)
    return values.count


@pytest.mark.parametrize("name", [*FAMILIES, *EXPERTS, "llama4_text"])
@pytest.mark.sampled(4)
def test_no_value_is_read(name: str) -> None:
    """Run also on the device "meta", where every operation that reads a value fails."""
    description = describe(config_of(name))
    for torch_device, dtype in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        for first, last in ((0, 1), (1, 3), (3, 4)):
            ends = {"is_first": first == 0, "is_last": last == 4}
            stage = build_stage(description, first, last, **ends, dtype=dtype, torch_device=torch_device)
            assert values_read(stage, torch.ones(2, 12, 64, dtype=dtype, device=torch_device)) == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "olmo3", "modernbert-decoder"])
def test_rows_of_several_sequences_are_found(name: str) -> None:
    """Give positions: for one sequence they change nothing, for two sequences they change only the second."""
    whole = whole_model(config_of(name))
    description = describe(whole)
    hidden, alone, packed = torch.randn(1, 12, 64, dtype=torch.float64), torch.arange(12), torch.arange(12)
    packed[5:] -= 5
    for stage in build_stages(description, (1, 3)):
        copy_parameters(stage, description)
        none = stage(hidden)
        assert torch.equal(none, stage(hidden, position_ids=alone[None]))
        several = stage(hidden, position_ids=packed[None])
        assert torch.equal(several[:, :5], none[:, :5])
        assert torch.allclose(several[:, 5:], stage(hidden[:, 5:]), rtol=0, atol=1e-9)
        assert not torch.allclose(several[:, 5:], none[:, 5:], rtol=0, atol=1e-3)


def test_a_forward_that_fails_does_not_hide_them() -> None:
    stage = build_stage(describe(config_of("llama")), 1, 3, is_first=False, is_last=False)
    with pytest.raises(RuntimeError):
        stage(torch.ones(1, 6, 63))
    assert values_read(stage, torch.ones(1, 6, 64), position_ids=torch.arange(6)[None]) == 1
