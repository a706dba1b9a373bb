"""Vocabulary modes: where the embedding and the output layer run, and which passes that takes."""

from __future__ import annotations

from enum import StrEnum

from evenpipe.words import unknown

from .passes import Kind


class VocabularyMode(StrEnum):
    """Where the vocabulary layers run.

    The last three shard both layers over all devices. Sources: nnScaler (OSDI'24); arXiv 2411.05288, algorithms 1
    and 2.
    """

    FIRST_LAST = "first-last"
    """The first stage has the whole embedding, the last stage the whole output layer."""
    REDISTRIBUTE = "redistribute"
    """The same, but the split of layers over stages makes up for it."""
    INTERLACED = "interlaced"
    """All devices run the passes of their shards at the same time; T combines the statistics."""
    VOCAB_1 = "vocab-1"
    """T combines the statistics, so the backward of the last stage waits for S and T."""
    VOCAB_2 = "vocab-2"
    """C combines the statistics, so T can run at any time after it."""

    @classmethod
    def of(cls, name: str) -> VocabularyMode:
        """The mode called `name`; "balanced" is vocab-2. Raises InputError for an unknown name."""
        name = _ALIASES.get(name, name)
        if name not in MODES:
            raise unknown("vocabulary", name, (*_ALIASES, *MODES))
        return cls(name)

    def of_rows(self, *, forward_only: bool = False) -> VocabularyMode:
        """The mode recorded in orders of this mode: the simplest mode with the same passes and needs.

        The split of layers and the times of passes are not needs, and an evaluation has no T that could combine the
        statistics.
        """
        if self.combining is None:
            return VocabularyMode.FIRST_LAST
        return VocabularyMode.VOCAB_2 if forward_only else _BY_COMBINING[self.combining]

    @property
    def combining(self) -> Kind | None:
        """The kind of pass that combines the statistics of all shards in training; the backward of the last stage takes
        its dX. None if the vocabulary layers are not sharded."""
        return _COMBINING[self]

    @property
    def sharded(self) -> bool:
        """Whether every device has a shard of both vocabulary layers."""
        return self.combining is not None

    @property
    def barriers(self) -> int:
        """Number of successive vocabulary passes, on all devices, that a backward of the last stage waits for.

        Each stage has this many more activations in flight.
        """
        return _BARRIERS[self.combining]

    def kinds(self, *, forward_only: bool) -> tuple[Kind, ...]:
        """The vocabulary passes that every device runs once per unit."""
        if not self.sharded:
            return ()
        if forward_only:
            return Kind.E, Kind.S, Kind.C
        combining = (Kind.C, Kind.T) if self.combining is Kind.C else (Kind.T,)
        return (Kind.E, Kind.S, *combining, Kind.G)


MODES: tuple[str, ...] = tuple(mode.value for mode in VocabularyMode)
"""Names of all modes."""
_ALIASES = {"balanced": VocabularyMode.VOCAB_2.value}
_COMBINING: dict[VocabularyMode, Kind | None] = {
    VocabularyMode.FIRST_LAST: None,
    VocabularyMode.REDISTRIBUTE: None,
    VocabularyMode.INTERLACED: Kind.T,
    VocabularyMode.VOCAB_1: Kind.T,
    VocabularyMode.VOCAB_2: Kind.C,
}
_BY_COMBINING = {Kind.T: VocabularyMode.VOCAB_1, Kind.C: VocabularyMode.VOCAB_2}
_BARRIERS: dict[Kind | None, int] = {None: 0, Kind.C: 1, Kind.T: 2}
