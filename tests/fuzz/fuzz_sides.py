"""The two that play a case: a pipeline, and transformers (or plain modules) in one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from fuzz_case import Case
from fuzz_model import FP64, IGNORE, Data, PlainModel, freeze, live_model
from fuzz_pipeline import ends_of_slices, gathered
from torch import Tensor, nn

from evenpipe import HostAdamW, LossOptions, Pipeline

Observed = list[tuple[str, Any]]
"""What was seen, in turn: (what, a number, or tensors by name)."""

ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-5, "foreach": False}
"""With torch's own eps, 1e-8, gradients that are nothing but rounding move weights by as much as 1e-8 of a step, and in
one process alone, too, the gradients of later steps differ by that much from one rounding to another."""


class Update(NamedTuple):
    """Several steps whose gradients add up to a mean."""

    weight: float
    """Of the labels of all steps and replicas, all of which count equally; 0: the mean is that of the steps' means."""
    steps: int


class OneProcess:
    """transformers, or plain modules, on the batches of all replicas."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        """model: from here on, this one's."""
        self._case, self._model = case, model.train()
        self._options = LossOptions(**case.loss)
        self._optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=False)

    def freeze(self, what: str, number: int) -> None:
        freeze(self._model.named_parameters(), self._case, what, number)

    def add_hooks(self) -> None:
        add_hooks(self._model.named_parameters(), self._case)

    def step(self, data: list[Data], recorded: bool, update: Update | None) -> Observed:
        loss, seen = self._loss(data, update if update and update.weight else None)
        if loss.requires_grad:
            (loss if update is None or update.weight else loss / update.steps).backward()
        fill_gradients(self._model.parameters(), self._case)
        return seen

    def evaluate(self, data: list[Data]) -> Observed:
        with torch.no_grad():
            logits = [self._logits(one)[0] for one in data]
            seen = self._loss(data)[1]
        log_probabilities = [
            torch.log_softmax(found, -1).gather(-1, one.targets.clamp(min=0)[..., None])[..., 0]
            * (one.targets != IGNORE)
            for found, one in zip(logits, data, strict=True)
        ]
        return [*seen, ("log probabilities", dict(zip(map(str, range(len(data))), log_probabilities, strict=True)))]

    def clip(self, max_norm: float) -> float:
        found = [one.grad for one in self._model.parameters() if one.grad is not None]
        norm = torch.nn.utils.get_total_norm(found) if found else torch.zeros(())
        if max_norm != float("inf"):
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)
        return float(norm)

    def update(self) -> None:
        self._optimizer.step()

    def clear(self) -> None:
        self._model.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        return {name: one.grad.clone() for name, one in self._model.named_parameters() if one.grad is not None}

    def weights(self) -> dict[str, Tensor]:
        saved = self._model.state_dict()
        return {
            name: one.detach().clone()
            for name, one in (*self._model.named_parameters(), *self._model.named_buffers())
            if name in saved
        }

    def _loss(self, data: list[Data], update: Update | None = None) -> tuple[Tensor, Observed]:
        total, steps = update or Update(weight_of(data), 1)
        loss = entropy = router = torch.zeros((), dtype=FP64)
        for one in data:
            logits, router_loss = self._logits(one)
            weights = one.weights / total if total else torch.zeros_like(one.weights)
            losses, entropies = losses_of(logits, one.targets, self._options)
            loss = loss + (losses * weights).sum()
            entropy = entropy + (entropies * weights).sum()
            router = router + router_loss / (len(data) * steps)
        seen: Observed = [
            ("loss", float(loss + router)),
            ("router loss", float(router)),
            ("tokens", sum(int((one.targets != IGNORE).sum()) for one in data)),
        ]
        if self._options.entropy:
            seen.append(("entropy", float(entropy)))
        return loss + router, seen

    def _logits(self, data: Data) -> tuple[Tensor, Tensor]:
        """Of the whole batch, and what routers add: the mean over microbatches, each of which has its own.

        One microbatch after the other: transformers computes parts of its models in fp32 whatever their dtype, and
        the last bit of an fp64 number that depends on the shape of a product may decide how it is rounded there.
        """
        nothing = torch.zeros((), dtype=FP64)
        if isinstance(self._model, PlainModel):
            ids = data.input_ids.chunk(self._case.microbatches if self._case.model.unusual_layers else 1)
            logits = torch.cat([self._model(microbatch) for microbatch in ids]) * self._options.logit_scale
            cap = self._options.soft_cap
            return logits if cap is None else cap * torch.tanh(logits / cap), nothing
        if data.starts is not None:
            return self._logits_of_documents(data, data.starts), nothing
        given = {name: getattr(data, name) for name in ("input_ids", "position_ids", "attention_mask")}
        coefficient = self._case.model.router_loss
        parts = [
            self._model(
                **{
                    name: None if one is None else one.chunk(self._case.microbatches)[index]
                    for name, one in given.items()
                },
                use_cache=False,
                return_dict=True,
            )
            for index in range(self._case.microbatches)
        ]
        router = [coefficient * one.aux_loss.double() for one in parts] if coefficient else [nothing]
        return torch.cat([one.logits.double() for one in parts]), sum(router, nothing) / len(router)

    def _logits_of_documents(self, data: Data, starts: Tensor) -> Tensor:
        """Of each document alone."""
        rows = []
        for row, begun in enumerate(starts):
            lengths = torch.diff(torch.cat([begun.nonzero()[:, 0], torch.tensor([len(begun)])])).tolist()
            ids = data.input_ids[row].split(lengths)
            positions = [None] * len(ids) if data.position_ids is None else data.position_ids[row].split(lengths)
            parts = [
                self._model(
                    input_ids=tokens[None],
                    position_ids=None if places is None else places[None],
                    use_cache=False,
                    return_dict=True,
                ).logits
                for tokens, places in zip(ids, positions, strict=True)
            ]
            rows.append(torch.cat(parts, 1))
        return torch.cat(rows).double()


