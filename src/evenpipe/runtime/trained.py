"""Which parameters are trainable and which have hooks: read at the start of each step.

A caller may freeze and unfreeze parameters between steps, and register hooks of their gradients. Processes that hold
the same parameter, or parts of one, must agree: replicas do; so do the context ranks and the tensor ranks of a device;
and the devices of a pipeline hold rows of the vocabulary matrices, or the tied one twice. If they did not, copies would
diverge. A process cannot know about a change in another one, so every step compares. The numbers are sent with its
inputs (`batch.py`):

    over replicas    a fingerprint of all flags of a process; if they differ, the flags, to find the parameter
    over devices,    the parameter that replicas disagree about, if any, fingerprints of all flags and of those that
    context and      tensor ranks have in common, and the flags of the vocabulary matrices; if any differ, the flags by
    tensor ranks     parameter of the model, to find it
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from evenpipe.communication.calls import gather_numbers
from evenpipe.communication.communicator import Communicator
from evenpipe.errors import InputError
from evenpipe.words import join

FROZEN, TRAINED = 0, 1
"""Flags of parameters; that of a trained one with hooks is larger, and says how many of each kind."""
TENSOR, CONTEXT = "tensor rank", "context rank"


class Trained:
    """The flags of one process, without communication."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        names: Sequence[str],
        vocabulary: Sequence[str],
        tensor_ranks: int = 1,
        context_ranks: int = 1,
        alone: Collection[str] = (),
        follow: Sequence[Callable[[], None]],
    ) -> None:
        """
        Args:
            parameters: of this process, by name: the same names in all replicas of a device.
            names: of all parameters of the model, in one order on every process.
            vocabulary: those of them that several devices may hold.
            tensor_ranks: of this device; `parameters` are in the same order on all of them.
            context_ranks: of this device, each with as many tensor ranks.
            alone: names of parameters that only the first tensor rank holds.
            follow: called at the first step, and if flags have changed since the last one.
        """
        self._parameters, self._names, self._vocabulary = parameters, names, vocabulary
        self._tensor_ranks, self._context_ranks = tensor_ranks, context_ranks
        self._common = [number for number, name in enumerate(parameters) if name not in alone]
        self._follow = follow
        self._followed: list[int] | None = None
        self._disputed = 0
        """Number of the parameter that replicas disagree about, from 1, negative if only about its hooks; 0 if they
        agree."""
        self.flags: list[int] = []
        """Flags of the parameters here, in order."""
        self.hooked: dict[str, nn.Parameter] = {}
        """Trained parameters with hooks, in the order of the model."""
        self.fingerprint = self._common_fingerprint = 0
        """Of the flags, an int64; and of those that tensor ranks have in common."""
        self._of_vocabulary = [0] * len(vocabulary)
        """As in `by_name`, of the vocabulary matrices."""

    def read(self) -> None:
        """Read the flags at the start of a step."""
        flags = [
            parameter.requires_grad
            and (_hooked(parameter) if parameter._backward_hooks or parameter._post_accumulate_grad_hooks else TRAINED)
            for parameter in self._parameters.values()
        ]
        self._disputed = 0
        if flags != self.flags:
            self.flags = flags
            self.fingerprint = _fingerprint(flags)
            self._common_fingerprint = _fingerprint([flags[number] for number in self._common])
            self._of_vocabulary = self._of(self._vocabulary)
            places = {name: place for place, name in enumerate(self._names)}
            hooked = [name for name, flag in zip(self._parameters, flags, strict=True) if flag > TRAINED]
            self.hooked = {name: self._parameters[name] for name in sorted(hooked, key=places.__getitem__)}

    def dispute(self, flags: Sequence[Sequence[int]]) -> None:
        """Find the disputed parameter from the flags of all replicas of this device, which have different
        fingerprints."""
        by_name = zip(self._parameters, zip(*flags, strict=True), strict=True)
        name, held = next((name, held) for name, held in by_name if len({*held}) > 1)
        number = self._names.index(name) + 1
        self._disputed = number if FROZEN in held else -number

    def for_pipeline(self) -> list[int]:
        """Return the numbers that the processes of a pipeline compare: the disputed parameter; the fingerprints; then
        for each vocabulary matrix 0 if it is not held here, else 1 more than its flag."""
        return [self._disputed, self.fingerprint, self._common_fingerprint, *self._of_vocabulary]

    def agree(self, processes: Sequence[Sequence[int]]) -> bool:
        """Return whether all processes of the pipeline agree, by their numbers: those of a device one after the other,
        context rank by context rank.

        Raises:
            InputError: replicas disagree about a parameter. On every process of all pipelines, since each has a replica
                of the disagreeing ones.
        """
        disputed, fingerprints, common, *matrices = zip(*processes, strict=True)
        for number in disputed:
            if number:
                raise self._error(self._names[abs(number) - 1], "some replicas", "others", hooks=number < 0)
        for axis, _, mates in self._mates(len(processes)):
            if len({*(common if axis == TENSOR else fingerprints)[mates]}) > 1:
                return False
        return all(len({*held} - {0}) <= 1 for held in matrices)

    def _mates(self, processes: int) -> Iterator[tuple[str, int, slice]]:
        """Yield processes of the pipeline that hold the same parameters, but for those that one of them holds alone:
        along which axis they differ, their device, and where they are among all."""
        tensor, of_device = self._tensor_ranks, self._tensor_ranks * self._context_ranks
        for device, first in enumerate(range(0, processes, of_device)):
            if tensor > 1:
                for start in range(first, first + of_device, tensor):
                    yield TENSOR, device, slice(start, start + tensor)
            if self._context_ranks > 1:
                for start in range(first, first + tensor):
                    yield CONTEXT, device, slice(start, first + of_device, tensor)

    def by_name(self) -> list[int]:
        """Return, for each parameter of the model, 0 if it is not held here, else 1 more than its flag."""
        return self._of(self._names)

    def _of(self, names: Sequence[str]) -> list[int]:
        flags = dict(zip(self._parameters, self.flags, strict=True))
        return [1 + flags[name] if name in flags else 0 for name in names]

    def disagreement(self, processes: Sequence[Sequence[int]]) -> InputError:
        """Return the error for the first parameter that processes of the pipeline disagree about, from what `by_name`
        returned on each of them. It is the same on every process of all pipelines, as replicas agree."""
        by_name = zip(self._names, zip(*processes, strict=True), strict=True)
        name, flags = next((name, flags) for name, flags in by_name if len({*flags} - {0}) > 1)
        hooks = 1 + FROZEN not in flags
        if not hooks:
            flags = tuple(min(flag, 1 + TRAINED) for flag in flags)
        for axis, device, mates in self._mates(len(flags)):
            held = {rank: flag for rank, flag in enumerate(flags[mates]) if flag}
            if len({*held.values()}) > 1:
                some = [str(rank) for rank, flag in held.items() if flag == max(held.values())]
                others = [str(rank) for rank in held if str(rank) not in some]
                return self._error(name, _ranks(axis, some), f"{_ranks(axis, others)} of device {device}", hooks=hooks)
        return self._error(name, "some devices", "others", hooks=hooks)

    @staticmethod
    def _error(name: str, some: str, others: str, *, hooks: bool) -> InputError:
        """some: who trains the parameter, or has more hooks."""
        if hooks:
            return InputError(
                f"{name}: {some} and {others} have different gradient hooks, expected the same on every process that"
                " holds the parameter or rows of it"
            )
        return InputError(
            f"{name}: requires_grad is True on {some} and False on {others}, expected the same on every process that"
            " holds the parameter"
        )

    def follow(self) -> None:
        """Use these flags in the step, after all agree."""
        if self.flags != self._followed:
            self._followed = self.flags
            for one in self._follow:
                one()


def _hooked(parameter: nn.Parameter) -> int:
    """Return the flag of a trained parameter with hooks."""
    before, after = parameter._backward_hooks or (), parameter._post_accumulate_grad_hooks or ()
    return TRAINED + 2 * len(before) + (len(after) << 32)


def _ranks(axis: str, numbers: Sequence[str]) -> str:
    return f"{axis}{'' if len(numbers) == 1 else 's'} {join(numbers)}"


def _fingerprint(flags: Sequence[int]) -> int:
    """Return an int64."""
    text = ",".join(map(str, map(int, flags)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def check_trained(
    trained: Trained, processes: list[list[int]], communicator: Communicator | None, torch_device: torch.device
) -> None:
    """Raise InputError on every process if some disagree on parameters or hooks; `processes` are the numbers of all
    processes of the pipeline. Nothing more is sent unless processes of the pipeline disagree."""
    if not trained.agree(processes):
        what = "which parameters are trained"
        raise trained.disagreement(gather_numbers(communicator, trained.by_name(), what, "the step", torch_device))
