"""Inputs of a step, cut into microbatches: which of them have a mask."""

from __future__ import annotations

import pytest
import torch

from evenpipe.runtime.batch import Batch, Inputs, cut

IDS = torch.arange(24).reshape(4, 6)


def cut_in_two(*padded: int, positions: bool = False, torch_device: str = "cpu") -> Batch:
    """Of four sequences, those with these numbers have padding."""
    mask = torch.ones_like(IDS)
    mask[list(padded), -2:] = 0
    position_ids = torch.arange(6).repeat(4, 1) if positions else None
    inputs = Inputs(IDS, IDS, position_ids, mask)
    return cut(inputs, microbatches=2, dtype=torch.float32, torch_device=torch_device)


@pytest.mark.parametrize(
    ("padded", "positions", "masked"),
    [
        ((), False, (False, False)),
        ((1,), False, (True, False)),
        ((0, 1, 3), False, (True, True)),
        ((), True, (True, True)),  # a mask tells transformers not to look for several sequences in a row
    ],
)
def test_a_microbatch_without_padding_has_no_mask(
    padded: tuple[int, ...], positions: bool, masked: tuple[bool, ...]
) -> None:
    batch = cut_in_two(*padded, positions=positions)
    assert tuple(one.attention_mask is not None for one in batch.microbatches) == masked
    for index, one in enumerate(batch.microbatches):
        if one.attention_mask is not None:
            rows = [row for row in padded if row // 2 == index]
            assert one.attention_mask.shape == (2, 6)
            assert int((one.attention_mask == 0).sum()) == 2 * len(rows)


def test_masks_are_looked_at_before_they_move() -> None:
    """The device "meta" has no values to look at."""
    first, second = cut_in_two(1, torch_device="meta").microbatches
    assert first.attention_mask is not None and first.attention_mask.device.type == "meta"
    assert second.attention_mask is None
