"""What tensor ranks hold: closed forms against the reference, against the trace, and against real layers in threads."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from back_ends import PASSES, WITH_R, both
from families import NAMED, tiny_config
from test_layers import SHAPES, kept, llama, of, per_unit
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import LlamaConfig

from evenpipe import Recipe
from evenpipe.errors import InputError
from evenpipe.memory.bench import Bench
from evenpipe.memory.bytes import StageBytes
from evenpipe.memory.closed import ClosedForms
from evenpipe.memory.cut import Portion
from evenpipe.memory.estimate import estimate
from evenpipe.memory.kernels import PRESETS
from evenpipe.memory.parameters import Parameters
from evenpipe.memory.tracker import Tracker
from evenpipe.model import build_stage, describe, fill_parameters
from evenpipe.tensor.check import cut_of_model
from evenpipe.tensor.threads import ThreadExchange, in_threads, thread_exchanges

FAMILIES = [*NAMED, "gpt2", "phi"]
RANKS = (2, 4)

# --- the reference, section 5: bytes / (n h) in bf16 ------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("sizes", SHAPES)
def test_coefficients(sizes, ranks):
    """Kept from F: (12 + 4r + 6q) / t, and where the forward is repeated the rest of both gathered inputs. Between I
    and W: 4 + (8 + 4r + 6q) / t."""
    shape, (h, f, a, k) = llama(*sizes), sizes
    r, q = max(k, ranks) / a, f / h
    statistics = (4 * a / h + 8 / h) / ranks
    layer, again = (of(shape, tp=ranks, blocks=True, repeats=repeats) for repeats in (False, True))
    assert per_unit(kept(layer), shape) == pytest.approx((12 + 4 * r + 6 * q) / ranks + statistics, abs=5e-5)
    assert per_unit(kept(again) - kept(layer), shape) == pytest.approx(4 * (1 - 1 / ranks), abs=5e-5)
    assert per_unit(layer.queued, shape) == pytest.approx(4 + (8 + 4 * r + 6 * q) / ranks, abs=1e-9)


def test_figures_of_one_shape():
    """Llama with r = 1/4 and q = 3.5, fused kernels: 34.08 / t, and over 8 ranks 7.8 between I and W."""
    shape = llama(512, 1792, 8, 2)
    assert [round(per_unit(kept(of(shape, tp=t, blocks=True)), shape) * t, 2) for t in (1, 2)] == [34.08, 34.08]
    wide = llama(1024, 3584, 32, 8)
    assert round(per_unit(of(wide, tp=8, blocks=True).queued, wide), 1) == 7.8


def test_other_frameworks_keep_their_way():
    """Megatron-LM keeps own rows of output gradients, and gathers for every product."""
    shape = llama(512, 1792, 8, 2)
    theirs, ours = (of(shape, tp=2, blocks=blocks) for blocks in (False, True))
    assert per_unit(theirs.queued, shape, tp=2) == 12 + 1 + 21
    assert theirs.saved == ours.saved and theirs.queued < ours.queued


# --- the trace --------------------------------------------------------------------------------------------------------

CASES = [
    *((family, "transformers", 2, "none", first) for family in FAMILIES for first in (0, 2)),
    *((family, "fused", 2, "none", 1) for family in FAMILIES),
    *(("llama", "transformers", ranks, choice, 1) for ranks in RANKS for choice in ("none", "full")),
    ("gpt2", "transformers", 2, "full", 2),
    ("gemma2", "transformers", 2, "full", 0),
]
HOLD_MORE = ("phi", "phi3")
"""Their attention holds some more of queries and keys in a forward without a graph, whose most is there with tensor
ranks and elsewhere without: closed forms do not know it."""


@pytest.mark.parametrize(("family", "kernels", "ranks", "checkpointing", "first"), CASES)
@pytest.mark.sampled(6)
def test_agrees_with_the_trace(family, kernels, ranks, checkpointing, first):
    """To the byte, also at the ends; in a backward a stage may let tables of positions go earlier than counted."""
    ours, traced = both(
        family,
        PRESETS[kernels],
        (torch.bfloat16, 2, 12),
        first=first,
        last=first + 2,
        checkpointing=checkpointing,
        ranks=ranks,
    )
    names = ("input", "output", "stored", "queued", "moved", "saves_input")
    assert [getattr(ours, name) for name in names] == [getattr(traced, name) for name in names]
    assert ours.recomputed is not None and traced.recomputed is not None
    assert ours.recomputed.stored == traced.recomputed.stored
    for name in (*PASSES, *WITH_R):
        if name == "bare_forward" and family in HOLD_MORE:
            assert 0 <= traced.peaks.bare_forward - ours.peaks.bare_forward < 0.2 * traced.peaks.bare_forward
            continue
        tables = 2 * 2 * 12 * 16 * 4 if name in ("backward", "input", "weight") else 0
        assert 0 <= getattr(ours.peaks, name) - getattr(traced.peaks, name) <= tables, name


# --- real layers ------------------------------------------------------------------------------------------------------


class Apart(ThreadExchange):
    """Ranks exchange copies that no tracker counts: it does not know when others are done with them."""

    def gather(self, rows: Tensor) -> Tensor:
        return self._apart(super().gather, rows)

    def scatter(self, partial: Tensor) -> Tensor:
        return self._apart(super().scatter, partial)

    def _apart(self, way: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            found = way(tensor.clone())
        return found.clone()


HIDDEN, MLP, HEADS, BATCH, SEQUENCE = 64, 224, 8, 2, 16


def real(ranks: int, checkpointing: str) -> list[StageBytes]:
    """What each rank's thread counts of one layer in the middle."""
    description = describe(
        LlamaConfig(
            vocab_size=64,
            hidden_size=HIDDEN,
            intermediate_size=MLP,
            num_hidden_layers=3,
            num_attention_heads=HEADS,
            num_key_value_heads=4,
        )
    )
    cut = cut_of_model(description, ranks, check=False)
    exchanges = [Apart(one._meeting, one.rank) for one in thread_exchanges(ranks)]
    stages = []
    for exchange in exchanges:
        held = cut.placements(description, 1, exchange.rank, ranks)
        stage = build_stage(
            description, 1, 2, is_first=False, is_last=False, dtype=torch.bfloat16, held=held, tensor_ranks=ranks
        )
        fill_parameters(stage, description, 0)
        again = [] if checkpointing == "none" else [1]
        cut.make_local(stage, {1: stage.get_submodule("model.layers.1")}, exchange, again)
        stages.append(stage)

    def run(rank: int) -> StageBytes:
        stage = stages[rank]
        with Tracker() as tracker:
            tracker.add(*stage.parameters(), *stage.buffers())
            bench = Bench(
                stage,
                ["model.layers.1"],
                [checkpointing],
                argument="hidden_states",
                shape=(BATCH, SEQUENCE, HIDDEN),
                dtype=torch.bfloat16,
                tracker=tracker,
                exchange=exchanges[rank],
            )
            return bench.trace(split=True, recompute=False).over([0])

    return in_threads(exchanges, run)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("ranks", RANKS)
