"""Closed forms of layers against the layers themselves, run with tensors that have no memory."""

from dataclasses import replace

import pytest
import torch
from back_ends import PASSES, WITH_R, both
from families import NAMED

from evenpipe.memory.kernels import PRESETS

FAMILIES = [*NAMED, "gpt2", "phi"]
FUSED = PRESETS["fused"]
MIXTURES = ["mixtral", "qwen3_moe", "olmoe"]
WIDE, NARROW, ONE = (torch.float32, 2, 12), (torch.bfloat16, 3, 7), (torch.bfloat16, 1, 12)
WIDEST = torch.float64, 2, 12
"""dtype, sequences, tokens: the tiny configs look back on 8 tokens."""
CASES = [
    *((family, "transformers", case) for family in FAMILIES for case in (WIDE, NARROW)),
    *((family, "fused", case) for family in FAMILIES for case in (WIDE, NARROW)),
    *((family, "eager attention", WIDE) for family in FAMILIES),
    *(
        (family, kernels, ONE)
        for family in ("llama", "gpt_neox", "gemma3_text")
        for kernels in ("transformers", "fused")
    ),
    *((family, "eager attention", NARROW) for family in ("llama", "gpt2", "gpt_neox")),
    *((family, "packed", NARROW) for family in ("llama", "qwen3", "starcoder2")),
    *((family, "transformers", case) for family in MIXTURES for case in (WIDE, NARROW, WIDEST)),
    *((family, "fused", case) for family in MIXTURES for case in (WIDE, NARROW)),
]
KERNELS = {
    "transformers": PRESETS["transformers"],
    "fused": FUSED,
    "eager attention": replace(FUSED, attention="eager"),
    "packed": replace(FUSED, packed_qkv=True),
}
LOOSE = {
    # Tables of positions are counted to the end of the stage's backward; here the only layer that has them lets them
    # go before its most.
    ("cohere2", "transformers"): ("input",),
}
"""Peaks that differ, and why: ours is larger by at most those tables."""


@pytest.mark.parametrize(("family", "kernels", "case"), CASES, ids=str)
@pytest.mark.sampled(12)
def test_agrees_with_the_trace(family, kernels, case):
    """To the byte: what F leaves, what lies between I and W, and the most that lives within every pass."""
    recompute = kernels == "transformers"
    ours, traced = both(family, KERNELS[kernels], case, recompute=recompute)
    assert ours.stored == traced.stored
    if kernels == "packed":  # the trace packs products that the queue does not see
        return
    assert ours.queued == traced.queued
    loose = LOOSE.get((family, kernels), ())
    dtype, _, sequence = case
    for name in loose:
        assert 0 <= getattr(ours.peaks, name) - getattr(traced.peaks, name) <= 2 * sequence * 16 * dtype.itemsize
    compared = set(PASSES + (WITH_R if recompute else ())) - set(loose)
    found = {name: (getattr(ours.peaks, name), getattr(traced.peaks, name)) for name in compared}
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}
