"""Transfers of different kinds that share a network card."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from evenpipe.costs.analytic import LayerTime, Setting, layer_time
from evenpipe.costs.cards import slowdowns
from evenpipe.costs.collectives import Axes
from evenpipe.costs.experts import one_way_seconds
from evenpipe.costs.hardware import KNOWN
from evenpipe.costs.step import WHOLE, Cut, costs_of_cut
from evenpipe.costs.work import layers_of
from evenpipe.model import describe
from evenpipe.schedule import MODES, Costs, Placement

H100 = KNOWN["H100-80G"]
LAYERS, STAGES = 8, 4

# seconds that each kind keeps a card busy, of 10; how many times as long each takes
SHARED: list[tuple[dict[str, float], dict[str, float]]] = [
    ({"a": 5.0}, {"a": 1.0}),
    ({"a": 5.0, "b": 0.0}, {"a": 1.0, "b": 1.0}),
    ({"a": 4.0, "b": 2.0}, {"a": 1 / 0.9, "b": 1 / 0.8}),
    ({"a": 10.0, "b": 10.0}, {"a": 2.0, "b": 2.0}),
    ({"a": 30.0, "b": 1.0}, {"a": 1 / 0.95, "b": 2.0}),
    ({"a": 2.0, "b": 2.0, "c": 4.0}, {"a": 1 / 0.7, "b": 1 / 0.7, "c": 1 / 0.8}),
]


def test_transfers_that_meet_have_half_of_a_card_each() -> None:
    for busy, expected in SHARED:
        assert slowdowns(busy, 10.0) == pytest.approx(expected)


def llama() -> list:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    return list(layers_of(describe(LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=32000))))


def costs(given: Setting, layers: list[LayerTime], mode: str = "first-last") -> Costs:
    cut = Cut(
        placement=Placement.linear(STAGES),
        layers_per_stage=(LAYERS // STAGES,) * STAGES,
        checkpointing=("none",) * LAYERS,
        vocabulary=mode,
    )
    return costs_of_cut(cut, layers, given, rows=32000, hidden_size=4096)


def setting(**axes: int) -> Setting:
    sizes = {"dp": 1, "tp": 1, "cp": 1, "pp": STAGES, **axes}
    return Setting(hardware=H100, axes=Axes.of(**sizes), dtype="bf16", microbatch_size=1, sequence=65536)


def test_hops_and_keys_share_cards_across_nodes() -> None:
    """All of a middle stage's times follow from its layers, each with the same share of the exchange."""
    given = setting(cp=16)
    layer = layer_time(llama()[0], given)
    keys, alone = layer.across, given.axes.pipeline.hop_seconds(H100, given.hop_bytes(4096))
    assert keys is not None and keys.forward > 0 and keys.whole == keys.inputs > keys.forward
    work = LAYERS * (layer.forward + layer.backward)
    meets = {"hops": LAYERS * (keys.forward + keys.backward) / work, "keys": 2 * (STAGES - 1) * alone / work}
    found = costs(given, [layer] * LAYERS)
    assert layer_time(llama()[0], setting(cp=2)).across is None, "inside a node nothing is shared"
    assert found.p2p == pytest.approx(alone / (1 - meets["hops"] / 2)) and found.p2p > 1.02 * alone
    more = 1 / (1 - meets["keys"] / 2) - 1
    assert isinstance(found.F, tuple) and isinstance(found.B, tuple) and isinstance(found.W, tuple)
    each = LAYERS // STAGES
    assert found.F[1] == pytest.approx(each * (layer.forward + more * keys.forward))
    assert found.B[1] == pytest.approx(each * (layer.whole + more * keys.whole))
    assert found.W[1] == pytest.approx(each * layer.weights)


@pytest.mark.parametrize("mode", MODES)
def test_collectives_of_vocabulary_layers_share_them_too(mode: str) -> None:
    given = setting(dp=8)
    layer, pipeline = layer_time(llama()[0], given), given.axes.pipeline
    assert layer.across is None
    hop = pipeline.hop_seconds(H100, given.hop_bytes(4096))
    found = costs(given, [layer] * LAYERS, mode)
    if mode in WHOLE:
        assert found.p2p == hop
        return
    work, to_all = LAYERS * (layer.forward + layer.backward), pipeline.broadcast_seconds(H100, given.hop_bytes(4096))
    statistics = pipeline.gather_seconds(H100, given.tokens * STAGES * 12.0)
    busy = STAGES * (3 * to_all + statistics)
    assert found.p2p == pytest.approx(hop / (1 - busy / work / 2))
    assert found.collectives["reduce"] == pytest.approx(to_all / (1 - 2 * (STAGES - 1) * hop / work / 2))


def test_rows_of_experts_travel_both_ways_in_a_pass() -> None:
    config = Qwen3MoeConfig(
        hidden_size=4096,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=4,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        vocab_size=32000,
    )
    (work,) = layers_of(describe(config))
    assert work.experts is not None
    given = replace(setting(dp=16, ep=16), sequence=8192)
    across, once = layer_time(work, given).across, one_way_seconds(work.experts, 4096, given)
    assert across is not None and across.forward == across.inputs == across.whole == 2 * once > 0
    assert (across.weights, across.again_selective, across.again_full) == (0, 0, once)
    assert layer_time(work, replace(given, axes=Axes.of(dp=16, tp=1, cp=1, pp=STAGES, ep=8))).across is None
