"""Traces of the output layer against its passes in the runtime, counted with real tensors; losses of frameworks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from evenpipe.memory.exchange import FirstRank
from evenpipe.memory.heads import per_logit
from evenpipe.memory.output_bench import BuffersOfGpu, Machine, OutputLayer, output_bytes
from evenpipe.memory.tracker import Span, Tracker
from evenpipe.memory.vocabulary import VocabularyShape, vocabulary_bytes
from evenpipe.parallel.parameters import Matrix
from evenpipe.runtime.batch import Microbatch
from evenpipe.runtime.inputs import IGNORE_INDEX
from evenpipe.runtime.vocabulary_layers import OutputShard
from evenpipe.schedule import Placement
from evenpipe.vocabulary import LossOptions, output, products, split, state
from evenpipe.vocabulary.kernels import triton_kernels

DEVICES, ROWS, HIDDEN, SEQUENCES, TOKENS = 4, 4109, 96, 2, 160
N, V = SEQUENCES * TOKENS, SEQUENCES * (TOKENS - 1)

OPTIONS = {
    "plain": LossOptions(),
    "blocks": LossOptions(rows_per_block=64),
    "smoothing": LossOptions(label_smoothing=0.1),
    "soft-cap": LossOptions(soft_cap=3.0),
    "soft-cap and smoothing": LossOptions(soft_cap=3.0, label_smoothing=0.1),
    "entropy": LossOptions(entropy=True),
    "entropy and smoothing": LossOptions(label_smoothing=0.1, entropy=True),
}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Lets products allocate what they do on a machine; what they compute does not matter."""
    in_blocks = output.rows_per_block

    @contextmanager
    def run(machine: Machine) -> Iterator[None]:
        with monkeypatch.context() as patch:
            if machine == "gpu":  # bf16 products write into their accumulators, and kernels into what is there
                patch.setattr(output, "rows_per_block", lambda *x, **given: in_blocks(*x, **{**given, "on_gpu": True}))
                patch.setattr(output, "logits_dtype", lambda x: products.accumulator_dtype(x.dtype))
                patch.setattr(output, "logits_product", lambda x, w, out: out.zero_())
                patch.setattr(state, "hidden_product", lambda e, w, out, add: out.zero_())
                patch.setattr(output, "weight_product", lambda e, x, out, add: out.zero_())
                patch.setattr(triton_kernels, "launch", lambda *_, **__: None)
                patch.setattr(output, "choose", lambda options, like: triton_kernels.TritonKernels())
            patch.setattr(products, "cpu_has_bf16", lambda: machine == "cpu")
            yield

    return run


