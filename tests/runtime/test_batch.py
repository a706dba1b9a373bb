"""Inputs of a step, cut into microbatches: which of them have a mask."""

from __future__ import annotations

import pytest
import torch

from evenpipe.errors import InputError
from evenpipe.model.interface import counted_positions
from evenpipe.runtime.batch import Batch, cut
from evenpipe.runtime.inputs import Inputs, with_positions

IDS = torch.arange(24).reshape(4, 6)


def cut_in_two(*padded: int, positions: bool = False, torch_device: str = "cpu") -> Batch:
    """Of four sequences, those with these numbers have padding."""
    mask = torch.ones_like(IDS)
    mask[list(padded), -2:] = 0
    position_ids = torch.arange(6).repeat(4, 1) if positions else None
    inputs = Inputs(IDS, IDS, position_ids, mask)
    return cut(inputs, microbatches=2, dtype=torch.float32, torch_device=torch_device)


def test_a_microbatch_without_padding_has_no_mask() -> None:
    for padded, positions, masked in (
        ((), False, (False, False)),
        ((1,), False, (True, False)),
        ((0, 1, 3), False, (True, True)),
        ((), True, (True, True)),  # a mask tells transformers not to look for several sequences in a row
    ):
        microbatches = cut_in_two(*padded, positions=positions).microbatches
        assert tuple(one.attention_mask is not None for one in microbatches) == masked
        for index, mask in enumerate(one.attention_mask for one in microbatches):
            if mask is not None:
                assert mask.shape == (2, 6)
                assert int((mask == 0).sum()) == 2 * sum(row // 2 == index for row in padded)


class Counting:
    """A model that counts the tokens that are not padding, with rows for 6 of them."""

    padding_index, position_rows = 1, 8

    def positions_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        return counted_positions(token_ids, self.padding_index)


def test_positions_are_counted_where_the_model_does() -> None:
    ids = torch.tensor([[5, 1, 6, 7, 8, 9]])
    assert with_positions(Inputs(ids), Counting()).position_ids.tolist() == [[2, 1, 3, 4, 5, 6]]
    given = torch.arange(6)[None]
    assert with_positions(Inputs(ids, None, given), Counting()).position_ids is given
    with pytest.raises(InputError, match=r"^input_ids: 7 tokens per sequence, the model allows at most 6$"):
        with_positions(Inputs(torch.full((1, 7), 5)), Counting())


def test_masks_are_looked_at_before_they_move() -> None:
    """The device "meta" has no values to look at."""
    first, second = cut_in_two(1, torch_device="meta").microbatches
    assert first.attention_mask is not None and first.attention_mask.device.type == "meta"
    assert second.attention_mask is None
