"""The barrier: combine the statistics of all shards into the loss and the coefficients of the gradient.

Log-odds form. With M and s the maximum and the sum of exp(z_j - M) over all j other than the target t,

    a = M - z_t + log s                       log of the odds against the target
    loss = softplus(a)                        = lse - z_t
    dloss/dz_t = -sigmoid(a)
    dloss/dz_j = sigmoid(a) exp(z_j - M) / s

The entropy of the whole distribution, if wanted, is that of "target or other", plus the probability of "other" times
the entropy of the others, with d = sum of (z_j - M) exp(z_j - M) over them:

    entropy = sigmoid(a) softplus(-a) + sigmoid(-a) softplus(a) + sigmoid(a) (log s - d / s)

This form avoids cancellation when the model is confident, so a loss of 1e-12 has as many correct digits as a loss of 1.
The rescaling of shard-wise exponentials is that of arXiv 2411.05288, equations 5 and 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evenpipe.vocabulary.copies import to_device
from evenpipe.vocabulary.options import LossOptions

MAXIMUM, SUM, TARGET, TOTAL, COUNT = range(5)
"""Columns of the statistics of a shard, all but TARGET over the tokens other than the target: maximum of z; sum of
exp(z - maximum); the target's z if the shard owns it, else 0; and with label smoothing the sum of z - maximum and the
number of its terms. A shard without other tokens has (-inf, 0, ., 0, 0)."""
WEIGHTED = -1
"""For the entropy, one more column: the sum of (z - maximum) exp(z - maximum)."""


@dataclass(frozen=True, slots=True)
class Combined:
    """The result of the barrier; all [tokens], and equal bit for bit on every device. Ignored tokens have 0 throughout.

    With g the weight of a token in the step's loss, the gradient with respect to the logits (before scale and soft-cap)
    is, on a shard whose own maximum is m and whose stored exponentials are E:
        others * exp(m - maximum) * E  +  uniform * (derivative of the soft-cap)  +  target on the target's column.
    """

    losses: Tensor
    """Unweighted loss of each token, with label smoothing and z-loss."""
    log_probabilities: Tensor
    """Logarithm of the label's probability, whatever the loss options."""
    log_sum_exp: Tensor
    """Over all logits, including the target's."""
    maximum: Tensor
    others: Tensor
    target: Tensor
    uniform: Tensor | None
    """None without label smoothing."""
    entropies: Tensor | None
    """In nats, of the distribution over the vocabulary; None unless wanted."""


def combine_plainly(
    statistics: Tensor, token_weights: Tensor, labels: Tensor, options: LossOptions, vocabulary: int
) -> Combined:
    """As `evenpipe.vocabulary.combine`, which has checked the shapes, in operations of torch: in fp64, on numbers per
    token and shard only."""
    table = statistics.double()
    maxima = table[..., MAXIMUM]
    maximum = maxima.amax(0)
    maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
    total = (table[..., SUM] * torch.exp(maxima - maximum)).sum(0)
    target = table[..., TARGET].sum(0)

    odds = maximum - target + total.log()
    negative_log_probability = odds.clamp(min=0.0) + torch.log1p(torch.exp(-odds.abs()))
    against, towards = torch.sigmoid(odds), torch.sigmoid(-odds)
    log_sum_exp = target + negative_log_probability
    losses = negative_log_probability

    smoothing = options.label_smoothing
    if smoothing:
        counts = table[..., COUNT]
        offsets = torch.where(counts > 0, maxima - maximum, 0.0)
        total_above_target = (table[..., TOTAL] + counts * offsets).sum(0) + counts.sum(0) * (maximum - target)
        losses = negative_log_probability - smoothing * total_above_target / vocabulary
    entropies = None
    if options.entropy:
        of_others = _entropy_of_others(table, maximum, total)
        # softplus(-a) without a subtraction
        no_target = (-odds).clamp_(min=0.0).add_(torch.log1p(torch.exp(-odds.abs())))
        entropies = torch.where(
            total > 0, against * no_target.add_(of_others) + towards * negative_log_probability, 0.0
        )
        del of_others, no_target
    # The z-loss adds tilt * p_j to the gradient with respect to every z_j.
    tilt = 2.0 * options.z_loss * log_sum_exp
    if options.z_loss:
        losses = losses + options.z_loss * log_sum_exp.square()

    valid = to_device(labels != options.ignore_index, statistics.device)
    weights = to_device(token_weights, statistics.device).double() * options.logit_scale
    others = torch.where(total > 0, weights * (1.0 + tilt) * against / total, 0.0)
    at_target = weights * (tilt * towards - against + smoothing)
    if options.soft_cap is not None:
        at_target = at_target * (1.0 - (target / options.soft_cap).square())

    def finish(values: Tensor) -> Tensor:
        return torch.where(valid, values, 0.0).to(statistics.dtype)

    return Combined(
        losses=finish(losses),
        log_probabilities=finish(-negative_log_probability),
        log_sum_exp=finish(log_sum_exp),
        maximum=finish(maximum),
        others=finish(others),
        target=finish(at_target),
        uniform=finish(weights * (-smoothing / vocabulary)) if smoothing else None,
        entropies=None if entropies is None else finish(entropies),
    )


def _entropy_of_others(table: Tensor, maximum: Tensor, total: Tensor) -> Tensor:
    """Return log s - d / s of every token, from `table` [shards, tokens, k]."""
    maxima = table[..., MAXIMUM]
    offsets = torch.where(maxima > -torch.inf, maxima - maximum, 0.0)
    weighted = offsets.mul_(table[..., SUM]).add_(table[..., WEIGHTED])
    weighted = weighted.mul_((maxima - maximum).exp_()).sum(0)
    return total.log().sub_(weighted.div_(total))


@torch.no_grad()
def merge(statistics: Tensor, options: LossOptions) -> Tensor:
    """Return the statistics [tokens, k] of several shards together, from [shards, tokens, k], as if they were one.

    The arithmetic is in fp64, and exact but for its rounding; every process gets the same bits from the same table.
    """
    table = statistics.double()
    maxima = table[..., MAXIMUM]
    maximum = maxima.amax(0)
    has_others = maxima > -torch.inf
    offsets = torch.where(has_others, maxima - maximum, 0.0)
    factors = torch.where(has_others, offsets.exp(), 0.0)
    merged = torch.empty_like(table[0])
    merged[:, MAXIMUM] = maximum
    merged[:, SUM] = (table[..., SUM] * factors).sum(0)
    merged[:, TARGET] = table[..., TARGET].sum(0)
    if options.label_smoothing:
        counts = table[..., COUNT]
        merged[:, TOTAL] = (table[..., TOTAL] + counts * offsets).sum(0)
        merged[:, COUNT] = counts.sum(0)
    if options.entropy:
        merged[:, WEIGHTED] = (factors * (table[..., WEIGHTED] + offsets * table[..., SUM])).sum(0)
    return merged.to(statistics.dtype)
