"""Compares small copies of a model, computed in parts, with the whole copies before an architecture is trained.

transformers runs a small copy (`small_copy.py`) as a whole, and this package runs it like a pipeline, with the same
random weights and tokens. Checking the loss is not enough: Granite cut at `inputs_embeds` is off by 7e-4 in the loss
and by 0.9 in the gradients.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.model.graph import graph_nodes, run_backward
from evenpipe.model.interface import takes
from evenpipe.model.loading import copy_parameters
from evenpipe.model.small_copy import SmallCopies, SmallCopy
from evenpipe.model.stage import Stage, build_stage
from evenpipe.model.structure import first_line

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
PARTLY_FP32 = 1e-6  # in fp64, for families that always round some results to fp32
OWN_LOSS = 1e-6  # transformers always computes it in fp32
BATCH, SEQUENCE, PADDED = 2, 12, 3
SILENT_SECONDS = 3.0
SEED = 0
"""Seed of the numbers that layers draw, so that the parts drop the same elements as the whole model."""

Gradients = dict[str, Tensor | None]

Split = Callable[[nn.Module], Callable[[], None]]
"""Splits the backwards of a module; the function that it returns computes the weight gradients of the last backward."""


class Batch(NamedTuple):
    """Token ids, labels and a mask, each [BATCH, SEQUENCE]."""

    tokens: Tensor
    labels: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a forward and backward."""

    loss: float
    gradients: Gradients
    logits_dtype: torch.dtype
    rounds: bool = False
    """Whether the forward casts (norms, attention, logits in fp32): fp64 results are then only as exact as fp32."""


def self_check(
    description: Description, split: Split | None = None, *, say: Callable[[str], None] | None = None
) -> None:
    """Compare a small copy of the model, cut in three, with transformers in one piece. Takes about a second on a CPU.

    Models of plain modules are not checked: they have no reference, and their layers are called directly.
    The user's config, the random state and torch's default dtype stay unchanged.

    Args:
        split: also compare with backwards split by it.
        say: receives a message, on another thread, if the check takes more than three seconds.

    Raises:
        InputError: they differ, or no small copy could be made; one sentence names the architecture and the difference.
    """
    if description.config is None:
        return
    text = (
        f"checking on a small copy that {description.architecture} gives the same gradients in stages, which takes"
        " longer than usual (self_check=False leaves it out)"
    )
    timer = threading.Timer(SILENT_SECONDS, say or (lambda text: None), [text])
    timer.daemon = True
    timer.start()
    try:
        copy = SmallCopies.of(description).plain
        with copy.computing():
            _check_stages(copy, split)
    finally:
        timer.cancel()


def _check_stages(copy: SmallCopy, split: Split | None) -> None:
    """Raise InputError if three stages of a small copy differ from the whole."""
    small = copy.description
    bounds = itertools.pairwise((0, 1, small.layers - 1, small.layers))
    stages: list[Stage] = []
    for splitter in (None,) if split is None else (None, split):
        cut = f"a small copy of it, cut in three{', its backward split,' if splitter else ','}"
        refuse = f"{small.architecture} cannot be trained in stages: {cut}"
        weight_backwards: list[Callable[[], None]] = []
        for batch, expected in references(copy):
            try:
                stages = stages or [build_filled_stage(copy, first, last) for first, last in bounds]
                if splitter is not None:
                    weight_backwards = weight_backwards or [splitter(stage) for stage in stages]
                actual = result_of_stages(
                    small, stages, batch, expected.logits_dtype, weight_backwards=weight_backwards
                )
            except InputError as error:
                raise InputError(f"{refuse} does not run: {error}") from error
            except Exception as error:  # families raise many types when their parts do not fit
                raise InputError(
                    f"{refuse} does not run ({type(error).__name__}: {first_line(error)}), so its layers need something"
                    " of the model around them besides the hidden states."
                ) from error
            compare(refuse, tolerance(copy.dtype, rounds=expected.rounds), actual, expected)


def build_filled_stage(copy: SmallCopy, first: int, last: int, **tensor: Any) -> Stage:
    """Build layers [first, last) of a small copy, with its parameters; `tensor`: as for `build_stage`."""
    small = copy.description
    ends: dict[str, Any] = {"is_first": first == 0, "is_last": last == small.layers}
    stage = build_stage(small, first, last, dtype=copy.dtype, **ends, **tensor)
    assert isinstance(stage, Stage)
    copy_parameters(stage, small)
    return stage


# --- errors ---------------------------------------------------------------------------------------------------------


def tolerance(dtype: torch.dtype, *, rounds: bool) -> float:
    """Return the largest relative error of correct results in a dtype; `rounds`: some are always cast to fp32."""
    return max(TOLERANCE[dtype], PARTLY_FP32 if rounds else 0.0)