def weight_of(data: list[Data]) -> float:
    """Of the labels of all replicas."""
    return sum(float(replica.weights.sum()) for replica in data)


def add_hooks(parameters: Iterable[tuple[str, nn.Parameter]], case: Case) -> None:
    """Hooks on some parameters, which say by their curvature what they were called with: twice with a half is not once
    with all of it. They look at single numbers, so they mean the same for any rows of a parameter."""
    for name, parameter in parameters:
        if not parameter.requires_grad or case.random("hooks", name).random() < 0.5:
            continue
        if case.hooks in ("tensor", "both"):
            parameter.register_hook(lambda gradient: gradient / (1 + gradient.abs()))
        if case.hooks in ("accumulated", "both"):
            parameter.register_post_accumulate_grad_hook(_bend)


def fill_gradients(parameters: Iterable[nn.Parameter], case: Case) -> None:
    """Give zeros to trained parameters without a gradient, which layers that stop gradients leave: a pipeline gives
    zeros to those of earlier stages, one process nothing, and an optimizer takes the two differently."""
    for parameter in parameters if case.model.unusual_layers else ():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _bend(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(1 + parameter.grad.abs())


def losses_of(logits: Tensor, targets: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Loss and entropy of every position, as `LossOptions` writes them."""
    total = torch.logsumexp(logits, -1)
    own = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    smooth = (total[..., None] - logits).mean(-1)
    losses = (1 - options.label_smoothing) * (total - own) + options.label_smoothing * smooth
    return losses + options.z_loss * total.square(), torch.special.entr(logits.detach().softmax(-1)).sum(-1)


def judge_model(case: Case, weights: dict[str, Tensor]) -> nn.Module:
    """The model of one process; fresh weights are the pipeline's own."""
    model = live_model(case)
    if case.model.given_as == "config":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
            for name, buffer in model.named_buffers():
                if name in weights:
                    buffer.copy_(weights[name])
    return model


class InProcesses:
    """A pipeline. Collective: every process plays the same case."""

    def __init__(self, case: Case, pipeline: Pipeline) -> None:
        self._case, self.pipeline = case, pipeline
        for tokens in {batch.tokens for step in case.steps for replicas in step.batches for batch in replicas}:
            if (ends := ends_of_slices(case, tokens)) is not None:
                pipeline._cutter.ends[tokens] = ends
        held = list(pipeline.parameters())
        self._optimizer: Any = None  # a device may hold nothing
        if held and case.optimizer == "HostAdamW":
            share = case.share_on_host
            self._optimizer = HostAdamW(held, share=share, bucket_bytes=4096, **ADAMW, fused=case.fused)
        elif held:
            self._optimizer = torch.optim.AdamW(held, **ADAMW, fused=False)

    def freeze(self, what: str, number: int) -> None:
        freeze(self.pipeline.named_parameters(), self._case, what, number)

    def add_hooks(self) -> None:
        add_hooks(self.pipeline.named_parameters(), self._case)

    def step(self, data: list[Data], recorded: bool, update: Update | None) -> Observed:
        ids, named = self._given(data)
        if update is not None:
            if update.weight:
                named["total_tokens"] = update.weight
            if self._case.model.router_loss or not update.weight:
                named["accumulate"] = update.steps
        result = self.pipeline.step(ids, **named, record_passes=recorded)
        if recorded:
            self.pipeline.trace(result)
        fill_gradients(self.pipeline.parameters(), self._case)
        return self._seen(result)

    def evaluate(self, data: list[Data]) -> Observed:
        ids, named = self._given(data)
        result = self.pipeline.evaluate(ids, **named)
        own = {str(self.pipeline.replica): result.log_probabilities}
        return [*self._seen(result), ("log probabilities", {k: v for one in gathered(own) for k, v in one.items()})]

    def clip(self, max_norm: float) -> float:
        return self.pipeline.clip_grad_norm_(max_norm)

    def update(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()

    def clear(self) -> None:
        self.pipeline.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        return self.pipeline.full_gradients()

    def weights(self) -> dict[str, Tensor]:
        return self.pipeline.full_state_dict()

    def _given(self, data: list[Data]) -> tuple[Any, dict[str, Any]]:
        own = data[self.pipeline.replica]
        pipeline = self.pipeline
        if (
            pipeline.device == pipeline.context_rank == pipeline.tensor_rank == 0
            or self._case.others_give == "the same"
        ):
            return own.input_ids, own.named
        nonsense = self._case.others_give == "nonsense"
        return (torch.full((7,), -1), {"labels": torch.zeros(3)}) if nonsense else (None, {})

    def _seen(self, result: Any) -> Observed:
        seen: Observed = [("loss", result.loss), ("router loss", result.router_loss), ("tokens", result.tokens)]
        if self._case.loss.get("entropy"):
            seen.append(("entropy", result.entropy))
        return seen
