"""Everything that bytes depend on besides the model and the program."""

from __future__ import annotations

from dataclasses import dataclass

from evenpipe.errors import InputError
from evenpipe.recipe.parallelism import Parallelism
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule.planning import BARRIERS

from .framework import Framework
from .kernels import Kernels
from .reserved import Overheads
from .states import ELEMENT_BYTES, Dtypes
from .vocabulary import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a recipe is computed. Raises InputError for one that cannot be estimated."""

    recipe: Recipe
    """With a sequence length."""
    checkpointing: tuple[str, ...]
    """Checkpointing of each layer."""
    kept_layers: frozenset[int] = frozenset()
    """Layers whose activations are not copied to the host."""
    kernels: Kernels
    dtypes: Dtypes
    framework: Framework
    on_cpu: bool
    overheads: Overheads
    optimizer: str
    offloaded: float
    foreach: bool
    traced: bool

    def __post_init__(self) -> None:
        for name, size in (("ep", self.parallelism.ep), ("slices", self.recipe.slices)):
            if size > 1:
                raise InputError(f"{name}: {size}, expected 1: estimates know no more yet")
        if self.sequence % self.parallelism.cp:
            raise InputError(f"sequence is {self.sequence}, expected a multiple of cp = {self.parallelism.cp}")

    @property
    def parallelism(self) -> Parallelism:
        """Sizes of the axes."""
        return self.recipe.parallelism

    @property
    def sequence(self) -> int:
        """Tokens of a sequence, before context parallelism."""
        length = self.recipe.batch.sequence_length
        assert length is not None
        return length

    @property
    def microbatch_size(self) -> int:
        """Sequences of a microbatch."""
        return self.recipe.batch.microbatch_size

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return ELEMENT_BYTES[self.dtypes.compute]

    @property
    def machine(self) -> Machine:
        """Machine of the vocabulary layers."""
        return "cpu" if self.on_cpu else "gpu"

    @property
    def tokens_here(self) -> int:
        """Tokens of a microbatch, before sequence parallelism."""
        return self.microbatch_size * self.sequence // self.parallelism.cp

    @property
    def gathers_blocks(self) -> bool:
        """Whether tensor ranks have their own rows of hidden states, and blocks gather those of all."""
        parallelism = self.parallelism
        return self.framework.gathers == "blocks" and parallelism.tp > 1 and parallelism.sequence_parallel

    @property
    def sharded(self) -> bool:
        """Whether every device holds a part of the vocabulary."""
        return BARRIERS[self.recipe.vocabulary] > 0
