"""The judge of every gradient: transformers, in one process, on the whole model."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

IGNORE = -100


@dataclass(frozen=True)
class Reference:
    """What one process finds: losses, gradients of the first step, and weights after a few of AdamW."""

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


def adamw(parameters) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, foreach=False, fused=False)


def train(model: PreTrainedModel, data: Sequence[tuple[Tensor, Tensor]]) -> Reference:
    """Step through the batches of ids and labels. The model is changed."""
    model.train()
    optimizer = adamw(model.parameters())
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for ids, labels in data:
        optimizer.zero_grad()
        loss = loss_of(model, ids, labels)
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
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


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """A copy in bf16, as transformers loads one: `.to()` by itself rounds the rotary frequencies too, and parameters
    that transformers keeps in fp32."""
    config = copy.deepcopy(model.config)
    narrow = type(model).from_pretrained(None, config=config, state_dict=model.state_dict(), dtype=torch.bfloat16)
    narrow.config._experts_implementation = model.config._experts_implementation
    return narrow.train(model.training)


class Bf16Errors:
    """Gradients in bf16, and perhaps log-probabilities, against fp32 in one process, measured by the errors of bf16 in
    one process.

    Rounding is a throw of dice: the errors that two correct programs make in the few numbers of a norm differ by a
    factor of two in one batch as easily as not. So errors are summed over batches before they are compared.
    """

    def __init__(self, exact: PreTrainedModel) -> None:
        self._exact, self._narrow = exact, rounded(exact)
        self._ours: dict[str, float] = {}
        self._one_process: dict[str, float] = {}
        self._of_probabilities = [0.0, 0.0]
        """Sums of absolute errors of log-probabilities: ours and those of one process."""

    def add(self, found: dict[str, Tensor], loss: float, ids: Tensor, log_probabilities: Tensor | None = None) -> None:
        """What came out for a batch. log_probabilities: of the labels of its first rows, [rows, sequence]."""
        results = []
        for model in (self._exact, self._narrow):
            model.zero_grad()
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            losses = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            losses.mean().backward()
            if model is self._exact:
                assert abs(loss - losses.mean().item()) < 2e-2
            results.append(-losses.detach())
        if log_probabilities is not None:
            exact, one_process = (result[: len(log_probabilities)] for result in results)
            self._of_probabilities[0] += float((log_probabilities[:, :-1] - exact).abs().sum())
            self._of_probabilities[1] += float((one_process - exact).abs().sum())
        for name, gradient in found.items():
            wanted, narrow = self._exact.get_parameter(name).grad, self._narrow.get_parameter(name).grad.float()
            for errors, one in ((self._ours, gradient), (self._one_process, narrow)):
                errors[name] = errors.get(name, 0.0) + float((one - wanted).square().sum())

    def check(self, case: str) -> None:
        """No more than 1.5 times the error of one process."""
        for name, squares in self._ours.items():
            ours, one_process = math.sqrt(squares), math.sqrt(self._one_process[name])
            assert ours <= 1.5 * one_process + 1e-7, f"{case} {name}: {ours:.2e} against {one_process:.2e}"

    def check_together(self, case: str) -> None:
        """The same for all gradients together, and for the mean error of log-probabilities. A token that narrowly takes
        another expert makes errors of single gradients that are a throw of dice, too."""
        ours, one_process = (math.sqrt(sum(errors.values())) for errors in (self._ours, self._one_process))
        assert ours <= 1.5 * one_process, f"{case}, gradients: {ours:.2e} against {one_process:.2e}"
        ours, one_process = self._of_probabilities
        assert ours <= 1.5 * one_process, f"{case}, log-probabilities: {ours:.2e} against {one_process:.2e}"
