"""Optimizers that need whole matrices, correct even if a process has only some rows of a matrix.

AdamW and SGD work element by element, so torch's own are correct with any rows.
"""
