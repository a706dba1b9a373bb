"""The head for one device against torch's own cross-entropy of a linear layer, in fp64."""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from vocabulary_reference import frobenius

from evenpipe import linear_cross_entropy
from evenpipe.errors import InputError
from evenpipe.vocabulary import head

TOKENS, HIDDEN, VOCABULARY = 37, 12, 50
POSITIONAL = ("input", "linear_weight", "target")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(dtype: torch.dtype = torch.float64, *, ignored: tuple[int, ...] = (3, 20)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    target = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    target[list(ignored)] = -100
    target[5:9] = 7
    return {
        "input": normal(TOKENS, HIDDEN),
        "linear_weight": normal(VOCABULARY, HIDDEN),
        "target": target.to(DEVICE),
        "linear_bias": normal(VOCABULARY),
    }


def in_fp64(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in arguments.items()}


def reference(
    arguments: dict[str, Tensor],
    *,
    reduction: str = "mean",
    token_weights: Tensor | None = None,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    **options: Any,
) -> Tensor:
    """Of torch's functions."""
    logits = linear(arguments["input"], arguments["linear_weight"], arguments.get("linear_bias")) * logit_scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    target = arguments["target"]
    losses = cross_entropy(logits, target, reduction="none", **options)
    counts = (target != options.get("ignore_index", -100)).to(losses)
    classes = options.get("weight")
    factors = counts if classes is None else counts * classes[target.clamp(min=0)]
    losses = losses + z_loss * logits.logsumexp(1).square() * factors
    if token_weights is not None:
        losses, factors = losses * token_weights, factors * token_weights
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / factors.sum()}[reduction]


def gradients(
    arguments: dict[str, Tensor], function: Any, upstream: Tensor | float = 1.0, **options: Any
) -> list[Tensor]:
    """The result, and the gradients of input, weight and bias."""
    leaves = {
        name: value.detach().clone().requires_grad_() if value.is_floating_point() else value
        for name, value in arguments.items()
    }
    if function is reference:
        result = reference(leaves, **options)
    else:
        others = {name: value for name, value in leaves.items() if name not in POSITIONAL}
        result = function(*(leaves[name] for name in POSITIONAL), **others, **options)
    (result * upstream).sum().backward()
    return [result.detach(), *(one.grad for one in leaves.values() if one.grad is not None)]


def assert_equal(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape
        assert frobenius(ours, theirs) <= tolerance


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "soft-cap and scale": {"soft_cap": 4.0, "logit_scale": 0.7},
    "everything": {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 4.0, "logit_scale": -0.7},
    "classes": {"weight": torch.linspace(0.1, 2.0, VOCABULARY, dtype=torch.float64, device=DEVICE)},
    "tokens": {"token_weights": torch.linspace(-1.0, 2.0, TOKENS, dtype=torch.float64, device=DEVICE)},
    "ignore": {"ignore_index": 7},
}


