"""Megatron's `--pipeline-model-parallel-layout`: which layers are on which stage.

    Et*3|(tt|)*29,m|L      61 decoder layers on 32 stages: embedding and three layers on the first, then 29 stages of
                           two, one with the multi-token prediction alone, one with the loss alone

`E` is the embedding, `t` a decoder layer, `m` a multi-token prediction layer, `L` the output layer with the loss; `|`
ends a stage, `x*n` repeats a character, `(...)*n` a group, commas are ignored. A stage may be empty.
Grammar and rules as in Megatron-LM, megatron/core/transformer/pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from evenpipe.errors import InputError
from evenpipe.schedule import Placement
from evenpipe.words import count

LETTERS = {"E": "the embedding", "t": "a decoder layer", "m": "a multi-token prediction layer", "L": "the loss"}

LONGEST = 100_000
"""Most layers and stages in a layout, against mistyped numbers."""


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The parts of one stage, in this order."""

    embedding: bool
    layers: int
    """Decoder layers."""
    prediction_layers: int
    """Layers that predict further tokens (Megatron's MTP)."""
    loss: bool


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """A Megatron layout: the parts of each stage."""

    stages: tuple[StageLayout, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the decoder layers of each stage."""
        return tuple(stage.layers for stage in self.stages)

    def placement(self, devices: int) -> Placement:
        """Place these stages on `devices`, round-robin like Megatron's virtual pipeline.

        Raises InputError unless all devices get the same number of stages.
        """
        if devices < 1 or len(self.stages) % devices:
            raise InputError(
                f"the layout has {count(len(self.stages), 'stage')}, which {count(devices, 'device')} cannot share"
                " evenly; devices must divide the number of stages"
            )
        return Placement.looped(devices, len(self.stages) // devices)


def from_megatron(text: str) -> MegatronLayout:
    """Return the layout that `text` spells.

    Raises InputError that names the position (from 1) and what is accepted there, and for the rules of Megatron:
    exactly one E, first; exactly one L, last; no t after an m; all m on one stage.
    """
    letters = list(_expanded(text))
    _validate(text, letters)
    stages: list[list[str]] = [[]]
    for _, letter in letters:
        if letter == "|":
            stages.append([])
        else:
            stages[-1].append(letter)
    return MegatronLayout(
        tuple(StageLayout("E" in stage, stage.count("t"), stage.count("m"), "L" in stage) for stage in stages)
    )


Letter = tuple[int, str]
"""Position in the text, from 1, and the character there."""


def _expanded(text: str) -> Iterator[Letter]:
    """Return the letters and bars of `text`, with every repetition expanded."""
    characters = [(place, character) for place, character in enumerate(text, start=1) if character != ","]
    count = here = 0
    while here < len(characters):
        place, character = characters[here]
        if character == "(":
            body, here = _group(text, characters, here)
            times, here = _times(text, characters, here, f"the group that opens at position {place}")
        elif character in LETTERS or character == "|":
            body, here = [characters[here]], here + 1
            times, here = _times(text, characters, here, None)
        else:
            raise _error(text, place, f"'{character}' where {_ACCEPTED} or ( is expected")
        count += times * len(body)
        if count > LONGEST:
            raise _error(text, place, f"more than {LONGEST} layers and stages")
        for _ in range(times):
            yield from body


def _group(text: str, characters: list[Letter], here: int) -> tuple[list[Letter], int]:
    """Return the letters of the group that opens at `here`, and where it ends."""
    opening, body = characters[here][0], []
    here += 1
    while here < len(characters) and characters[here][1] != ")":
        place, character = characters[here]
        if character == "(":
            raise _error(text, place, f"a group inside the one that opens at position {opening}; groups do not nest")
        if character not in LETTERS and character != "|":
            raise _error(text, place, f"'{character}' where {_ACCEPTED} or ) is expected")
        letter = characters[here]
        times, here = _times(text, characters, here + 1, None)
        body += [letter] * min(times, LONGEST + 1)
    if here == len(characters):
        raise _error(text, opening, "a group that is not closed")
    if characters[here - 1][1] == "(":
        raise _error(text, opening, "an empty group")
    return body, here + 1


def _times(text: str, characters: list[Letter], here: int, repeated: str | None) -> tuple[int, int]:
    """Return the number after a `*` at `here`, and where it ends; 1 without a `*`, which a group (`repeated`) needs."""
    if here == len(characters) or characters[here][1] != "*":
        if repeated:
            place = characters[here][0] if here < len(characters) else len(text) + 1
            raise _error(text, place, f"no * and number after {repeated}")
        return 1, here
    star, here = characters[here][0], here + 1
    digits = ""
    while here < len(characters) and characters[here][1] in "0123456789":
        digits += characters[here][1]
        here += 1
    if not digits:
        raise _error(text, star, "a * without a number after it")
    return int(digits[:9]), here


def _validate(text: str, letters: list[Letter]) -> None:
    """Raise InputError for a layout that breaks Megatron's rules."""
    layers = [letter for letter in letters if letter[1] != "|"]
    if not layers:
        raise InputError(f"layout '{text}' has no layers; it must start with E and end with L, as in Et|tL")
    for letter, which, (place, found) in (("E", "first", layers[0]), ("L", "last", layers[-1])):
        if found != letter:
            raise _error(text, place, f"{found} is {which}, where {LETTERS[letter]}, {letter}, is expected")
    for letter, others in (("E", layers[1:]), ("L", layers[:-1])):
        for place, found in others:
            if found == letter:
                raise _error(text, place, f"a second {letter}; {LETTERS[letter]} must appear exactly once")
    stage, predicting = 0, None
    for place, found in letters:
        if found == "|":
            stage += 1
        elif found == "t" and predicting is not None:
            raise _error(text, place, "t after an m; multi-token prediction comes after all decoder layers")
        elif found == "m":
            if predicting not in {None, stage}:
                raise _error(text, place, "m on a second stage; all multi-token prediction layers must be on one stage")
            predicting = stage


def _error(text: str, place: int, what: str) -> InputError:
    return InputError(f"layout '{text}', position {place}: {what}")


_ACCEPTED = "E, t, m, L, |"
