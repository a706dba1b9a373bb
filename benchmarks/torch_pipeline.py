"""The same model under torch's own runtime, to measure against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn import functional
from transformers import LlamaConfig

from evenpipe.model import build_stage, describe, fill_parameters, fill_rows
from evenpipe.schedule.layers import even_split


class TorchStage(nn.Module):
    """An even share of the layers, with the embedding on the first stage and the output layer on the last."""

    def __init__(self, config: LlamaConfig, stage: int, stages: int, *, checkpointing: bool = False) -> None:
        super().__init__()
        description = describe(config)
        counts = even_split(config.num_hidden_layers, stages)
        first = sum(counts[:stage])
        self.stage = build_stage(
            description,
            first,
            first + counts[stage],
            is_first=stage == 0,
            is_last=stage == stages - 1,
            dtype=torch.float32,
            torch_device="cpu",
        )
        fill_parameters(self.stage, description, 0)
        if checkpointing:
            self.stage.whole.gradient_checkpointing_enable({"use_reentrant": False})
        rows, width = config.vocab_size, config.hidden_size
        self.embedding = nn.Embedding(rows, width) if stage == 0 else None
        self.head = nn.Linear(width, rows, bias=False) if stage == stages - 1 else None
        self.names = {"embedding.weight": description.embedding_name, "head.weight": description.head_name}
        with torch.no_grad():
            for module, name in ((self.embedding, description.embedding_name), (self.head, description.head_name)):
                if module is not None:
                    module.weight.copy_(fill_rows(description, name, 0, rows, 0))

    def forward(self, value: Tensor) -> Tensor:
        hidden = value if self.embedding is None else self.embedding(value)
        hidden = self.stage(hidden)
        return hidden if self.head is None else self.head(hidden)

    def by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their Hugging Face names."""
        for name, parameter in self.named_parameters():
            yield self.names.get(name, name.removeprefix("stage.")), parameter


class TorchPipeline:
    """torch.distributed.pipelining with one of its schedules.

    schedule: a class. Those of several stages per device get two; `v_shaped` has the first and the last on one device.
    """

    def __init__(
        self,
        config: LlamaConfig,
        schedule: type,
        microbatches: int,
        *,
        v_shaped: bool = False,
        checkpointing: bool = False,
    ) -> None:
        device, devices = dist.get_rank(), dist.get_world_size()
        single = issubclass(schedule, PipelineScheduleSingle)
        stages = devices if single else 2 * devices
        if single:
            held = [device]
        else:
            held = [device, stages - 1 - device] if v_shaped else [device, device + devices]
        self.modules = {stage: TorchStage(config, stage, stages, checkpointing=checkpointing) for stage in held}
        self._first, self._last = 0 in held, stages - 1 in held
        parts = [PipelineStage(self.modules[stage], stage, stages, torch.device("cpu")) for stage in held]
        self.schedule = schedule(parts[0] if single else parts, microbatches, loss_fn=_loss)

    def step(self, ids: Tensor) -> float | None:
        """One step; the loss where the last stage is."""
        losses: list[Tensor] = []
        arguments = (ids,) if self._first else ()
        target = {"target": ids, "losses": losses, "return_outputs": False} if self._last else {}
        self.schedule.step(*arguments, **target)
        return torch.stack(losses).mean().item() if losses else None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those held here, by their Hugging Face names."""
        for module in self.modules.values():
            yield from module.by_name()

    def zero_grad(self) -> None:
        for module in self.modules.values():
            module.zero_grad()


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
