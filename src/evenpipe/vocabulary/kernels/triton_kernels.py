"""The launches of Triton's kernels (rows.py). Only a launch needs Triton."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from evenpipe.vocabulary.combination import Combined
from evenpipe.vocabulary.copies import to_device
from evenpipe.vocabulary.kernels.plain import Kernels
from evenpipe.vocabulary.options import LossOptions
from evenpipe.vocabulary.state import OutputState, Products, Rooms

COLUMNS_AT_ONCE = 4096
"""Columns of a row of logits at a time, with 16 warps: 8 numbers per thread, so that a Hopper multiprocessor has
registers for three rows at a time (twice as many numbers leave room for one). Fixed, not autotuned: the kernels are
limited by memory bandwidth, and a choice that depends on a measurement would change the bits of sums from run to
run."""
HIDDEN_AT_ONCE = 2048
LABELS_AT_ONCE = 8
"""Tokens of a target at a time, with a quarter of HIDDEN_AT_ONCE numbers of each."""
TOKENS_AT_ONCE = 128


Kernel = Literal["exponentials_of_rows", "combine_rows", "hidden_gradient_of_rows", "scaled_rows", "add_label_rows"]


def launch(kernel: Kernel, grid: tuple[int, ...], *arguments: Any, warps: int, **compiled: Any) -> None:
    """Launch a kernel of rows.py on the GPU of its tensors, which need not be the current one."""
    from evenpipe.vocabulary.kernels import rows

    if all(grid):
        like = next(argument for argument in arguments if isinstance(argument, Tensor))
        with torch.cuda.device(like.device if like.is_cuda else -1):
            getattr(rows, kernel)[grid](*arguments, num_warps=warps, **compiled)


def _launch_over_logits(
    rooms: Rooms, options: LossOptions, of_tokens: tuple[Tensor | None, ...], first_column: int = 0, **compiled: Any
) -> None:
    """Launch a program for each row of logits."""
    tokens, columns = rooms.logits.shape
    tensors = [room for room in (rooms.logits, rooms.exponentials, rooms.derivative) if room is not None]
    launch(
        "exponentials_of_rows",
        (tokens,),
        rooms.logits,
        rooms.exponentials,
        rooms.derivative,
        *of_tokens,
        rooms.bias,
        columns,
        first_column,
        min(room.stride(0) for room in tensors),  # columns that all of them have memory for
        rooms.logits.stride(0),
        rooms.exponentials.stride(0),
        0 if rooms.derivative is None else rooms.derivative.stride(0),
        warps=16,
        SCALE=options.logit_scale,
        CAP=options.soft_cap or 0.0,
        HAS_BIAS=rooms.bias is not None,
        STORES_DERIVATIVE=rooms.derivative is not None,
        SIZE=_size(columns, COLUMNS_AT_ONCE),
        **compiled,
    )


def _launch_over_hidden(
    kernel: Kernel, rows: int, hidden_size: int, *arguments: Any, at_once: int | None = None, **compiled: Any
) -> None:
    """Launch a program for each row and each piece of its numbers."""
    size = _size(hidden_size, at_once or HIDDEN_AT_ONCE)
    launch(kernel, (rows, -(-hidden_size // size)), *arguments, warps=4, SIZE=size, **compiled)


def _size(numbers: int, at_once: int) -> int:
    return min(at_once, 1 << max(0, numbers - 1).bit_length())


class TritonKernels(Kernels):
    """One launch for each."""

    by_column = True

    def tokens_at_once(self, tokens: int, columns: int, like: Tensor) -> int:
        """All: a launch has a program for each."""
        return tokens

    def exponentials(
        self, rooms: Rooms, first: int, statistics: Tensor, state: OutputState, *, gradients: bool
    ) -> None:
        """The logits are read twice: the second time from the cache if a block fits."""
        column = state.targets.column
        assert column is not None
        _launch_over_logits(
            rooms,
            state.options,
            (statistics, column[first : first + len(rooms.logits)]),
            AGAIN=False,
            NUMBERS=state.options.statistics,
            SMOOTHS=state.options.label_smoothing != 0,
            ENTROPY=state.options.entropy,
            STORES=gradients,
        )

    def exponentials_again(self, rooms: Rooms, first_column: int, maximum: Tensor, state: OutputState) -> None:
        constants = {"AGAIN": True, "NUMBERS": 1, "SMOOTHS": False, "ENTROPY": False, "STORES": True}
        _launch_over_logits(rooms, state.options, (maximum, state.targets.column), first_column, **constants)

    @staticmethod
    def combine(
        statistics: Tensor, token_weights: Tensor, labels: Tensor, options: LossOptions, vocabulary: int
    ) -> Combined:
        shards, tokens, numbers = statistics.shape
        smooths = options.label_smoothing != 0
        results = statistics.new_empty(6 + smooths + options.entropy, tokens)  # in the order of Combined
        launch(
            "combine_rows",
            (-(-tokens // TOKENS_AT_ONCE),),
            statistics.contiguous(),
            to_device(token_weights, statistics.device).contiguous(),
            to_device(labels, statistics.device).contiguous(),
            results,
            tokens,
            shards,
            vocabulary,
            options.ignore_index,
            warps=4,
            SCALE=options.logit_scale,
            CAP=options.soft_cap or 0.0,
            SMOOTHING=options.label_smoothing,
            Z_LOSS=options.z_loss,
            NUMBERS=numbers,
            ENTROPY=options.entropy,
            SIZE=TOKENS_AT_ONCE,
        )
        losses, log_probabilities, log_sum_exp, maximum, others, target, *optional = results.unbind()
        uniform = optional[0] if smooths else None
        entropies = optional[-1] if options.entropy else None
        return Combined(losses, log_probabilities, log_sum_exp, maximum, others, target, uniform, entropies)

    def hidden_gradient(self, state: OutputState, combined: Combined, weight: Tensor, products: Products) -> Tensor:
        """In place in A, unless tokens were removed."""
        product = products.exponentials
        tokens, hidden_size = product.shape
        valid = state.targets.valid
        gradient = product if valid is None else product.new_zeros(state.targets.tokens, hidden_size)
        constant = state.options.adds_constant
        _launch_over_hidden(
            "hidden_gradient_of_rows",
            tokens,
            hidden_size,
            product,
            products.derivative,
            weight,
            weight.sum(0, dtype=product.dtype) if constant else None,
            gradient,
            valid,
            state.targets.column,
            state.maximum,
            combined.others,
            combined.maximum,
            combined.target,
            combined.uniform,
            hidden_size,
            weight.stride(0),
            HAS_VALID=valid is not None,
            HAS_DERIVATIVE=products.derivative is not None,
            HAS_CONSTANT=constant,
        )
        return gradient

    def scaled_hidden(
        self, state: OutputState, combined: Combined, hidden: Tensor, dtype: torch.dtype, *, of_derivative: bool
    ) -> tuple[Tensor, Tensor]:
        tokens, hidden_size = hidden.shape
        valid = state.targets.valid
        scaled = hidden.new_empty(tokens, hidden_size, dtype=dtype)
        coefficients = combined.others.new_empty(tokens)
        _launch_over_hidden(
            "scaled_rows",
            tokens,
            hidden_size,
            hidden,
            scaled,
            coefficients,
            valid,
            state.targets.column,
            state.maximum,
            combined.uniform if of_derivative else combined.others,
            combined.maximum,
            hidden_size,
            hidden.stride(0),
            HAS_VALID=valid is not None,
            OF_DERIVATIVE=of_derivative,
        )
        return scaled, coefficients

    def add_label_rows(
        self,
        state: OutputState,
        combined: Combined,
        hidden: Tensor,
        weight_gradient: Tensor | None,
        bias_gradient: Tensor | None,
    ) -> None:
        """Always in the same order for the tokens of a target."""
        if weight_gradient is None and bias_gradient is None:
            return
        owned, hidden_size = state.targets.owned, hidden.shape[1]
        entries = owned.rows.shape[0]
        _launch_over_hidden(
            "add_label_rows",
            entries,
            hidden_size,
            hidden,
            weight_gradient,
            bias_gradient,
            owned.rows,
            owned.columns,
            state.targets.valid,
            combined.target,
            entries,
            hidden_size,
            hidden.stride(0),
            0 if weight_gradient is None else weight_gradient.stride(0),
            HAS_VALID=state.targets.valid is not None,
            HAS_WEIGHT=weight_gradient is not None,
            HAS_BIAS=bias_gradient is not None,
            ENTRIES=LABELS_AT_ONCE,
            at_once=max(1, HIDDEN_AT_ONCE // 4),
        )
