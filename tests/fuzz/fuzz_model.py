"""The models and batches of a case: the same tensors wherever they are made."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from families import EXPERTS, FAMILIES, WINDOW, tiny_config, whole_model
from fuzz_case import MODULES, Batch, Case, Model
from torch import Tensor, nn

IGNORE = -100
FP64 = torch.float64
HIDDEN = 32

WITHOUT_BIAS = {"smollm3", "cohere2"}
"""Some of their layers have no rotary embedding: the gradient of a bias of the keys is zero but for rounding there,
and AdamW makes that rounding a full step."""


# --- models -----------------------------------------------------------------------------------------------------------


class PlainModel(nn.Module):
    """Plain modules in one piece; names are those of `Pipeline.from_modules`."""

    def __init__(self, model: Model, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(model.vocabulary, HIDDEN, padding_idx=model.padding)
        layers = [PLAIN_LAYERS[(seed + index) % 6]() for index in range(model.layers)]
        self.layers = nn.ModuleList(
            unusual(layers, random.Random(seed), model.changes_input) if model.unusual_layers else layers
        )
        self.norm = nn.LayerNorm(HIDDEN) if model.norm else nn.Identity()
        self.head = nn.Linear(HIDDEN, model.vocabulary, bias=model.head_bias)
        self.to(FP64)
        if model.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Scale(nn.Module):
    """A parameter without rows, which cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(1.1))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.number


class OverTime(nn.Module):
    """Its weight gradient is no product of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, groups=4)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.mix(hidden.transpose(1, 2))[..., :-2].transpose(1, 2))


class Skipped(nn.Module):
    """A layer that some microbatches skip: those whose first number is negative, which is a throw of dice that comes
    out alike in one process and when it is computed again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if hidden.flatten()[0] < 0 else self.layer(hidden)


class Cut(nn.Module):
    """A layer below which nothing is trained, in all microbatches or in those that `Skipped` would skip."""

    def __init__(self, layer: nn.Module, *, always: bool, without_graph: bool) -> None:
        super().__init__()
        self.layer = layer
        self.always, self.without_graph = always, without_graph

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.always and hidden.flatten()[0] < 0:
            return self.layer(hidden)
        if self.without_graph:
            with torch.no_grad():
                return self.layer(hidden)
        return self.layer(hidden.detach())


class Odd(nn.Module):
    """A layer beside parameters to stumble over: used twice, of one row, without a gradient."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.twice = layer, nn.Linear(HIDDEN, HIDDEN)
        self.scale = nn.Parameter(torch.rand(1))
        self.unused = nn.Parameter(torch.rand(3, HIDDEN))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) + self.twice(torch.tanh(self.twice(hidden))) * self.scale


class InPlace(nn.Module):
    """A layer that changes its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        hidden.mul_(0.9)
        hidden[..., :3] = 0.1
        return self.layer(hidden)


def unusual(layers: list[nn.Module], dice: random.Random, changes_input: bool) -> list[nn.Module]:
    """Wrap some layers. A layer may change its input where the one before, if it may not be skipped, has saved
    nothing of it for its backward."""
    wrapped = []
    for index, layer in enumerate(layers):
        saves_nothing = index == 0 or isinstance(layers[index - 1], (OverTime, Residual))
        may_change = changes_input and saves_nothing and not (wrapped and isinstance(wrapped[-1], Skipped))
        match dice.choice(("plain", "plain", "odd", "skipped", "cut", "in place", "in place")):
            case "odd":
                layer = Odd(layer)
            case "skipped":
                layer = Skipped(layer)
            case "cut" if dice.random() < 0.5:
                layer = Cut(layer, always=dice.random() < 0.4, without_graph=dice.random() < 0.5)
            case "in place" if may_change:
                layer = InPlace(layer)
        wrapped.append(layer)
    return wrapped


def twice() -> nn.Module:
    layer = nn.Linear(HIDDEN, HIDDEN)
    return nn.Sequential(layer, nn.GELU(), layer)


PLAIN_LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()),
    nn.Tanh,
    OverTime,
    twice,
    Scale,
    Residual,
]


def config_of(case: Case) -> Any:
    """transformers' config of a case's model."""
    model, dice = case.model, case.random("config")
    known = (FAMILIES | EXPERTS)[model.family][1]
    changes: dict[str, Any] = {
        "vocab_size": model.vocabulary,
        "hidden_size": HIDDEN,
        "num_hidden_layers": model.layers,
        "num_attention_heads": (heads := 4 if case.tp == 4 else 2),
        "pad_token_id": model.padding,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model.family == "modernbert-decoder":  # which takes no None
        tokens = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
        changes |= dict.fromkeys(tokens, model.padding or 0)
    if "num_key_value_heads" in known:
        changes["num_key_value_heads"] = heads if model.family == "deepseek_v3" else model.key_value_heads
    if "intermediate_size" in known:
        changes["intermediate_size"] = 48
    if "layer_types" in known:
        changes["layer_types"] = [dice.choice(("sliding_attention", "full_attention")) for _ in range(model.layers)]
    if "no_rope_layers" in known:
        changes["no_rope_layers"] = [dice.choice((0, 1)) for _ in range(model.layers)]
    if "moe_layer_end_index" in known:
        changes["moe_layer_end_index"] = model.layers - 1
    if model.family in WITHOUT_BIAS:
        changes["attention_bias"] = False
    if case.bf16:  # every expert, since rounding decides which ones are chosen
        everyone = {"num_experts_per_tok": "num_local_experts", "moe_k": "moe_num_experts"}
        numbers = {key: value for name in everyone.values() for key, value in known.items() if key == name}
        changes |= {key: numbers[name] for key, name in everyone.items() if key in known and name in numbers}
        for name in ("num_experts", "n_routed_experts"):
            if name in known:
                changes["num_experts_per_tok"] = known[name]
        if "n_group" in known:
            changes |= {"n_group": 1, "topk_group": 1}
    if model.router_loss:
        changes |= {"output_router_logits": True, "router_aux_loss_coef": model.router_loss}
    return tiny_config(model.family, tied=model.tied, **changes)


def seed_of(case: Case) -> int:
    return case.random("weights").randrange(2**31)


def dtype_of(case: Case) -> torch.dtype:
    """Of the parameters."""
    return torch.float32 if case.bf16 else FP64


def live_model(case: Case) -> nn.Module:
    """The whole model of a case, in fp64 unless it is to compute in bf16, with what is frozen frozen."""
    if case.model.family == MODULES:
        model: nn.Module = PlainModel(case.model, seed_of(case))
    else:
        model = whole_model(config_of(case), dtype_of(case), seed_of(case))
    for _, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype_of(case))  # some families make routers in fp32 whatever the dtype
    freeze(model.named_parameters(), case, case.model.frozen)
    return model.train()


