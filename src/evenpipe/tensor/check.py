"""Checks, with threads as tensor ranks, that a small copy of a model has the gradients of the whole one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from evenpipe.errors import InputError
from evenpipe.model.comparison import (
    TOLERANCE,
    Batch,
    Result,
    compare,
    loss_of_hidden,
    one_thread,
    some_batch,
    whole_result,
)
from evenpipe.model.description import Description
from evenpipe.model.draws import noise_of_routers
from evenpipe.model.fp64 import InFp64
from evenpipe.model.graph import run_backward
from evenpipe.model.loading import copy_parameters
from evenpipe.model.placement import TensorPlacement
from evenpipe.model.rules import undisturbed
from evenpipe.model.small_model import SmallModel, small_model
from evenpipe.model.stage import Stage, build_stage
from evenpipe.model.structure import first_line
from evenpipe.tensor.exchange import all_rows, own_rows
from evenpipe.tensor.layers import ModelCut, TensorCut, find_model_cut
from evenpipe.tensor.threads import ThreadExchange, in_threads, thread_exchanges

MORE_THAN_HEADS = 4
"""Ranks of a small copy that are more than its heads of keys and values."""


def cut_of_model(
    description: Description, ranks: int, small_copy: SmallModel | None = None, *, check: bool = True
) -> ModelCut:
    """Return how the layers of a model are cut over tensor ranks, found on a small copy. Takes a second on a CPU.

    Args:
        small_copy: as `copy_to_cut` returns it, for several numbers of ranks; None: a new one.
        check: compare the small copy, cut, with the whole one: some more seconds.

    Raises:
        InputError: the model cannot be cut, or would be trained wrongly; one sentence names the reason.
    """
    if (noise := noise_of_routers(description)) is not None:
        raise InputError(
            f"tp: {noise[0]} is {noise[1]:g} in the model's config; it must be 0: every tensor rank routes"
            " all tokens, and would add noise of its own to them"
        )
    small, dtype, kept = small_copy or copy_to_cut(description)
    with undisturbed(), torch.enable_grad(), one_thread(), _throughout(dtype):
        few = 2  # ranks of the small copy
        of_copy = find_model_cut(small)
        cut = of_copy.for_model(description, small, kept)
        if cut.repeats_heads(description, ranks):  # so does the small copy, which has one or two
            few = MORE_THAN_HEADS
            of_copy = find_model_cut(small, repeats=True)
            cut = of_copy.for_model(description, small, kept)
        for index in range(description.layers):
            cut.placements(description, index, ranks - 1, ranks)
        if check:
            _compare(small, dtype, of_copy, few)
    return cut


def _compare(small: Description, dtype: torch.dtype, cut: ModelCut, ranks: int) -> None:
    """Raise InputError if a small copy, cut, differs from the whole one."""
    generator = torch.Generator().manual_seed(1)
    for padded in (False, True) if small.takes("attention_mask") else (False,):
        batch = some_batch(small, generator, padded)
        expected = whole_result(small, *batch)
        refuse = (
            f"{small.architecture} cannot be trained with tensor parallelism: a small copy of it, its layers cut in"
            f" {ranks},"
        )
        try:
            exchanges = thread_exchanges(ranks)
            stages = [_stage(small, dtype, cut, exchange) for exchange in exchanges]
            found = _over_ranks(small, batch, stages, exchanges, expected.logits_dtype)
        except Exception as error:  # families raise many types when their parts do not fit
            raise InputError(f"{refuse} does not run ({type(error).__name__}: {first_line(error)}).") from error
        compare(refuse, TOLERANCE[dtype], found, expected, floor=torch.finfo(dtype).eps / TOLERANCE[dtype])


def copy_to_cut(description: Description) -> SmallModel:
    """Return a small copy for `cut_of_model`: in fp64 throughout, if it runs so. Raises InputError if there is none."""
    if description.config is None:
        raise InputError("tp: plain modules do not say how they could be cut, expected 1 with them.")
    with undisturbed(), torch.enable_grad(), one_thread():
        try:
            with InFp64():
                return small_model(description, dtypes=(torch.float64,))
        except InputError:
            return small_model(description, dtypes=(torch.float32,))


def _throughout(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a small copy of that dtype is cut and compared."""
    return InFp64() if dtype == torch.float64 else contextlib.nullcontext()


