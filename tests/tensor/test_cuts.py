"""A cut is accepted only if its parts add up to the whole block, and is applied to blocks of other sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from family_configs import SETTINGS, small_config
from small_families import CONFIGS, WHOLE
from transformers import AutoModelForCausalLM, DbrxConfig, LlamaConfig, MixtralConfig, Phi3Config

from evenpipe.errors import InputError
from evenpipe.model import describe
from evenpipe.model.placement import TensorPlacement
from evenpipe.model.small_copy import SmallCopies
from evenpipe.tensor import check, layers, summed, units
from evenpipe.tensor.check import cut_of_model
from evenpipe.tensor.exchange import OwnRows, Scatter
from evenpipe.tensor.layers import ModelCut, find_model_cut, whole_parts

# --- cuts ------------------------------------------------------------------------------------------------------------


def placements(cut: ModelCut, config, rank: int, ranks: int) -> dict[str, TensorPlacement | None]:
    found = cut.placements(describe(config), 0, rank, ranks)
    return {name.removeprefix("model.layers.0."): one for name, one in found.items()}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.sampled(3)
def test_a_small_copy_of_every_family_is_equal_to_the_whole(family: str) -> None:
    cut = cut_of_model(describe(CONFIGS[family]()), 2)
    assert not whole_parts(cut)


def test_what_cannot_be_cut_is_computed_whole(sample) -> None:
    """DBRX's attention returns several hidden states, also the residual, which it adds inside."""
    dbrx = DbrxConfig(
        d_model=16,
        n_heads=4,
        n_layers=4,
        vocab_size=61,
        max_seq_len=32,
        attn_config={"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4},
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 8, "moe_num_experts": 4, "moe_top_k": 2},
    )
    for config, whole in sample([(WHOLE["bloom"](), {"self_attention"}), (dbrx, {"norm_attn_norm", "ffn"})], 1):
        assert {*whole_parts(cut_of_model(describe(config), 2))} == whole


