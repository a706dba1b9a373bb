"""Which parameters are trainable and which have hooks: read at the start of each step.

A caller may freeze and unfreeze parameters between steps, and register gradient hooks on them. Processes that hold the
same parameter, or parts of it, must agree, or copies would diverge: replicas; the context ranks and the tensor ranks of
a device; and the devices of a pipeline, which hold rows of the vocabulary matrices or two copies of the tied one. A
process cannot know about a change in another one, so every step compares fingerprints of all flags of a process and of
those that tensor ranks have in common, and the flags of the vocabulary matrices. They travel with the first numbers of
the step (`batch.py`). If any differ, all processes gather their flags to name the parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch import nn

from evenpipe.errors import InputError
from evenpipe.words import join

FROZEN, TRAINED = 0, 1
"""Flags of parameters. The flag of a trained parameter with hooks is larger, and encodes how many of each kind."""
TENSOR, CONTEXT = "tensor rank", "context rank"


class Trained:
    """The flags of a process; it does not communicate."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        names: Sequence[str],
        vocabulary: Sequence[str],
        tensor_ranks: int = 1,
        context_ranks: int = 1,
        on_first_rank: Collection[str] = (),
        follow: Sequence[Callable[[], None]],
    ) -> None:
        """
        Args:
            parameters: of this process, by name; all replicas of a device have the same names.
            names: of all parameters of the model, in the same order on every process.
            vocabulary: names of parameters that several devices may hold.
            tensor_ranks: number in this device; `parameters` are in the same order on all of them.
            context_ranks: number in this device, each with `tensor_ranks` tensor ranks.
            on_first_rank: names of parameters that only the first tensor rank holds.
            follow: functions to call at the first step, and whenever flags have changed since the last one.
        """
        self._parameters, self._names, self._vocabulary = parameters, names, vocabulary
        self._tensor_ranks, self._context_ranks = tensor_ranks, context_ranks
        self._common = [number for number, name in enumerate(parameters) if name not in on_first_rank]
        self._follow = follow
        self._followed: list[int] | None = None
        self.flags: list[int] = []
        """Flags of the parameters here, in order."""
        self.hooked: dict[str, nn.Parameter] = {}
        """Trained parameters with hooks, in the order of the model."""
        self.fingerprint = self._common_fingerprint = 0
        """int64 fingerprints of all flags, and of those that tensor ranks have in common."""
        self._of_vocabulary = [0] * len(vocabulary)
        """Like `by_name`, for the vocabulary matrices only."""

    def read(self) -> None:
        """Read the flags at the start of a step."""
        flags = [
            parameter.requires_grad
            and (_hooked(parameter) if parameter._backward_hooks or parameter._post_accumulate_grad_hooks else TRAINED)
            for parameter in self._parameters.values()
        ]
        if flags != self.flags:
            self.flags = flags
            self.fingerprint = _fingerprint(flags)
            self._common_fingerprint = _fingerprint([flags[number] for number in self._common])
            self._of_vocabulary = self._of(self._vocabulary)
            order = {name: position for position, name in enumerate(self._names)}
            hooked = [name for name, flag in zip(self._parameters, flags, strict=True) if flag > TRAINED]
            self.hooked = {name: self._parameters[name] for name in sorted(hooked, key=order.__getitem__)}

    def for_all(self) -> list[int]:
        """Return the numbers that processes compare: both fingerprints, then for each vocabulary matrix its flag plus
        1, or 0 if it is not held here."""
        return [self.fingerprint, self._common_fingerprint, *self._of_vocabulary]

    def agree(self, processes: Sequence[Sequence[int]], replicas: int) -> bool:
        """Return whether the numbers of all processes agree. Their order: by replica, then by device, by context rank
        and by tensor rank."""
        per_replica = len(processes) // replicas
        first_replica = processes[:per_replica]
        if any(
            processes[start : start + per_replica] != first_replica
            for start in range(per_replica, len(processes), per_replica)
        ):
            return False
        fingerprints, common, *matrices = zip(*first_replica, strict=True)
        for axis, _, mates in self._mates(per_replica):
            if len({*(common if axis == TENSOR else fingerprints)[mates]}) > 1:
                return False
        return all(len({*held} - {0}) <= 1 for held in matrices)

    def _mates(self, processes: int) -> Iterator[tuple[str, int, slice]]:
        """Yield groups of the pipeline's processes that hold the same parameters, except for parameters that only one
        of them holds: the axis along which they differ, their device, and their slice of the list of processes."""
        tensor, per_device = self._tensor_ranks, self._tensor_ranks * self._context_ranks
        for device, first in enumerate(range(0, processes, per_device)):
            if tensor > 1:
                for start in range(first, first + per_device, tensor):
                    yield TENSOR, device, slice(start, start + tensor)
            if self._context_ranks > 1:
                for start in range(first, first + tensor):
                    yield CONTEXT, device, slice(start, first + per_device, tensor)

    def by_name(self) -> list[int]:
        """Return for each parameter of the model its flag plus 1, or 0 if it is not held here."""
        return self._of(self._names)

    def _of(self, names: Sequence[str]) -> list[int]:
        flags = dict(zip(self._parameters, self.flags, strict=True))
        return [1 + flags[name] if name in flags else 0 for name in names]

    def disagreement(self, processes: Sequence[Sequence[int]], replicas: int) -> InputError:
        """Return the error for the first parameter on which replicas, or else processes of a replica, disagree.

        processes: what `by_name` returned on each process, in the order of `agree`. The error is the same on all of
        them.
        """
        per_replica = len(processes) // replicas
        for position in range(per_replica):
            for name, flags in zip(self._names, zip(*processes[position::per_replica], strict=True), strict=True):
                if len({*flags}) > 1:
                    return self._error(name, "some replicas", "others", hooks=1 + FROZEN not in flags)
        by_name = zip(self._names, zip(*processes[:per_replica], strict=True), strict=True)
        name, flags = next((name, flags) for name, flags in by_name if len({*flags} - {0}) > 1)
        hooks = 1 + FROZEN not in flags
        if not hooks:
            flags = tuple(min(flag, 1 + TRAINED) for flag in flags)
        for axis, device, mates in self._mates(per_replica):
            held = {rank: flag for rank, flag in enumerate(flags[mates]) if flag}
            if len({*held.values()}) > 1:
                some_ranks = [str(rank) for rank, flag in held.items() if flag == max(held.values())]
                other_ranks = [str(rank) for rank in held if str(rank) not in some_ranks]
                return self._error(
                    name, _ranks(axis, some_ranks), f"{_ranks(axis, other_ranks)} of device {device}", hooks=hooks
                )
        return self._error(name, "some devices", "others", hooks=hooks)

    @staticmethod
    def _error(name: str, group: str, peers: str, *, hooks: bool) -> InputError:
        """group: the processes that train the parameter, or have more hooks."""
        if hooks:
            return InputError(
                f"{name}: {group} and {peers} have different gradient hooks; expected the same on every process that"
                " holds the parameter or rows of it"
            )
        return InputError(
            f"{name}: requires_grad is True on {group} and False on {peers}; expected the same on every process that"
            " holds the parameter"
        )

    def follow(self) -> None:
        """Apply the flags to the step, once all processes agree."""
        if self.flags != self._followed:
            self._followed = self.flags
            for callback in self._follow:
                callback()


def _hooked(parameter: nn.Parameter) -> int:
    """Return the flag of a trained parameter with hooks."""
    gradient_hooks, accumulate_hooks = parameter._backward_hooks or (), parameter._post_accumulate_grad_hooks or ()
    return TRAINED + 2 * len(gradient_hooks) + (len(accumulate_hooks) << 32)


def _ranks(axis: str, numbers: Sequence[str]) -> str:
    return f"{axis}{'' if len(numbers) == 1 else 's'} {join(numbers)}"


def _fingerprint(flags: Sequence[int]) -> int:
    """Return an int64."""
    text = ",".join(map(str, map(int, flags)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
