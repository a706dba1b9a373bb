"""`Recipe`: how a run is distributed over devices, and in which order they compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

from evenpipe.communication.nccl import NcclOptions
from evenpipe.declaration import Instance, Names, NonNegativeInt, declare
from evenpipe.errors import InputError
from evenpipe.experts.overlap import ExpertOptions
from evenpipe.recipe.batch_shape import BatchShape, Documents
from evenpipe.recipe.given_schedule import read_schedule
from evenpipe.recipe.offload import OffloadOptions
from evenpipe.recipe.parallelism import ContextExchange, DataParallel, Parallelism, TensorOverlap
from evenpipe.schedule import PER_KIND, SHARING, Costs, Order, Program, Schedule, VocabularyMode
from evenpipe.words import count, nearest, refused

ARRANGE = ("auto", "flops")
"""Choices of `Recipe.arrange` that name no hardware."""

Communicators = Annotated[str, Names(SHARING)]

SEPARATE = ("name", "devices", "microbatches", "costs")
"""Arguments of generators that are not options."""


class RecipeOptions(TypedDict, total=False):
    """The fields of a `Recipe` in one table, as users write them, besides the sizes of `dp` and `pp`. Those of
    `Recipe.parallelism` and `Recipe.batch` have the same names there."""

    cp: int
    tp: int
    ep: int
    data_parallel: DataParallel
    dp_shard: int | None
    reshard: bool
    prefetch: int | None
    sequence_parallel: bool
    context_exchange: ContextExchange
    tensor_overlap: TensorOverlap
    microbatches: int | None
    microbatch_size: int
    slices: int | Literal["auto"]
    sequence_length: int | None
    documents: Documents
    schedule: Path | Schedule | Any
    schedule_options: Mapping[str, Any] | None
    vocabulary: str
    layers_per_stage: Sequence[int] | None
    activation_checkpointing: str | Sequence[str]
    compile_layers: bool
    offload: OffloadOptions | None
    experts: ExpertOptions | None
    communicators: Communicators | None
    nccl: NcclOptions | None
    costs: Costs | None
    arrange: str


@declare()
class Recipe:
    """How a run is spread and ordered. `Recipe.of` makes one from one table of options.

    What a user gives is read once: the schedule is an order, a program, a name or a function, the number of
    microbatches is known, sequences are tuples, and the vocabulary mode has its canonical name.

    Raises InputError for a value that is not accepted; the sentence names it.
    """

    parallelism: Parallelism = field(default_factory=Parallelism)
    """Sizes of the axes."""
    batch: BatchShape = field(default_factory=BatchShape)
    """How the batch of a step is cut."""
    schedule: Annotated[Schedule, Instance("schedule")] = "1f1b"
    """A name such as "1f1b" or "zbv"; an `Order`; a `Program`, which is executed without changes if it has the passes
    of the vocabulary mode, and else only gives its own; a function of devices and microbatches that returns an `Order`;
    as given, also the path of a CSV file with an order or program, in the format of evenpipe or torch, or a schedule of
    `torch.distributed.pipelining`, an instance or a class, whose order is used."""
    schedule_options: Annotated[
        tuple[tuple[str, Any], ...], Instance("dictionary of options by name", (Mapping, tuple))
    ] = ()
    """Options of a named schedule, if it has them: `stages_per_device`, `group_size`, `max_in_flight`; for a class of
    torch, `stages_per_device`. As given, a mapping."""
    vocabulary: str = "balanced"
    """Placement of embedding and output layer: first-last, redistribute, interlaced, vocab-1, vocab-2; "balanced" is
    vocab-2."""
    layers_per_stage: tuple[NonNegativeInt, ...] | None = None
    """Transformer layers of each stage, first to last: one number per stage of the whole pipeline. Default: split
    evenly; with vocabulary "redistribute" by time, or in `evenpipe train` on a known GPU by memory too, if the split by
    time does not fit by the estimate and another one does."""
    activation_checkpointing: str | tuple[str, ...] = "none"
    """Tensors that a layer keeps for its backward: "none" keeps all; "full" keeps only the input and repeats the
    forward; "selective" also keeps the results of matrix products and of attention. One choice, or a list with one per
    layer. If the order has R for a microbatch, R repeats the forward before the backward."""
    compile_layers: bool = False
    """Run every layer through torch.compile; the first steps take longer. Embedding, output layer, loss and other code
    outside the layers are not compiled."""
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    """Which activations go to the host, and the memory that they use there."""
    communicators: Communicators | None = None
    """Transfers that share a communicator. "per-kind": all forward hops, all backward hops, small collectives, large
    collectives. "per-pair": all hops from one device to another, and each kind of collective. "one": all. Fewer
    communicators take less memory (with NCCL about 0.5 GB each), but their transfers wait for each other. Default:
    "per-kind", and for a program that has its transfers what it was made with ("per-pair" from a file)."""
    nccl: NcclOptions = field(default_factory=NcclOptions)
    """Priority and channels of communication on GPUs. No effect on gloo."""
    costs: Annotated[Costs, Instance("Costs", (Costs,))] | None = None
    """Pass times that arrange the order, one F and B per stage *without* the vocabulary layers."""
    arrange: str = "auto"
    """What arranges the order without `costs`: the model's pass times on a known GPU (for example "H100-80G") or on the
    hardware of a file of `evenpipe profile --hardware`; "flops"; or "auto": the GPU at hand if it is known, else
    FLOPs."""

    @classmethod
    def of(cls, *, dp: int = 1, pp: int = 1, **options: Unpack[RecipeOptions]) -> Recipe:
        """The recipe for one table of options. Raises TypeError for an unknown name."""
        refuse_unknown(options, RecipeOptions.__annotations__)
        values: dict[str, Any] = {"dp": dp, "pp": pp, **options}
        for name in ("schedule_options", "offload", "experts", "nccl"):
            if values.get(name, 0) is None:
                del values[name]
        parallelism, batch = (
            {entry.name: values.pop(entry.name) for entry in fields(kind) if entry.name in values}
            for kind in (Parallelism, BatchShape)
        )
        return cls(parallelism=Parallelism(**parallelism), batch=BatchShape(**batch), **values)

    def __post_init__(self) -> None:
        self._put("vocabulary", VocabularyMode.of(self.vocabulary).value)
        schedule, microbatches, options = read_schedule(
            self.schedule, self.devices, self.batch.microbatches, self.options
        )
        self._put("schedule", schedule)
        self._put("batch", replace(self.batch, microbatches=microbatches))
        self._put("schedule_options", _hashable(options))
        for name in SEPARATE:
            if name in options:
                raise InputError(f"schedule_options: {name} is not an option of a schedule, but a separate argument")
        if options and not isinstance(schedule, str):
            raise InputError(
                f"schedule_options: {', '.join(options)} given, but only a schedule with a name has options"
            )

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def sharing(self) -> str:
        """Which transfers share a communicator."""
        return self.communicators or (self.schedule.sharing if isinstance(self.schedule, Program) else PER_KIND)

    @property
    def mode(self) -> VocabularyMode:
        """The vocabulary mode."""
        return VocabularyMode(self.vocabulary)

    @property
    def devices(self) -> int:
        """Devices of the pipeline."""
        return self.parallelism.pp

    @property
    def microbatches(self) -> int:
        """Microbatches of a step, in each replica."""
        count = self.batch.microbatches
        assert count is not None, "a recipe knows it"
        return count

    @property
    def slices(self) -> int:
        """Slices of every sequence. Raises InputError while they are "auto", which `slice_choice` replaces."""
        slices = self.batch.slices
        if slices == "auto":
            raise refused("slices", slices, "a number of at least 1 where no model runs, by which it is chosen")
        return slices

    @property
    def options(self) -> dict[str, Any]:
        """`schedule_options` as keyword arguments."""
        return dict(self.schedule_options)

    def checkpointing_of(self, layers: int) -> tuple[str, ...]:
        """One choice for each layer of a model. Raises InputError for a wrong number of choices."""
        policy = self.activation_checkpointing
        choices = policy if isinstance(policy, tuple) else (policy,) * layers
        if len(choices) != layers:
            raise refused(
                "activation_checkpointing", policy, f"one choice, or one for each of the {count(layers, 'layer')}"
            )
        return choices

    def check_runnable(self) -> None:
        """Raise InputError for options that estimates and plans support but the runtime does not yet, and for a number
        of slices that the given order does not have."""
        self.parallelism.check_runnable()
        order = self.schedule.order if isinstance(self.schedule, Program) else self.schedule
        if isinstance(order, Order) and self.batch.slices not in (1, order.slices):
            accepted = (
                f"{order.slices}, as in the order: only a schedule with a name, or a function of devices and units, is"
                " cut into slices"
            )
            raise refused("slices", self.batch.slices, accepted)


def refuse_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for an unknown argument, suggesting the nearest known one."""
    names_known = list(known)
    for name in names:
        if name not in names_known:
            raise TypeError(f"unknown argument '{name}'; known: {', '.join(names_known)}{nearest(name, names_known)}")


def _hashable(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Options sorted by name, with lists converted to tuples."""
    return tuple(sorted((name, tuple(value) if isinstance(value, list) else value) for name, value in options.items()))
