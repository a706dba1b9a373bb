"""From a block of logits to exponentials and statistics, in place and without the target.

Plain operations in as few passes over the block as they allow; setting the few target columns by index is cheaper than
masking the block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evenpipe.vocabulary.combination import COUNT, MAXIMUM, SUM, TARGET, TOTAL
from evenpipe.vocabulary.options import LossOptions
from evenpipe.vocabulary.targets import Owned

LOG2_E = 1.0 / math.log(2.0)


def _soft_cap_(logits: Tensor, soft_cap: float, derivative: Tensor | None) -> None:
    """logits <- soft_cap tanh(logits / soft_cap), and its derivative 1 - tanh^2 into `derivative`."""
    logits.div_(soft_cap).tanh_()
    if derivative is not None:
        torch.mul(logits, logits, out=derivative).neg_().add_(1.0)
    logits.mul_(soft_cap)


def _exp_(values: Tensor) -> None:
    """values <- exp(values). On a CPU a multiplication and exp2 take half the time of exp."""
    if values.device.type == "cpu":
        values.mul_(LOG2_E).exp2_()
    else:
        values.exp_()


def exponentiate_(
    logits: Tensor, owned: Owned, options: LossOptions, statistics: Tensor, derivative: Tensor | None
) -> None:
    """logits [tokens, rows >= 1] (scaled, before the soft-cap) <- exp(z - maximum of the others), 0 at the target.

    statistics: [tokens, options.statistics], written. derivative: room for the derivative of the soft-cap, or None when
    it is not wanted (no gradient, or no soft-cap).
    """
    if options.soft_cap is not None:
        _soft_cap_(logits, options.soft_cap, derivative)
    at_target = (owned.rows, owned.columns)
    statistics[:, TARGET] = 0.0
    statistics[owned.rows, TARGET] = logits[at_target]
    logits[at_target] = -torch.inf
    maximum = logits.amax(1)
    statistics[:, MAXIMUM] = maximum
    maximum.masked_fill_(maximum == -torch.inf, 0.0)
    if options.label_smoothing:
        logits[at_target] = maximum[owned.rows]
        logits.sub_(maximum[:, None])
        statistics[:, TOTAL] = logits.sum(1)
        statistics[:, COUNT] = logits.shape[1]
        statistics[owned.rows, COUNT] = logits.shape[1] - 1.0
        logits[at_target] = -torch.inf
    else:
        logits.sub_(maximum[:, None])
    _exp_(logits)
    statistics[:, SUM] = logits.sum(1)


def exponentiate_again_(
    logits: Tensor, first_column: int, owned: Owned, maximum: Tensor, *, options: LossOptions, derivative: Tensor | None
) -> None:
    """The same exponentials a second time, for the columns of the shard from `first_column` on: [tokens, columns].

    maximum: [tokens], that of the whole shard, 0 where it was -inf.
    """
    if options.soft_cap is not None:
        _soft_cap_(logits, options.soft_cap, derivative)
    _exp_(logits.sub_(maximum[:, None]))
    columns = owned.columns - first_column
    here = (columns >= 0) & (columns < logits.shape[1])
    columns = columns.clamp(0, logits.shape[1] - 1)
    logits[owned.rows, columns] = torch.where(here, 0.0, logits[owned.rows, columns])
