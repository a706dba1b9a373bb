"""Documents that share a row have the loss and gradients of each of them alone in transformers."""

from __future__ import annotations

import pytest
import torch
from families import tiny_config, tokens_and_labels, whole_model
from test_rows_in_pieces import FAMILIES, ROUNDS, ROW, assert_gradients_close, described, gradients_of, loss_of

from evenpipe.attention.check import check_pieces, looks_across_documents
from evenpipe.attention.function import adopt
from evenpipe.attention.sight import Alone, Sight, documents_of, seeing
from evenpipe.errors import InputError
from evenpipe.model import describe

LENGTHS = ((9, 1, 14), (20, 4))
"""Of the documents of two rows."""
LOOK_ACROSS = ("gpt_oss", "afmoe", "opt", "biogpt")
"""Their own attention does not look at position ids."""


def configuration(family: str):
    if family in FAMILIES:
        return tiny_config(family)
    from family_configs import Configuration

    config = Configuration(family).build()
    config._experts_implementation = "eager"  # others do not take fp64
    return config


def alone(model, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = []
    for row, lengths in enumerate(LENGTHS):
        for ids, targets in zip(tokens[row].split(lengths), labels[row].split(lengths), strict=True):
            losses.append(loss_of(model(input_ids=ids[None], use_cache=False).logits, targets[None]))
    return torch.stack(losses).sum()


@pytest.mark.parametrize("family", (*FAMILIES, *LOOK_ACROSS[1:]))
@pytest.mark.sampled(3)
def test_documents_of_a_row_have_the_gradients_of_each_alone(family: str) -> None:
    config = configuration(family)
    tokens, labels = (one % config.get_text_config().vocab_size for one in tokens_and_labels(sequence=ROW))
    model = whole_model(config)
    loss = alone(model, tokens, labels)
    loss.backward()
    expected = gradients_of(model)
    model.zero_grad()
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS])
    across = looks_across_documents(describe(config))
    assert across == (family in LOOK_ACROSS)
    given = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    if across:
        separate = loss_of(model(**given).logits, labels).item()
        assert separate != pytest.approx(loss.item(), rel=1e-4)
        adopt(model)
        every = torch.arange(ROW)
        sight = Sight(every, every, Alone(), ROW, positions, documents_of(positions), apart=True)
        with seeing(sight):
            found = loss_of(model(**given).logits, labels)
    else:
        found = loss_of(model(**given).logits, labels)
    found.backward()
    tolerance = 1e-6 if family in (*ROUNDS, "afmoe") else 1e-10
    assert found.item() == pytest.approx(loss.item(), rel=tolerance)
    assert_gradients_close(model, expected, tolerance)


REFUSED = {
    **dict.fromkeys(("bloom", "mamba", "roberta"), "it numbers positions in a way of its own, or takes none"),
    "falcon": "it computes attention in a way of its own, not transformers' one",
    **dict.fromkeys(("lfm2", "llama4_text", "qwen3_next"), "a document beside others computes something else"),
}


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.sampled(2)
def test_families_that_cannot_keep_documents_apart_are_refused(family: str) -> None:
    with pytest.raises(InputError, match=rf'documents = "separate", only with "joined" \(data.*: {REFUSED[family]}'):
        looks_across_documents(described(family))


def test_dropout_of_attention_is_refused_before_a_step() -> None:
    config = configuration("opt")
    config.attention_dropout = 0.1
    with pytest.raises(InputError, match=r"its attention drops weights \(attention_dropout is 0.1 in the model's"):
        looks_across_documents(describe(config))


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("family", ("llama", "gemma2", "phi3", "deepseek_v3", *LOOK_ACROSS))
@pytest.mark.sampled(2)
def test_pieces_of_separate_documents_pass_the_check(family: str, slices: bool) -> None:
    check_pieces(describe(configuration(family)), "this", slices=slices, apart=True)


def test_the_check_finds_documents_that_see_each_other(monkeypatch) -> None:
    """A mask that forgets that documents are apart."""
    monkeypatch.setattr("evenpipe.attention.check.Sight", lambda *given, apart, **others: Sight(*given, **others))
    for check in (
        looks_across_documents,
        lambda description: check_pieces(description, "this", slices=True, apart=True),
    ):
        with pytest.raises(InputError, match="computes something else"):
            check(describe(configuration("gpt_oss")))