def test_one_real_layer_keeps_what_the_closed_forms_say(ranks, checkpointing):
    """From F to W and from I to W, on every rank."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=MLP, num_attention_heads=HEADS, num_key_value_heads=4
    )
    portion = Portion(microbatch_size=BATCH, sequence=SEQUENCE, element=2, tp=ranks, blocks=True)
    expected = ClosedForms(describe(config)).stage(
        1, 2, portion, is_first=False, is_last=False, checkpointing=checkpointing
    )
    r, q, unit = 4 / HEADS, MLP / HIDDEN, BATCH * SEQUENCE * HIDDEN
    between = 4 + (8 + 4 * r + 6 * q) / ranks if checkpointing == "none" else 8 + (4 + 4 * r + 6 * q) / ranks
    for found in real(ranks, checkpointing):
        assert (found.input, found.output, found.stored) == (expected.input, expected.output, expected.stored)
        assert found.queued == expected.queued == between * unit


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "ranks", "changes"),
    [
        ("llama", 2, {}),
        ("llama", 4, {}),  # two heads of keys and values
        ("phi3", 2, {}),
        ("gpt_neox", 2, {}),
        ("starcoder2", 2, {}),
        ("gpt2", 2, {}),
        ("olmo2", 2, {}),
        ("bloom", 2, {}),  # attention is not cut
    ],
)
def test_the_first_rank_holds_what_is_counted(family, ranks, changes):
    description = describe(tiny_config(family, **changes))
    cut, parameters = cut_of_model(description, ranks, check=False), Parameters(description)
    for first, last in ((0, 2), (2, 4)):
        ends = {"is_first": first == 0, "is_last": last == 4}
        held, alone = {}, set()
        for index in range(first, last):
            held |= cut.placements(description, index, 0, ranks)
            alone |= cut.alone(description, index)
        stage = build_stage(description, first, last, **ends, held=held, tensor_ranks=ranks)
        sizes = {name: parameter.numel() for name, parameter in stage.named_parameters()}
        bucket = 0
        for name, size in sizes.items():
            places = math.prod(one.parts for one in held[name].cuts) if name in held else 1
            bucket += size * places if places < ranks and name not in alone else 0
        found = parameters.stage(first, last, ranks, **ends, cut=cut)
        assert (found.elements, found.tensors, found.shared) == (sum(sizes.values()), len(sizes), bucket)


def test_what_the_runtime_refuses_is_refused():
    """With a sentence of its own: heads divide, columns do not."""
    changes = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 100}
    recipe = Recipe.of(tp=8, sequence_length=32, microbatches=4)
    with pytest.raises(InputError, match="8 ranks cannot share 100 columns"):
        estimate(describe(tiny_config("llama", **changes)), recipe)
