"""Walks autograd graphs."""

from __future__ import annotations

from collections.abc import Iterator
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
