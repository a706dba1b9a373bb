"""The peak of a device in a step, its moment and its parts: its row of a program, with bytes.

    replay(program, device, stages, vocabulary, state)      # DeviceMemory

A row is replayed once for all sizes (`walk`); each set of sizes then takes one product of a small matrix and a vector.
Communication and the overhead of an allocator are not tensors and are counted elsewhere (`reserved`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from evenpipe.memory.bytes import DeviceMemory, PartBytes, StageBytes, StateBytes, VocabularyBytes
from evenpipe.memory.things import NO_STAGE, TERMS, Thing
from evenpipe.memory.walk import walk
from evenpipe.schedule import Program

OPTIMIZER_STEP = "optimizer step"


def replay(
    program: Program,
    device: int,
    stages: Mapping[int, StageBytes],
    vocabulary: VocabularyBytes,
    state: StateBytes,
    *,
    batch: int = 0,
    gradients_exist: bool = True,
    buffers_exist: bool = True,
    curve: bool = False,
) -> DeviceMemory:
    """Return the peak of one device over a training step and the optimizer's step after it.

    Args:
        stages: at least those of the device, by number.
        vocabulary: of this device.
        state: its gradients are those of all parameters of the device.
        batch: bytes of the step's inputs, which stay from its beginning to its end (`vocabulary.batch_bytes`).
        gradients_exist: when the step begins. In our own runtime they do not: `zero_grad` drops them.
        buffers_exist: as after the first step; matters if the vocabulary's bytes have `handed_on` or `room`.
        curve: also the bytes after every item of the row.
    """
    found = Replay(program, device, gradients_exist=gradients_exist, buffers_exist=buffers_exist)
    return found.memory(stages, vocabulary, state, batch=batch, curve=curve)


class Replay:
    """A walk as arrays, for any sizes."""

    def __init__(self, program: Program, device: int, *, gradients_exist: bool, buffers_exist: bool = True) -> None:
        walked = walk(program, device, gradients_exist=gradients_exist, buffers_exist=buffers_exist)
        self._walk = walked
        self._gradients_exist = gradients_exist
        self._counts = np.array([moment.counts for moment in walked.moments], dtype=np.int64)
        self._above = np.array([moment.above for moment in walked.moments], dtype=np.int64)
        self._after = np.array(walked.after, dtype=np.int64)
        self._rooms = np.array(walked.rooms, dtype=np.int64)
        self._terms = [TERMS.index(thing.term) for thing in walked.things]

    def memory(
        self,
        stages: Mapping[int, StageBytes],
        vocabulary: VocabularyBytes,
        state: StateBytes,
        *,
        batch: int,
        curve: bool = False,
    ) -> DeviceMemory:
        """Arguments as for `replay`."""
        things = self._walk.things
        sizes = np.array([_size(thing, stages, vocabulary) for thing in things], dtype=np.int64)
        always = state.parameters + state.copies + state.unsharded + state.optimizer + batch
        if self._gradients_exist:
            always += state.gradients
        held: NDArray[np.int64] = self._counts @ sizes
        whole = held + np.append(sizes, 0)[self._above]
        moment = int(whole.argmax()) if len(whole) else -1
        peak = always + int(whole[moment]) if len(whole) else always
        at_step = state.total + state.step_peak + int(self._rooms @ sizes)
        values = tuple(int(size) for size in held[self._after] + always) if curve else ()
        if at_step > peak or moment < 0:
            terms = self._fixed(state, 0, gradients=True)
            terms["vocabulary"] += int(self._rooms @ sizes)
            terms["transient"] += state.step_peak
            return DeviceMemory(peak=at_step, binding_event=OPTIMIZER_STEP, terms=terms, curve=values)
        terms = self._fixed(state, batch, gradients=self._gradients_exist)
        terms["parameters"] += state.unsharded
        shares = self._counts[moment] * sizes
        for term, share in zip(self._terms, shares, strict=True):
            terms[TERMS[term]] += int(share)
        terms["transient"] += int(whole[moment] - held[moment])
        return DeviceMemory(peak=peak, binding_event=self._walk.labels[moment], terms=terms, curve=values)

    @staticmethod
    def _fixed(state: StateBytes, batch: int, *, gradients: bool) -> dict[str, int]:
        """Return the bytes that do not depend on the moment."""
        return {
            "parameters": state.parameters + state.copies,
            "gradients": state.gradients if gradients else 0,
            "optimizer": state.optimizer,
            "activations": 0,
            "vocabulary": 0,
            "buffers": batch,
            "transient": 0,
        }


# --- sizes ----------------------------------------------------------------------------------------------------------

RECOMPUTED = "recomputed_"


def _size(thing: Thing, stages: Mapping[int, StageBytes], vocabulary: VocabularyBytes) -> int:
    """Return the bytes of a thing. Its name is a field, with the fields that lead to it, or one of those below."""
    name = thing.size
    if thing.stage == NO_STAGE:
        of_vocabulary = _OF_VOCABULARY.get(name, _field(name))
        return int(of_vocabulary(vocabulary))
    stage = stages[thing.stage]
    if name == "copied_gradient":
        return 0 if vocabulary.gradient == stage.output else stage.output
    if name.startswith(RECOMPUTED):
        stage, name = stage.recomputed or stage, name.removeprefix(RECOMPUTED)
    given = None if name in _ONLY_DERIVED else _field(name)(stage)
    return int(_OF_STAGE[name](stage) if given is None else given)


def _reduced(part: PartBytes) -> int:
    return part.gradients if part.reduced is None else part.reduced


_field = cache(attrgetter)


_OF_VOCABULARY: Mapping[str, Callable[[VocabularyBytes], int]] = {
    "stored": lambda one: one.stored - one.product - one.handed_on,
    "parameters.reduced": lambda one: _reduced(one.parameters),
    "embedding.parameters.reduced": lambda one: _reduced(one.embedding.parameters),
    "peaks.output": lambda one: one.peaks.output - one.handed_on,
}
"""`product` and `handed_on` are separate things."""

_OF_STAGE: Mapping[str, Callable[[StageBytes], int]] = {
    "moved": lambda one: one.input + one.stored,
    "unmoved": lambda one: 0 if one.moved is None else one.input + one.stored - one.moved,
    "weight_gradients": lambda one: one.parameters.gradients - one.parameters.input_gradients,
    "parameters.reduced": lambda one: _reduced(one.parameters),
    "peaks.bare_forward": lambda one: one.peaks.forward,
    "peaks.first_backward": lambda one: one.peaks.backward + one.parameters.gradients,
    "peaks.first_input": lambda one: one.peaks.input + one.parameters.input_gradients,
    "peaks.first_weight": lambda one: one.peaks.weight + one.parameters.gradients - one.parameters.input_gradients,
}
"""Things that are not given directly."""
_ONLY_DERIVED = ("unmoved", "weight_gradients")
"""Those that are no fields."""
