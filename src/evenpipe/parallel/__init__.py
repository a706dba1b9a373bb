"""The mesh and what crosses it outside the program: which processes form a pipeline, and gradient clipping over all of
them. Data parallelism and precision over replicas belong here too."""

from evenpipe.parallel.clipping import clip_gradients, total_norm
from evenpipe.parallel.mesh import PipelineGroup, pipeline_group

__all__ = ["PipelineGroup", "clip_gradients", "pipeline_group", "total_norm"]
