"""Everything that an estimate depends on besides the model and the program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from evenpipe.layers.checkpointing import check_choices
from evenpipe.model import Description, RowWork, slice_ends
from evenpipe.model.context_exchange import choose
from evenpipe.model.expert_rows import check_skew
from evenpipe.recipe.parallelism import Parallelism, divisor_of
from evenpipe.recipe.recipe import Recipe
from evenpipe.vocabulary import LossOptions
from evenpipe.words import count, refused

from .framework import Framework
from .kernels import Kernels
from .output_bench import Machine, this_cpu
from .pieces import Piece
from .reserved import Overheads
from .states import ELEMENT_BYTES, Casts, Dtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a recipe is computed. Raises InputError for one that cannot be estimated."""

    recipe: Recipe
    """With a sequence length."""
    checkpointing: tuple[str, ...]
    """Checkpointing of each layer."""
    kernels: Kernels
    dtypes: Dtypes
    framework: Framework
    on_cpu: bool
    overheads: Overheads
    optimizer: str
    offloaded: float
    foreach: bool
    skew: float = 1.0
    """Load of the fullest of the members that share experts, relative to the mean."""
    loss: LossOptions = field(default_factory=LossOptions)
    """Options of the loss, without the model's own changes to its logits."""

    def __post_init__(self) -> None:
        check_skew(self.skew)
        check_choices(self.checkpointing)
        if self.slices > 1 and not self.is_ours:
            raise refused("slices", self.slices, "1 with kernels of Megatron-LM, which has none")
        if self.skew > 1 and self.parallelism.ep > 1 and self.kernels.experts == "pairs":
            raise refused("skew", self.skew, "1 with kernels that keep a row for each token and expert")
        if self.kernels.attention == "unfused" and self.parallelism.cp > 1:
            raise refused("kernels: attention", "unfused", f"fused or flash with cp = {self.parallelism.cp}")
        if self.sequence % self.parallelism.cp:
            raise refused("sequence", self.sequence, f"a multiple of cp = {self.parallelism.cp}")

    @property
    def is_ours(self) -> bool:
        """Whether layers are cut and run as in this library."""
        return self.framework.gathers == "blocks"

    @property
    def casts(self) -> Casts:
        """How a device keeps the matrices of layers in 8 bits, and with them their inputs."""
        if self.kernels.products == "compute" or not self.framework.saves_casts:
            return "none"
        return "instead" if self.kernels.parameters == "cast" else "beside"

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
    def slices(self) -> int:
        """Number of slices in which a sequence flows through the pipeline."""
        return self.recipe.slices

    def pieces(self, description: Description, work: RowWork) -> tuple[Piece | None, ...]:
        """Return the part of each slice that the first context rank of our runtime holds; None for whole sequences, and
        where another framework's attention shares them. work: the model's work, by which slices are cut.

        Raises InputError for a sequence, or a model, that cannot be cut this way.
        """
        parallelism, slices = self.parallelism, self.slices
        if not self.is_ours or (parallelism.cp == 1 and slices == 1):
            return (None,)
        if not description.takes("position_ids"):
            name, size = ("cp", parallelism.cp) if parallelism.cp > 1 else ("slices", slices)
            raise refused(
                name, size, f"1: {description.architecture} takes no position ids, so its sequences cannot be cut"
            )
        divisor = divisor_of(parallelism.cp, parallelism.tp)
        if self.sequence % divisor or self.sequence < divisor * slices:
            raise refused(
                "sequence",
                self.sequence,
                f"a multiple of {divisor} and at least {divisor * slices}:"
                f" {count(slices, 'slice')} for {count(parallelism.cp, 'context rank')} with two chunks of each, and"
                f" {count(parallelism.tp, 'tensor rank')}",
            )
        ends = slice_ends(work, self.sequence, slices, divisor)
        device_type: Literal["cpu", "cuda"] = "cpu" if self.on_cpu else "cuda"
        kernels_of: Literal["cpu", "cuda", "none"] = device_type if self.kernels.attention == "sdpa" else "none"
        choice = choose(
            description, parallelism.context_exchange, ranks=parallelism.cp, tensor_ranks=parallelism.tp, slices=slices
        )
        return tuple(
            Piece(ends=ends, index=index, ranks=parallelism.cp, exchange=choice.exchange, kernels_of=kernels_of)
            for index in range(slices)
        )

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
        """Machine of the vocabulary layers; CPU processes are assumed to run on the host that makes the estimate."""
        return this_cpu() if self.on_cpu else "gpu"

    @property
    def tokens_here(self) -> int:
        """Tokens of a microbatch, before sequence parallelism."""
        return self.microbatch_size * self.sequence // self.parallelism.cp

    @property
    def gathers_blocks(self) -> bool:
        """Whether tensor ranks hold only local rows of hidden states, and blocks gather all rows."""
        parallelism = self.parallelism
        return self.is_ours and parallelism.tp > 1 and parallelism.sequence_parallel

    @property
    def sharded(self) -> bool:
        """Whether every device holds a part of the vocabulary."""
        return self.recipe.mode.sharded