def contains_cast(result: Tensor) -> bool:
    """Return whether the graph of a result contains a cast."""
    return any(node.name().startswith("ToCopy") for node in graph_nodes(result))


def relative_error(ours: Tensor | None, theirs: Tensor | None, min_norm: float = 0.0) -> float:
    """Return the relative Frobenius error of a tensor; infinity if it is not finite. None means zeros.

    Args:
        min_norm: divide by this if the norm of `theirs` is smaller.
    """
    norm = max(min_norm, 0.0 if theirs is None else theirs.norm().item())
    if ours is not None and theirs is not None:
        ours = ours - theirs
    elif ours is None:
        ours = theirs
    distance = 0.0 if ours is None else ours.norm().item()
    return distance / norm if norm and math.isfinite(distance) else math.inf


def gradient_errors(actual: Gradients, expected: Gradients, floor: float = 1e-6) -> dict[str, float]:
    """Return the relative error of each gradient.

    Args:
        floor: divide by at least this share of the largest norm, since a gradient may be zero except for rounding.
    """
    min_norm = floor * max(0.0 if gradient is None else gradient.norm().item() for gradient in expected.values())
    return {name: relative_error(actual[name], gradient, min_norm) for name, gradient in expected.items()}


def compare(refuse: str, max_error: float, actual: Result, expected: Result, floor: float = 1e-6) -> None:
    """Raise InputError, its text beginning with `refuse`, if results differ by more than `max_error`; `floor`: see
    `gradient_errors`."""
    refuse = f"{refuse} differs from the whole in"
    reason = "so more than the hidden states passes between its layers, or they depend on where they stand"
    if actual.gradients.keys() != expected.gradients.keys():
        names = ", ".join(sorted(actual.gradients.keys() ^ expected.gradients.keys())[:4])
        raise InputError(f"{refuse} the parameters it has ({names}).")
    if not abs(actual.loss - expected.loss) <= max_error * max(1.0, abs(expected.loss)):
        raise InputError(f"{refuse} the loss ({actual.loss:.9g} against {expected.loss:.9g}), {reason}.")
    errors = gradient_errors(actual.gradients, expected.gradients, floor)
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= max_error:
        raise InputError(f"{refuse} the gradient of {worst} (relative error {errors[worst]:.1e}), {reason}.")


# --- the whole copy --------------------------------------------------------------------------------------------------


def references(copy: SmallCopy) -> Iterator[tuple[Batch, Result]]:
    """Yield a batch and the result of the whole copy on it, first without a mask and then with one."""
    for index, batch in enumerate(copy.once(_batches, partial(_batches, copy.description))):
        yield batch, copy.once((_whole_result, index), partial(_whole_result, copy.description, batch))


def _batches(small: Description) -> list[Batch]:
    """Return tokens that include padding, labels that include ignored ones, and in the second batch a mask.

    The mask has padding on the right and a hole: padding alone changes nothing under causal attention.
    """
    generator, batches = torch.Generator().manual_seed(1), []
    for padded in (False, True) if small.takes("attention_mask") else (False,):
        tokens = torch.randint(0, small.vocabulary_size, (BATCH, SEQUENCE), generator=generator)
        labels = torch.randint(0, small.head_rows, (BATCH, SEQUENCE), generator=generator)
        if small.padding_index is not None:
            tokens[0, 4] = small.padding_index
            labels[1, 5] = min(small.padding_index, small.head_rows - 1)
        labels[0, 7] = -100
        mask = None
        if padded:
            mask = torch.ones_like(tokens)
            mask[1, 2:4] = mask[1, -PADDED:] = 0
            labels = labels.masked_fill(mask == 0, -100)
        batches.append(Batch(tokens, labels, mask))
    return batches


def _whole_result(small: Description, batch: Batch) -> Result:
    (tokens, labels, mask), model, router = batch, small.model, small.router_loss
    model.zero_grad()
    torch.default_generator.manual_seed(SEED)
    kwargs = {"labels": labels} if takes(type(model), "labels") else {}
    try:
        output = model(input_ids=tokens, attention_mask=mask, use_cache=False, return_dict=True, **kwargs)
    except Exception as error:  # it did run on token ids alone
        raise InputError(
            f"{small.architecture} cannot be trained in stages: in transformers it does not run on labels of the shape"
            f" of the token ids ({type(error).__name__}: {first_line(error)})."
        ) from error
    loss = _loss_of_logits(output.logits, labels)
    added = 0.0 if router is None else router.coefficient * output.aux_loss
    if kwargs:
        with torch.no_grad():
            logits = output.logits.float()
            known = _loss_of_logits(logits[:, :-1], labels[:, 1:]), _loss_of_logits(logits, labels)
            _check_own_loss(model, float(output.loss), [float(cross_entropy + added) for cross_entropy in known])
    loss = loss + added
    rounds = contains_cast(loss)
    loss.backward()
    listed = dict(small.skeleton.named_parameters())  # a spec may have turned frozen ones into buffers
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if name in listed or parameter.grad is not None
    }
    if small.tied and small.head_name in gradients:  # the head is registered before the model with the embedding
        gradients[small.embedding_name] = gradients.pop(small.head_name)
    return Result(loss.item(), gradients, output.logits.dtype, rounds)


