"""Replays a device's row of a program with bytes: its peak in a step, the moment of the peak, and its parts.

    Replay(program, device).memory(stages, vocabulary, state)      # DeviceMemory

A row is replayed once for all sizes (`walk`); each set of sizes then takes one product of a small matrix and a vector.
Communication and the overhead of an allocator are not tensors and are counted elsewhere (`reserved`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from evenpipe.memory.allocations import NO_STAGE, Allocation, label_of
from evenpipe.memory.bytes import TERMS, DeviceMemory, StageBytes, StateBytes, VocabularyBytes
from evenpipe.memory.walk import walk
from evenpipe.schedule import Program

OPTIMIZER_STEP = "optimizer step"
SUMS = "sums over tensor ranks"


class Replay:
    """A device's row, walked once, for any sizes.

    Args:
        gradients_exist: whether gradients exist when the step begins. In our runtime they do not: `zero_grad` frees
            them.
        buffers_exist: whether buffers exist, as after the first step; matters only if the vocabulary's bytes have
            `handed_on` or `room`.
        places_rows, slice_tokens: as for `walk`.
    """

    def __init__(
        self,
        program: Program,
        device: int,
        *,
        gradients_exist: bool = True,
        buffers_exist: bool = True,
        places_rows: bool = False,
        slice_tokens: Sequence[int] = (),
    ) -> None:
        self._walk = walked = walk(
            program,
            device,
            gradients_exist=gradients_exist,
            buffers_exist=buffers_exist,
            places_rows=places_rows,
            slice_tokens=slice_tokens,
        )
        self._gradients_exist = gradients_exist
        self._counts = walked.counts.astype(np.int64)
        self._above = np.array(walked.above, dtype=np.int64)
        self._moments_after = np.array(walked.moments_after, dtype=np.int64)
        self._rooms = np.array(walked.rooms, dtype=np.int64)
        self._allocations = walked.allocations

    def memory(
        self,
        stages: Mapping[int, StageBytes],
        vocabulary: VocabularyBytes,
        state: StateBytes,
        *,
        later: Sequence[tuple[Mapping[int, StageBytes], VocabularyBytes]] = (),
        batch: int = 0,
        curve: bool = False,
    ) -> DeviceMemory:
        """Return the peak of the device over a training step and the optimizer's step after it.

        Args:
            stages: bytes by stage number, at least for the device's stages.
            vocabulary: bytes of this device's vocabulary layers.
            later: stages and vocabulary of each slice but the first, if sequences are cut into slices.
            state: permanent bytes; its gradients are those of all parameters of the device.
            batch: bytes of the step's inputs, which live throughout the step (`vocabulary.batch_bytes`).
            curve: whether to return the bytes after every item of the row, too.
        """
        slices = ((stages, vocabulary), *later)
        sizes = np.array(
            [_size_of(allocation, *slices[allocation.slice or 0]) for allocation in self._allocations], dtype=np.int64
        )
        always = state.parameters + state.copies + state.unsharded + state.optimizer + batch
        if self._gradients_exist:
            always += state.gradients
        held: NDArray[np.int64] = self._counts @ sizes
        totals = held + np.append(sizes, 0)[self._above]
        moment = int(totals.argmax()) if len(totals) else -1
        event = label_of(self._walk.items[moment]) if len(totals) else ""
        if len(self._moments_after) and held[self._moments_after[-1]] + state.summing_peak > totals[moment]:
            moment, event = int(self._moments_after[-1]), SUMS
            totals[moment] = held[moment] + state.summing_peak
        peak = always + int(totals[moment]) if len(totals) else always
        rooms = int(self._rooms @ sizes)
        at_step = state.total + state.step_peak + rooms
        values = tuple(int(size) for size in held[self._moments_after] + always) if curve else ()
        terms = dict.fromkeys(TERMS, 0)
        terms |= {"parameters": state.parameters + state.copies, "optimizer": state.optimizer}
        if at_step > peak or moment < 0:
            terms |= {"gradients": state.gradients, "vocabulary": rooms, "transient": state.step_peak}
            return DeviceMemory(peak=at_step, binding_event=OPTIMIZER_STEP, terms=terms, curve=values)
        terms |= {"gradients": state.gradients if self._gradients_exist else 0, "buffers": batch}
        terms["parameters"] += state.unsharded
        for allocation, share in zip(self._allocations, self._counts[moment] * sizes, strict=True):
            terms[allocation.term] += int(share)
        terms["transient"] += int(totals[moment] - held[moment])
        return DeviceMemory(peak=peak, binding_event=event, terms=terms, curve=values)


_NOTHING = StageBytes(input=0, output=0, stored=0, queued=0)


def _size_of(allocation: Allocation, stages: Mapping[int, StageBytes], vocabulary: VocabularyBytes) -> int:
    return allocation.size(_NOTHING if allocation.stage == NO_STAGE else stages[allocation.stage], vocabulary)
