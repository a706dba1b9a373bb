"""Checks share small copies and what they compute while somebody keeps them, and nothing outlives that."""

from __future__ import annotations

import copy
import gc
from unittest import mock
from weakref import ref

import pytest
import torch
from families import tiny_config, whole_model

from evenpipe.attention.check import check_pieces
from evenpipe.model import comparison, describe, self_check, small_copy
from evenpipe.model.copies import copied
from evenpipe.model.small_copy import SmallCopies
from evenpipe.tensor.check import cut_of_model


@pytest.mark.parametrize(("kept", "built"), [(True, 2), (False, 5)])
def test_checks_share_what_somebody_keeps(kept: bool, built: int) -> None:
    """One copy in each arithmetic, each with the result of the whole without and with a mask."""
    description = describe(tiny_config("llama"))
    copies = SmallCopies.of(description) if kept else None
    with (
        mock.patch.object(small_copy, "_build", wraps=small_copy._build) as build,
        mock.patch.object(comparison, "_whole_result", wraps=comparison._whole_result) as whole,
    ):
        self_check(description)
        for slices in (False, True):
            check_pieces(description, "this", slices=slices)
        for ranks in (2, 4):
            cut_of_model(description, ranks)
    assert build.call_count == built
    assert whole.call_count == (4 if kept else 6)
    assert copies is None or copies is SmallCopies.of(description)


def test_nothing_outlives_who_keeps_it() -> None:
    description = describe(tiny_config("llama"))
    copies = SmallCopies.of(description)
    check_pieces(description, "this", slices=True)
    model = ref(copies.plain.description.model)
    del copies
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2"])
def test_a_copied_module_is_a_deep_copy(name: str) -> None:
    model = whole_model(tiny_config(name, tied=True))
    hooked = next(iter(model.get_input_embeddings().parameters()))
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: None)
    ours, theirs = copied(model), copy.deepcopy(model)
    for (module, expected), of_model in zip(
        zip(ours.modules(), theirs.modules(), strict=True), model.modules(), strict=True
    ):
        assert type(module) is type(expected) and module is not of_model
        assert vars(module).keys() == vars(expected).keys()
        assert len(module._forward_pre_hooks) == len(expected._forward_pre_hooks)
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key])
        assert ours.state_dict()[key].data_ptr() != model.state_dict()[key].data_ptr()
    assert ours.config is not model.config and ours.config.to_dict() == model.config.to_dict()
    assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight, "as tied as the model"
    shared = copied(model, {id(hooked): hooked})
    assert shared.get_input_embeddings().weight is hooked
