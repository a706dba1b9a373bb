"""Times of experts in a layer: what replicas that share them exchange, and what of it stands beside products."""

from __future__ import annotations

from dataclasses import replace

import pytest
from families import EXPERTS, tiny_config
from transformers import Qwen3MoeConfig

from evenpipe.costs.analytic import Setting, layer_time
from evenpipe.costs.collectives import Axes
from evenpipe.costs.hardware import KNOWN, Wire
from evenpipe.costs.work import LayerWork, layers_of
from evenpipe.experts.overlap import ExpertOptions
from evenpipe.model import describe

H100 = KNOWN["H100-80G"]


def setting(*, ep: int = 1, tokens: int = 8192, **changes: object) -> Setting:
    options: dict = {"hardware": H100, "dtype": "bf16", "microbatch_size": 1, "sequence": tokens}
    axes = {"dp": 64, "tp": 1, "cp": 1, "pp": 8, "ep": ep} | {
        name: changes.pop(name) for name in ("tp", "cp", "experts", "skew") if name in changes
    }
    return Setting(**{**options, "axes": Axes.of(**axes), **changes})


@pytest.fixture(scope="module")
def qwen() -> LayerWork:
    """A layer of Qwen3-30B-A3B."""
    config = Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=1000,
    )
    return layers_of(describe(config))[0]


def test_experts_are_read_from_the_shapes() -> None:
    """What is not of experts that run as one module is dense."""
    for family in EXPERTS:
        for work in layers_of(describe(tiny_config(family))):
            experts = work.experts
            assert sum(product.parameters for product in work.dense) + work.expert_parameters <= work.parameters
            if experts is not None:
                matrices = 3 if experts.gated else 2
                assert experts.parameters >= experts.count * work.hidden_size * experts.width * matrices, family
                assert experts.choices <= experts.count


def test_a_process_with_all_experts_multiplies_only(qwen: LayerWork) -> None:
    """Of an expert layer alone: three products per pair and matrix, at the speed of large ones."""
    rest = replace(qwen, experts=None, products=qwen.dense)
    alone = setting()
    whole, without = layer_time(qwen, alone), layer_time(rest, alone)
    assert qwen.experts is not None
    products = 2 * 8192 * 8 * 3 * qwen.hidden_size * qwen.experts.width
    seconds = products / (H100.peak("bf16") * H100.product_fraction)
    assert whole.forward - without.forward == pytest.approx(seconds, rel=0.6)
    assert whole.forward - without.forward > seconds
    assert whole.weights - without.weights > seconds
    assert whole.whole == pytest.approx(whole.inputs + whole.weights)
    slow = setting(hardware=replace(H100, inside=Wire(latency_seconds=1.0, bandwidth=1.0)))
    assert layer_time(qwen, slow).forward == whole.forward


def test_what_travels_takes_time_that_products_hide(qwen: LayerWork) -> None:
    plain_options = ExpertOptions(columns=1, arrivals=1)

    def forward(members: int, skew: float = 1.0, options: ExpertOptions | None = None) -> float:
        return layer_time(qwen, setting(ep=members, skew=skew, experts=options)).forward

    for members, skew in ((2, 1.0), (8, 1.0), (16, 1.0), (8, 2.0)):
        plain = forward(members, skew, plain_options)
        assert forward(members, skew) <= plain > forward(1)
        if skew > 1:
            even = forward(members, options=plain_options)
            assert even < plain < skew * even


def test_across_nodes_rows_take_longer(qwen: LayerWork) -> None:
    """Eight members share a node; sixteen are half as near, and their own network cards carry what crosses."""
    inside, across = (layer_time(qwen, setting(ep=members)) for members in (8, 16))
    assert across.forward > inside.forward
    assert across.inputs > inside.inputs
    assert across.weights == pytest.approx(inside.weights, rel=0.2)


def test_a_repeated_forward_sends_nothing_back(qwen: LayerWork) -> None:
    shared = setting(ep=16)
    whole = layer_time(qwen, shared)
    attention = layer_time(replace(qwen, experts=None, products=qwen.dense), shared)
    assert whole.again_full - attention.again_full < whole.forward - attention.forward
    assert whole.again_selective - attention.again_selective < 0.2 * (whole.again_full - attention.again_full)
