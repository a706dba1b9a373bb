"""The judge of bits: transformers' layers in one process, one microbatch after the other, gradients added up by torch.

The vocabulary layers are the plain functions of `evenpipe.vocabulary` on all shards in turn, which have their own tests
against autograd: what is judged is how a pipeline takes a model apart and in which order it adds.
"""

from __future__ import annotations

import torch
from reference import IGNORE
from torch import Tensor
from transformers import LlamaForCausalLM

from evenpipe.vocabulary import (
    LossOptions,
    add_row_gradients,
    backward_shard,
    combine,
    forward_shard,
    hidden_gradient,
    pick_row_gradients,
    route,
    split,
)


def accumulate(
    model: LlamaForCausalLM, ids: Tensor, labels: Tensor, microbatches: int, *, shards: int = 1, barriers: int = 0
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step of a model with untied weights, which is left as it was.

    shards, barriers: how the vocabulary is cut, and 0 for whole layers, 1 for vocab-2, 2 for vocab-1. The parts of dX
    are added in the order of the shards, which for two shards is that of any library.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    vocabulary, rows = head.shape[0], split(head.shape[0], shards)
    targets = torch.full_like(labels, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    weight = 1.0 / (targets != IGNORE).sum().to(torch.float64)
    options, total = LossOptions(), None
    gradients = {"model.embed_tokens.weight": torch.zeros_like(embedding), "lm_head.weight": torch.zeros_like(head)}
    model.zero_grad()
    for part, wanted in zip(ids.chunk(microbatches), targets.chunk(microbatches), strict=True):
        inputs = torch.nn.functional.embedding(part, embedding).detach().requires_grad_()
        output = model.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        hidden, wanted = output.detach().flatten(0, 1), wanted.flatten()
        weights = (wanted != IGNORE).to(torch.float64) * weight
        passes = [
            forward_shard(hidden, head.detach()[own.start : own.stop], None, wanted, own, options, barriers == 1)
            for own in rows
        ]
        table = torch.stack([statistics for statistics, _ in passes])
        combined = combine(table, weights.to(hidden.dtype), wanted, options, vocabulary)
        loss = torch.dot(combined.losses, weights.to(combined.losses.dtype))
        total = loss if total is None else total + loss
        parts = []
        for own, (_, state) in zip(rows, passes, strict=True):
            held = slice(own.start, own.stop)
            if barriers == 1:
                parts.append(hidden_gradient(state, combined, head.detach()[held]))
            part_of_two = backward_shard(state, combined, head.detach()[held], gradients["lm_head.weight"][held])
            parts += [] if part_of_two is None else [part_of_two]
        output.backward(sum(parts[1:], parts[0]).to(output.dtype).view(output.shape))
        routes = route(part, rows, padding_index=model.get_input_embeddings().padding_idx)
        picked = pick_row_gradients(inputs.grad.flatten(0, 1), routes)
        for number, own in enumerate(rows):
            held = gradients["model.embed_tokens.weight"][own.start : own.stop]
            add_row_gradients(held, picked[routes.span(number)], routes, number)
    for name, parameter in model.named_parameters():
        gradients.setdefault(name, parameter.grad)
    model.zero_grad()
    return float(total), gradients
