"""The judge of every gradient: transformers, in one process, on the whole model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

IGNORE = -100


@dataclass(frozen=True)
class Reference:
    """What one process finds: losses and gradients of the first step, and weights after a few of AdamW."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def batches(vocabulary: int, sequences: int, tokens: int, steps: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """(ids, labels) with a padding token (id 0) here and there, and labels that are ignored."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(steps):
        ids = torch.randint(0, vocabulary, (sequences, tokens), generator=generator)
        ids[:, tokens // 2] = 0
        labels = ids.clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE
        labels[0, :] = labels[0, :] if sequences == 1 else IGNORE  # a sequence without any label that counts
        result.append((ids, labels))
    return result


def loss_of(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean over the valid tokens of the whole batch, from the model's own logits."""
    logits = model(input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)


def adamw(parameters, learning_rate: float = 1e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.1, foreach=False, fused=False)


def train(model: PreTrainedModel, data: list[tuple[Tensor, Tensor]]) -> Reference:
    """Steps through the batches; the model is changed."""
    model.train()
    optimizer = adamw(model.parameters())
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for ids, labels in data:
        optimizer.zero_grad()
        loss = loss_of(model, ids, labels)
        loss.backward()
        losses.append(loss.item())
        if not gradients:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return Reference(losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()})


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Largest relative Frobenius error over the tensors, and whose it is. The names must be the same."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    errors = {}
    for name, tensor in expected.items():
        difference = torch.linalg.vector_norm((found[name] - tensor).double())
        norm = torch.linalg.vector_norm(tensor.double())
        errors[name] = float(difference / norm) if norm > 0 else float(difference)
    name = max(errors, key=errors.__getitem__)
    return errors[name], name
