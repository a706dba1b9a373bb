"""The bytes of a stage of a tiny model, by both back-ends."""

from families import tiny_config

from evenpipe.memory.bytes import StageBytes
from evenpipe.memory.closed import ClosedForms
from evenpipe.memory.cut import Portion
from evenpipe.memory.traced import StageTracer
from evenpipe.model import describe

PASSES = ("forward", "backward", "input", "weight")
WITH_R = ("recompute", "bare_forward")


def both(
    family, kernels, case, *, first=1, last=3, checkpointing="none", recompute=True
) -> tuple[StageBytes, StageBytes]:
    """The bytes of a stage by both back-ends."""
    dtype, batch, sequence = case
    description = describe(tiny_config(family))
    ends = {"is_first": first == 0, "is_last": last == 4}
    sizes = {"microbatch_size": batch, "sequence": sequence}
    tracer = StageTracer(
        description,
        compute_dtype=dtype,
        parameter_dtype=dtype,
        split=True,
        recompute=recompute,
        kernels=kernels,
        **sizes,
    )
    portion = Portion(element=dtype.itemsize, **sizes)
    return (
        ClosedForms(description).stage(first, last, portion, checkpointing=checkpointing, kernels=kernels, **ends),
        tracer.stage(first, last, checkpointing=checkpointing, **ends),
    )