@pytest.fixture(params=["whole", "parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All tokens at once, or 10 by 10: then gradients are made with the loss, or logits a second time."""
    if request.param == "parts":
        monkeypatch.setattr(head, "KEPT_BYTES", 0)
        monkeypatch.setattr(head, "TOKENS_AT_LEAST", 10)
    name: str = request.param
    return name


@pytest.mark.usefixtures("parts")
def test_gradients(sample) -> None:
    kernels = ["torch", "triton"] if find_spec("triton") else ["torch"]
    for name, reduction, kernel in sample(itertools.product(OPTIONS, ("mean", "sum", "none"), kernels), 4):
        arguments = inputs(ignored=() if name == "ignore" else (3, 20))
        options = {"reduction": reduction, **OPTIONS[name]}
        shape = (TOKENS,) if reduction == "none" else ()
        upstream = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)
        expected = gradients(arguments, reference, upstream, **options)
        actual = gradients(arguments, linear_cross_entropy, upstream, kernels=kernel, **options)
        assert_equal(actual, expected, 1e-10)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    """Gradients have the dtype of what they belong to, and are as good as torch's of the same dtype allow."""
    arguments = inputs(dtype)
    for reduction in ("mean", "none"):
        actual = gradients(arguments, linear_cross_entropy, reduction=reduction)
        assert {tensor.dtype for tensor in actual} == {dtype}
        assert_equal(actual, gradients(in_fp64(arguments), reference, reduction=reduction), tolerance)


def test_bf16_is_as_good_as_torch() -> None:
    """At most 1.5 times the error of bf16 products with cross-entropy in fp32, for every gradient."""
    arguments = inputs(torch.bfloat16, ignored=())

    def torchs(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor) -> Tensor:
        return cross_entropy(linear(input, linear_weight, linear_bias).float(), target)

    expected = gradients(in_fp64(arguments), reference)
    theirs, ours = gradients(arguments, torchs), gradients(arguments, linear_cross_entropy)
    for own, other, right in zip(ours[1:], theirs[1:], expected[1:], strict=True):
        assert frobenius(own, right) <= 1.5 * frobenius(other, right)


def test_several_dimensions_and_strides() -> None:
    arguments = inputs(ignored=())
    sequence = {**arguments, "input": arguments["input"][:36].reshape(3, 12, HIDDEN).transpose(0, 1)}
    sequence["target"] = arguments["target"][:36].reshape(3, 12).transpose(0, 1)
    sequence["linear_weight"] = arguments["linear_weight"].t().contiguous().t()
    flat = {**arguments, "input": sequence["input"].reshape(36, HIDDEN), "target": sequence["target"].reshape(36)}
    actual = gradients(sequence, linear_cross_entropy, reduction="none")
    expected = gradients(flat, reference, reduction="none")
    assert actual[0].shape == (12, 3)
    assert_equal([actual[0].flatten(), actual[1].reshape(36, HIDDEN), *actual[2:]], expected, 1e-10)


@pytest.mark.usefixtures("parts")
def test_only_what_is_wanted() -> None:
    """Gradients of single leaves; in an evaluation, of none."""
    arguments = inputs()
    expected = gradients(arguments, reference)
    for number, needed in enumerate(("input", "linear_weight", "linear_bias"), 1):
        leaves = {name: value.detach().requires_grad_(name == needed) for name, value in arguments.items()}
        linear_cross_entropy(**leaves).backward()
        assert [name for name, value in leaves.items() if value.grad is not None] == [needed]
        assert frobenius(leaves[needed].grad, expected[number]) <= 1e-10
    with torch.no_grad():
        loss = linear_cross_entropy(**arguments)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, reference(arguments))


@pytest.mark.usefixtures("parts")
def test_no_token_counts() -> None:
    """As in torch: a mean of nothing is NaN, a sum 0; and no gradient is anything but 0."""
    for reduction in ("mean", "sum", "none"):
        arguments = inputs(ignored=tuple(range(TOKENS)))
        arguments["target"][:] = -100
        arguments["input"][0] = torch.nan
        result, *leaves = gradients(arguments, linear_cross_entropy, reduction=reduction)
        assert bool(result.isnan().all()) if reduction == "mean" else not bool(result.any())
        assert len(leaves) == 3 and not any(bool(gradient.any()) for gradient in leaves)
    for reduction, expected in {"mean": torch.nan, "sum": 0.0}.items():
        empty = torch.zeros(0, HIDDEN, device=DEVICE, requires_grad=True)
        weight = torch.zeros(VOCABULARY, HIDDEN, device=DEVICE, requires_grad=True)
        target = torch.zeros(0, dtype=torch.int64, device=DEVICE)
        loss = linear_cross_entropy(empty, weight, target, reduction=reduction)
        torch.testing.assert_close(loss.detach(), torch.tensor(expected, device=DEVICE), equal_nan=True)
        loss.backward()
        assert weight.grad is not None and not bool(weight.grad.any())


