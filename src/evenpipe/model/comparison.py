"""Checks that the cut model has the loss and every gradient of the whole one before an architecture is trained.

transformers runs a small copy of the model (`small_model`) whole, and this package runs it in three pieces, with the
same random weights and tokens. Checking the loss is not enough: Granite cut at `inputs_embeds` is off by 7e-4 in the
loss and by 0.9 in the gradients.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.model.graph import graph_nodes, run_backward
from evenpipe.model.interface import takes
from evenpipe.model.loading import copy_parameters
from evenpipe.model.rules import undisturbed
from evenpipe.model.small_model import small_model
from evenpipe.model.stage import ModuleStage, Stage, build_stage
from evenpipe.model.structure import first_line

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
PARTLY_FP32 = 1e-6  # in fp64, for families that always round some results to fp32
OWN_LOSS = 1e-6  # transformers always computes it in fp32
BATCH, SEQUENCE, PADDED = 2, 12, 3
SILENT_SECONDS = 3.0
SEED = 0
"""Of what layers draw: they skip the same ones in pieces."""

Gradients = dict[str, torch.Tensor | None]

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Token ids, labels and a mask, each [BATCH, SEQUENCE]."""

Split = Callable[[nn.Module], Callable[[], None]]
"""Splits the next backward of a module; returns a function that computes the weight gradients after the backward."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one forward and backward."""

    loss: float
    gradients: Gradients
    logits_dtype: torch.dtype
    rounds: bool = False
    """Whether the forward casts (norms, attention, logits in fp32): fp64 results are then only as exact as fp32."""


def self_check(
    description: Description, split: Split | None = None, *, say: Callable[[str], None] | None = None
) -> None:
    """Compare a small copy of the model, cut in three, with transformers in one piece. Takes about a second on a CPU.

    Models of plain modules are not checked: there is no reference, and their layers are called directly.
    The user's config, the random state and torch's default dtype are not changed.

    Args:
        split: also compare with backwards that it splits.
        say: receives a message, on another thread, if the check takes more than three seconds.

    Raises:
        InputError: they differ, or no small copy could be made; one sentence names the architecture and the difference.
    """
    if description.config is None:
        return
    with undisturbed(), torch.enable_grad(), one_thread(), _sign_of_life(description, say):
        small, dtype, _ = small_model(description)
        generator = torch.Generator().manual_seed(1)
        for padded in (False, True) if small.takes("attention_mask") else (False,):
            _check_cut(small, dtype, some_batch(small, generator, padded), split)


