"""What S, C and T cost: arithmetic counted, and the largest tensors that they make."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vocabulary_reference import BACKWARDS, problem

from evenpipe.vocabulary import (
    Buffers,
    LossOptions,
    OutputState,
    backward_shard,
    combine,
    forward_shard,
    hidden_gradient,
    products,
    split,
)
from evenpipe.vocabulary.products import vocabulary_slices

TOKENS, HIDDEN, VOCABULARY = 64, 16, 512
PRODUCT = 2 * TOKENS * HIDDEN * VOCABULARY


class Layer:
    """One shard that is the whole vocabulary."""

    def __init__(self, options: LossOptions, *, one_barrier: bool, dtype: torch.dtype, bias: bool = False) -> None:
        self.inputs = problem(TOKENS, HIDDEN, VOCABULARY, bias=bias).to(dtype)
        self.options = options
        self.one_barrier = one_barrier
        self.buffers = Buffers()
        (self.shard,) = split(VOCABULARY, 1)
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        self.weight_gradient = torch.zeros(VOCABULARY, HIDDEN, dtype=accumulator)

    def forward(self, gradients: bool = True) -> tuple[Tensor, OutputState]:
        tensors = self.inputs.hidden, self.inputs.weight, self.inputs.bias, self.inputs.labels
        return forward_shard(
            *tensors, self.shard, self.options, self.one_barrier, gradients=gradients, buffers=self.buffers
        )

    def backward(self, statistics: Tensor, state: OutputState) -> tuple[Callable[[], object], Callable[[], object]]:
        weight = self.inputs.weight
        combined = combine(statistics[None], self.inputs.token_weights, self.inputs.labels, self.options, VOCABULARY)
        return (
            lambda: hidden_gradient(state, combined, weight),
            lambda: backward_shard(state, combined, weight, self.weight_gradient),
        )


class Recorder(TorchDispatchMode):
    """Sizes of the tensors that operations return, and the matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, torch.dtype]] = set()
        """Elements of the storage, and dtype."""
        self.products: list[tuple[int, int, int]] = []
        """Rows, inner dimension, columns."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.made.add((tensor.untyped_storage().nbytes() // tensor.element_size(), tensor.dtype))
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[:2] if name == "mm" else args[1:3]
            self.products.append((*left.shape, right.shape[1]))
        return result

    def largest(self, dtype: torch.dtype) -> int:
        return max((elements for elements, made in self.made if made == dtype), default=0)


def flops(run: Callable[[], Any]) -> tuple[int, Any]:
    with Recorder() as recorder:
        result = run()
    return sum(2 * rows * inner * columns for rows, inner, columns in recorder.products), result


DTYPES = (torch.float32, torch.bfloat16)
PRODUCTS = {
    # whether there is one barrier, what is kept -> products in S, in C, in T
    (True, "probabilities"): (2, 0, 1),
    (False, "probabilities"): (1, 0, 2),
    (True, "nothing"): (2, 0, 2),
    (False, "nothing"): (1, 0, 3),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrix_products(dtype: torch.dtype) -> None:
    """Three in all, in units of 2 tokens x hidden_size x rows; a fourth only when nothing is kept."""
    for (one_barrier, keep), counts in PRODUCTS.items():
        layer = Layer(LossOptions(keep=keep, rows_per_block=24, z_loss=1e-3), one_barrier=one_barrier, dtype=dtype)
        count, (statistics, state) = flops(layer.forward)
        assert count == counts[0] * PRODUCT
        hidden_pass, weight_pass = layer.backward(statistics, state)
        if one_barrier:
            assert flops(hidden_pass)[0] == counts[1] * PRODUCT
        assert flops(weight_pass)[0] == counts[2] * PRODUCT


def test_ignored_tokens_cost_nothing() -> None:
    layer = Layer(LossOptions(), one_barrier=True, dtype=torch.float32)
    layer.inputs.labels[::2] = -100
    count, (statistics, state) = flops(layer.forward)
    assert count == PRODUCT
    assert flops(layer.backward(statistics, state)[1])[0] == PRODUCT // 2


@pytest.mark.parametrize("one_barrier", [True, False])
@pytest.mark.parametrize("native", [True, False], ids=["bf16 products", "none"])
def test_bf16_never_has_fp32_logits_of_all_tokens(
    native: bool, one_barrier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the processor has no products in bf16, factors are made wide in slices of the vocabulary."""
    monkeypatch.setattr(products, "cpu_has_bf16", lambda: native)
    monkeypatch.setattr(products, "vocabulary_slices", lambda rows: vocabulary_slices(rows, 96))
    options = LossOptions(rows_per_block=8, soft_cap=5.0, label_smoothing=0.1)
    layer = Layer(options, one_barrier=one_barrier, dtype=torch.bfloat16)
    with Recorder() as recorder:
        statistics, state = layer.forward()
        hidden_pass, weight_pass = layer.backward(statistics, state)
        if one_barrier:
            hidden_pass()
        weight_pass()
    assert recorder.largest(torch.bfloat16) == TOKENS * VOCABULARY
    assert recorder.largest(torch.float32) == VOCABULARY * HIDDEN  # the gradient; a block of logits is half of that
    assert recorder.largest(torch.float64) < 10 * TOKENS


