"""A model whose rows are cut into slices, one after the other, has the gradients of whole rows in transformers."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from families import tiny_config, tokens_and_labels, whole_model
from torch.nn import functional
from transformers import LlamaConfig

from evenpipe.attention import function
from evenpipe.attention.carry import Carry
from evenpipe.attention.check import check_pieces
from evenpipe.attention.function import adopt
from evenpipe.attention.sight import Alone, Mask, Sight, documents_of, seeing
from evenpipe.errors import InputError
from evenpipe.model import describe

ROW = 24
ROUNDS = ("gemma2", "gemma3_text", "cohere2", "olmo2", "olmo3", "gpt_oss", "deepseek_v3", "mixtral", "qwen3_moe")
"""Families with a norm or router in fp32."""
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "smollm3", "gpt_neox"),
    *("cohere2", "starcoder2", "gpt2", "phi", "nanochat", "olmo3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"),
)
KINDS = ("whole", "packed", "padded")


def rows_of(kind: str) -> dict[str, torch.Tensor]:
    places = torch.arange(ROW).expand(2, -1)
    if kind == "packed":
        restarted = places.clone()
        restarted[0, 9:] -= 9
        restarted[1, 20:] -= 20
        return {"position_ids": restarted}
    if kind == "padded":
        mask = torch.ones(2, ROW, dtype=torch.int64)
        mask[1, -3:] = 0
        return {"attention_mask": mask}
    return {}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def in_slices(model, tokens, labels, given, ends) -> tuple[float, Carry]:
    """Run all forwards, then all backwards in reverse; return the loss and what is left of the carry."""
    positions = given.get("position_ids", torch.arange(ROW).expand(2, -1))
    mask = given.get("attention_mask")
    carry, every, losses = Carry(ends), torch.arange(ROW), []
    for index, (start, end) in enumerate(itertools.pairwise((0, *ends))):
        sight = Sight(
            every[start:end],
            every[:end],
            carry.slice(index, Alone()),
            ROW,
            positions=positions,
            documents=documents_of(positions),
            valid=None if mask is None else mask.bool(),
        )
        with seeing(sight):
            logits = model(input_ids=tokens[:, start:end], position_ids=positions[:, start:end], use_cache=False).logits
        losses.append(loss_of(logits, labels[:, start:end]))
    for loss in reversed(losses):
        loss.backward()
    return sum(loss.item() for loss in losses), carry


def gradients_of(model) -> dict[str, torch.Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_gradients_close(model, expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Relative to each gradient, or to a millionth of the largest one."""
    gradients = gradients_of(model)
    assert gradients.keys() == expected.keys()
    least = 1e-6 * max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in gradients.items():
        error = float((gradient - expected[name]).norm())
        assert error <= tolerance * max(float(expected[name].norm()), least), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(3)
def test_slices_have_the_gradients_of_whole_rows(family: str, kind: str) -> None:
    tokens, labels = tokens_and_labels(sequence=ROW)
    given = rows_of(kind)
    if kind == "padded":
        labels = labels.masked_fill(given["attention_mask"] == 0, -100)
    model = whole_model(tiny_config(family))
    loss = loss_of(model(input_ids=tokens, use_cache=False, **given).logits, labels)
    loss.backward()
    expected = gradients_of(model)
    adopt(model)
    tolerance = 1e-6 if family in ROUNDS else 1e-10
    dice = random.Random(f"{family} {kind}")
    for slices in (2, 3, 8):
        ends = (*sorted(dice.sample(range(1, ROW), slices - 1)), ROW)
        model.zero_grad()
        found, carry = in_slices(model, tokens, labels, given, ends)
        assert carry.empty
        assert found == pytest.approx(loss.item(), rel=tolerance)
        assert_gradients_close(model, expected, tolerance)


