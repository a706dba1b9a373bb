"""Which parameters are trainable: their `requires_grad`, read at the start of each step.

A caller may freeze and unfreeze parameters between steps. Processes that hold the same parameter, or parts of one, must
agree: replicas do; so do the tensor ranks of a device; and the devices of a pipeline hold rows of the vocabulary
matrices, or the tied one twice. A process cannot know about a change in another one, so every step compares. The
numbers are sent with its inputs (`batch.py`):

    over replicas    a fingerprint of all flags of a process; if they differ, the flags, to find the parameter
    over devices     the parameter that replicas disagree about, if any, a fingerprint of the flags that tensor ranks
                     have in common, and the flags of the vocabulary matrices
    and tensor ranks only if these fingerprints differ: the flags, to find the parameter
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from evenpipe.communication.communicator import Communicator
from evenpipe.errors import InputError
from evenpipe.schedule.words import join


class Trained:
    """The flags of one process, without communication."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        names: Sequence[str],
        vocabulary: Sequence[str],
        tensor_ranks: int = 1,
        alone: Collection[str] = (),
        follow: Sequence[Callable[[], None]],
    ) -> None:
        """
        Args:
            parameters: of this process, by name: the same names in all replicas of a device.
            names: of all parameters of the model, in one order on every process.
            vocabulary: those of them that several devices may hold.
            tensor_ranks: of this device; `parameters` are in the same order on all of them.
            alone: names of parameters that only the first of them holds.
            follow: called at the first step, and if flags have changed since the last one.
        """
        self._parameters, self._names, self._vocabulary = parameters, names, vocabulary
        self._tensor_ranks = tensor_ranks
        self._common = [number for number, name in enumerate(parameters) if name not in alone]
        self._follow = follow
        self._followed: list[bool] | None = None
        self._disputed = 0
        """Number of the parameter that replicas disagree about, from 1; 0 if they agree."""
        self.flags: list[bool] = []
        """Flags of the parameters here, in order."""
        self.fingerprint = self._common_fingerprint = 0
        """Of the flags, an int64; and of those that tensor ranks have in common."""

    def read(self) -> None:
        """Read the flags at the start of a step."""
        flags = [parameter.requires_grad for parameter in self._parameters.values()]
        self._disputed = 0
        if flags != self.flags:
            self.flags = flags
            self.fingerprint, self._common_fingerprint = _fingerprint(flags), _fingerprint(self.common_flags)

    @property
    def common_flags(self) -> list[bool]:
        """Flags of the parameters that all tensor ranks of the device hold, or parts of them."""
        return [self.flags[number] for number in self._common]

    def dispute(self, flags: Sequence[Sequence[int]]) -> None:
        """Find the disputed parameter from the flags of all replicas of this device, which have different
        fingerprints."""
        self._disputed = self._number(list(self._parameters), flags)

    def _number(self, names: Sequence[str], flags: Sequence[Sequence[int]]) -> int:
        """Return the number, from 1, of the first of these parameters whose flags differ."""
        name = next(name for name, *held in zip(names, *flags, strict=True) if len(set(held)) > 1)
        return self._names.index(name) + 1

    def for_devices(self) -> list[int]:
        """Return the numbers that the processes of a pipeline compare: the disputed parameter; the fingerprint of
        tensor ranks; then for each vocabulary matrix 0 if it is not held here, 1 if it is frozen, 2 if it is
        trainable."""
        matrices = (self._parameters.get(name) for name in self._vocabulary)
        held = (0 if matrix is None else 1 + matrix.requires_grad for matrix in matrices)
        return [self._disputed, self._common_fingerprint, *held]

    def check(self, processes: Sequence[Sequence[int]]) -> list[int]:
        """Check the numbers of all processes of the pipeline, device by device; return the devices whose tensor ranks
        disagree, for `disagreement`.

        Raises:
            InputError: replicas, or devices whose tensor ranks agree, disagree about a parameter. On every process of
                all pipelines, since each has a replica of the disagreeing ones.
        """
        disputed, fingerprints, *matrices = zip(*processes, strict=True)
        ranks = self._tensor_ranks
        for number in disputed:
            if number:
                raise self._error(number, "some replicas", "others")
        by_device = [fingerprints[first : first + ranks] for first in range(0, len(fingerprints), ranks)]
        differing = [device for device, found in enumerate(by_device) if len(set(found)) > 1]
        for name, held in zip(self._vocabulary, matrices, strict=True):
            if not differing and {1, 2} <= set(held):
                raise self._error(self._names.index(name) + 1, "some devices", "others")
        return differing

    def disagreement(self, flags: Sequence[Sequence[int]]) -> list[int]:
        """Return the number of the parameter that tensor ranks of this device disagree about, from their common flags,
        and its flag on each of them."""
        parameters = list(self._parameters)
        names = [parameters[number] for number in self._common]
        number = self._number(names, flags)
        place = names.index(self._names[number - 1])
        return [number, *(held[place] for held in flags)]

    def disagreement_error(self, device: int, found: Sequence[int]) -> InputError:
        """Return the error for what `disagreement` has found on a device."""
        number, *flags = found

        def ranks(wanted: int) -> str:
            numbers = [str(rank) for rank, flag in enumerate(flags) if flag == wanted]
            return f"{'tensor rank' if len(numbers) == 1 else 'tensor ranks'} {join(numbers)}"

        return self._error(number, ranks(1), f"{ranks(0)} of device {device}")

    def _error(self, number: int, trains: str, freezes: str) -> InputError:
        return InputError(
            f"{self._names[number - 1]}: requires_grad is True on {trains} and False on {freezes}, expected the same on"
            " every process that holds the parameter"
        )

    def follow(self) -> None:
        """Use these flags in the step, after all agree."""
        if self.flags != self._followed:
            self._followed = self.flags
            for one in self._follow:
                one()


def _fingerprint(flags: Sequence[bool]) -> int:
    """Return an int64."""
    return int.from_bytes(hashlib.blake2b(bytes(flags), digest_size=8).digest(), "little", signed=True)


def check_trained(
    trained: Trained,
    processes: list[list[int]],
    communicator: Communicator | None,
    tensor: Communicator | None,
    torch_device: torch.device,
) -> None:
    """Raise InputError on every process if some disagree on the trainable parameters; `processes` are the numbers of
    all processes of the pipeline. Nothing more is sent unless tensor ranks disagree."""
    differing = trained.check(processes)
    if not differing:
        return
    assert communicator is not None and tensor is not None
    what = "which parameters are trained"
    own_device = communicator.position // len(tensor.members)
    found = [0] * (1 + len(tensor.members))
    if own_device in differing:
        found = trained.disagreement(gather(tensor, list(map(int, trained.common_flags)), what, torch_device))
    table = gather(communicator, found, what, torch_device)
    raise trained.disagreement_error(differing[0], table[differing[0] * len(tensor.members)])


def gather(
    communicator: Communicator | None, numbers: list[int], what: str, torch_device: torch.device
) -> list[list[int]]:
    """Return the numbers of all members, in order, on each of them; only one's own without others."""
    if communicator is None:
        return [numbers]
    own = torch.tensor(numbers, dtype=torch.int64, device=torch_device)
    table = own.new_empty((len(communicator.members), len(numbers)))
    communicator.all_gather(table, own, what).wait("the step")
    return table.tolist()
