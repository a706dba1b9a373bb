"""What the order of a pipeline is arranged by: the same on every process."""

from __future__ import annotations

import torch

from evenpipe.costs.hardware import Hardware, known_gpu
from evenpipe.costs.timed_model import arranging_model
from evenpipe.model import Description
from evenpipe.processes.worker import Worker
from evenpipe.recipe.layout import ModelCosts
from evenpipe.recipe.recipe import Recipe
from evenpipe.vocabulary import LossOptions

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Names of dtypes in `Hardware.peak_flops`."""


def model_costs(
    description: Description, recipe: Recipe, worker: Worker, dtype: torch.dtype, loss: LossOptions
) -> ModelCosts:
    """Return the costs by which a recipe without `costs` is arranged. dtype: of products.

    Raises InputError as `arranging_model`, and StoreError if the store of the processes is gone.
    """
    return arranging_model(description, recipe, _gpu_of_all(worker), DTYPES.get(dtype), loss)


def _gpu_of_all(worker: Worker) -> Hardware | None:
    """Return the GPU of the process that asks first, if it is a known one: all processes must arrange the same order,
    even if their GPUs differ."""
    if worker.torch_device.type != "cuda":
        return None
    return known_gpu(worker.settle("GPU", torch.cuda.get_device_name(worker.torch_device)))