def test_sizes_of_a_large_model() -> None:
    """8 heads of keys and values, 64 of queries: the small copy has 2 and 4."""
    sizes = {
        "vocab_size": 256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
    }
    config = Phi3Config(**sizes)
    cut = find_model_cut(SmallCopies.of(describe(config)).plain.description)
    packed = placements(cut, config, 3, 8)["self_attn.qkv_proj.weight"]
    assert packed is not None
    assert packed.ranges(0) == [range(3072, 4096), range(8192 + 384, 8192 + 512), range(9216 + 384, 9216 + 512)]
    config = LlamaConfig(**sizes)
    cut = find_model_cut(SmallCopies.of(describe(config)).plain.description, repeats=True)
    shares = {}
    for rank in (4, 5):
        found = placements(cut, config, rank, 16)
        shares[rank] = {name: one.ranges(0) for name, one in found.items() if one is not None}
        key = found["self_attn.k_proj.weight"]
        assert key is not None and key.copied_along == ({"tp"} if rank == 5 else set())
    assert shares[4]["self_attn.q_proj.weight"] == [range(2048, 2560)]
    assert shares[4]["self_attn.k_proj.weight"] == shares[5]["self_attn.k_proj.weight"] == [range(256, 384)]
    config = MixtralConfig(**sizes)  # all ranks have some columns of each expert
    experts = placements(find_model_cut(SmallCopies.of(describe(config)).plain.description), config, 3, 8)
    gate_up, down = (experts[f"mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    assert gate_up is not None and down is not None
    assert gate_up.ranges(1) == [range(10752, 14336), range(28672 + 10752, 28672 + 14336)]
    assert down.ranges(2) == [range(10752, 14336)]


def test_ranks_that_cannot_share_heads_or_columns() -> None:
    """There are 4 heads of queries."""
    narrow = LlamaConfig(**CONFIGS["llama"]().to_dict() | {"intermediate_size": 18})
    for config, ranks, sentence in (
        (CONFIGS["llama"](), 3, "tp: 3, but model.layers.0.self_attn cannot be cut so: 3 ranks"),
        (CONFIGS["llama"](), 8, "8 ranks cannot share 2 heads of keys and values"),
        (narrow, 4, "4 ranks cannot share 18 columns"),
    ):
        with pytest.raises(InputError, match=sentence):
            cut_of_model(describe(config), ranks)


class UnbatchedGradient(torch.autograd.Function):
    """Looks at numbers in its backward, so that several gradients cannot be computed at once."""

    @staticmethod
    def forward(ctx, hidden):
        return 2 * hidden

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (2 if gradient.sum().item() else 0)


def test_gradients_of_several_outputs_at_once() -> None:
    hidden, unused = torch.arange(6.0, requires_grad=True), torch.ones(2, requires_grad=True)
    seeds = torch.diag(torch.arange(6.0))
    for output in (hidden * 2, UnbatchedGradient.apply(hidden)):
        of_hidden, of_unused = units._gradients(output, [hidden, unused], seeds)
        assert of_hidden is not None and torch.equal(of_hidden, 2 * seeds) and of_unused is None


# --- every mistake is refused, not trained ---------------------------------------------------------------------------


def without(**left_out: tuple[()]) -> Callable[[ModelCut], ModelCut]:
    """Return a function that takes something out of the cut of every block."""

    def change(cut: ModelCut) -> ModelCut:
        def of_block(block: layers.Block) -> layers.Block:
            assert block.cut is not None
            return replace(block, cut=replace(block.cut, **left_out))

        return replace(
            cut,
            blocks={
                kind: {name: of_block(block) for name, block in blocks.items()} for kind, blocks in cut.blocks.items()
            },
        )

    return change


def without_attention(cut: ModelCut) -> ModelCut:
    """The attention gets only its own rows."""
    blocks = {
        kind: {name: block for name, block in blocks.items() if name != "self_attn"}
        for kind, blocks in cut.blocks.items()
    }
    return replace(cut, blocks=blocks)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", without_attention),
        ("phi3", without(settings=())),  # counts that are not divided
        ("starcoder2", without(biases=())),  # a bias on all ranks
        ("olmo2", without(norms=())),  # a norm over heads without a sum
    ],
)
@pytest.mark.sampled(2)
def test_a_wrong_cut_is_refused(family: str, change: Callable[[ModelCut], ModelCut]) -> None:
    with (
        mock.patch.object(check, "find_model_cut", lambda small: change(find_model_cut(small))),
        pytest.raises(InputError, match="cannot be trained with tensor parallelism"),
    ):
        cut_of_model(describe(CONFIGS[family]()), 2)


def test_parts_that_are_not_summed_are_refused() -> None:
    compare = check._compare

    def without_sums(*given) -> None:
        with mock.patch.object(summed, "Scatter", OwnRows):
            compare(*given)

    with (
        mock.patch.object(check, "_compare", without_sums),  # the cut itself is found with them
        pytest.raises(InputError, match="cannot be trained with tensor parallelism"),
    ):
        cut_of_model(describe(CONFIGS["llama"]()), 2)


class NearlyScatter(Scatter):
    """Forgets as much as a rounding to fp32 would hide."""

    @staticmethod
    def forward(ctx, partial, exchange):
        return Scatter.forward(ctx, partial, exchange) * (1 + 1e-7)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["gemma2", "deepseek-v3"])
def test_fp32_inside_a_model_hides_nothing(family: str) -> None:
    description = describe(CONFIGS[family]())
    with (
        mock.patch.object(summed, "Scatter", NearlyScatter),
        pytest.raises(InputError, match="cannot be trained with tensor parallelism"),
    ):
        cut_of_model(description, 2)


@pytest.mark.slow
def test_small_differences_of_large_numbers_in_fp32_are_no_errors() -> None:
    """Gradients of its decay are; in fp32 they change by 1e-5 with the order of sums."""
    assert not whole_parts(cut_of_model(describe(small_config("qwen3_next", SETTINGS.get("qwen3_next", {}))), 2))


def test_nothing_of_the_caller_changes() -> None:
    config = CONFIGS["phi3"]()
    model = AutoModelForCausalLM.from_config(config)
    state, before = torch.get_rng_state(), model.config.to_dict()
    cut_of_model(describe(model), 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == before and model.config.num_attention_heads == 4
