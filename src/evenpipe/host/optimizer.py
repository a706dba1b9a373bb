"""AdamW whose moments, or a share of them, are on the host and visit the device bucket by bucket.

    host    | bucket 0 | bucket 1 | bucket 2 | ...         exp_avg and exp_avg_sq
                 v  ^       v  ^
    device     update      (in transit)                    parameters and gradients

torch updates on the device with any share, so the bits are those of `torch.optim.AdamW`, fused or not. Buckets end at
multiples of 64 elements of a parameter, where the fused kernels cut as well.

On a GPU, moments are in pinned host memory and copies have two streams: during the update of a bucket the next one
comes and the previous one leaves, and the host waits once, at the end of the step. On the CPU, moments are in an
unnamed file that is mapped into memory: the update works on it in place and releases its pages bucket by bucket, so
that at most one bucket is resident.

The state has the form of torch's, one tensor of the parameter's shape by name, so checkpoints do not depend on the
share.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from evenpipe.errors import InputError
from evenpipe.host.pool import PinnedSlab, carve, unnamed_file
from evenpipe.optimizers.held import loss_of
from evenpipe.words import refused

MOMENTS = ("exp_avg", "exp_avg_sq")
BUCKET_BYTES = 64 * 2**20
"""Bytes of a moment. Three buckets of two moments are on a GPU at a time: one comes, one is updated, one leaves."""
_WIDTH = 64
"""Elements. Cuts of a parameter at multiples of it do not change the bits of a fused update."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of a parameter's elements."""

    parameter: nn.Parameter
    first: int
    last: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.view(-1)[self.first : self.last]


class HostAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with a share of its moments on the host.

    Args:
        params: parameters or groups of them; none on a process without a trainable parameter.
        share: share of all elements, 0 to 1, whose moments are on the host: whole parameters, the largest first, as
            many as fit.
        directory: on the CPU, directory of the file; None: the system's directory for temporary files.
        bucket_bytes: bytes of a moment per bucket.
        options: as for `torch.optim.AdamW`, except amsgrad, capturable and differentiable.

    Raises:
        InputError: a share outside 0 to 1, an option that is not supported, or a directory without enough space.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        share: float = 1.0,
        directory: str | Path | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        **options: Any,
    ) -> None:
        if isinstance(share, bool) or not 0 <= share <= 1:
            raise refused("share", share, "a number from 0 to 1")
        for name in ("amsgrad", "capturable", "differentiable"):
            if options.get(name):
                raise InputError(f"{name} is True; it must be False with moments on the host")
        if not isinstance(params, Tensor):  # which torch refuses
            params = list(params) or [{"params": []}]  # torch refuses an empty list
        super().__init__(params, **options)
        self._bucket_bytes = bucket_bytes
        self._hosted = _largest(
            (parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad),
            share,
        )
        self._host = _pinned([parameter for parameter in self._hosted if parameter.device.type != "cpu"])
        """By parameter and name, moments of the parameter's shape on the host."""
        in_file, self._map = _in_file(
            [parameter for parameter in self._hosted if parameter.device.type == "cpu"], directory
        )
        self._host |= in_file
        self._streams: tuple[Any, Any] | None = None

    @property
    def hosted(self) -> frozenset[nn.Parameter]:
        """The parameters whose moments are on the host."""
        return frozenset(self._hosted)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters, as `torch.optim.AdamW` does."""
        loss = loss_of(closure)
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                self._state_of(parameter, group)
            on_device: list[Tensor] = [parameter for parameter in trained if parameter not in self._hosted]
            states = [self.state[parameter] for parameter in on_device]
            moments = [[state[name] for state in states] for name in MOMENTS]
            gradients = [_gradient(parameter) for parameter in on_device]
            _update(group, on_device, gradients, moments, [state["step"] for state in states])
            pieces = [piece for parameter in trained if parameter in self._hosted for piece in self._pieces(parameter)]
            self._stream(group, pieces)
            for parameter in trained:
                if parameter in self._hosted:
                    self.state[parameter]["step"].add_(1)
        if self._streams is not None:
            self._streams[1].synchronize()  # afterwards a checkpoint, for example, may read the host memory
        return loss

    # --- state -------------------------------------------------------------------------------------------------

    def moment_on_host(self, parameter: nn.Parameter, name: str) -> Tensor | None:
        """Return the host memory of a moment; None if it is on the device. A caller that fills it before the first step
        must also put it into the state, which does not have it yet."""
        return self._host.get((parameter, name))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but without copying moments of the host to the device."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        states, moments = dict(state_dict["state"]), []
        for number, parameter in zip(numbers, held, strict=False):  # torch reports different lengths
            if parameter in self._hosted and number in states:
                state = dict(states[number])
                removed = {name: state.pop(name) for name in MOMENTS if name in state}
                states[number] = state
                moments.append((parameter, removed))
        super().load_state_dict({**state_dict, "state": states})
        for parameter, removed in moments:
            for name, moment in removed.items():
                self.state[parameter][name] = self._host[parameter, name].copy_(moment)

    def _state_of(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Make sure that a parameter has its state, on the host if it belongs there."""
        state = self.state[parameter]
        if not state:
            on_device = group["fused"]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            for name in MOMENTS:
                if parameter not in self._hosted:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if parameter not in self._hosted:
            return
        for name in MOMENTS:
            hosted = self._host[parameter, name]
            moment = state.get(name)
            if moment is not hosted:  # in the first step, or after loading a checkpoint
                hosted.zero_() if moment is None else hosted.copy_(moment)
                state[name] = hosted

    def _pieces(self, parameter: nn.Parameter) -> Iterator[_Piece]:
        elements = max(_WIDTH, self._bucket_bytes // parameter.element_size() // _WIDTH * _WIDTH)
        for first in range(0, parameter.numel(), elements):
            yield _Piece(parameter, first, min(first + elements, parameter.numel()))

    # --- the update --------------------------------------------------------------------------------------------

    def _update_piece(self, group: dict[str, Any], piece: _Piece, first: Tensor, second: Tensor) -> None:
        """Update a piece with these moments; its step count stays."""
        gradient = _gradient(piece.parameter).contiguous()
        step = self.state[piece.parameter]["step"].clone()
        _update(group, [piece.of(piece.parameter)], [piece.of(gradient)], [[first], [second]], [step])

    def _stream(self, group: dict[str, Any], pieces: list[_Piece]) -> None:
        """Update pieces whose moments are on the host."""
        if pieces and pieces[0].parameter.device.type != "cpu":
            self._stream_to_gpu(group, pieces)
            return
        for piece in pieces:
            self._update_piece(group, piece, *(piece.of(self.state[piece.parameter][name]) for name in MOMENTS))
            if self._map is not None:
                self._map.madvise(mmap.MADV_DONTNEED)  # release its pages from memory, until they are used again

    def _stream_to_gpu(self, group: dict[str, Any], pieces: list[_Piece]) -> None:
        """Update piece by piece: the next one comes during the update of the current one. The computing stream
        allocates and frees the memory, after the copies that read it."""
        device = pieces[0].parameter.device
        if self._streams is None:
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        inward, outward = self._streams
        computing = torch.cuda.current_stream(device)
        gone: list[tuple[Any, list[Tensor]]] = []

        def fetch(piece: _Piece) -> tuple[Any, list[Tensor]]:
            while len(gone) > 1:  # the previous bucket may leave while this one comes; wait for the one before it
                computing.wait_event(gone[0][0])
                del gone[0]  # frees its memory
            size, dtype = piece.last - piece.first, piece.parameter.dtype
            moments = [torch.empty(size, dtype=dtype, device=device) for _ in MOMENTS]
            inward.wait_stream(computing)  # wait until its memory is free
            with torch.cuda.stream(inward):
                for name, moment in zip(MOMENTS, moments, strict=True):
                    moment.copy_(piece.of(self.state[piece.parameter][name]), non_blocking=True)
                return inward.record_event(), moments

        coming = [fetch(pieces[0])]
        for number, piece in enumerate(pieces):
            arrived, moments = coming.pop()
            if number + 1 < len(pieces):
                coming.append(fetch(pieces[number + 1]))
            computing.wait_event(arrived)
            self._update_piece(group, piece, *moments)
            outward.wait_stream(computing)
            with torch.cuda.stream(outward):
                for name, moment in zip(MOMENTS, moments, strict=True):
                    piece.of(self.state[piece.parameter][name]).copy_(moment, non_blocking=True)
                gone.append((outward.record_event(), moments))
        for event, _ in gone:
            computing.wait_event(event)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _update(
    group: dict[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    moments: list[list[Tensor]],
    steps: list[Tensor],
) -> None:
    """Update parameters, `moments` (a list of the first and one of the second ones) and step counts with torch."""
    if not parameters:
        return
    names = ("foreach", "fused", "lr", "weight_decay", "eps", "maximize")
    options: dict[str, Any] = {name: group[name] for name in names}
    (first, second), (beta1, beta2) = moments, group["betas"]
    unused: dict[str, Any] = {"grad_scale": None, "found_inf": None, "amsgrad": False}
    adamw(parameters, gradients, first, second, [], steps, beta1=beta1, beta2=beta2, **options, **unused)


def _largest(parameters: Iterable[nn.Parameter], share: float) -> dict[nn.Parameter, None]:
    """Return the largest non-empty parameters that together do not exceed a share of all elements."""
    ordered = sorted(parameters, key=lambda parameter: -parameter.numel())
    left = share * sum(parameter.numel() for parameter in ordered) * (1 + 1e-12)
    chosen: dict[nn.Parameter, None] = {}
    for parameter in ordered:
        if 0 < parameter.numel() <= left:
            chosen[parameter] = None
            left -= parameter.numel()
    return chosen


def _pinned(parameters: list[nn.Parameter]) -> dict[tuple[nn.Parameter, str], Tensor]:
    """Return moments in few pinned slabs: the size of each moment would be rounded up to a power of two."""
    keys = [(parameter, name) for parameter in parameters for name in MOMENTS]
    sizes, slots = carve([parameter.nbytes for parameter, _ in keys])
    slabs = [PinnedSlab(size) for size in sizes]
    return {
        (parameter, name): slabs[slot.slab].view(slot, parameter.nbytes).view(parameter.dtype).view(parameter.shape)
        for (parameter, name), slot in zip(keys, slots, strict=True)
    }


def _in_file(
    parameters: list[nn.Parameter], directory: str | Path | None
) -> tuple[dict[tuple[nn.Parameter, str], Tensor], mmap.mmap | None]:
    """Return moments in a file that is mapped into memory, and its map. Raises InputError if the directory does not
    exist or has no room for it."""
    if not parameters:
        return {}, None
    sizes = [-(-parameter.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for parameter in parameters]
    size = len(MOMENTS) * sum(sizes)
    with unnamed_file(size, directory, "directory") as file:
        mapped = mmap.mmap(file.fileno(), size)
    moments, offset = {}, 0
    for parameter, bytes_ in zip(parameters, sizes, strict=True):
        for name in MOMENTS:
            flat = torch.frombuffer(mapped, dtype=parameter.dtype, count=parameter.numel(), offset=offset)
            moments[parameter, name] = flat.view(parameter.shape)
            offset += bytes_
    return moments, mapped
