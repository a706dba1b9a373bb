"""Which parameters are trainable and which have hooks: read at the start of each step.

A caller may freeze and unfreeze parameters between steps, and register hooks of their gradients. Processes that hold
the same parameter, or parts of one, must agree: replicas do; so do the context ranks and the tensor ranks of a device;
and the devices of a pipeline hold rows of the vocabulary matrices, or the tied one twice. If they did not, copies would
diverge. A process cannot know about a change in another one, so every step compares: fingerprints of all flags of a
process and of those that tensor ranks have in common, and the flags of the vocabulary matrices, which travel with the
first numbers of the step (`batch.py`). If any differ, all processes gather their flags, to name the parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch import nn

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
        on_first_rank: Collection[str] = (),
        follow: Sequence[Callable[[], None]],
    ) -> None:
        """
        Args:
            parameters: of this process, by name: the same names in all replicas of a device.
            names: of all parameters of the model, in one order on every process.
            vocabulary: those of them that several devices may hold.
            tensor_ranks: of this device; `parameters` are in the same order on all of them.
            context_ranks: of this device, each with as many tensor ranks.
            on_first_rank: names of parameters that only the first tensor rank holds.
            follow: called at the first step, and if flags have changed since the last one.
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
        if flags != self.flags:
            self.flags = flags
            self.fingerprint = _fingerprint(flags)
            self._common_fingerprint = _fingerprint([flags[number] for number in self._common])
            self._of_vocabulary = self._of(self._vocabulary)
            order = {name: position for position, name in enumerate(self._names)}
            hooked = [name for name, flag in zip(self._parameters, flags, strict=True) if flag > TRAINED]
            self.hooked = {name: self._parameters[name] for name in sorted(hooked, key=order.__getitem__)}

    def for_all(self) -> list[int]:
        """Return the numbers that processes compare: the fingerprints; then for each vocabulary matrix 0 if it is not
        held here, else 1 more than its flag."""
        return [self.fingerprint, self._common_fingerprint, *self._of_vocabulary]

    def agree(self, processes: Sequence[Sequence[int]], replicas: int) -> bool:
        """Return whether all processes agree, by their numbers: replica by replica, those of a device one after the
        other, context rank by context rank."""
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
        """Yield processes of the pipeline that hold the same parameters, but for those that one of them holds alone:
        along which axis they differ, their device, and where they are among all."""
        tensor, per_device = self._tensor_ranks, self._tensor_ranks * self._context_ranks
        for device, first in enumerate(range(0, processes, per_device)):
            if tensor > 1:
                for start in range(first, first + per_device, tensor):
                    yield TENSOR, device, slice(start, start + tensor)
            if self._context_ranks > 1:
                for start in range(first, first + tensor):
                    yield CONTEXT, device, slice(start, first + per_device, tensor)

    def by_name(self) -> list[int]:
        """Return, for each parameter of the model, 0 if it is not held here, else 1 more than its flag."""
        return self._of(self._names)

    def _of(self, names: Sequence[str]) -> list[int]:
        flags = dict(zip(self._parameters, self.flags, strict=True))
        return [1 + flags[name] if name in flags else 0 for name in names]

    def disagreement(self, processes: Sequence[Sequence[int]], replicas: int) -> InputError:
        """Return the error for the first parameter that replicas disagree about, or else processes of one replica, from
        what `by_name` returned on each of them, in the order of `agree`. It is the same on every process."""
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
        """group: who trains the parameter, or has more hooks."""
        if hooks:
            return InputError(
                f"{name}: {group} and {peers} have different gradient hooks, expected the same on every process that"
                " holds the parameter or rows of it"
            )
        return InputError(
            f"{name}: requires_grad is True on {group} and False on {peers}, expected the same on every process that"
            " holds the parameter"
        )

    def follow(self) -> None:
        """Use these flags in the step, after all agree."""
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
