"""The bytes of one microbatch, pass by pass: what both back-ends produce and the replay walks with.

All of one GPU (already divided by tensor and context parallelism). "Above" means above what lived when the pass began:
its inputs lived, its result did not.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Of one stage and one microbatch."""

    input: int
    """The stage's input, received or made here: it lives from before F until the end of B (or I)."""
    output: int
    """What F hands on, until it is sent or used; the gradient that B receives is as large."""
    stored: int
    """What F leaves for the backward beside its input and its output."""
    moved: int | None = None
    """The part of `input` and `stored` that copies to the host and back carry; None: all of it."""
    forward_peak: int
    """The most that lives at one moment within F, above."""
    backward_peak: int
    """Within B, above; the gradients of parameters exist already."""
    input_peak: int
    """Within I, above."""
    queued: int
    """What lives between I and W: inputs and output gradients of linear layers."""
    weight_peak: int
    """Within W, above."""
    recompute_peak: int = 0
    """Within R, above; R leaves `stored`, and an F that has an R leaves nothing but its input."""
    bare_forward_peak: int | None = None
    """Within an F that has an R, above; None: as `forward_peak`."""
    recomputed: StageBytes | None = None
    """Of microbatches that have R, whose layers keep everything whatever their checkpointing; None: the same."""
    gradients: int = 0
    """Of the stage's parameters."""
    input_gradients: int = 0
    """The part of them that I makes; W makes the rest."""
    first_backward_peak: int | None = None
    """Within a B that makes the gradients of parameters because there are none yet, above; None: with all of them from
    its beginning."""
    first_input_peak: int | None = None
    """The same of I."""
    first_weight_peak: int | None = None
    """The same of W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyBytes:
    """Of the vocabulary layers of one device and one microbatch; zeros where it has none of it."""

    rows_input: int = 0
    """Rows of the embedding that this device contributes (E), or their gradients (G)."""
    rows_all: int = 0
    """At the first stage: the rows of all devices, received, or their gradients."""
    hidden: int = 0
    """X: the last hidden states as every shard receives them."""
    stored: int = 0
    """What S (or a forward that contains the output layer) leaves for C and T, without X."""
    product: int = 0
    """The part of `stored` that C takes out (one barrier)."""
    handed_on: int = 0
    """The part of `stored` that T does not give back: the next S takes it over (tensors in the memory of a CPU)."""
    output_peak: int = 0
    """Within S, above."""
    combine_peak: int = 0
    """While the loss is finished (at the beginning of C, of T with two barriers, at the end of an F that contains the
    output layer), above."""
    combined: int = 0
    """What that leaves for T."""
    gradient_peak: int = 0
    """While dX is made (in C after the loss is finished, in the I of a stage that contains the output layer), above."""
    backward_peak: int = 0
    """Within T, above; of an output layer that is part of a stage, at the beginning of its B."""
    weight_peak: int = 0
    """Of an output layer that is part of a stage, at the beginning of its W, above."""
    statistics: int = 0
    """The gathered table of statistics."""
    own_statistics: int = 0
    """The part of it that S makes."""
    gradient: int = 0
    """dX: one shard's part of the gradient of the last hidden states."""
    embedding_peak: int = 0
    """Within E, above."""
    embedding_backward_peak: int = 0
    """Within G, above."""
    room: int = 0
    """Memory that is kept from one microbatch to the next, beside what microbatches in flight hold."""
    output_gradients: int = 0
    """Of the rows of the output layer, and of the embedding where it is the same matrix."""
    embedding_gradients: int = 0
    """Of the rows of the embedding, where they are others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """What a GPU holds for the whole run, whatever runs on it."""

    parameters: int
    gradients: int
    optimizer: int
    copies: int = 0
    """Parameters in the dtype of the computation, where they are kept in another."""
    unsharded: int = 0
    """With ZeRO-3: the largest parameters that are whole at one moment."""
    step_peak: int = 0
    """Above all of these, while the optimizer steps."""

    @property
    def total(self) -> int:
        """All that stays."""
        return self.parameters + self.gradients + self.optimizer + self.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The most that one device holds, and what it consists of at that moment."""

    peak: int
    """Bytes of tensors: what `torch.cuda.max_memory_allocated` counts, but for the rounding of the allocator."""
    binding_event: str
    """When: "F of stage 0, microbatch 3", "optimizer step", ..."""
    terms: dict[str, int] = field(default_factory=dict)
    """parameters, gradients, optimizer, activations, vocabulary, buffers, transient: at that moment; they add up to
    `peak`."""
    curve: tuple[int, ...] = ()
    """Live bytes after each item of the device's row, where they were asked for."""
