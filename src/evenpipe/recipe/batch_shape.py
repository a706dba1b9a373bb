"""How the batch of a step is cut."""

from __future__ import annotations

from typing import Literal

from evenpipe.declaration import PositiveInt, declare

Documents = Literal["joined", "separate"]


@declare()
class BatchShape:
    """Sizes of a replica's part of a step's batch, and what shares a sequence.

    Raises InputError for a value that is not accepted; the sentence names it.
    """

    microbatches: PositiveInt | None = None
    """Microbatches per step in each pipeline. Default: those of the order or CSV file, else 4 per device."""
    microbatch_size: PositiveInt = 1
    """Sequences per microbatch. `evenpipe train` trains on replicas * microbatches * microbatch_size sequences in a
    step; a `Pipeline` takes the batches that it gets, and only estimates and plans need the size."""
    slices: PositiveInt | Literal["auto"] = 1
    """Slices of every sequence, processed one after another: activations of fewer sequences are in flight, and devices
    wait less. "auto": the fewest whose predicted step is at most 1 % longer than the shortest; a line at the
    start says why."""
    sequence_length: PositiveInt | None = None
    """Tokens of a sequence, before context parallelism. Orders are arranged for it, since the share of attention
    depends on it; the steps of a pipeline may have others. None: 2048, or the maximum of the model."""
    documents: Documents = "joined"
    """Several documents in one sequence; a new one begins where position ids do not count on. "separate": each is
    trained as if it were alone, with every model. The first token of each is not predicted, and padding is a document
    without labels, not an `attention_mask`. "joined": position ids mean what they mean to the model in transformers:
    many models keep such documents apart, others do not; the first token is predicted if it has a label."""

    @property
    def separate(self) -> bool:
        """Whether documents of a sequence do not see each other."""
        return self.documents == "separate"
