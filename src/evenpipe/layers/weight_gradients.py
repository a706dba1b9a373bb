"""The split backward: I puts (input, output gradient) of every linear layer in a queue, W multiplies them.

A linear layer of a stage becomes an instance of a subclass (its class is changed, so that wrappers and checkpointing
see an ordinary module). For a microbatch with a split backward, its forward is an autograd function with the weight
outside of autograd: the backward of that function returns the input's gradient and queues the rest. Otherwise the layer
behaves like torch's, so fused and split backwards can be mixed in a schedule.

    I    y.grad -> x.grad, and (x, y.grad) into the queue     norms and other small parameters get their gradient here
    W    weight.grad += y.grad^T x, bias.grad += sum y.grad

Both tensors are queued detached: the saved input would keep its graph alive, and with it the stage's input. Nothing
else is kept between I and W, and shared tensors (the input of the three projections of an attention) are kept once.
Gradients are bitwise identical to the fused backward: one product per use of a layer, uses within a microbatch summed
in the order of autograd, then one addition, in the order of the W passes. See arXiv 2401.10241, section 2.

Reductions of gradients over replicas must wait for the last W (hooks at the end of a backward run in I, before it), and
W needs the same parameter objects as I, though not their values: a parameter may be sharded in between if the same
object is unsharded again when gradients are reduced. For layers compiled by torch.compile see `compilation.py`.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evenpipe.layers.checkpointing import only_saves
from evenpipe.model.linear import is_one_product, is_transposed, specialised
from evenpipe.model.products import PLAIN, SUMMED, Products, products_of
from evenpipe.vocabulary.products import writes_accumulator

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightProduct:
    """The gradient of a weight, not computed yet."""

    products: Products
    gradient: Tensor
    """[n, out]"""
    hidden: Tensor
    """[n, in]"""
    transposed: bool
    """Whether the weight is [in, out] instead of [out, in]."""

    def compute(self) -> Tensor:
        """Return the gradient of the weight, in the dtype of the operands."""
        return self.products.weight_gradient(self.gradient, self.hidden, transposed=self.transposed)

    @property
    def adds_in_fp32(self) -> bool:
        """Whether one kernel can compute it and add it to a sum in fp32, without rounding or a temporary tensor."""
        return _writes_fp32(self.products, self.hidden) and self.gradient.dtype == self.hidden.dtype

    def add_to(self, total: Tensor | None) -> Tensor:
        """Return the sum in fp32, in the memory of `total` if given."""
        left, right = (self.hidden, self.gradient) if self.transposed else (self.gradient, self.hidden)
        if total is None:
            return torch.mm(left.t(), right, out_dtype=torch.float32)
        return torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)


def _writes_fp32(products: Products, operand: Tensor) -> bool:
    return products is PLAIN and writes_accumulator(operand)


Gradients = tuple[Tensor | WeightProduct, ...]


@dataclass(slots=True, eq=False)
class Entry:
    """The inputs of W for a single use of a layer."""

    parameters: tuple[nn.Parameter, ...]
    """The parameters of `gradients`, in this order."""
    gradients: Callable[[], Gradients]
    """Called once, without grad mode: returns new tensors, which become `.grad` or are added to it, or products that
    compute such tensors. Only the (detached) tensors in the callable are kept between I and W; it is released with the
    entry."""
    source: Source | None = None
    """Gathers the layer's input again before it is needed."""
    saved: Tensor | None = None
    """The tensor from which `source` gathers."""

    @torch.no_grad()
    def compute(self) -> None:
        """Add the gradients immediately."""
        for parameter, gradient in zip(self.parameters, self.gradients(), strict=True):
            accumulate(parameter, gradient)


