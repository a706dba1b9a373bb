"""Sums the gradients of tied weights of which two devices have a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from evenpipe.communication.communicator import Communicator
from evenpipe.parallel.parameters import Matrix


@contextmanager
def tied_gradients(matrix: Matrix | None, communicator: Communicator | None) -> Iterator[None]:
    """Sum the gradients of a step on both devices; `matrix` is None on all others.

    A step gives the first device the embedding's part of the gradient, and the last device the output layer's. Both
    then get the sum, added to their gradient from before. It is reduced over these two processes on their own
    communicator, and broadcast to both.
    """
    if matrix is None or not matrix.trainable:
        yield
        return
    parameter, before = matrix.parameter, matrix.parameter.grad
    parameter.grad = None
    try:
        yield
    except BaseException:
        parameter.grad = before
        raise
    assert communicator is not None
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
    communicator.reduce(gradient, communicator.members[0], "the sum of tied gradients").wait("the optimizer")
    communicator.broadcast(gradient, communicator.members[0], "tied gradients").wait("the optimizer")
    parameter.grad = gradient if before is None else before.add_(gradient)