@dataclass(slots=True)
class _OfRank:
    loss: float
    gradients: dict[str, Tensor | None]
    embedding: Tensor
    """Gradient of the embedding matrix."""
    head: dict[str, Tensor]
    held: Mapping[str, TensorPlacement | None]


def _over_ranks(
    small: Description,
    batch: Batch,
    stages: Sequence[Stage],
    exchanges: Sequence[ThreadExchange],
    logits_dtype: torch.dtype,
) -> Result:
    """Compute as tensor ranks do, the vocabulary layers by hand."""
    results = in_threads(exchanges, lambda rank: _of_rank(small, batch, stages[rank], exchanges[rank], logits_dtype))
    first = results[0]
    gradients: dict[str, Tensor | None] = {}
    for name in dict.fromkeys(name for one in results for name in one.gradients):
        parts = [(one.gradients[name], one.held.get(name)) for one in results if name in one.gradients]
        gradients[name] = _put_together(parts)
    embedding = torch.stack([one.embedding for one in results]).sum(0)
    head = dict(first.head)
    gradients[small.embedding_name] = embedding + head.pop(small.embedding_name, 0)
    gradients.update(head)
    return Result(first.loss, gradients, logits_dtype)


def _put_together(parts: list[tuple[Tensor | None, TensorPlacement | None]]) -> Tensor | None:
    """Return the whole gradient: the sum of all ranks' gradients of what they hold."""
    if all(gradient is None for gradient, _ in parts):
        return None
    whole: Tensor | None = None
    for gradient, placement in parts:
        if gradient is None:
            continue
        if whole is None:
            whole = gradient.new_zeros(gradient.shape if placement is None else placement.shape)
        if placement is None:
            whole += gradient
        else:
            for box in placement.boxes():
                whole[box.whole] += gradient[box.local]
    return whole


def _stage(small: Description, dtype: torch.dtype, cut: ModelCut, exchange: ThreadExchange) -> Stage:
    """Return one rank's part of all layers."""
    held: dict[str, TensorPlacement | None] = {}
    for index in range(small.layers):
        held |= cut.placements(small, index, exchange.rank, exchange.size)
    stage = build_stage(
        small,
        0,
        small.layers,
        is_first=True,
        is_last=True,
        dtype=dtype,
        held=held,
        tensor_ranks=exchange.size,
    )
    assert isinstance(stage, Stage)
    copy_parameters(stage, small)
    layers = {index: stage.get_submodule(f"{small.structure.layers_name}.{index}") for index in range(small.layers)}
    TensorCut(cut, exchange).apply(stage, layers)
    return stage


def _of_rank(
    small: Description, batch: Batch, stage: Stage, exchange: ThreadExchange, logits_dtype: torch.dtype
) -> _OfRank:
    tokens, labels, mask = batch
    model, router, ranks = small.model, small.router_loss, exchange.size
    matrices = {name: model.get_parameter(name).detach().clone().requires_grad_() for name in small.vocabulary_names}
    table = matrices[small.embedding_name].detach()
    rows = functional.embedding(tokens, table, padding_idx=small.padding_index).requires_grad_()
    counted = small.positions_of(tokens)
    positions = {} if counted is None else {"position_ids": counted}
    recorded: dict[str, list[Tensor]] = {} if router is None else {"router_logits": []}
    own = stage(rows.clone(), attention_mask=mask, **positions, **recorded)  # it may change them in place
    hidden = all_rows(own.detach(), exchange).requires_grad_()
    loss = loss_of_hidden(small, matrices, hidden, labels, logits_dtype)
    loss.backward()
    assert hidden.grad is not None
    roots, given = [own], [own_rows(hidden.grad, exchange)]
    value = loss.item()
    if router is not None:
        totals, probabilities = router.add(router.start(), recorded["router_logits"], mask)
        value += router.coefficient * float(router.value(totals))
        roots.append(probabilities)
        given.append(router.gradient(totals, 1 / ranks))  # every rank routes all tokens
    run_backward(roots, given)
    embedding = torch.zeros_like(table)
    if rows.grad is not None:
        embedding.index_add_(0, tokens.flatten(), rows.grad.reshape(-1, rows.shape[-1]))
    if small.padding_index is not None:
        embedding[small.padding_index] = 0
    found = {name: parameter.grad for name, parameter in stage.named_parameters()}
    others = {name: matrix.grad for name, matrix in matrices.items() if matrix.grad is not None}
    return _OfRank(value, found, embedding, others, stage.held)
