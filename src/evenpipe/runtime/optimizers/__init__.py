"""Optimizers that look at whole matrices: right also where a process holds only some rows of one.

AdamW and SGD work element by element, so torch's own are right with any rows.
"""
