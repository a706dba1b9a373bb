"""The vocabulary layers: input embedding (E, G) and output layer with its loss (S, C, T), sharded by rows.

Plain functions on tensors without process groups. Their caller gathers, reduces and sends:
`forward_shard` -> all-gather -> `combine` -> `hidden_gradient` -> reduce, and `backward_shard` (see output.py).
"""

from evenpipe.vocabulary.buffers import Buffers
from evenpipe.vocabulary.combination import Combined, merge
from evenpipe.vocabulary.embedding import Routes, add_row_gradients, gather_rows, pick_row_gradients, place_rows, route
from evenpipe.vocabulary.options import LossOptions
from evenpipe.vocabulary.output import backward_shard, combine, forward_shard, hidden_gradient
from evenpipe.vocabulary.shards import Shard, split
from evenpipe.vocabulary.state import OutputState

__all__ = [
    "Buffers",
    "Combined",
    "LossOptions",
    "OutputState",
    "Routes",
    "Shard",
    "add_row_gradients",
    "backward_shard",
    "combine",
    "forward_shard",
    "gather_rows",
    "hidden_gradient",
    "merge",
    "pick_row_gradients",
    "place_rows",
    "route",
    "split",
]