def test_nothing_is_kept_when_nothing_is_to_be_kept() -> None:
    """Neither with keep = "nothing" nor in evaluation does S make a tensor of all tokens and all rows."""
    for gradients, dtype in itertools.product((True, False), DTYPES):
        options = LossOptions(keep="nothing" if gradients else "probabilities", rows_per_block=8, soft_cap=5.0)
        layer = Layer(options, one_barrier=True, dtype=dtype)
        with Recorder() as recorder:
            layer.forward(gradients=gradients)
        assert max(map(recorder.largest, DTYPES)) <= VOCABULARY * HIDDEN, (gradients, dtype)


def test_recomputation_works_in_slices_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenpipe.vocabulary.output.BLOCK_LOGITS", TOKENS * 256)
    layer = Layer(LossOptions(keep="nothing"), one_barrier=False, dtype=torch.float32)
    statistics, state = layer.forward()
    _, weight_pass = layer.backward(statistics, state)
    layer.buffers.clear()
    with Recorder() as recorder:
        weight_pass()
    assert recorder.largest(torch.float32) == TOKENS * 256
    assert len(recorder.products) == 2 * 3


def test_the_weight_gradient_sums_all_tokens_at_once() -> None:
    for dtype, keep in itertools.product(DTYPES, ("probabilities", "nothing")):
        layer = Layer(LossOptions(rows_per_block=8, keep=keep), one_barrier=True, dtype=dtype)
        hidden_pass, weight_pass = layer.backward(*layer.forward())
        hidden_pass()
        with Recorder() as recorder:
            weight_pass()
        again = {HIDDEN} if keep == "nothing" else set()
        assert {inner for _, inner, _ in recorder.products} == {TOKENS} | again, (dtype, keep)


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_goes_from_one_microbatch_to_the_next(dtype: torch.dtype, backward: str) -> None:
    """After the first microbatch nothing of the size of a block is allocated any more, and nothing is kept twice. Of a
    split backward, only X, the exponentials and numbers per token wait for the second half."""
    options = LossOptions(rows_per_block=8, soft_cap=5.0, label_smoothing=0.1)
    layer = Layer(options, one_barrier=backward == "one barrier", dtype=dtype)
    rooms: list[list[int]] = []
    for _ in range(3):
        statistics, state = layer.forward()
        kept = [tensor.data_ptr() for tensor in (state.exponentials, state.derivative) if tensor is not None]
        assert len(kept) == 2
        assert not {room.data_ptr() for room in layer.buffers._free} & set(kept), "given back while in use"
        hidden_pass, weight_pass = layer.backward(statistics, state)
        if backward != "two barriers":
            hidden_pass()
            assert state.products is None and state.hidden is not None and state.exponentials is not None
        weight_pass()
        assert state.hidden is None and state.exponentials is None and state.derivative is None
        rooms.append(sorted(room.data_ptr() for room in layer.buffers._free))
        assert set(kept) <= set(rooms[-1]), "not given back"
    assert rooms[0] == rooms[1] == rooms[2]


def test_microbatches_in_flight_have_their_own_memory() -> None:
    layer = Layer(LossOptions(), one_barrier=True, dtype=torch.float32)
    states = [layer.forward()[1] for _ in range(3)]
    assert len({state.exponentials.data_ptr() for state in states if state.exponentials is not None}) == 3


def test_buffers_fit_the_largest_use() -> None:
    buffers, like = Buffers(), torch.empty(0)
    small = buffers.take(3, 10, like, torch.float32, room=8)
    assert small.shape == (3, 10)
    buffers.give(small)
    large = buffers.take(8, 10, like, torch.float32)
    assert large.data_ptr() == small.data_ptr() and large.shape == (8, 10)
    assert buffers.take(2, 2, like, torch.float32).data_ptr() != large.data_ptr(), "handed out twice"
    buffers.give(large)
    assert buffers.take(2, 2, like, torch.float64).dtype == torch.float64
    assert buffers.take(9, 10, like, torch.float32).shape == (9, 10) and not buffers._free, "outgrown"
    for room in (None, torch.empty(20), less := torch.empty(10)):
        buffers.give(room)
    assert buffers.take(1, 8, like, torch.float32).data_ptr() == less.data_ptr(), "the smallest that fits"


def test_memory_that_is_not_the_hosts_goes_back_to_its_allocator() -> None:
    buffers = Buffers()
    buffers.give(buffers.take(3, 10, torch.empty(0, device="meta"), torch.float32))
    assert not buffers._free