class WeightGradients:
    """The queue between I and W, for all stages of a device, by stage and unit (a microbatch, or a slice of one)."""

    def __init__(self) -> None:
        self.under_way: tuple[int, int] | None = None
        """Stage and unit whose F, R or I is running, if its backward is split; else None."""
        self._entries: dict[tuple[int, int], list[Entry]] = {}

    def __len__(self) -> int:
        """Number of units between I and W."""
        return len(self._entries)

    def takes(self, hidden: Tensor) -> bool:
        """Return whether the weight gradient of a layer on `hidden` can wait. Without a graph there is nothing to
        split, and I would not reach a layer whose input needs no gradient."""
        return self.under_way is not None and hidden.requires_grad and torch.is_grad_enabled()

    def begin(self, key: tuple[int, int]) -> None:
        """Start I of a unit. It will have a W, even if no layer adds an entry."""
        self.under_way = key
        self._entries[key] = []

    def add(self, entry: Entry) -> None:
        """Add an entry. Called by layers from within the backward."""
        assert self.under_way is not None, "a layer whose backward is split ran outside of I"
        self._entries[self.under_way].append(entry)

    @torch.no_grad()
    def compute(self, key: tuple[int, int]) -> None:
        """W: add the gradients of a unit, in the order in which I reached the layers.

        The uses of a parameter within the unit are summed before they are added, as in autograd. An input that must be
        gathered is in flight during the products of the previous input:

            [gather x of the MLP]  [gather x of the attention]  [gather x of the MLP before]
             W of down              W of gate, up, o             W of q, k, v, down
        """
        entries = self._entries.pop(key)
        uses = Counter([id(parameter) for entry in entries for parameter in entry.parameters])
        sums: dict[int, Tensor] = {}
        entries.reverse()
        sources = [entry for entry in entries if entry.source is not None]
        in_flight = _start_next(sources, None)
        while entries:
            entry = entries.pop()  # frees the tensors of each entry after its use
            if entry.source is not None and entry.source is in_flight:
                in_flight = _start_next(sources, in_flight)
            _add_uses(entry, uses, sums)

    def clear(self) -> None:
        self._entries.clear()
        self.under_way = None


def _add_uses(entry: Entry, uses: Counter[int], sums: dict[int, Tensor]) -> None:
    """Add the gradients of parameters that are not used again in this W, and add those of others to `sums`. This is a
    separate function so that no local variable keeps a tensor alive."""
    for parameter, gradient in zip(entry.parameters, entry.gradients(), strict=True):
        number = id(parameter)
        uses[number] -= 1
        if number not in sums and not uses[number]:
            accumulate(parameter, gradient)
            continue
        value = gradient.compute() if isinstance(gradient, WeightProduct) else gradient
        summed = sums.pop(number).add_(value) if number in sums else value
        if uses[number]:
            sums[number] = summed
        else:
            accumulate(parameter, summed)


def _start_next(entries: list[Entry], source: Source | None) -> Source | None:
    """Start gathering for the last entry with another source, and remove it and the entries after it. Return its
    source."""
    while entries:
        entry = entries.pop()
        if entry.source is not source:
            assert entry.source is not None and entry.saved is not None
            entry.source.start(entry.saved)
            return entry.source
    return None


def accumulate(parameter: nn.Parameter, gradient: Tensor | WeightProduct) -> None:
    """Add a gradient as autograd would, with the hooks that Python can see. Every gradient of W passes through here.

    If a parameter has a sum in fp32 (`parallel.gradients.AddTo`), the product itself adds to that sum, if it can.

    Hooks of `Tensor.register_hook` may replace the gradient, then it becomes `.grad` or is added to it, then hooks of
    `register_post_accumulate_grad_hook` run. Hooks on the parameter's node of the graph do not run. In a pipeline these
    are hooks of the library: it sets aside those of users (`runtime/gradient_hooks.py`).
    """
    if isinstance(gradient, WeightProduct):
        summed = getattr(parameter, SUMMED, None)
        if summed is not None and gradient.adds_in_fp32 and parameter.grad is None and not parameter._backward_hooks:
            summed.grad = gradient.add_to(summed.grad)
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)
            return
        gradient = gradient.compute()
    for replace in list((parameter._backward_hooks or {}).values()):
        replaced = replace(gradient)
        gradient = gradient if replaced is None else replaced
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """The `LayerTransform` that lets linear layers take part in split backwards."""

    queue: WeightGradients

    def apply(self, model: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        """Split the linear layers of a stage.

        Only layers that are a single product (`is_one_product`) are split: other modules may use their parameters in
        unknown ways. A layer that shares parameters with another kind of module is not changed.
        """
        foreign = {
            parameter
            for module in model.modules()
            if not is_one_product(module)
            for parameter in module._parameters.values()
            if parameter is not None
        }
        for layer in model.modules():
            if is_one_product(layer) and foreign.isdisjoint(layer._parameters.values()):
                layer.__class__ = specialised(type(layer), SplitLayer)  # type: ignore[arg-type]  # a class is hashable
                layer.transposed = is_transposed(layer)  # type: ignore[assignment]
                layer._weight_gradients = self.queue  # type: ignore[assignment]


def unsplit_matrices(model: nn.Module) -> list[str]:
    """Return the names of the trained matrices (parameters of two or more dimensions) of a stage that are in no module
    with a queue: their gradient is computed in I, which is correct, but leaves less for W."""
    split = {
        parameter
        for module in model.modules()
        if hasattr(module, "_weight_gradients")
        for parameter in module._parameters.values()
    }
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and parameter.requires_grad and parameter not in split
    ]