def _check_cut(small: Description, dtype: torch.dtype, batch: Batch, split: Split | None) -> None:
    """Raise InputError if the small model differs in pieces from the whole."""
    expected = whole_result(small, *batch)
    for way in (None,) if split is None else (None, split):
        cut = f"a small copy of it, cut in three{', its backward split,' if way else ','}"
        refuse = f"{small.architecture} cannot be trained in stages: {cut}"
        try:
            found = _in_pieces(small, dtype, batch, way, expected.logits_dtype)
        except InputError as error:
            raise InputError(f"{refuse} does not run: {error}") from error
        except Exception as error:  # families raise many types when their parts do not fit
            raise InputError(
                f"{refuse} does not run ({type(error).__name__}: {first_line(error)}), so its layers need something of"
                " the model around them besides the hidden states."
            ) from error
        compare(refuse, max(TOLERANCE[dtype], PARTLY_FP32 if expected.rounds else 0.0), found, expected)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: on busy cores, threads that share such small matrices take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _sign_of_life(description: Description, say: Callable[[str], None] | None) -> Iterator[None]:
    if say is None:
        yield
        return
    text = (
        f"checking on a small copy that {description.architecture} gives the same gradients in stages, which takes"
        " longer than usual (self_check=False leaves it out)"
    )
    timer = threading.Timer(SILENT_SECONDS, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def gradient_errors(found: Gradients, expected: Gradients, floor: float = 1e-6) -> dict[str, float]:
    """Return the relative Frobenius error of each tensor; infinity for one that is not finite.

    Args:
        floor: a gradient that is zero except for rounding is measured against this share of the largest norm.
    """
    norms = {name: 0.0 if gradient is None else gradient.norm().item() for name, gradient in expected.items()}
    least = floor * max(norms.values())
    errors = {}
    for name, gradient in expected.items():
        ours = found[name]
        if gradient is None or ours is None:
            present = ours if gradient is None else gradient
            distance = 0.0 if present is None else present.norm().item()
        else:
            distance = (ours - gradient).norm().item()
        errors[name] = distance / max(norms[name], least) if math.isfinite(distance) else math.inf
    return errors


def some_batch(small: Description, generator: torch.Generator, padded: bool) -> Batch:
    """Return tokens that include padding tokens, labels that include ignored ones, and with `padded` a mask.

    The mask has padding on the right and a hole: padding alone changes nothing under causal attention.
    """
    tokens = torch.randint(0, small.vocabulary_size, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(0, small.vocabulary_size, (BATCH, SEQUENCE), generator=generator)
    if small.padding_index is not None:
        tokens[0, 4] = small.padding_index
        labels[1, 5] = small.padding_index
    labels[0, 7] = -100
    if not padded:
        return tokens, labels, None
    mask = torch.ones_like(tokens)
    mask[1, 2:4] = mask[1, -PADDED:] = 0
    return tokens, labels.masked_fill(mask == 0, -100), mask


def loss_of_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss_of_hidden(
    small: Description,
    weights: Mapping[str, torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    logits_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the loss of the last hidden states [batch, sequence, hidden_size], by the vocabulary matrices of these
    names."""
    head = weights[small.embedding_name if small.tied else small.head_name]
    bias = None if small.head_bias_name is None else weights[small.head_bias_name]
    logits = functional.linear(hidden, head, bias).to(logits_dtype) * small.logit_scale
    if small.soft_cap is not None:
        logits = small.soft_cap * torch.tanh(logits / small.soft_cap)
    return loss_of_logits(logits, labels)


def whole_result(small: Description, tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> Result:
    model, router = small.model, small.router_loss
    model.zero_grad()
    torch.default_generator.manual_seed(SEED)
    given = {"labels": labels} if takes(type(model), "labels") else {}
    try:
        output = model(input_ids=tokens, attention_mask=mask, use_cache=False, return_dict=True, **given)
    except Exception as error:  # it did run on token ids alone
        raise InputError(
            f"{small.architecture} cannot be trained in stages: in transformers it does not run on labels of the shape"
            f" of the token ids ({type(error).__name__}: {first_line(error)})."
        ) from error
    loss = loss_of_logits(output.logits, labels)
    added = 0.0 if router is None else router.coefficient * output.aux_loss
    if given:
        with torch.no_grad():
            logits = output.logits.float()
            known = loss_of_logits(logits[:, :-1], labels[:, 1:]), loss_of_logits(logits, labels)
            _check_own_loss(model, float(output.loss), [float(one + added) for one in known])
    loss = loss + added
    rounds = contains_cast(loss)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if small.tied and small.head_name in gradients:  # the head is registered before the model with the embedding
        gradients[small.embedding_name] = gradients.pop(small.head_name)
    return Result(loss.item(), gradients, output.logits.dtype, rounds)


def _check_own_loss(model: PreTrainedModel, own: float, known: list[float]) -> None:
    """Raise InputError if the model's own loss differs from the loss that a pipeline computes from its logits.

    Args:
        known: the loss if the model shifts the labels, as nearly all do, and the loss if it does not.
    """
    if any(math.isclose(own, ours, rel_tol=OWN_LOSS) for ours in known):
        return
    settings = vars(model.config.get_text_config()).items()
    options = [
        f"{name} (now {value})" for name, value in settings if "loss" in name and isinstance(value, float) and value
    ]
    raise InputError(
        f"{type(model).__name__} cannot be trained in stages: its own loss is more than the cross-entropy of its logits"
        f" ({own:.6g} against {known[0]:.6g} on a small copy)"
        + (f"; set {', '.join(options)} to 0.0 in the model's config." if options else ".")
    )


def _in_pieces(
    small: Description, dtype: torch.dtype, batch: Batch, split: Split | None, logits_dtype: torch.dtype
) -> Result:
    """Compute like the pipeline, in one process: three stages, detached at the cuts, the vocabulary by hand.

    Logits are rounded as in the whole model (xLSTM: to fp32), since some gradients are small differences of large
    numbers.
    """
    assert small.model is not None
    tokens, labels, mask = batch
    counted = small.positions_of(tokens)
    positions = {} if counted is None else {"position_ids": counted}
    router = small.router_loss
    totals = torch.empty(0) if router is None else router.start()
    routed: list[torch.Tensor] = []
    bounds = [0, 1, small.layers - 1, small.layers]
    weights = {
        name: small.model.get_parameter(name).detach().clone().requires_grad_() for name in small.vocabulary_names
    }
    embedding = weights[small.embedding_name]
    stages: list[Stage | ModuleStage] = []
    inputs: list[list[torch.Tensor]] = []
    outputs: list[list[torch.Tensor]] = []
    behind: list[Callable[[], None]] = []
    passed = [functional.embedding(tokens, embedding, padding_idx=small.padding_index)]
    torch.default_generator.manual_seed(SEED)
    for first, last in itertools.pairwise(bounds):
        stage = build_stage(small, first, last, is_first=first == 0, is_last=last == small.layers, dtype=dtype)
        copy_parameters(stage, small)
        if split is not None:
            behind.append(split(stage))
        inputs.append(passed if not stages else [one.detach().requires_grad_() for one in passed])
        entered = [one.clone() for one in inputs[-1]]  # may be changed in place
        recorded: dict[str, list] = {} if router is None else {"router_logits": []}
        returned = stage(*entered, attention_mask=mask, **positions, **recorded)
        passed = list(returned) if isinstance(returned, tuple) else [returned]
        if router is not None:
            totals, probabilities = router.add(totals, recorded["router_logits"], mask)
            routed.append(probabilities)
        stages.append(stage)
        outputs.append(passed)
    loss = loss_of_hidden(small, weights, passed[0], labels, logits_dtype)
    for index in range(len(stages) - 1, -1, -1):
        is_last = index == len(stages) - 1
        roots = [loss] if is_last else [*outputs[index]]
        given = [torch.ones_like(loss)] if is_last else [one.grad for one in inputs[index + 1]]
        if router is not None:
            roots.append(routed[index])
            given.append(router.gradient(totals, 1.0))
        run_backward(roots, given)
    for weight_gradients in behind:
        weight_gradients()
    if router is not None:
        loss = loss.detach() + router.coefficient * router.value(totals)
    gradients: Gradients = {name: weight.grad for name, weight in weights.items()}
    for stage in stages:
        gradients |= {name: parameter.grad for name, parameter in stage.named_parameters()}
    return Result(loss.item(), gradients, logits_dtype)


def contains_cast(loss: torch.Tensor) -> bool:
    """Return whether the loss's graph contains a cast."""
    return any(node.name().startswith("ToCopy") for node in graph_nodes(loss))


def compare(refuse: str, tolerance: float, found: Result, expected: Result, floor: float = 1e-6) -> None:
    """Raise InputError, its text beginning with `refuse`, if results differ; `floor`: see `gradient_errors`."""
    refuse = f"{refuse} differs from the whole in"
    reason = "so more than the hidden states passes between its layers, or they depend on where they stand"
    if found.gradients.keys() != expected.gradients.keys():
        names = ", ".join(sorted(found.gradients.keys() ^ expected.gradients.keys())[:4])
        raise InputError(f"{refuse} the parameters it has ({names}).")
    if not abs(found.loss - expected.loss) <= tolerance * max(1.0, abs(expected.loss)):
        raise InputError(f"{refuse} the loss ({found.loss:.9g} against {expected.loss:.9g}), {reason}.")
    errors = gradient_errors(found.gradients, expected.gradients, floor)
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= tolerance:
        raise InputError(f"{refuse} the gradient of {worst} (relative error {errors[worst]:.1e}), {reason}.")