def test_autocast() -> None:
    arguments = inputs(torch.float32, ignored=())
    narrow = {name: value.bfloat16() if value.is_floating_point() else value for name, value in arguments.items()}
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        actual = gradients(arguments, linear_cross_entropy)
    loss, *expected = gradients({**narrow, "linear_bias": arguments["linear_bias"]}, linear_cross_entropy)
    assert torch.equal(actual[0].bfloat16(), loss)
    for ours, theirs in zip(actual[1:], expected, strict=True):
        assert torch.equal(ours, theirs.float())


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_under_autocast_are_those_of_torch(dtype: torch.dtype, reduction: str) -> None:
    """The loss is not rounded, and fp64 stays fp64."""
    arguments = inputs(dtype, ignored=())
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        actual, expected = (gradients(arguments, one, reduction=reduction) for one in (linear_cross_entropy, reference))
    assert [one.dtype for one in actual] == [one.dtype for one in expected]
    assert_equal(actual, expected, 1e-12 if dtype == torch.float64 else 2e-2)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_and_a_second_derivative_are_refused(reduction: str) -> None:
    """Not taken as 0: the gradient of a gradient's norm would be wrong in silence."""
    arguments = inputs()
    arguments["input"].requires_grad_()
    loss = linear_cross_entropy(**arguments, reduction=reduction).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has only one backward"):
        loss.backward()

    for by in ("input", "linear_weight", "scale"):
        leaves = inputs()
        leaves["scale"] = torch.ones((), dtype=torch.float64, device=DEVICE)
        wanted = [leaves[name].requires_grad_() for name in ("input", "linear_weight", "scale")]

        def first(leaves: dict[str, Tensor] = leaves, wanted: list[Tensor] = wanted, **options: Any) -> Any:
            loss = linear_cross_entropy(*(leaves[name] for name in POSITIONAL), reduction=reduction).sum()
            return torch.autograd.grad(loss * leaves["scale"], wanted, **options)

        derivatives = first(create_graph=True)
        assert all(map(torch.equal, derivatives, first()))
        penalty = derivatives[0].square().sum() + sum(derivative.sum() for derivative in wanted)
        with pytest.raises(RuntimeError, match="has no second derivative"):
            torch.autograd.grad(penalty, leaves[by], retain_graph=True)
        with pytest.raises(RuntimeError, match="has no second derivative"):
            penalty.backward()


def test_under_torch_compile_it_is_called_as_it_is() -> None:
    arguments = inputs(torch.float32)

    def loss(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 2, arguments["linear_weight"], arguments["target"]) + 1

    expected = loss(arguments["input"])
    compiled = torch.compile(loss, backend="eager")(arguments["input"])
    assert torch.equal(compiled, expected)


def test_what_does_not_go_together() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"linear_weight": torch.zeros(5, 3)}, r"input must be \[..., hidden_size\].* not \[37, 12\] and \[5, 3\]"),
        ({"linear_weight": torch.zeros(5, HIDDEN).half()}, r"one dtype, not torch.float64 and torch.float16"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, r"target is \[4\]; it must be \[37\]"),
        ({"target": torch.zeros(TOKENS)}, r"target must hold labels in torch.int64, not torch.float32"),
        ({"linear_bias": torch.zeros(2)}, r"linear_bias is \[2\]; it must be \[50\]"),
        ({"weight": torch.zeros(3)}, r"weight is \[3\]; it must be \[50\]"),
        ({"token_weights": torch.zeros(3)}, r"token_weights is \[3\]; it must be \[37\]"),
        ({"reduction": "median"}, 'reduction must be "none", "mean" or "sum", not \'median\''),
        ({"weight": torch.ones(VOCABULARY), "label_smoothing": 0.1}, "does not go with label_smoothing"),
        ({"token_weights": torch.ones(TOKENS, requires_grad=True)}, "token_weights is a constant here"),
        ({"label_smoothing": 2.0}, "label_smoothing is 2.0; it must be between 0 and 1"),
        ({"target": torch.full((TOKENS,), VOCABULARY)}, "Label 50 is neither a token"),
    ]
    for changes, sentence in refused:
        arguments: dict[str, Any] = {name: value.cpu() for name, value in inputs().items()} | changes
        with pytest.raises(InputError, match=sentence):
            linear_cross_entropy(**arguments)
    with pytest.raises(TypeError, match="unexpected keyword argument 'keep'"):
        linear_cross_entropy(**inputs(), keep="nothing")  # type: ignore[call-arg]