def report_unsplit(names: Iterable[str]) -> None:
    """Log in one line which matrices leave nothing for W; layers of the same kind are named once."""
    kinds = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    if kinds:
        listed = ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in kinds.items())
        logger.warning("not part of the split backward, their weight gradients are computed in I: %s", listed)


class Source(Protocol):
    """Provides the input of a layer again in the backward: each tensor rank keeps only its local rows of it."""

    def gave(self, hidden: Tensor) -> bool:
        """Return whether a layer's input is the entire gathered tensor."""
        ...

    def save(self, layer: nn.Module) -> Tensor:
        """Return the tensor that a layer saves instead of its input."""
        ...

    def product(self, layer: nn.Module) -> Tensor | None:
        """Return the layer's output [n, out], if it was computed while the input arrived; plain products only."""
        ...

    def start(self, saved: Tensor) -> None:
        """Start gathering the input again."""
        ...

    def all_rows(self, saved: Tensor) -> Tensor:
        """Return the input [n, in]."""
        ...

    def later(self, work: Callable[[], None]) -> None:
        """Schedule work for later in the same backward."""
        ...

    def takes(self, gradient: Tensor, matrix: Tensor) -> bool:
        """Return whether the source computes the input's gradient, [n, out] times [out, in], while it sums over
        ranks."""
        ...


