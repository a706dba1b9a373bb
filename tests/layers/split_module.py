"""A module run pass by pass, its backward split or not, and what to compare it with: the same module under autograd."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evenpipe.layers.weight_gradients import SplitConv1D, SplitLinear, WeightGradients, split_layers

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


class Split:
    """Runs passes of microbatches on one module, as the walker does on a stage."""

    def __init__(self, module: nn.Module, batches: list[Any]) -> None:
        self.module, self.batches = module, batches
        self.queue = WeightGradients()
        self.unsplit = split_layers(module, self.queue)
        self.outputs: dict[int, Tensor] = {}
        self.input_gradients: dict[int, Tensor] = {}
        self._forwarded: dict[int, tuple[Tensor, Any]] = {}
        self._passes = {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}

    def run(self, passes: str) -> None:
        """Such as "F0 I0 F1 B1 W0"."""
        tokens = passes.split()
        self._split = {int(token[1:]) for token in tokens if token[0] == "I"}
        for token in tokens:
            self._passes[token[0]](int(token[1:]))

    def run_counted(self, passes: str, count: Callable[[], AbstractContextManager]) -> list[int]:
        """What is counted in each of the passes."""
        tokens, counts = passes.split(), []
        self._split = {int(token[1:]) for token in tokens if token[0] == "I"}
        for token in tokens:
            with count() as counter:
                self._passes[token[0]](int(token[1:]))
            counts.append(counter.count)
        return counts

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
    """What is not bit for bit what F and B of the same microbatches give.

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
    runner = split(module, batches)
    runner.run(passes)
    assert not len(runner.queue)
    return unequal(runner, fused["W"], fused["I"])


def unequal(split: Split, plain: Split, plain_in_order_of_I: Split | None = None) -> list[str]:
    """Names of the values that differ in a single bit, or that only one of the two has."""
    found = []
    for index in range(len(split.batches)):
        for name in ("outputs", "input_gradients"):
            if not torch.equal(getattr(split, name)[index], getattr(plain, name)[index]):
                found.append(f"{name} of microbatch {index}")
    linear = {
        parameter
        for layer in split.module.modules()
        if isinstance(layer, (SplitLinear, SplitConv1D)) and layer.weight.requires_grad
        for parameter in layer.parameters()
    }
    expected = dict(plain.module.named_parameters())
    others = dict((plain_in_order_of_I or plain).module.named_parameters())
    for name, parameter in split.module.named_parameters():
        wanted = (expected if parameter in linear else others)[name].grad
        if (wanted is None) != (parameter.grad is None) or (
            wanted is not None and not torch.equal(parameter.grad, wanted)
        ):
            found.append(f"gradient of {name}")
    return found


class Storages(TorchDispatchMode):
    """Counts the bytes that are alive of all storages made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {
            tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    @property
    def alive(self) -> int:
        return sum(size for storage, size in self._made.values() if not storage.expired())


@contextmanager
def without_collector() -> Iterator[None]:
    """Only reference cycles would need it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Products(TorchDispatchMode):
    """Counts products of matrices and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        self.count += name in {"mm", "addmm", "bmm", "baddbmm"} or name.endswith(("attention_for_cpu", "attention"))
        return function(*args, **(kwargs or {}))
