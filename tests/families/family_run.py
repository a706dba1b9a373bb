"""Runs configurations in two processes, many per launch, and reports the outcome of each."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import json
import logging
import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from family_configs import Configuration
from torch.nn import functional

from evenpipe import Pipeline, launch
from evenpipe.attention.check import check_pieces
from evenpipe.errors import InputError, RunError
from evenpipe.model import Description, describe
from evenpipe.model.comparison import contains_cast, gradient_errors
from evenpipe.model.fp64 import InFp64
from evenpipe.processes.launcher import prepare_launch
from evenpipe.tensor.check import cut_of_model
from evenpipe.tensor.layers import whole_parts

HERE = Path(__file__).resolve().parent
PRELOAD = ("evenpipe.runtime.pipeline", "family_run")
PROCESSES = 2
SCHEDULES = ("zbv", "1f1b")
"""The first one splits backwards, so its self-check covers split and whole backwards."""

ROWS, TOKENS = 2, 12
NOISE = 0.05
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
ROUNDED = 1e-6
"""Tolerance in fp64, for families that always compute some results in fp32."""

BLOCK = 32
"""Number of configurations per launch."""

LIMIT_SECONDS = 120.0
"""Time limit of one configuration."""

UNSUPPORTED = (RuntimeError, TypeError, ValueError, NotImplementedError)
"""What families raise in a dtype that they cannot run in."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a configuration."""

    model_type: str
    variant: str
    word: str
    """"equal", "refused", "wrong", "traceback", or "cannot run" if transformers itself cannot run it."""
    sentence: str = ""
    """The refusal, the fault or the traceback."""
    error: float = 0.0
    """The largest relative error of a gradient."""
    dtype: str = ""
    seconds: float = 0.0
    tensor: str = ""
    """The outcome with two tensor ranks instead of two devices: "equal", "refused" or "wrong"."""
    tensor_sentence: str = ""
    """Why it is refused or wrong; if it is equal, the parts of layers that every rank computes whole."""
    tensor_error: float = 0.0
    pieces: str = ""
    """The outcome of sequences in pieces, over two context ranks and then in two slices: "equal", "refused" or
    "wrong"."""
    pieces_sentence: str = ""
    """Why they are refused or wrong."""
    pieces_error: float = 0.0


def run(configurations: Sequence[Configuration]) -> Iterator[Outcome]:
    """Yield the outcomes one by one; after a failure, restart the processes for the remaining configurations."""
    left = list(configurations)
    while left:
        outcomes = _serve(left[:BLOCK])
        yield from outcomes
        left = left[len(outcomes) :]


def _serve(configurations: Sequence[Configuration]) -> list[Outcome]:
    """Return the outcomes of one launch: all, or up to the configuration that ends it."""
    with tempfile.TemporaryDirectory(prefix="evenpipe-families-") as name:
        folder = Path(name)
        path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
        with mock.patch.dict(os.environ, PYTHONPATH=path):
            prepare_launch(*PRELOAD)
        started, failure, word = time.perf_counter(), "", "traceback"
        try:
            launch(
                serve,
                list(configurations),
                folder,
                processes=PROCESSES,
                torch_device="cpu",
                silence_seconds=LIMIT_SECONDS,
                preload=PRELOAD,
            )
        except InputError as error:  # a step that one process refuses ends the launch
            failure, word = str(error), "refused"
        except RunError as error:
            failure = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        outcomes = [
            Outcome(**json.loads(file.read_text()))
            for index in range(len(configurations))
            if (file := folder / f"outcome-{index}").exists()
        ]
        if failure:
            one = configurations[min(len(outcomes), len(configurations) - 1)]
            stacks = "" if word == "refused" else "".join(file.read_text() for file in sorted(folder.glob("stacks-*")))
            seconds = time.perf_counter() - started
            outcomes = outcomes[: len(configurations) - 1]
            outcomes.append(Outcome(one.model_type, one.variant, word, failure + stacks, seconds=round(seconds, 1)))
        return outcomes


# --- a process that serves --------------------------------------------------------------------------------------------