def freeze(parameters: Iterable[tuple[str, nn.Parameter]], case: Case, what: str, *place: int) -> None:
    """What of some parameters is trained from now on. place: of the step."""
    for name, parameter in parameters:
        parameter.requires_grad_(not _is_frozen(what, name, parameter, case.random("frozen", name, *place)))


def _is_frozen(what: str, name: str, parameter: Tensor, dice: random.Random) -> bool:
    in_layers = "layers." in name or ".h." in name
    return {
        "nothing": False,
        "everything": True,
        "embedding": any(word in name for word in ("embed", "wte", "wpe")),
        "head": "head" in name or "embed_out" in name,
        "layers": in_layers,
        "all but layers": not in_layers,
        "vectors": parameter.dim() < 2,
        "some": dice.random() < 0.5,
    }[what]


# --- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """What one replica is given; labels, mask, positions and weights may be None."""

    input_ids: Tensor
    labels: Tensor | None
    position_ids: Tensor | None
    attention_mask: Tensor | None
    token_weights: Tensor | None
    starts: Tensor | None = None
    """[batch, sequence] bool: the first tokens of documents that do not see each other."""

    @property
    def named(self) -> dict[str, Tensor]:
        others = ("input_ids", "starts")
        return {name: value for name, value in vars(self).items() if value is not None and name not in others}

    @property
    def targets(self) -> Tensor:
        """[batch, sequence]: the token that each position predicts, IGNORE where there is none."""
        labels = self.labels
        if labels is None:
            labels = self.input_ids
            if self.attention_mask is not None:
                labels = labels.masked_fill(self.attention_mask == 0, IGNORE)
        targets = torch.full_like(self.input_ids, IGNORE)
        targets[:, :-1] = labels[:, 1:]
        if self.starts is not None:
            targets[:, :-1][self.starts[:, 1:]] = IGNORE
        return targets

    @property
    def weights(self) -> Tensor:
        """[batch, sequence] fp64 of the targets, 0 where there is none; not yet a mean."""
        weights = (self.targets != IGNORE).double()
        if self.token_weights is not None:
            weights[:, :-1] *= self.token_weights[:, 1:].double()
        return weights


def data_of(case: Case, batch: Batch, *place: int) -> Data:
    """place: of the step, of the batch among those of the step, of the replica."""
    seed = case.random("data", *place).randrange(2**31)
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    shape = (batch.sequences * case.microbatches, batch.tokens)
    ids = numbers(0, case.model.vocabulary, *shape)
    if case.model.given_as == "config" and (padding := case.model.padding) is not None:
        # A fresh model has zeros for padding. On the way back every norm makes 1 / sqrt(eps) of a difference there.
        ids[ids == padding] = (padding + 1) % case.model.vocabulary
    labels = positions = mask = weights = None
    if batch.labels != "default":
        labels = torch.where(
            torch.rand(shape, generator=generator) < 0.4, numbers(0, case.model.vocabulary, *shape), ids
        )
        labels[torch.rand(shape, generator=generator) < 0.3] = IGNORE
        if batch.labels == "too large":
            labels[-1, -1] = case.model.vocabulary
        if batch.labels == "none":
            labels[:] = IGNORE
        if batch.labels == "a silent microbatch":
            first = batch.sequences * int(numbers(0, case.microbatches, 1))
            labels[first : first + batch.sequences] = IGNORE
    if batch.padded:
        # Not so much that a sliding window holds nothing else: transformers' own attention has no number then.
        lengths = numbers(max(1, batch.tokens - WINDOW["sliding_window"] + 2), batch.tokens + 1, shape[0], 1)
        mask = (torch.arange(batch.tokens) < lengths).long()
    if batch.positions == "shifted":
        positions = torch.arange(batch.tokens).expand(shape) + numbers(0, 20, shape[0], 1)
    if batch.positions == "packed":
        starts = torch.arange(batch.tokens).masked_fill(torch.rand(shape, generator=generator) < 0.7, 0)
        positions = torch.arange(batch.tokens) - starts.cummax(1).values
    if batch.weights != "default":
        weights = torch.rand(shape, generator=generator, dtype=FP64)
        if batch.weights == "some zero":
            weights[torch.rand(shape, generator=generator) < 0.5] = 0.0
        if batch.weights == "single":
            weights = weights.float()
    begun = None
    if case.documents == "separate":
        begun = torch.arange(batch.tokens).expand(shape) == 0
        if positions is not None:
            begun = begun | (positions == 0)
    return Data(ids, labels, positions, mask, weights, begun)
