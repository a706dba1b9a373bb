"""A pipeline of plain modules has the same interface, and the same results as calling the modules one by one."""

from __future__ import annotations

import re

import pytest
import torch
from families import build_stages
from torch import nn

from evenpipe.errors import InputError
from evenpipe.model import (
    build_stage,
    describe_modules,
    disk_tensors,
    fill_parameters,
    fill_rows,
    head_flops,
    layer_flops,
    self_check,
    write_folder_metadata,
)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.scale = nn.Buffer(torch.tensor(1.0 + 2**-20))

    def forward(self, hidden):
        return hidden + torch.tanh(self.mix(hidden)) * self.scale


def parts(tied: bool = False, norm: bool = True, embedding_class=nn.Embedding):
    torch.manual_seed(0)
    embedding = embedding_class(31, 8, padding_idx=3).double()
    head = nn.Linear(8, 31, bias=not tied).double()
    if tied:
        head.weight = embedding.weight
    return embedding, [Block(8).double() for _ in range(4)], nn.LayerNorm(8).double() if norm else None, head


def test_names_and_facts() -> None:
    description = describe_modules(*parts(norm=False))
    stages = build_stages(description, (1, 3))
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [f"layers.{index}.mix.{kind}" for index in range(4) for kind in ("weight", "bias")]
    assert description.vocabulary_names == ("embedding.weight", "head.weight", "head.bias")
    assert (description.padding_index, description.tied, description.config) == (3, False, None)
    assert (description.takes("position_ids"), description.takes("attention_mask")) == (False, False)
    assert description.position_rows is None
    assert layer_flops(description, 100) == [2 * 8 * 8] * 4 and head_flops(description) == 2 * 8 * 31
    tensors = [(name, torch.ones(())) for name in names]
    assert list(disk_tensors(description, tensors)) == tensors
    assert self_check(description) is None


def test_weights_are_copies_and_buffers_keep_their_dtype() -> None:
    embedding, layers, norm, head = parts()
    description = describe_modules(embedding, layers, norm, head)
    stage = build_stage(description, 1, 3, is_first=False, is_last=False, dtype=torch.bfloat16)
    fill_parameters(stage, description)
    weight = stage.get_parameter("layers.1.mix.weight")
    assert weight.dtype == torch.bfloat16 and torch.equal(weight, layers[1].mix.weight.bfloat16())
    assert {buffer.dtype for buffer in stage.buffers()} == {torch.float64}
    weight.data.zero_()
    assert layers[1].mix.weight.abs().sum() > 0
    assert torch.equal(fill_rows(description, "head.bias", 4, 9), head.bias[4:9])


class Narrow(nn.Linear):
    """Returns fewer columns than it receives."""

    def __init__(self):
        super().__init__(8, 7)


class Rounded(nn.Identity):
    def forward(self, hidden):
        return hidden.half()


class Tuple(nn.Identity):
    def forward(self, hidden):
        return (hidden,)


class RoundedNow(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids).half()


def test_modules_return_what_they_receive() -> None:
    embedding, layers, norm, head = parts()
    rounded, _, _, _ = parts(embedding_class=RoundedNow)
    layer_2 = [(Narrow(), "[1, 2, 7] torch.float32"), (Rounded(), "[1, 2, 8] torch.float16"), (Tuple(), "a tuple")]
    cases = [
        *((embedding, [*layers[:2], layer, layers[3]], norm, f"Layer 2 returned {said}") for layer, said in layer_2),
        (rounded, layers, norm, "The embedding returned [1, 2, 8] torch.float16"),
        (embedding, layers, Rounded(), "The norm returned [1, 2, 8] torch.float16"),
    ]
    for first, between, last, sentence in cases:
        description = describe_modules(first, between, last, head)
        bounds = (0, 2) if first is rounded else (2, 4)
        stage = build_stage(description, *bounds, is_first=first is rounded, is_last=first is not rounded)
        sentence += "; expected hidden [sequences, tokens, 8] torch.float32"
        with pytest.raises(InputError, match=re.escape(sentence)):
            stage(torch.zeros(1, 2, 8))


class WithMore(nn.Embedding):
    def __init__(self):
        super().__init__(31, 8)
        self.norm = nn.LayerNorm(8)


def test_what_does_not_fit_is_refused(tmp_path) -> None:
    embedding, layers, norm, head = parts()
    description = describe_modules(embedding, layers, norm, head)
    stage = build_stage(description, 0, 2, is_first=True, is_last=False)
    for call, sentence in (
        (lambda: describe_modules(head, layers, norm, head), "embedding is Linear"),
        (lambda: describe_modules(embedding, layers, norm, nn.Linear(9, 31)), "their widths must agree"),
        (lambda: describe_modules(embedding, [], norm, head), r"layers = \[\] holds no layer"),
        (lambda: describe_modules(WithMore(), layers, norm, head), "embedding holds parameters besides its matrix"),
        (lambda: stage(torch.zeros(1, 2, 8), position_ids=torch.arange(2)[None]), "position_ids were given"),
        (lambda: write_folder_metadata(description, tmp_path, torch.float32), "cannot be written as a folder"),
    ):
        with pytest.raises(InputError, match=sentence):
            call()
