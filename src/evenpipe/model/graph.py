"""Walks autograd graphs, and runs their backwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def graph_nodes(output: torch.Tensor) -> Iterator[Any]:
    """Iterate over the nodes of the graph that computed `output`, each once; a leaf has no nodes."""
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def run_backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Run the backward from several tensors, with a gradient for each; None: nothing depends on the tensor. Layers that
    stop gradients may leave a tensor without a graph."""
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad and pair[1] is not None]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
