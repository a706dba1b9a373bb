"""Bytes of traced layers against the coefficients of the literature, in bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import tiny_config, whole_model
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from evenpipe.memory.bytes import LayerBytes
from evenpipe.memory.exchange import Sharing
from evenpipe.memory.framework import kernels_and_framework
from evenpipe.memory.kernels import PRESETS, Kernels
from evenpipe.memory.megatron import MegatronLayout
from evenpipe.memory.traced import StageTracer, Tracing
from evenpipe.model import Description, describe
from evenpipe.model.structure import layers_of
from evenpipe.tensor.check import cut_of_model

FUSED = PRESETS["megatron"]
UNFUSED = replace(FUSED, activation="eager")
BATCH, SEQUENCE = 2, 256


def llama(hidden: int, mlp: int, heads: int, key_value_heads: int) -> Description:
    return describe(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=mlp,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            num_hidden_layers=3,
            vocab_size=64,
        )
    )


def layer(model: Description, kernels: Kernels = FUSED, checkpointing: str = "none", **options) -> LayerBytes:
    layout = MegatronLayout(**options)
    how = Tracing(sequence=SEQUENCE, compute_dtype=torch.bfloat16, kernels=kernels, ranks=layout.tp, layout=layout)
    cut = None if layout.tp == 1 else cut_of_model(model, layout.tp, check=False)
    return StageTracer(model, how, cut).layer(1, checkpointing, BATCH)


@pytest.mark.parametrize("sizes", [(512, 1792, 8, 2), (256, 896, 4, 1), (1024, 2816, 16, 16)], ids=str)
@pytest.mark.sampled(1)
def test_saved_with_flash_attention(sizes: tuple[int, int, int, int]) -> None:
    """12 + 4r + 6q fused and 12 + 4r + 8q unfused, in units of s b h / (t c) (arXiv 2205.05198, section 4, for gated
    MLPs and grouped heads); beside them an fp32 log-sum-exp per head, and an inverse deviation per norm. A Llama 3 8B,
    r = 1/4 and q = 3.5, has 34 and 41."""
    model, (h, f, a, k) = llama(*sizes), sizes
    r, q = k / a, f / h
    for tp, cp in ((1, 1), (2, 1), (1, 2), (4, 2)):
        if tp > k:  # some would be held several times
            continue
        for kernels, mlp in ((FUSED, 6), (UNFUSED, 8)):
            unit = BATCH * SEQUENCE * h / tp / cp
            found = layer(model, kernels, tp=tp, cp=cp).waiting / unit
            assert found == pytest.approx(12 + 4 * r + mlp * q + 4 * a / h + 8 / h, abs=5e-5), (tp, cp)


def test_saved_with_unfused_attention_and_dropout() -> None:
    """34 + 5 a s / h without parallelism (arXiv 2205.05198, equation 2), and two numbers in fp32 per norm and token. A
    mask of dropout has one byte for each element on a GPU; on a CPU two, as its input."""
    h, a = 256, 8
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = describe(GPT2Config(n_embd=h, n_head=a, n_layer=3, vocab_size=64, n_positions=SEQUENCE, **ids))
    how = Tracing(
        sequence=SEQUENCE,
        compute_dtype=torch.bfloat16,
        kernels=kernels_and_framework("megatron,attention=unfused")[0],
        layout=MegatronLayout(fuses_gradients=True),
    )
    both = (StageTracer(model, one).layer(1, "none", BATCH) for one in (how, replace(how, on_cpu=True)))
    gpu, cpu = (found.waiting / (BATCH * SEQUENCE * h) for found in both)
    assert gpu == 34 + 5 * a * SEQUENCE / h + 16 / h
    assert cpu - gpu == 2


def test_selective_checkpointing_keeps_all_products_or_every_second_one() -> None:
    """Of q, k, v, attention's, gate, up and down, and attention itself with its log-sum-exp. torchtitan's "op" counts
    products, and keeps the first (torchtitan/distributed/activation_checkpoint.py)."""
    h, r, q, a, unit = 512, 1 / 4, 3.5, 8, BATCH * SEQUENCE * 512
    model = llama(512, 1792, 8, 2)
    for selective, products in (("products", 2 + 4 * r + 2 + 4 * q + 2), ("half", 2 + 2 * r + 2 * q + 2)):
        kernels = replace(PRESETS["fsdp"], selective=selective)
        how = Tracing(sequence=SEQUENCE, compute_dtype=torch.bfloat16, kernels=kernels)
        found = StageTracer(model, how).layer(1, "selective", BATCH).waiting / unit
        assert found == 2 + products + 2 + 4 * a / h, selective


def test_experts_of_megatron_have_all_rows_and_a_part_of_every_width() -> None:
    """Tensor ranks gather a block's input, and keep it, what its two experts get of it, and their results. However many
    replicas share the experts, as many pairs meet those of each."""
    sizes = {"hidden_size": 512, "intermediate_size": 1792, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = MixtralConfig(**sizes, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=3, vocab_size=64)
    model, kept = describe(config), {}
    for tp, ep in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 4)):
        shared = {"ranks": tp, "layout": MegatronLayout(tp=tp), "sharing": Sharing(ep)}
        how = Tracing(sequence=SEQUENCE, compute_dtype=torch.bfloat16, kernels=FUSED, **shared)
        cut = None if tp == 1 else cut_of_model(model, tp, check=False)
        kept[tp, ep] = StageTracer(model, how, cut).layer(1, "none", BATCH).waiting
    of_all = 2 * kept[2, 1] - kept[1, 1]
    assert kept[1, 1] - kept[2, 1] == 2 * (kept[2, 1] - kept[4, 1])
    assert 0 < of_all / (2 * BATCH * SEQUENCE * 512) - (1 + 2 + 2) < 0.1  # and the router's
    assert kept[1, 2] == pytest.approx(kept[1, 1], abs=16)
    assert kept[2, 4] == pytest.approx(kept[2, 1], abs=16)


def test_products_in_fp8_keep_their_inputs_in_8_bits() -> None:
    """One byte less for each number of the input of q, k and v, of that of gate and up, and of down's. Attention keeps
    its result in 16 bits, so its product has a byte more. What recomputes keeps the layer's input as it is."""
    h, q, model = 512, 3.5, llama(512, 1792, 8, 2)
    for tp in (1, 2):
        unit = BATCH * SEQUENCE * h / tp
        plain, casts = (layer(model, tp=tp, casts=casts).waiting / unit for casts in (False, True))
        assert casts - plain == 1 - 1 - 1 - q, tp
    assert layer(model, casts=True, checkpointing="full").waiting == 2 * BATCH * SEQUENCE * h


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.sampled(1)
def test_compiled_layers_keep_what_the_compiler_keeps(family: str) -> None:
    """Of a layer in bf16, split into forward and backward as inductor splits it: the same bytes, but for the tables of
    rotary embedding, which all layers have in common."""
    sizes = {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = tiny_config(family, **sizes, head_dim=64, num_hidden_layers=2, max_position_embeddings=SEQUENCE)
    model = whole_model(config, torch.bfloat16)
    layer = layers_of(model, describe(config).structure.layers_name)[1]
    run = torch.compile(layer.forward, backend="aot_eager_decomp_partition")
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return run(*args, **kwargs)

    layer.forward = forward
    model(torch.zeros(BATCH, SEQUENCE, dtype=torch.long), use_cache=False)
    tables = 2 * SEQUENCE * 64 * 2
    how = Tracing(sequence=SEQUENCE, compute_dtype=torch.bfloat16, kernels=PRESETS["compiled"])
    found = StageTracer(describe(config), how).layer(1, "none", BATCH).waiting
    assert sum(storage.nbytes() for storage in kept.values()) - tables == found


def test_saved_without_sequence_parallelism_and_by_other_choices() -> None:
    h, r, q, tp, tokens = 512, 1 / 4, 3.5, 2, BATCH * SEQUENCE
    model = llama(512, 1792, 8, 2)
    found = layer(model, tp=tp, sequence_parallel=False).waiting  # T h (8 + (4 + 4r + 6q) / t)
    assert found == tokens * h * (8 + (4 + 4 * r + 6 * q) / tp) + 4 * tokens * 8 / tp + 8 * tokens
    # Llama's norm on bf16 saves its input in fp32 and the product in bf16 in place of its input: 6 for 2
    eager, fused = (layer(model, replace(FUSED, norm=norm)).waiting for norm in ("eager", "fused"))
    assert eager - fused == 2 * (6 - 2) * tokens * h
    assert layer(model, checkpointing="full").waiting == 2 * tokens * h
    assert layer(model, copies_attention=True).waiting - fused == 2 * tokens * h


def test_the_backward_of_attention_holds_the_keys_of_other_context_ranks() -> None:
    """Three ranks' keys, values and gradients of both, where nothing else is as large."""
    model = llama(512, 64, 8, 8)
    alone, shared = (layer(model, cp=cp, checkpointing="full") for cp in (1, 4))
    assert alone.waiting == 4 * shared.waiting
    assert shared.turning - alone.turning / 4 == 3 * 4 * BATCH * SEQUENCE // 4 * 512 * 2


@pytest.mark.parametrize("ends", [(True, False), (False, False), (False, True)], ids=["first", "middle", "last"])
def test_a_stage_with_several_choices_is_put_together_from_stages_with_one(ends: tuple[bool, bool]) -> None:
    """As if its own layers had been traced together, on a tensor rank."""
    model = llama(512, 1792, 8, 2)
    how = Tracing(sequence=SEQUENCE, compute_dtype=torch.bfloat16, ranks=2)
    choices = ("selective", "selective", "none")
    together, apart = (StageTracer(model, how, cut_of_model(model, 2, check=False)) for _ in range(2))
    apart._can_join = lambda kinds, choices: False
    of_stage = {"is_first": ends[0], "is_last": ends[1], "sequences": BATCH, "checkpointing": choices}
    assert together.stage(0, 3, **of_stage) == apart.stage(0, 3, **of_stage)
    assert len(together._traces) == 2