class Sums(Protocol):
    """Sums the outputs of a block's last layer over tensor ranks; each rank gets its local rows."""

    result: Tensor | None
    """The layer's last output, if it is already summed."""

    def rows_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a rank's rows of a tensor."""
        ...

    def product(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Return the local rows [n/t, out] of the sum over ranks of [n, in] times [in, out], plus the bias."""
        ...

    def gather(self, gradient: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients [n, out] of all rows, from a rank's, and their product with [out, in]."""
        ...


class SplitLayer(nn.Module):
    """A linear layer whose weight gradient can be computed later. Created by `SplitBackward` only."""

    weight: Any
    bias: Any
    transposed: bool
    """Whether the weight is [in, out] instead of [out, in]."""
    _weight_gradients: WeightGradients
    _tapped: Taps | None = None
    """Set by `compilation.py` while it calls the decoder layer that contains this layer."""
    _source: Source | None = None
    """Set during the call of a block whose input was gathered."""
    _sums: Sums | None = None
    """Set if the layer's outputs are summed over tensor ranks. If the layer does not sum them, its hook does."""

    def forward(self, x: Tensor) -> Tensor:
        if self._tapped is not None:
            return _TappedLinear.apply(x, self, *self._tapped)
        if not torch.compiler.is_compiling() and is_trained(self):
            source, sums = self._source, self._sums if products_of(self) is PLAIN else None
            if source is not None and not (x.requires_grad and torch.is_grad_enabled() and source.gave(x)):
                source = None
            if sums is not None and x.requires_grad and torch.is_grad_enabled():
                output = sums.result = _Linear.apply(x, self, source, sums)
                return output
            if source is not None or self._weight_gradients.takes(x) or _adds_in_fp32(self, x):
                return _Linear.apply(x, self, source, None)
        return super().forward(x)


Taps = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""Detached weight and bias; the taps for the input and for the gradient of the output."""


def is_trained(layer: SplitLayer) -> bool:
    """Return whether the weight is trained. If not, the gradient of the bias is cheap enough to compute immediately."""
    weight = layer._parameters["weight"]  # module attributes are slow
    return weight is not None and weight.requires_grad


def _adds_in_fp32(layer: SplitLayer, hidden: Tensor) -> bool:
    """Return whether the product can add the weight's gradient to a sum in fp32."""
    weight = layer._parameters["weight"]
    summed = hasattr(weight, SUMMED) and _writes_fp32(products_of(layer), hidden)
    return summed and hidden.requires_grad and torch.is_grad_enabled()


class _Linear(torch.autograd.Function):
    """x W^T + b, and with `Sums` the local rows of its sum over ranks. The parameters are outside of autograd: their
    hooks would otherwise run in I, before there is a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: SplitLayer, source: Source | None, sums: Sums | None) -> Tensor:
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]  # module attributes are slow
        assert weight is not None
        ctx.save_for_backward(hidden if source is None else source.save(layer))
        ctx.of = layer, layer.transposed or bias is None or _in_rows(hidden), source, sums
        ctx.shape = hidden.shape
        shape = (*hidden.shape[:-1], weight.shape[1 if layer.transposed else 0])
        shape = shape if sums is None else sums.rows_of(shape)
        if only_saves():  # a repeated forward, and this was the last tensor that it has to save
            return hidden.new_empty(shape)
        computed: Tensor | None
        if sums is not None:
            rows = hidden.reshape(-1, hidden.shape[-1])
            computed = sums.product(rows, weight if layer.transposed else weight.t(), bias)
        else:
            computed = None if source is None else source.product(layer)
        if computed is not None:
            return torch.ops.aten._unsafe_view(computed, shape)  # type: ignore[no-any-return]
        output = products_of(layer).output(hidden, weight.t() if layer.transposed else weight, bias)
        # Some models modify it in place, which autograd forbids for a view returned by a function.
        return output.new_empty(0).set_(output) if output._is_view() else output  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        (saved,) = ctx.saved_tensors
        layer, in_rows, source, sums = ctx.of
        products, weight = products_of(layer), layer._parameters["weight"]
        matrix = weight.t() if layer.transposed else weight
        of_input = None
        if sums is not None:
            gradient, of_input = sums.gather(gradient.reshape(-1, gradient.shape[-1]), matrix)
            gradient, of_input = gradient.view(*ctx.shape[:-1], -1), of_input.view(ctx.shape)
        # The gradient has no graph; the input has one, which would stay alive until W.
        entry = linear_entry(layer, saved.detach(), gradient, in_rows, source)
        if layer._weight_gradients.under_way is not None:
            layer._weight_gradients.add(entry)
            if source is not None and products is PLAIN and source.takes(gradient, matrix):
                return None, None, None, None
        elif source is not None:  # the backward is not split: the source decides when
            source.start(saved)
            source.later(entry.compute)
        else:
            entry.compute()
        return products.input_gradient(gradient, matrix) if of_input is None else of_input, None, None, None


class _TappedLinear(torch.autograd.Function):
    """x W^T + b, whose backward returns x and the gradient of the output [tokens, ...] as the gradients of taps."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: SplitLayer, *taps: Tensor) -> Tensor:
        """taps: `Taps`."""
        weight, bias, _, _ = taps
        ctx.save_for_backward(hidden, weight)
        ctx.how = products, transposed = products_of(layer), layer.transposed
        return products.output(hidden, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        columns, rows = hidden.reshape(-1, hidden.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        products, transposed = ctx.how
        of_hidden = products.input_gradient(gradient, weight.t() if transposed else weight)
        return of_hidden, None, None, None, columns, rows


def _in_rows(hidden: Tensor) -> bool:
    """Return whether torch's linear layer treats this input as rows of a matrix. If not, it adds the bias in all
    dimensions, and sums the bias's gradient over them."""
    dimensions = hidden.dim()
    return dimensions <= 2 or (dimensions == 3 and hidden.stride(0) == hidden.stride(1) * hidden.size(1))


def linear_entry(
    layer: SplitLayer, hidden: Tensor, gradient: Tensor, in_rows: bool = True, source: Source | None = None
) -> Entry:
    """Return the entry for one use of a linear layer.

    Args:
        hidden: its input [..., in], detached; or with a source, the saved tensor.
        gradient: gradient of its output [..., out], without a graph.
        in_rows: whether the bias's gradient is summed over rows, or over all dimensions at once; the last bit differs.
    """
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    assert weight is not None

    def of_weight() -> WeightProduct:
        full_input = hidden if source is None else source.all_rows(hidden)
        rows, columns = gradient.reshape(-1, gradient.shape[-1]), full_input.reshape(-1, full_input.shape[-1])
        return WeightProduct(products_of(layer), rows, columns, layer.transposed)

    saved = None if source is None else hidden
    if bias is None or not bias.requires_grad:
        return Entry((weight,), lambda: (of_weight(),), source, saved)

    def of_bias() -> Tensor:
        return gradient.reshape(-1, len(bias)).sum(0) if in_rows else gradient.sum(tuple(range(gradient.dim() - 1)))

    return Entry((weight, bias), lambda: (of_weight(), of_bias()), source, saved)
