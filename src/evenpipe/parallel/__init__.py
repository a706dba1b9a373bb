"""The grid of processes and the communication outside the program: which processes form a pipeline and which are
replicas, sums of gradients over replicas, parameters sharded over replicas, and global gradient clipping."""

from evenpipe.parallel.clipping import clip_gradients, total_norm
from evenpipe.parallel.fsdp import ShardedModule
from evenpipe.parallel.gradients import GradientReducer
from evenpipe.parallel.grid import Grid, process_grid

__all__ = [
    "GradientReducer",
    "Grid",
    "ShardedModule",
    "clip_gradients",
    "process_grid",
    "total_norm",
]
