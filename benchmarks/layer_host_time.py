"""Host time of what the split backward and checkpointing add to a layer, in processor time of one thread.

    python benchmarks/layer_host_time.py [--repeats 5]      # a table; best of the repeats, microseconds

Tensors are tiny, so that what is left is the host's work: Python, autograd, allocations. The first table is about one
linear layer, the second about one Llama layer, F and B together, less the time without checkpointing.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaModel

from evenpipe.layers.checkpointing import Switch, checkpointed
from evenpipe.layers.random_state import RandomState
from evenpipe.layers.weight_gradients import SplitBackward, WeightGradients

CPU = torch.device("cpu")
WIDTH, TOKENS = 16, 8


def best_of(repeats: int, calls: int, function: Callable[[], Any]) -> float:
    """Microseconds of processor time per call."""
    function()
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        for _ in range(calls):
            function()
        best = min(best, time.process_time() - started)
    return best / calls * 1e6


def linear_layer(repeats: int, calls: int) -> dict[str, float]:
    plain, split = nn.Linear(WIDTH, WIDTH, bias=False), nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    queue = WeightGradients()
    SplitBackward(queue).apply(split, {})
    hidden, gradient = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)

    def fused() -> None:
        torch.autograd.backward(plain(hidden.detach().requires_grad_()), gradient)

    def inputs() -> None:
        queue.under_way = (0, 0)
        output = split[0](hidden.detach().requires_grad_())
        queue.begin((0, 0))
        torch.autograd.backward(output, gradient)

    def weights() -> None:
        inputs()
        queue.compute((0, 0))

    times = {
        "F + B of nn.Linear": best_of(repeats, calls, fused),
        "F + I": best_of(repeats, calls, inputs),
        "F + I + W": best_of(repeats, calls, weights),
    }
    return times | {"W": times["F + I + W"] - times["F + I"]}


def llama_layer(repeats: int, calls: int) -> dict[str, float]:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaModel(config).train()
    layer = model.layers[0]
    hidden = torch.randn(1, TOKENS, WIDTH)
    rotary = model.rotary_emb(hidden, torch.arange(TOKENS)[None])
    forward = functools.partial(layer.forward, attention_mask=None, position_embeddings=rotary, use_cache=False)
    gradient = torch.randn_like(hidden)

    def run(forward: Callable[[Tensor], Tensor]) -> None:
        torch.autograd.backward(forward(hidden.detach().requires_grad_()), gradient)

    def recompute() -> None:
        """What R in an order does."""
        state = RandomState.of(CPU)
        with torch.no_grad():
            forward(hidden.detach())
        with state.restored():
            output = forward(hidden.detach().requires_grad_())
        torch.autograd.backward(output, gradient)

    variants: dict[str, Callable[[], None]] = {
        "nothing recomputed": lambda: run(forward),
        "R": recompute,
        '"full"': functools.partial(run, checkpointed(forward, "full", Switch(), CPU)),
        "torch, reentrant": lambda: run(lambda one: checkpoint(forward, one, use_reentrant=True)),
        "torch, non-reentrant": lambda: run(lambda one: checkpoint(forward, one, use_reentrant=False)),
        '"selective"': functools.partial(run, checkpointed(forward, "selective", Switch(), CPU)),
    }
    times = {name: best_of(repeats, calls, function) for name, function in variants.items()}
    return {
        name: time - (times["nothing recomputed"] if index else 0) for index, (name, time) in enumerate(times.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    print("one linear layer")
    for name, microseconds in linear_layer(options.repeats, 10 * options.calls).items():
        print(f"    {name:24}{microseconds:8.1f} us")
    print("one Llama layer, F + B; the others add to the first")
    for name, microseconds in llama_layer(options.repeats, options.calls).items():
        print(f"    {name:24}{microseconds:8.0f} us")


if __name__ == "__main__":
    main()
