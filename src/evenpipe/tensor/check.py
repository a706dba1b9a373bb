"""Checks, with threads as tensor ranks, that a small copy of a model has the same gradients cut and uncut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenpipe.errors import InputError
from evenpipe.model.comparison import (
    TOLERANCE,
    Batch,
    Gradients,
    Result,
    build_filled_stage,
    compare,
    references,
    result_of_stages,
)
from evenpipe.model.description import Description
from evenpipe.model.draws import noise_of_routers
from evenpipe.model.placement import TensorPlacement
from evenpipe.model.small_copy import SmallCopies, SmallCopy
from evenpipe.model.stage import Stage
from evenpipe.model.structure import first_line
from evenpipe.tensor.exchange import Gather
from evenpipe.tensor.layers import ModelCut, TensorCut, find_model_cut
from evenpipe.tensor.threads import ThreadExchange, in_threads, thread_exchanges

MORE_THAN_HEADS = 4
"""A number of ranks that exceeds a small copy's heads of keys and values."""


def cut_of_model(description: Description, ranks: int, *, check: bool = True) -> ModelCut:
    """Return how the layers of a model are cut over tensor ranks, found on a small copy in about a second on a CPU.

    Args:
        check: compare the small copy cut and uncut, which takes some more seconds.

    Raises:
        InputError: the model cannot be cut, or would be trained incorrectly; one sentence gives the reason.
    """
    if (noise := noise_of_routers(description)) is not None:
        raise InputError(
            f"tp: {noise[0]} is {noise[1]:g} in the model's config; it must be 0: every tensor rank routes"
            " all tokens, and would add noise of its own to them"
        )
    if description.config is None:
        raise InputError("tp: plain modules do not say how they could be cut; expected 1 with them.")
    copy = SmallCopies.of(description).exact
    with copy.computing():
        copy_ranks = 2  # ranks of the small copy
        of_copy, cut = _cuts(copy, description)
        if cut.repeats_heads(description, ranks):  # then so must the small copy, which has one or two
            copy_ranks = MORE_THAN_HEADS
            of_copy, cut = _cuts(copy, description, repeats=True)
        for index in range(description.layers):
            cut.placements(description, index, ranks - 1, ranks)
        if check:
            copy.once(("compared", copy_ranks), lambda: _compare(copy, of_copy, copy_ranks))
    return cut


def _cuts(copy: SmallCopy, description: Description, **repeats: bool) -> tuple[ModelCut, ModelCut]:
    """Return how the layers of a small copy are cut, and how those of its model are."""

    def cuts() -> tuple[ModelCut, ModelCut]:
        of_copy = find_model_cut(copy.description, **repeats)
        return of_copy, of_copy.for_model(description, copy.kept_layers)

    return copy.once(("cut", *repeats), cuts)


def _compare(copy: SmallCopy, cut: ModelCut, ranks: int) -> None:
    """Raise InputError if a small copy computes something else when it is cut."""
    refuse = (
        f"{copy.description.architecture} cannot be trained with tensor parallelism: a small copy of it, its layers cut"
        f" in {ranks},"
    )
    exchanges, limit = thread_exchanges(ranks), TOLERANCE[copy.dtype]
    stages: list[Stage] = []
    for batch, expected in references(copy):
        try:
            stages = stages or [_stage(copy, cut, exchange) for exchange in exchanges]
            result = _over_ranks(copy.description, batch, stages, exchanges, expected.logits_dtype)
        except Exception as error:  # families raise many types when shapes do not fit
            raise InputError(f"{refuse} does not run ({type(error).__name__}: {first_line(error)}).") from error
        compare(refuse, limit, result, expected, floor=torch.finfo(copy.dtype).eps / limit)


def _stage(copy: SmallCopy, cut: ModelCut, exchange: ThreadExchange) -> Stage:
    """Return one rank's shard of all layers."""
    small, layers = copy.description, range(copy.description.layers)
    held: dict[str, TensorPlacement | None] = {}
    for index in layers:
        held |= cut.placements(small, index, exchange.rank, exchange.size)
    stage = build_filled_stage(copy, 0, len(layers), held=held, tensor_ranks=exchange.size)
    name = small.structure.layers_name
    TensorCut(cut, exchange).apply(stage, {index: stage.get_submodule(f"{name}.{index}") for index in layers})
    return stage


def _over_ranks(
    small: Description,
    batch: Batch,
    stages: Sequence[Stage],
    exchanges: Sequence[ThreadExchange],
    logits_dtype: torch.dtype,
) -> Result:
    """Compute as tensor ranks do: each has all tokens at both ends, and a share of the gradients of their loss. Full
    gradients are summed from the gradients of all ranks' shards."""

    def result_of(rank: int) -> Result:
        def gather(local_rows: Tensor) -> Tensor:
            rows: Tensor = Gather.apply(local_rows, exchanges[rank])
            return rows

        share = 1 / len(exchanges)
        return result_of_stages(small, [stages[rank]], batch, logits_dtype, gather=gather, share=share)

    results = in_threads(exchanges, result_of)
    gradients: Gradients = dict.fromkeys(name for result in results for name in result.gradients)
    for result, stage in zip(results, stages, strict=True):
        for name, gradient in result.gradients.items():
            if gradient is None:
                continue
            placement, total = stage.placement_of(name, gradient.shape), gradients[name]
            if total is None:
                total = gradients[name] = gradient.new_zeros(placement.shape)
            for box in placement.boxes():
                total[box.whole] += gradient[box.local]
    return Result(results[0].loss, gradients, logits_dtype)