class Device:
    """One device's shard of the output layer, whose passes are counted; of several tensor ranks the first one's."""

    def __init__(
        self, device: int, dtype: torch.dtype, options: LossOptions, machine: Machine, barriers: int, *, ranks: int = 1
    ) -> None:
        self.shards, self.ranks = DEVICES if barriers else 1, ranks
        self.shard = split(ROWS, self.shards * ranks)[device * ranks if barriers else 0]
        self.barriers, self.dtype = barriers, dtype
        self.matrix = Matrix(nn.Parameter(torch.zeros(self.shard.rows, HIDDEN)), dtype)
        self.matrix.gradient()
        exchange = None if ranks == 1 else FirstRank(ranks)
        self.output = OutputShard(self.matrix, None, self.shard, options, one_barrier=barriers == 1, exchange=exchange)
        if machine == "gpu":
            self.output._buffers = BuffersOfGpu()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, ROWS, (SEQUENCES, TOKENS), generator=generator)
        targets = torch.roll(ids, -1, 1)
        targets[:, -1] = IGNORE_INDEX
        weights = torch.full((N,), 1.0 / V)
        self.microbatch = Microbatch(ids, targets.flatten(), weights, None, None)
        owned = (targets >= self.shard.start) & (targets < self.shard.stop)
        self.owned = int(owned.sum())

    def run(self) -> dict[str, Span]:
        """Every pass of the second microbatch: memory that is used again is there. Names are fields."""
        spans: dict[str, Span] = {}
        with Tracker() as tracker:
            tracker.add(self.matrix.weight, self.matrix.gradient(), self.microbatch.targets, self.microbatch.weights)
            for index in (0, 1):
                hidden = torch.zeros(N // self.ranks, HIDDEN, dtype=self.dtype)
                with tracker.span() as spans["output_peak"]:
                    statistics = self.output.forward(hidden, self.microbatch, index, gradients=True)
                with tracker.span() as spans["stored"]:
                    del hidden
                table = statistics[None] if self.shards == 1 else torch.stack([statistics] * self.shards)
                with tracker.span() as spans["combine_peak"]:
                    self.output.combine(table, self.microbatch, index, gradients=True)
                with tracker.span() as spans["gradient_peak"]:
                    gradient = self.output.hidden_gradient(index) if self.barriers == 1 else None
                with tracker.span() as spans["backward_peak"]:
                    part = self.output.backward(index)
                del gradient, part, statistics, table
        return spans


def predicted(device: Device, dtype: torch.dtype, options: LossOptions, machine: Machine):
    return output_bytes(
        OutputLayer(
            passes=("F B", "S C T", "S T")[device.barriers],
            shard=device.shard,
            shards=device.shards,
            ranks=device.ranks,
            tokens=N,
            labelled=V,
            owned=device.owned,
            hidden_size=HIDDEN,
            dtype=dtype,
            bias=False,
            options=options,
            machine=machine,
        )
    )


MACHINES = ("gpu", "cpu", "cpu without bf16")
DTYPES = (torch.float32, torch.bfloat16)
# options, machine, dtype, barriers, tensor ranks
CASES = [
    *itertools.product(OPTIONS, MACHINES, DTYPES, (0, 1, 2), (1,)),
    *itertools.product(("keep probabilities", "keep nothing"), MACHINES[1:], DTYPES, (2,), (1,)),
    *itertools.product(("plain", "smoothing", "entropy"), MACHINES[:2], DTYPES[1:], (0, 1, 2), (2, 4)),
]


def test_passes_allocate_what_is_predicted(on, sample) -> None:
    """To the byte, but for the loss, which the runtime keeps, and for lists of targets: how many a block has, and their
    padding when they are copied to a GPU together. With tensor ranks X comes as own rows, is gathered in S and stays
    until T; dX is summed, and its own rows stay."""
    wrong = []
    for case in sample(CASES, 16):
        options, machine, dtype, barriers, ranks = case
        number, loss_options = 1 if barriers else 0, OPTIONS.get(options) or LossOptions(keep=options.split()[1])
        with on(machine):
            device = Device(number, dtype, loss_options, machine, barriers, ranks=ranks)
            spans = device.run()
        said = predicted(device, dtype, loss_options, machine)
        hidden, loss, lists = N * HIDDEN * dtype.itemsize, 8, 480 if machine == "gpu" else 64
        kept = spans["output_peak"].retained + spans["stored"].retained + hidden // ranks
        pairs = [
            ("kept", kept, said.stored + said.own_statistics, lists if machine == "gpu" else 0),
            ("output", spans["output_peak"].above, said.peaks.output, lists),
            ("combine", spans["combine_peak"].above, said.peaks.combine, loss),
            ("combined", spans["combine_peak"].retained, said.combined, loss),
            ("backward", spans["backward_peak"].above, said.peaks.backward, 0),
        ]
        if barriers == 1:
            pairs += [
                ("gradient", spans["gradient_peak"].above, said.peaks.gradient, 0),
                ("gradient kept", spans["gradient_peak"].retained, said.gradient - said.product, 0),
            ]
        if ranks > 1:
            pairs += [("own rows of dX", N * HIDDEN * 4 // ranks, said.gradient, 0)]
        if ranks > 1 and barriers:
            pairs += [("own rows of X", hidden // ranks, said.hidden, 0)]
        if options.startswith("keep"):
            room = sum(tensor.untyped_storage().nbytes() for tensor in device.output.room)
            pairs += [("room", room, said.room + said.handed_on, 0)]
        wrong += [(case, *pair) for pair in pairs if abs(pair[1] - pair[2]) > pair[3]]
    assert wrong == []


# --- losses of frameworks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "peak"), [("fp32", 12), ("bf16", 6)])
def test_cross_entropy_of_torch(loss: str, peak: int) -> None:
    """Bytes per logit at most, parameters and what is not as large as the logits aside: reference, section 3.4."""
    tokens, hidden_size, rows = 256, 16, 2048
    weight = nn.Parameter(torch.zeros(rows, hidden_size, dtype=torch.bfloat16))
    weight.grad = torch.zeros_like(weight)
    hidden = torch.zeros(tokens, hidden_size, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.int64)

    def value() -> Tensor:
        logits = functional.linear(hidden, weight)
        return functional.cross_entropy(logits.float() if loss == "fp32" else logits, labels)

    with Tracker() as tracker:
        tracker.add(weight, weight.grad, hidden, labels)
        with tracker.span() as forward:
            result = value()
        with tracker.span() as backward:
            result.backward()
    shape = VocabularyShape(rows=rows, hidden_size=hidden_size, sequences=1, tokens=tokens, labelled=tokens)
    found = vocabulary_bytes("first-last", 0, Placement.linear(1), shape, loss=loss)
    logits, rest = tokens * rows, 20 * tokens * hidden_size + 2 * rows * hidden_size
    assert forward.retained == pytest.approx(found.stored, abs=rest)
    assert forward.above == pytest.approx(found.peaks.output, abs=rest)
    assert backward.above == pytest.approx(found.peaks.backward, abs=rest)
    assert max(forward.above, forward.retained + backward.above) / logits == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(("loss", "expected"), [("in-place", 6), ("fused", 2), ("fp32", 12), ("bf16", 6)])
def test_published_bytes_per_logit(loss: str, expected: int) -> None:
    """Llama-3's vocabulary, 8192 tokens: 6 bytes are 6.3 GB, 12 are 12.6 GB."""
    stays, forward, backward = per_logit(loss, 2)
    assert max(forward, stays + backward) == expected
    shape = VocabularyShape(rows=128256, hidden_size=4096, sequences=1, tokens=8192)
    hidden = 8192 * 4096 * 2
    whole, shared = (
        vocabulary_bytes("first-last", 3, Placement.linear(4), shape, loss=loss, tensor_parallel=parts)
        for parts in (1, 8)
    )
    assert whole.peaks.output - hidden == pytest.approx(forward * 128256 * 8192, rel=0.01)
    assert shared.stored - hidden == pytest.approx((whole.stored - hidden) / 8, rel=0.01)


def test_only_tensor_ranks_that_keep_own_rows_put_those_of_the_embedding_together() -> None:
    shape, hidden = VocabularyShape(rows=128, hidden_size=8, sequences=1, tokens=16), 16 * 8 * 2
    for ranks, placing, picking in ((1, 0, 0), (2, 2 * hidden, 3 * hidden // 2)):
        shared = {"tensor_parallel": ranks, "own_rows": True}
        embedding = vocabulary_bytes("first-last", 0, Placement.linear(2), shape, **shared).embedding
        assert (embedding.placing_peak, embedding.picking_peak) == (placing, picking)