def _check_own_loss(model: PreTrainedModel, own_loss: float, known: list[float]) -> None:
    """Raise InputError if the model's own loss differs from the loss that a pipeline computes from its logits.

    Args:
        known: the loss if the model shifts the labels, as nearly all models do, and the loss if it does not.
    """
    if any(math.isclose(own_loss, ours, rel_tol=OWN_LOSS) for ours in known):
        return
    settings = vars(model.config.get_text_config()).items()
    options = [
        f"{name} (now {value})" for name, value in settings if "loss" in name and isinstance(value, float) and value
    ]
    raise InputError(
        f"{type(model).__name__} cannot be trained in stages: its own loss is more than the cross-entropy of its logits"
        f" ({own_loss:.6g} against {known[0]:.6g} on a small copy)"
        + (f"; set {', '.join(options)} to 0.0 in the model's config." if options else ".")
    )


# --- in stages ------------------------------------------------------------------------------------------------------


def result_of_stages(
    small: Description,
    stages: Sequence[Stage],
    batch: Batch,
    logits_dtype: torch.dtype,
    *,
    weight_backwards: Sequence[Callable[[], None]] = (),
    gather: Callable[[Tensor], Tensor] | None = None,
    share: float = 1.0,
) -> Result:
    """Compute like the pipeline, in one process: stages detached at the cuts, the vocabulary layers by hand.

    Args:
        logits_dtype: logits are rounded as in the whole model (xLSTM: to fp32), since some gradients are small
            differences of large numbers.
        weight_backwards: functions that compute weight gradients after the backward.
        gather: returns all hidden states, given those of this process; None: this process has all.
        share: this process's share of the gradients, if several processes compute the same loss.
    """
    counted, router = small.positions_of(batch.tokens), small.router_loss
    positions = {} if counted is None else {"position_ids": counted}
    totals = torch.empty(0) if router is None else router.start()
    weights = {
        name: small.model.get_parameter(name).detach().clone().requires_grad_() for name in small.vocabulary_names
    }
    passed = [functional.embedding(batch.tokens, weights[small.embedding_name], padding_idx=small.padding_index)]
    inputs: list[list[Tensor]] = []
    outputs = [passed]
    torch.default_generator.manual_seed(SEED)
    for stage in stages:
        stage.zero_grad()
        inputs.append([tensor.detach().requires_grad_() for tensor in passed])
        recorded: dict[str, list] = {} if router is None else {"router_logits": []}
        entered = [tensor.clone() for tensor in inputs[-1]]  # may be changed in place
        returned = stage(*entered, attention_mask=batch.mask, **positions, **recorded)
        passed = list(returned) if isinstance(returned, tuple) else [returned]
        outputs.append(passed)
        if router is not None:
            totals, probabilities = router.add(totals, recorded["router_logits"], batch.mask)
            outputs[-1] = [*passed, probabilities]
    hidden = passed[0] if gather is None else gather(passed[0])
    head = weights[small.embedding_name if small.tied else small.head_name]
    bias = None if small.head_bias_name is None else weights[small.head_bias_name]
    logits = functional.linear(hidden, head, bias).to(logits_dtype) * small.logit_scale
    if small.soft_cap is not None:
        logits = small.soft_cap * torch.tanh(logits / small.soft_cap)
    loss = outputs[-1][0] = _loss_of_logits(logits, batch.labels)
    gradients_of: list[Tensor | None] = [torch.full_like(loss, share)]
    for entered, made in zip(reversed(inputs), reversed(outputs), strict=False):
        run_backward(made, gradients_of if router is None else [*gradients_of, router.gradient(totals, share)])
        gradients_of = [tensor.grad for tensor in entered]
    run_backward(outputs[0], gradients_of)
    for weight_gradients in weight_backwards:
        weight_gradients()
    value = loss.item() if router is None else float(loss.detach() + router.coefficient * router.value(totals))
    gradients: Gradients = {name: weight.grad for name, weight in weights.items()}
    for stage in stages:
        gradients |= {name: parameter.grad for name, parameter in stage.named_parameters()}
    return Result(value, gradients, logits_dtype)


def _loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
