"""The things that a device can hold, by name: each has its bytes in `StageBytes` or `VocabularyBytes` (`replay`)."""

from __future__ import annotations

from typing import NamedTuple

NO_STAGE = -1
"""Stage number of things without a stage."""
RECOMPUTED = "recomputed_"
"""Prefix of the sizes of a microbatch that has R."""


class Thing(NamedTuple):
    """A thing and the source of its bytes: a field, or one of those that `replay` derives."""

    size: str
    stage: int
    term: str


PARAMETERS, ACTIVATIONS, VOCABULARY = "parameters", "activations", "vocabulary"
BUFFERS, GRADIENTS, TRANSIENT = "buffers", "gradients", "transient"


def peak(size: str, stage: int = NO_STAGE) -> Thing:
    return Thing(size, stage, TRANSIENT)


def input_of(stage: int) -> Thing:
    return Thing("input", stage, ACTIVATIONS)


def output_buffer(stage: int) -> Thing:
    """Return a stage's output, on its way to the next stage; or on the way back the gradient of it."""
    return Thing("output", stage, BUFFERS)


def input_buffer(stage: int) -> Thing:
    """Return a stage's input, as it arrives; or the gradient of it, on its way back."""
    return Thing("input", stage, BUFFERS)


def moved_of(stage: int) -> tuple[Thing, Thing]:
    """Return the bytes left by a forward with copies, including its input: those that go to the host, and those that
    stay."""
    return Thing("moved", stage, ACTIVATIONS), Thing("unmoved", stage, ACTIVATIONS)


def gradient_of(stage: int) -> Thing:
    """Return the input of B: the gradient of the stage's output."""
    return Thing("output", stage, ACTIVATIONS)


def gradient_parts(stage: int) -> tuple[Thing, Thing]:
    """Return gradients of the stage's parameters: those that I computes, and the rest."""
    return Thing("parameters.input_gradients", stage, GRADIENTS), Thing("weight_gradients", stage, GRADIENTS)


class PartThings(NamedTuple):
    """What the items about a part's parameters hold, for a stage or a vocabulary matrix."""

    gradients: tuple[Thing, ...]
    gathered: Thing
    gathering_peak: Thing
    reduced: Thing
    reducing_peak: Thing


def part_things(prefix: str, stage: int, gradients: tuple[Thing, ...]) -> PartThings:
    """Return the things with bytes in the `PartBytes` called `prefix`."""
    return PartThings(
        gradients,
        Thing(f"{prefix}.gathered", stage, PARAMETERS),
        peak(f"{prefix}.gathering_peak", stage),
        Thing(f"{prefix}.reduced", stage, GRADIENTS),
        peak(f"{prefix}.reducing_peak", stage),
    )


def things_of_stage(stage: int) -> PartThings:
    return part_things("parameters", stage, gradient_parts(stage))


def _of_vocabulary(size: str, term: str = VOCABULARY) -> Thing:
    return Thing(size, NO_STAGE, term)


ROWS_INPUT = _of_vocabulary("embedding.rows")
ROWS_RECEIVED = _of_vocabulary("embedding.rows", BUFFERS)
ROWS_ALL = _of_vocabulary("embedding.all_rows")
ROWS_GRADIENT = _of_vocabulary("embedding.all_rows", BUFFERS)
X = _of_vocabulary("hidden")
OUTPUT_STORED = _of_vocabulary("stored")
PRODUCT = _of_vocabulary("product")
COMBINED = _of_vocabulary("combined")
OWN_STATISTICS = _of_vocabulary("own_statistics")
STATISTICS = _of_vocabulary("statistics")
DX = _of_vocabulary("gradient")
HANDED_ON = _of_vocabulary("handed_on")
ROOM = _of_vocabulary("room")
OUTPUT_GRADIENTS = _of_vocabulary("parameters.gradients", GRADIENTS)
EMBEDDING_GRADIENTS = _of_vocabulary("embedding.parameters.gradients", GRADIENTS)
OUTPUT_PART = part_things("parameters", NO_STAGE, (OUTPUT_GRADIENTS,))
EMBEDDING_PART = part_things("embedding.parameters", NO_STAGE, (EMBEDDING_GRADIENTS,))

ROOMS = ("handed_on", "room")
"""Things that are held between steps."""
