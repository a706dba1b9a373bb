"""Transformations of the layers of a stage: split backwards, checkpointing, compilation."""
