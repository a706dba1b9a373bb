"""Problems and configurations for the tests of the planner, and a search beside an evaluation of everything."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenpipe.costs.hardware import KNOWN, Hardware
from evenpipe.model import describe
from evenpipe.model.description import Description
from evenpipe.plan.bounds import layout_bound, order_bound, work_bound
from evenpipe.plan.configuration import Configuration
from evenpipe.plan.configuration_search import head_layers, search_configurations
from evenpipe.plan.evaluation import Evaluation, evaluate
from evenpipe.plan.problem import Problem, problem_of
from evenpipe.plan.space import Space, configurations, layouts
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import even_split, splits_by_cost
from evenpipe.sizes import GIB

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
LLAMA = {
    "small": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
MIXTRAL = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 16} | {
    "num_key_value_heads": 4,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 128256,
    "sliding_window": None,
}


@cache
def description_of(model: str, **changes: int) -> Description:
    """Of one of `LLAMA`, with changes, or of mixtral."""
    from transformers import LlamaConfig, MixtralConfig

    if model == "mixtral":
        return describe(MixtralConfig(**MIXTRAL))
    sizes = {"num_key_value_heads": 8, "vocab_size": 128256, **LLAMA[model], **changes}
    return describe(LlamaConfig(**sizes, tie_word_embeddings=False))


def problem(
    model: str | Path | PreTrainedConfig = "small",
    *,
    memory: float | None = None,
    hardware: str | Hardware = "A100-80G",
    **changes: Any,
) -> Problem:
    """Of a model by name, by its file or its config; `memory` of a GPU is in GiB."""
    sizes: dict[str, Any] = {"gpus": 8, "sequence": 4096, "sequences_per_step": 64, "kernels": "fused"} | changes
    named = isinstance(model, str)
    return problem_of(
        description_of(model) if named else describe(model),
        KNOWN[hardware] if isinstance(hardware, str) else hardware,
        memory_bytes=None if memory is None else int(memory * GIB),
        **sizes,
    )


def configuration(
    given: Problem,
    schedule: str,
    mode: str,
    microbatches: int,
    *,
    devices: int = 4,
    slices: int = 1,
    offload: str = "scheduled",
    open: tuple[str, ...] = (),
    **others: Any,
) -> Configuration:
    """With two stages per device where a schedule leaves the choice, and layers in even numbers where that is usual."""
    options = (("stages_per_device", 2),) if schedule in ("interleaved", "po-h") else ()
    shape = given.programs.shape(schedule, options, devices)
    assert shape is not None
    if mode == "redistribute":
        split = splits_by_cost([1.0] * given.layers, shape.placement, 2.0, shape.in_flight)[0]
    else:
        split = even_split(given.layers, shape.placement.stages)
    batch = {"microbatches": microbatches, "slices": slices, "sequence_length": given.sequence}
    order = {"schedule": schedule, "schedule_options": options, "vocabulary": mode, "layers_per_stage": split}
    recipe = Recipe.of(pp=devices, **batch, **order)
    if offload == "least":
        return Configuration.of(given, recipe, open=("offload", *open), **others)
    return Configuration.of(given, recipe, open=open, **others).with_offload(offload)


def check_against_all(given: Problem, space: Space) -> list[Evaluation]:
    """Check that bounds hold, and that the best plan that is found is the best one within 2 %; returns all that fit."""
    fitting = []
    for layout in layouts(given, space):
        for one in configurations(given, space, layout, head_layers(given, layout)):
            evaluation = evaluate(given, one)
            if evaluation.fits:
                fitting.append(evaluation)
                # Bounds that hold: else the search might pass the best plan over.
                above = evaluation.seconds * (1 + 1e-9)
                bound = work_bound(given, one)
                assert layout_bound(given, layout).seconds <= above, one.name
                assert max(bound.seconds, order_bound(given, one, bound.recomputation)) <= above, one.name
                assert not bound.shortfall and not layout_bound(given, layout).shortfall, one.name
    best = min((evaluation.seconds for evaluation in fitting), default=math.inf)
    found = search_configurations(given, space, count=3, workers=1)
    assert found.best is not None and best <= found.best.seconds <= 1.02 * best
    return fitting


def most(plan: Evaluation) -> int:
    """Bytes that the fullest device holds."""
    return max(use.peak_bytes for use in plan.devices)


def needed(plan: Evaluation, given: Problem) -> float:
    """Bytes of a card on which it just fits."""
    return given.memory_bytes - min(use.spare for use in plan.devices)


def host(plan: Evaluation) -> int:
    """Bytes that a device has on the host, at most."""
    return max(use.host_bytes for use in plan.devices)