@pytest.mark.parametrize("slices", [1, 2, 4, 8])
@pytest.mark.sampled(2)
def test_graphs_and_carry_hold_as_much_as_without_slices(slices: int) -> None:
    """16.85 [S, h] tensors per layer: whole rows with transformers' own attention, and with any number of slices."""
    length, hidden, layers = 512, 256, 4
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    model = whole_model(config, torch.float32).model
    held: dict[int, torch.UntypedStorage] = {}
    parameters = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage
        return tensor

    embedded, every = torch.randn(1, length, hidden), torch.arange(length)
    ends = tuple(length * (number + 1) // slices for number in range(slices))
    carry = Carry(ends)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if slices == 1:
            outputs = [model(inputs_embeds=embedded, use_cache=False)]
        else:
            adopt(model)
            outputs = []
            for index, (start, end) in enumerate(itertools.pairwise((0, *ends))):
                with seeing(Sight(every[start:end], every[:end], carry.slice(index, Alone()), length)):
                    outputs.append(
                        model(
                            inputs_embeds=embedded[:, start:end], position_ids=every[None, start:end], use_cache=False
                        )
                    )
    carried = sum(one.nbytes for pair in carry._keys.values() for one in pair)
    graphs = sum(storage.nbytes() for storage in held.values())
    assert len(outputs) == slices
    assert (graphs + carried) / (length * hidden * 4 * layers) == pytest.approx(16.85, abs=0.02)


def test_options_that_the_kernel_does_not_know_reach_the_familys_own_function(monkeypatch) -> None:
    """gpt-oss hands sinks on, which the kernel would drop without an error."""
    used = []
    monkeypatch.setattr(function._Kernel, "apply", lambda *arguments: used.append(arguments))
    model = whole_model(tiny_config("gpt_oss"))
    adopt(model)
    every = torch.arange(ROW)
    with torch.no_grad(), seeing(Sight(every, every, Alone(), ROW)):
        model(input_ids=tokens_and_labels(sequence=ROW)[0], position_ids=every.expand(2, -1), use_cache=False)
    assert not used


REFUSED = {
    "bloom": "numbers positions in a way of its own, or takes none",
    "diffllama": "its layers attend more than once",
    "gptj": "computes attention in a way of its own, not transformers' one",
    "llama4_text": "a piece of a sequence computes something else",
    "lfm2": "a piece of a sequence computes something else",
    "qwen3_next": "a piece of a sequence computes something else",
    "roberta": "numbers positions in a way of its own",
}


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.sampled(2)
def test_families_that_look_beyond_attention_are_refused(family: str, slices: bool) -> None:
    with pytest.raises(InputError, match=f"cannot be trained with this: .*{REFUSED[family]}"):
        check_pieces(described(family), "this", slices=slices)


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(2)
def test_families_that_may_be_cut_pass_the_check(family: str, slices: bool) -> None:
    check_pieces(describe(tiny_config(family)), "this", slices=slices)


def test_masks_and_dropout_that_pieces_cannot_have_are_refused() -> None:
    """Masks place by place; of the tokens of a call, as Gemma 4's for images, which looks places up in a table as long
    as the piece; and attention that drops weights."""
    every, groups = torch.arange(ROW), torch.zeros(ROW // 2)
    sight = Sight(every, every, Alone(), ROW)
    mask = Mask(sight, lambda b, h, q, k: groups[q] == groups[k], 1, apart=False)
    model = whole_model(tiny_config("llama", attention_dropout=0.1))
    adopt(model)
    tokens, _ = tokens_and_labels(sequence=ROW)
    for call, sentence in (
        (lambda: function.mask(1, ROW, ROW, mask_function=lambda *places: True, use_vmap=True), "one place at a time"),
        (mask.tensor, "look tokens up in a table"),
        (lambda: model(input_ids=tokens, position_ids=every.expand(2, -1), use_cache=False), "drops no weights"),
    ):
        with seeing(sight), pytest.raises(InputError, match=sentence):
            call()


def described(family: str):
    from family_configs import Configuration

    return describe(Configuration(family).build())


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.sampled(1)
def test_the_check_finds_a_rotary_table_of_the_piece(slices: bool, monkeypatch) -> None:
    monkeypatch.setattr(function, "depends_on_length", lambda module: False)
    with pytest.raises(InputError, match="a piece of a sequence computes something else"):
        check_pieces(describe(tiny_config("phi3")), "this", slices=slices)
