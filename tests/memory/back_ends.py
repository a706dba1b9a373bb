"""The bytes of a stage of a tiny model, by both back-ends."""

from families import tiny_config

from evenpipe.memory.bytes import StageBytes
from evenpipe.memory.closed import ClosedForms
from evenpipe.memory.cut import Portion
from evenpipe.memory.traced import StageTracer
from evenpipe.model import describe
from evenpipe.tensor.check import cut_of_model

PASSES = ("forward", "backward", "input", "weight")
WITH_R = ("recompute", "bare_forward")


def both(
    family, kernels, case, *, first=1, last=3, checkpointing="none", recompute=True, ranks=1
) -> tuple[StageBytes, StageBytes]:
    """The bytes of a stage by both back-ends, with so many tensor ranks."""
    dtype, batch, sequence = case
    description = describe(tiny_config(family))
    cut = None if ranks == 1 else cut_of_model(description, ranks, check=False)
    ends = {"is_first": first == 0, "is_last": last == 4}
    sizes = {"microbatch_size": batch, "sequence": sequence}
    tracer = StageTracer(
        description,
        compute_dtype=dtype,
        parameter_dtype=dtype,
        backwards="both",
        recompute=recompute,
        kernels=kernels,
        ranks=ranks,
        cut=cut,
        **sizes,
    )
    portion = Portion(element=dtype.itemsize, tp=ranks, blocks=ranks > 1, **sizes)
    how = {"checkpointing": checkpointing, "kernels": kernels, "whole_end": cut is not None and cut.end_is_whole}
    return (
        ClosedForms(description).stage(first, last, portion, **how, **ends),
        tracer.stage(first, last, checkpointing=checkpointing, **ends),
    )
