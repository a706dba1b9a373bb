"""Which parameters are trainable: their `requires_grad`, read at the start of each step.

A caller may freeze and unfreeze parameters between steps. Processes that add up one gradient must agree: replicas hold
the same parameters, and the devices of a pipeline hold rows of the vocabulary matrices, or the tied one twice. A
process cannot know about a change in another one, so every step compares. The numbers are sent with its inputs
(`batch.py`):

    over replicas    a fingerprint of all flags of a device; if they differ, the flags, to find the parameter
    over devices     the parameter that replicas disagree about, if any, and the flags of the vocabulary matrices
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from evenpipe.errors import InputError


class Trained:
    """The flags of one process. Communication is in `distribute`."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        names: Sequence[str],
        vocabulary: Sequence[str],
        follow: Sequence[Callable[[], None]],
    ) -> None:
        """
        Args:
            parameters: of this process, by name: the same names in all replicas of a device.
            names: of all parameters of the model, in one order on every process.
            vocabulary: those of them that several devices may hold.
            follow: called at the first step, and if flags have changed since the last one.
        """
        self._parameters, self._names, self._vocabulary = parameters, names, vocabulary
        self._follow = follow
        self._followed: list[bool] | None = None
        self._disputed = 0
        """Number of the parameter that replicas disagree about, from 1; 0 if they agree."""
        self.flags: list[bool] = []
        """Flags of the parameters here, in order."""
        self.fingerprint = 0
        """Of the flags, an int64."""

    def read(self) -> None:
        """Read the flags at the start of a step."""
        flags = [parameter.requires_grad for parameter in self._parameters.values()]
        self._disputed = 0
        if flags != self.flags:
            self.flags = flags
            digest = hashlib.blake2b(bytes(flags), digest_size=8).digest()
            self.fingerprint = int.from_bytes(digest, "little", signed=True)

    def dispute(self, flags: Sequence[Sequence[int]]) -> None:
        """Find the disputed parameter from the flags of all replicas of this device, which have different
        fingerprints."""
        name = next(name for name, *held in zip(self._parameters, *flags, strict=True) if len(set(held)) > 1)
        self._disputed = self._names.index(name) + 1

    def for_devices(self) -> list[int]:
        """Return the numbers that the devices of a pipeline compare: the disputed parameter; then for each vocabulary
        matrix 0 if it is not held here, 1 if it is frozen, 2 if it is trainable."""
        matrices = (self._parameters.get(name) for name in self._vocabulary)
        return [self._disputed, *(0 if matrix is None else 1 + matrix.requires_grad for matrix in matrices)]

    def check(self, devices: Sequence[Sequence[int]]) -> None:
        """Check the numbers of all devices of the pipeline.

        Raises:
            InputError: the processes that hold a parameter disagree. On every process of all pipelines, since each has
                a replica of the disagreeing ones.
        """
        disputed, *matrices = zip(*devices, strict=True)
        found = [(self._names[number - 1], "replicas") for number in disputed if number]
        found += [
            (name, "devices") for name, held in zip(self._vocabulary, matrices, strict=True) if {1, 2} <= set(held)
        ]
        for name, where in found:
            raise InputError(
                f"{name}: requires_grad is True on some {where} and False on others, expected the same on every process"
                " that holds the parameter"
            )

    def follow(self) -> None:
        """Use these flags in the step, after all agree."""
        if self.flags != self._followed:
            self._followed = self.flags
            for one in self._follow:
                one()
