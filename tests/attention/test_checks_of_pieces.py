"""Which models can be trained on pieces of rows and on separate documents: the check, what it refuses, and the carry.

tests/fuzz compares gradients of pieces with transformers, tests/multiprocess those of documents.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from families import EXPERTS, tiny_config, tokens_and_labels, whole_model
from families import FAMILIES as DENSE
from family_configs import Configuration

from evenpipe.attention import function
from evenpipe.attention.carry import Carries
from evenpipe.attention.check import _WholeRows, check_pieces, needs_our_attention
from evenpipe.attention.function import adopt
from evenpipe.attention.row_context import Alone, Mask, RowContext, activated
from evenpipe.errors import InputError
from evenpipe.model import Description, describe

ROW = 24
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "smollm3", "gpt_neox"),
    *("cohere2", "starcoder2", "gpt2", "phi", "nanochat", "olmo3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"),
)
LOOK_ACROSS = ("gpt_oss", "afmoe", "opt", "biogpt")
"""Their own attention does not look at position ids."""


def described(family: str) -> Description:
    return describe(tiny_config(family) if family in DENSE | EXPERTS else Configuration(family).build())


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("family", (*FAMILIES, *LOOK_ACROSS[1:]))
@pytest.mark.sampled(3)
def test_families_that_pass(family: str, slices: bool) -> None:
    description = described(family)
    check_pieces(description, "this", slices=slices)
    assert needs_our_attention(description) == (family in LOOK_ACROSS)
    assert needs_our_attention(description, on_gpu=True)
    check_pieces(description, "this", slices=slices, separate=True)


PIECES = {
    "bloom": "numbers positions in a way of its own, or takes none",
    "diffllama": "its layers attend more than once",
    "gptj": "computes attention in a way of its own, not transformers' one",
    "llama4_text": "a piece of a sequence computes something else",
    "lfm2": "a piece of a sequence computes something else",
    "qwen3_next": "a piece of a sequence computes something else",
    "roberta": "numbers positions in a way of its own",
}


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("family", PIECES)
@pytest.mark.sampled(2)
def test_families_that_look_beyond_attention_are_refused(family: str, slices: bool) -> None:
    with pytest.raises(InputError, match=f"cannot be trained with this: .*{PIECES[family]}"):
        check_pieces(described(family), "this", slices=slices)


DOCUMENTS = {
    **dict.fromkeys(("bloom", "mamba", "roberta"), "it numbers positions in a way of its own, or takes none"),
    "falcon": "it computes attention in a way of its own, not transformers' one",
    **dict.fromkeys(("lfm2", "llama4_text", "qwen3_next"), "a document beside others computes something else"),
}


@pytest.mark.parametrize("family", DOCUMENTS)
@pytest.mark.sampled(2)
def test_families_that_cannot_keep_documents_apart_are_refused(family: str) -> None:
    said = rf'documents = "separate", only with "joined" \(data.*: {DOCUMENTS[family]}'
    with pytest.raises(InputError, match=said):
        needs_our_attention(describe(Configuration(family).build()))


def test_on_a_gpu_a_model_that_only_its_own_attention_keeps_apart_keeps_it() -> None:
    description = described("llama")
    with mock.patch.object(_WholeRows, "keys", side_effect=IndexError):
        assert not needs_our_attention(description, on_gpu=True)


def test_masks_and_dropout_that_pieces_cannot_have_are_refused() -> None:
    """Masks place by place; of the tokens of a call, as Gemma 4's for images, which looks places up in a table as long
    as the piece; and attention that drops weights."""
    every, groups = torch.arange(ROW), torch.zeros(ROW // 2)
    row_context = RowContext(every, every, Alone(), ROW)
    mask = Mask(row_context, lambda b, h, q, k: groups[q] == groups[k], 1, separate=False)
    model = whole_model(tiny_config("llama", attention_dropout=0.1))
    adopt(model)
    tokens, _ = tokens_and_labels(sequence=ROW)
    for call, sentence in (
        (lambda: function.mask(1, ROW, ROW, mask_function=lambda *places: True, use_vmap=True), "one place at a time"),
        (mask.tensor, "look tokens up in a table"),
        (lambda: model(input_ids=tokens, position_ids=every.expand(2, -1), use_cache=False), "drops no weights"),
    ):
        with activated(row_context), pytest.raises(InputError, match=sentence):
            call()
    config = Configuration("opt").build()
    config.attention_dropout = 0.1
    with pytest.raises(InputError, match=r"its attention drops weights \(attention_dropout is 0.1 in the model's"):
        needs_our_attention(describe(config))


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.sampled(1)
def test_the_check_finds_a_rotary_table_of_the_piece(slices: bool, monkeypatch) -> None:
    monkeypatch.setattr(function, "depends_on_length", lambda module: False)
    with pytest.raises(InputError, match="a piece of a sequence computes something else"):
        check_pieces(described("phi3"), "this", slices=slices)


def test_the_check_finds_documents_that_see_each_other(monkeypatch) -> None:
    """A mask that forgets that documents are apart."""
    monkeypatch.setattr(
        "evenpipe.attention.check.RowContext", lambda *given, separate, **others: RowContext(*given, **others)
    )
    description = described("gpt_oss")
    for check in (
        lambda: needs_our_attention(description),
        lambda: check_pieces(description, "this", slices=True, separate=True),
    ):
        with pytest.raises(InputError, match="computes something else"):
            check()


def test_a_carry_is_empty_once_all_backwards_are_done() -> None:
    """Two slices of one layer: the later one adds its gradients to the keys of both."""
    carries, keys = Carries((2, 5)), torch.arange(5.0).view(1, 1, 5, 1)
    slices = [carries.exchange(0, index, Alone()) for index in range(2)]
    for piece, own, end in zip(slices, (slice(0, 2), slice(2, 5)), (2, 5), strict=True):
        key, value = piece.keys(0, keys[:, :, own], -keys[:, :, own])
        assert torch.equal(key, keys[:, :, :end]) and torch.equal(value, -key)
    for index, end, tokens in ((1, 5, 3), (0, 2, 2)):
        assert not carries.empty, "keys without gradients, and both"
        key, value = slices[index].gradients(0, torch.ones(1, 1, end, 1), torch.ones(1, 1, end, 1), torch.float32)
        carries.end_backward(0, index)
        assert key.flatten().tolist() == value.flatten().tolist() == [2.0 - index] * tokens
    assert carries.empty