def serve(configurations: Sequence[Configuration], folder: Path) -> None:
    """Run one configuration after the other; the first process writes the outcomes to files."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    with (folder / f"stacks-{rank}").open("w") as stacks:
        for index, configuration in enumerate(configurations):
            faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True, file=stacks)
            started = time.perf_counter()
            found = _outcome_of(configuration)
            words: list[Any] = [None] * PROCESSES
            dist.all_gather_object(words, found["word"])
            if "wrong" not in words and len(set(words)) > 1:
                found = {"word": "wrong", "sentence": f"processes do not agree: {words}"}
            if rank == 0:
                outcome = Outcome(
                    configuration.model_type,
                    configuration.variant,
                    **found,
                    seconds=round(time.perf_counter() - started, 2),
                )
                (folder / "part").write_text(json.dumps(asdict(outcome)))
                (folder / "part").rename(folder / f"outcome-{index}")
            gc.collect()
        faulthandler.cancel_dump_traceback_later()


def _outcome_of(configuration: Configuration) -> dict[str, Any]:
    config = configuration.build()
    config._experts_implementation = "eager"  # the grouped product of experts takes no fp64
    try:
        try:
            reference = _computed(config, torch.float64)
        except UNSUPPORTED:
            reference = _computed(config, torch.float32)
    except Exception as error:  # families raise many types on an unusable config
        reason = traceback.format_exception_only(error)[0].strip()
        try:
            describe(config)
        except InputError as refusal:
            return {"word": "refused", "sentence": str(refusal)}
        return {"word": "cannot run", "sentence": f"transformers in one process: {reason}"}
    dtype = str(reference.dtype).removeprefix("torch.")
    try:
        error = max(_compare(reference, schedule, self_check=schedule == SCHEDULES[0]) for schedule in SCHEDULES)
    except RefusedError as refusal:
        return {"word": "refused", "sentence": str(refusal), "dtype": dtype}
    except DifferentError as different:
        return {"word": "wrong", "sentence": str(different), "dtype": dtype}
    try:
        _step_from(config, reference.ids)
    except RefusedError as refusal:
        return {"word": "refused", "sentence": f"with fresh weights: {refusal}", "dtype": dtype}
    except DifferentError as different:
        return {"word": "wrong", "sentence": str(different), "dtype": dtype}
    around, exact = _in_fp64_throughout(config, reference)
    others = _over_tensor_ranks(exact, around) | _in_pieces(exact, around)
    return {"word": "equal", "error": error, "dtype": dtype, **others}


Around = Callable[[], contextlib.AbstractContextManager[Any]]


def _in_fp64_throughout(config: transformers.PreTrainedConfig, reference: Reference) -> tuple[Around, Reference]:
    """Return the arithmetic in which sums in another order are compared, and the reference in it: in fp64 throughout,
    if the family can run so, since what fp32 inside makes of another order would hide small differences."""
    try:
        with InFp64():
            return InFp64, replace(_computed(config, torch.float64), tolerance=TOLERANCE[torch.float64])
    except UNSUPPORTED:
        return contextlib.nullcontext, reference


def _over_tensor_ranks(reference: Reference, around: Around) -> dict[str, Any]:
    """Compare a step of two tensor ranks on one device."""
    try:
        with around():
            error = _compare(reference, "1f1b", self_check=True, tp=PROCESSES)
    except RefusedError as refusal:
        return {"tensor": "refused", "tensor_sentence": str(refusal)}
    except DifferentError as different:
        return {"tensor": "wrong", "tensor_sentence": str(different)}
    whole = whole_parts(cut_of_model(describe(reference.model), PROCESSES, check=False))
    return {"tensor": "equal", "tensor_error": error, "tensor_sentence": ", ".join(whole)}


def _in_pieces(reference: Reference, around: Around) -> dict[str, Any]:
    """Compare a step of two context ranks on one device, and one of two devices on sequences in two slices, after the
    check that a pipeline makes."""
    description, refusals, errors = describe(reference.model), [], []
    for option in ("cp", "slices"):
        refusal = [""]
        if dist.get_rank() == 0:
            try:
                check_pieces(description, option, slices=option == "slices")
            except InputError as error:
                refusal = [str(error)]
        dist.broadcast_object_list(refusal)
        if refusal[0]:
            refusals.append(refusal[0])
            continue
        try:
            with around():
                errors.append(_compare(reference, "1f1b", self_check=False, **{option: 2}))
        except RefusedError as refused:
            refusals.append(str(refused))
        except DifferentError as different:
            return {"pieces": "wrong", "pieces_sentence": f"{option}: {different}"}
    word = "refused" if refusals else "equal"
    return {"pieces": word, "pieces_error": max(errors, default=0.0), "pieces_sentence": " ".join(refusals)}


def _step_from(config: transformers.PreTrainedConfig, ids: torch.Tensor) -> None:
    """Run a step with fresh weights, drawn by each stage. No weight may be NaN, and the loss must be finite."""
    pipeline = _opened(config, schedule="1f1b", microbatches=ROWS, self_check=False)
    loss, weights = pipeline.step(ids).loss, pipeline.full_state_dict()
    pipeline.close()
    unset = [name for name, weight in weights.items() if weight.isnan().any()]
    good = not unset and math.isfinite(loss)
    fault = ["" if good else f"fresh weights are not numbers: {unset[:3]}, the loss is {loss}"]
    dist.broadcast_object_list(fault)
    if fault[0]:
        raise DifferentError(fault[0])


class RefusedError(Exception):
    """All processes refuse a pipeline. A refused step does not raise this, since a single process may refuse it."""


class DifferentError(Exception):
    """The results of a pipeline differ from the results of one process."""


@dataclass(frozen=True)
class Reference:
    """A model in one piece, and its results."""

    model: transformers.PreTrainedModel
    dtype: torch.dtype
    ids: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor | None]
    tolerance: float


def _computed(config: transformers.PreTrainedConfig, dtype: torch.dtype) -> Reference:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn_like(parameter))
    model.train()
    text = config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, text.vocab_size, (ROWS, TOKENS), generator=generator)
    if isinstance(getattr(text, "pad_token_id", None), int):
        ids[0, 5] = text.pad_token_id
    mean = _mean_loss(model, text, ids)
    if not mean.isfinite():
        raise ValueError("the loss is not finite")
    rounded = contains_cast(mean)
    mean.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if dtype == torch.float64 and any(one is not None and one.dtype != dtype for one in gradients.values()):
        raise TypeError("some of its parameters are fp32 whatever its dtype")
    tolerance = max(TOLERANCE[dtype], ROUNDED if rounded else 0.0)
    return Reference(model, dtype, ids, mean.item(), gradients, tolerance)


def _mean_loss(model: Any, text: Any, ids: torch.Tensor) -> torch.Tensor:
    losses = []
    for one in ids.split(1):  # microbatches of one row: a router loss is computed per microbatch
        output = model(input_ids=one, use_cache=False)
        loss = functional.cross_entropy(output.logits[0, :-1], one[0, 1:])
        if getattr(text, "output_router_logits", False):
            coefficients = [value for name, value in vars(text).items() if name.endswith("aux_loss_coef")]
            loss = loss + (coefficients or [model.router_aux_loss_coef])[0] * output.aux_loss
        losses.append(loss)
    return torch.stack(losses).mean()


def _opened(model: Any, **options: Any) -> Pipeline:
    """Return a pipeline, or raise on all processes."""
    try:
        pipeline = Pipeline(model, timeout_seconds=LIMIT_SECONDS, **options)
    except InputError as error:
        _agreed(str(error))
        raise RefusedError(str(error)) from error
    _agreed("")
    return pipeline


def _agreed(refusal: str) -> None:
    """Make all processes refuse a configuration if one does: otherwise the others would wait for it."""
    refusals: list[Any] = [None] * PROCESSES
    dist.all_gather_object(refusals, refusal)
    if any(refusals) and not all(refusals):
        raise DifferentError(f"only some processes refuse it: {refusals}")


def _compare(reference: Reference, schedule: str, *, self_check: bool, **options: Any) -> float:
    """Compare one step of a pipeline on the first process. Return the largest relative error of a gradient."""
    pipeline = _opened(
        reference.model,
        schedule=schedule,
        microbatches=ROWS,
        parameter_dtype=reference.dtype,
        self_check=self_check,
        **options,
    )
    loss = pipeline.step(reference.ids).loss  # a refusal by one process ends the launch: the others wait for it
    gradients = pipeline.full_gradients()
    pipeline.close()
    fault: list[Any] = [None, 0.0]
    if dist.get_rank() == 0:
        try:
            fault[1] = worst_error(reference, pipeline.description, loss, gradients)
        except DifferentError as different:
            fault[0] = f"{schedule}: {different}"
    dist.broadcast_object_list(fault)
    if fault[0]:
        raise DifferentError(fault[0])
    return fault[1]


def worst_error(
    reference: Reference, description: Description, loss: float, gradients: dict[str, torch.Tensor]
) -> float:
    """Return the largest relative error of a gradient. Raises DifferentError if it, or the loss's, is too large."""
    error = abs(loss - reference.loss) / max(1.0, abs(reference.loss))
    if not error <= reference.tolerance:
        raise DifferentError(f"the loss is {loss:.12g} and {reference.loss:.12g} in one process")
    expected = dict(reference.gradients)
    if description.tied and description.head_name in expected:  # transformers lists the shared matrix under either name
        expected[description.embedding_name] = expected.pop(description.head_name)
    if unknown := gradients.keys() - expected.keys():
        raise DifferentError(f"gradients of {sorted(unknown)[:3]}, which are no parameters")
    found = {name: gradients.get(name) for name in expected}
    errors = gradient_errors(found, expected, floor=torch.finfo(reference.dtype).eps / TOLERANCE[reference.dtype])
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= reference.tolerance:
        raise DifferentError(f"the gradient of {worst} is off by {errors[worst]:.1e} (relative)")
    return errors[worst]
