"""A module run pass by pass, its backward split or not, and what to compare it with: the same module under autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from evenpipe.layers.weight_gradients import SplitBackward, SplitLayer, WeightGradients, unsplit_matrices

COMMON = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
GROUPED = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen3": ("Qwen3Config", GROUPED),
    "qwen2": ("Qwen2Config", {**GROUPED, "layer_types": ["full_attention"] * 2}),  # biases
    "gemma2": ("Gemma2Config", {**GROUPED, "query_pre_attn_scalar": 8, "sliding_window": 4}),
    "gpt2": ("GPT2Config", {**COMMON, "bos_token_id": 0, "eos_token_id": 0}),  # Conv1D, dropout
}
"""Name -> config class, settings."""


def trunk(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """transformers' model without head: `module(inputs_embeds=hidden)` gives hidden states in an output object."""
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    module = transformers.AutoModel.from_config(getattr(transformers, name)(**(settings | changes)), dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norms of ones and biases of zero would hide errors
    return module.train()


def of_hidden(module: nn.Module, hidden: Tensor) -> Tensor:
    """Calls a trunk, or any module of hidden states."""
    if isinstance(module, transformers.PreTrainedModel):
        return module(inputs_embeds=hidden, use_cache=False).last_hidden_state
    return module(hidden)


def data(microbatches: int, batch: int = 1, width: int = 32, dtype: torch.dtype = torch.float64) -> list[Any]:
    """(input, gradient of the output) per microbatch, of changing lengths."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, 5 + 2 * index, width) for index in range(microbatches)]
    return [tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2)) for shape in shapes]


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class ChangesItsInput(Layers):
    """Of two layers, the second one's."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.layers[0](hidden)
        output = self.layers[1](hidden)
        hidden.add_(1)
        return output


class Split:
    """Runs passes of microbatches on one module, as the walker does on a stage."""

    def __init__(self, module: nn.Module, batches: list[Any]) -> None:
        self.module, self.batches = module, batches
        self.queue = WeightGradients()
        SplitBackward(self.queue).apply(module, {})
        self.unsplit = unsplit_matrices(module)
        self.outputs: dict[int, Tensor] = {}
        self.input_gradients: dict[int, Tensor] = {}
        self._forwarded: dict[int, tuple[Tensor, Any]] = {}
        self._passes = {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}

    def run(self, passes: str, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[Any]:
        """Such as "F0 I0 F1 B1 W0", each pass in a context of its own; returns these."""
        tokens, contexts = passes.split(), []
        self._split = {int(token[1:]) for token in tokens if token[0] == "I"}
        for token in tokens:
            with around() as context:
                self._passes[token[0]](int(token[1:]))
            contexts.append(context)
        return contexts

    def forward(self, index: int) -> None:
        hidden = self.batches[index][0].detach().requires_grad_()
        self.queue.under_way = (0, index) if index in self._split else None
        torch.manual_seed(index)  # dropout
        output = of_hidden(self.module, hidden)
        self.queue.under_way = None
        self.outputs[index] = output.detach()
        self._forwarded[index] = hidden, get_gradient_edge(output)

    def input_gradient(self, index: int) -> None:
        self.queue.begin((0, index))
        self.backward(index)
        self.queue.under_way = None

    def backward(self, index: int) -> None:
        hidden, edge = self._forwarded.pop(index)
        torch.autograd.backward((edge,), (self.batches[index][1],))
        self.input_gradients[index] = hidden.grad

    def weight_gradient(self, index: int) -> None:
        self.queue.compute((0, index))


class Fused(Split):
    """The same without a queue: torch's autograd on the untouched module."""

    def __init__(self, module: nn.Module, batches: list[Any]) -> None:
        super().__init__(nn.Module(), batches)
        self.module = module

    def input_gradient(self, index: int) -> None:
        raise AssertionError("nothing is split here")


def difference(make: Callable[[], nn.Module], batches: list[Any], passes: str, split: type[Split] = Split) -> list[str]:
    """Names of the values that are not bit for bit those of F and B of the same microbatches, or are on one side only.

    Sums over microbatches follow the order of the W passes in the parameters of linear layers, of the I passes in all
    others; so there are two fused runs, in these two orders.
    """
    module = make()
    forwards = " ".join(f"F{index}" for index in range(len(batches)))
    fused = {}
    for kind in "IW":
        fused[kind] = Fused(copy.deepcopy(module), batches)
        fused[kind].run(forwards)
        fused[kind].run(" ".join(f"B{token[1:]}" for token in passes.split() if token[0] in ("B", kind)))
    runner, plain = split(module, batches), fused["W"]
    runner.run(passes)
    assert not len(runner.queue)
    found = []
    for index in range(len(batches)):
        for name in ("outputs", "input_gradients"):
            if not torch.equal(getattr(runner, name)[index], getattr(plain, name)[index]):
                found.append(f"{name} of microbatch {index}")
    linear = {
        parameter
        for layer in runner.module.modules()
        if isinstance(layer, SplitLayer) and layer.weight.requires_grad
        for parameter in layer.parameters()
    }
    expected = dict(plain.module.named_parameters())
    others = dict(fused["I"].module.named_parameters())
    for name, parameter in runner.module.named_parameters():
        wanted = (expected if parameter in linear else others)[name].grad
        if (wanted is None) != (parameter.grad is None) or (
            wanted is not None and not torch.equal(parameter.grad, wanted)
        ):
            found.append(f"gradient of {name}")
    return found


class Products(TorchDispatchMode):
    """Counts products of matrices and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        self.count += name in {"mm", "addmm", "bmm", "baddbmm"} or name.endswith(("attention_for_cpu", "attention"))
        return function(*args, **(kwargs or {}))
