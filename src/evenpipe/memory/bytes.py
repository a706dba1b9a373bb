"""The bytes of a microbatch, pass by pass: the output of the trace and the input of the replay.

All bytes are for one GPU (already divided by tensor and context parallelism). "Above" means above the live bytes at the
start of the pass, when its inputs were live and its result was not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBytes:
    """Bytes of a part's parameters that change within a step. A part is a stage or a vocabulary matrix
    (`schedule/sharding.py`)."""

    gradients: int = 0
    """Sums over the microbatches."""
    input_gradients: int = 0
    """The part of the gradients that I computes; W computes the rest."""
    gathered: int = 0
    """Whole parameters, from UNSHARD to RESHARD; 0 if they always exist."""
    gathering_peak: int = 0
    """Peak while the first pass that uses the whole parameters waits for them, above."""
    reduced: int | None = None
    """Live from REDUCE_GRAD to the end of the step, in place of `gradients`; None: `gradients`."""
    reducing_peak: int = 0
    """Peak within REDUCE_GRAD, above; the gradients exist."""

    @property
    def weight_gradients(self) -> int:
        """The part of the gradients that W computes."""
        return self.gradients - self.input_gradients

    @property
    def summed(self) -> int:
        """Live from REDUCE_GRAD to the end of the step."""
        return self.gradients if self.reduced is None else self.reduced


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPeaks:
    """Peaks within the passes of a stage, above. The gradients of parameters exist already, except for the peaks
    called `first_...`."""

    forward: int = 0
    """Within F."""
    backward: int = 0
    """Within B."""
    input: int = 0
    """Within I."""
    weight: int = 0
    """Within W."""
    recompute: int = 0
    """Within R; it leaves `stored`, and an F that has an R leaves only its input."""
    bare_forward: int | None = None
    """Within an F that has an R; None: as `forward`."""
    first_backward: int | None = None
    """Within a B that allocates the gradients of parameters; None: as if it allocated all of them at its start."""
    first_input: int | None = None
    """The same for I."""
    first_weight: int | None = None
    """The same for W."""
    gathered: int = 0
    """The part of these peaks that is keys and values gathered by a layer from context ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Bytes of a stage for a microbatch."""

    input: int
    """The stage's input, received or computed here: live from before F until the end of B (or I), if `saves_input`."""
    output: int
    """The output of F, until it is sent or used; the gradient for B has the same size. As large as the input, except in
    a first stage that gets all tokens and returns those of a tensor rank."""
    stored: int
    """Stored by F for the backward, besides its input and its output."""
    moved: int | None = None
    """The part of `input` and `stored` that is copied to the host and back; None: all of it."""
    queued: int
    """Live between I and W: inputs and output gradients of linear layers."""
    saves_input: bool = True
    """Whether the graph of F keeps the input. If not, the input is freed at the end of F."""
    peaks: PassPeaks = field(default_factory=PassPeaks)
    recomputed: StageBytes | None = None
    """Bytes of microbatches that have R, whose layers keep everything regardless of checkpointing; None: the same."""
    parameters: PartBytes = field(default_factory=PartBytes)
    """Parameters of the stage, without vocabulary matrices."""
    carried: int = 0
    """The carry of whole sequences: their keys and values, from the first slice's F to its B (or I). Peaks of a slice's
    passes include it."""
    carried_gradients: int = 0
    """The gradients of the carry, from the last slice's B (or I) to the first slice's."""

    @property
    def bare_forward_peak(self) -> int:
        """The peak within an F that has an R."""
        peaks = self.peaks
        return peaks.forward if peaks.bare_forward is None else peaks.bare_forward

    @property
    def first_backward_peak(self) -> int:
        """The peak within a B that allocates the gradients of parameters."""
        first = self.peaks.first_backward
        return self.peaks.backward + self.parameters.gradients if first is None else first

    @property
    def first_input_peak(self) -> int:
        """The same for I."""
        first = self.peaks.first_input
        return self.peaks.input + self.parameters.input_gradients if first is None else first

    @property
    def first_weight_peak(self) -> int:
        """The same for W."""
        first = self.peaks.first_weight
        return self.peaks.weight + self.parameters.weight_gradients if first is None else first

    @property
    def uncopied(self) -> int:
        """The part of `input` and `stored` that is not copied."""
        return self._of_graph - self.copied

    @property
    def copied(self) -> int:
        """Bytes of a copy of a microbatch's activations to the host, if its forward keeps its graph."""
        return self._of_graph if self.moved is None else self.moved

    @property
    def kept_input(self) -> int:
        """Bytes of the input that the graph keeps."""
        return self.input * self.saves_input

    @property
    def _of_graph(self) -> int:
        return self.kept_input + self.stored


