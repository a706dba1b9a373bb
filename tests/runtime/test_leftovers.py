"""What one step leaves behind in one process."""

from __future__ import annotations

import gc

import torch
from families import tiny_config, whole_model

from evenpipe import Pipeline


def test_a_step_of_routers_with_a_loss_leaves_nothing() -> None:
    model = whole_model(tiny_config("mixtral", output_router_logits=True), torch.float32)
    pipeline = Pipeline(model, microbatches=2, self_check=False)
    ids = torch.zeros(2, 6, dtype=torch.int64)
    pipeline.step(ids)
    gc.collect()
    gc.disable()  # what has to wait for the collector is left over
    try:
        with pipeline.count_bytes() as counted:
            result = pipeline.step(ids)
        assert result.router_loss > 0
        del result
        assert [str(made) for made in counted.survivors()] == []
    finally:
        gc.enable()