class LayerBytes(NamedTuple):
    """Bytes that one layer adds to a stage and microbatch, without those that it shares with other layers."""

    waiting: int
    """Between its forward and its backward, including its input."""
    queued: int
    """Between I and W."""
    passing: int
    """The peak within a pass, above what the layer keeps."""
    turning: int
    """The peak within the pass that begins its backward (B or I), above."""
    carried: int
    """Keys and values of whole sequences, if sequences are cut into slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBytes:
    """Bytes of the embedding of a device for a microbatch."""

    rows: int = 0
    """Rows that this device contributes (E), or their gradients (G)."""
    all_rows: int = 0
    """At the first stage: the received rows of all devices, or their gradients."""
    looked_up: int = 0
    """A tensor rank's local rows, which the first stage's F keeps until its end besides its input, if no rows come from
    other devices."""
    placing_peak: int = 0
    """Peak within the first stage's F while tensor ranks combine their rows, above its other tensors."""
    picking_peak: int = 0
    """Peak at the end of the first stage's B while tensor ranks sum the gradients of all rows, above."""
    forward_peak: int = 0
    """Peak within E, above."""
    backward_peak: int = 0
    """Peak within G, above."""
    parameters: PartBytes = field(default_factory=PartBytes)
    """The rows of the matrix, if it is not the output layer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPeaks:
    """Peaks within the passes of the output layer, above."""

    output: int = 0
    """Within S."""
    combine: int = 0
    """While the loss is finished: at the start of C, at the start of T with two barriers, or at the end of an F that
    contains the output layer."""
    gradient: int = 0
    """While dX is computed: in C after the loss is finished, or in the I of a stage that contains the output layer."""
    backward: int = 0
    """Within T; if the output layer is part of a stage, at the start of its B."""
    weight: int = 0
    """If the output layer is part of a stage, at the start of its W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyBytes:
    """Bytes of the vocabulary layers of a device for a microbatch; zeros if it has none. All fields but `embedding`
    describe the output layer."""

    embedding: EmbeddingBytes = field(default_factory=EmbeddingBytes)
    hidden: int = 0
    """X: the last hidden states as every shard receives them."""
    stored: int = 0
    """Stored by S (or by a forward that contains the output layer) for C and T, including the part of X that they need;
    without `handed_on`."""
    product: int = 0
    """The part of `stored` that C frees (one barrier)."""
    handed_on: int = 0
    """Stored by S too, but not freed by T: the next S reuses it (on a CPU)."""
    room: int = 0
    """Memory that is kept from one microbatch to the next, besides that of microbatches in flight."""
    statistics: int = 0
    """The gathered table of statistics."""
    own_statistics: int = 0
    """The part of it that S computes."""
    combined: int = 0
    """Left for T once the loss is finished."""
    gradient: int = 0
    """dX: one shard's part of the gradient of the last hidden states."""
    peaks: OutputPeaks = field(default_factory=OutputPeaks)
    parameters: PartBytes = field(default_factory=PartBytes)
    """The rows of the output layer, and of the embedding if it is the same matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes that a GPU holds for the whole run."""

    parameters: int
    gradients: int
    optimizer: int
    copies: int = 0
    """Parameters in the dtype of the computation, if their own dtype differs."""
    unsharded: int = 0
    """The most bytes of whole parameters and gradients at one moment, if items of the program do not determine them."""
    summing_peak: int = 0
    """Peak while tensor ranks sum the gradients of parameters that several of them hold, above what is live after the
    passes."""
    step_peak: int = 0
    """Peak during the optimizer step, above all of these."""

    @property
    def total(self) -> int:
        """The permanent part."""
        return self.parameters + self.gradients + self.optimizer + self.copies


TERMS = ("parameters", "gradients", "optimizer", "activations", "carry", "vocabulary", "buffers", "transient")
"""Parts of a device's peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The peak of a device, and its parts at that moment."""

    peak: int
    """Bytes of tensors: `torch.cuda.max_memory_allocated` without the rounding of the allocator."""
    binding_event: str
    """The moment: "F of stage 0, microbatch 3", "optimizer step", ..."""
    terms: dict[str, int] = field(default_factory=dict)
    """Bytes by `TERMS` at that moment; they add up to `peak`."""
    curve: tuple[int, ...] = ()
    """Live bytes after each item of the device's row, if requested."""
