"""Compares a short forward of a live model with that of a model built from its config, as stages are.

The built model has no weights: its forward runs on the live model's tensors. Any difference then comes from state that
`changed_attributes` cannot see, such as objects that a module keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from evenpipe.errors import InputError
from evenpipe.model.copies import copies
from evenpipe.model.description import Description
from evenpipe.model.packed_rows import nothing_packed
from evenpipe.model.structure import neutral_tokens

TOKENS = 6
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
ROUNDED = 1e-2
"""Tolerance in narrower dtypes."""
PARTS = ("_modules", "_parameters", "_buffers")
LARGEST_ON_CPU = 4_000_000_000
"""Number of parameters above which a forward takes more than a few seconds."""


def check_forward(description: Description) -> None:
    """Check that the live model's logits are those of a model built from its config; neither is changed.

    A model that does not run here, is spread over several devices, or is large and on the CPU is not checked.

    Raises:
        InputError: they differ; the message names the first module whose result differs.
    """
    live = description.model
    parameters = list(live.parameters())
    devices = {parameter.device for parameter in parameters}
    large = parameters[0].device.type == "cpu" and sum(map(Tensor.numel, parameters)) > LARGEST_ON_CPU
    if len(devices) > 1 or parameters[0].is_meta or large:
        return
    token_ids = neutral_tokens(description.config, description.padding_index, TOKENS, description.vocabulary_size)
    inputs = {"input_ids": torch.tensor([token_ids], device=parameters[0].device), "use_cache": False}
    built = copies(description, live.dtype).of(range(description.layers)).eval()
    names = {name for name, _ in (*built.named_parameters(remove_duplicate=False), *built.named_buffers())}
    held = (*live.named_parameters(remove_duplicate=False), *live.named_buffers())
    tensors = {name: tensor for name, tensor in held if name in names}

    device = parameters[0].device
    forked = [device] if device.type == "cuda" else []

    def of_live() -> Tensor:
        with torch.random.fork_rng(forked):
            torch.manual_seed(0)  # some layers draw in evaluation, too
            return live(**inputs).logits

    def of_built() -> Tensor:
        with torch.random.fork_rng(forked):
            torch.manual_seed(0)
            return functional_call(built, tensors, (), inputs).logits

    with torch.no_grad(), nothing_packed(), _in_evaluation(live):
        description.adapt(live)  # until it is restored; RWKV would change its weights
        try:
            expected = of_live()
        except Exception:  # families raise many types where a kernel is missing
            return
        actual = of_built()
        error = float(
            (actual - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
        )
        if error <= TOLERANCE.get(live.dtype, ROUNDED):
            return
        marks = _marks_of(live, of_live), _marks_of(built, of_built)
    pairs = zip_longest(*marks, fillvalue=("", None))
    name = next((live_mark[0] for live_mark, built_mark in pairs if live_mark != built_mark), "")
    raise InputError(
        f"model: {name or 'it'} computes something else than in a {description.architecture} built from its config, as"
        f" stages are (relative error {error:.1e} of the logits of {TOKENS} tokens): change the config or the class"
        " instead of the model."
    )


@contextlib.contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, uncompiled; on exit restore what its modules set, such as grown rotary tables."""
    saved = [
        (module, {key: dict(value) if key in PARTS else value for key, value in vars(module).items()})
        for module in model.modules()
    ]
    model.eval()
    for module, _ in saved:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)


def _marks_of(model: nn.Module, run: Callable[[], Any]) -> list[tuple[str, Any]]:
    """Return (name, a number that depends on the result) of each module, in the order in which the modules return."""
    marks: list[tuple[str, Any]] = []

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            tensor = output[0] if isinstance(output, (tuple, list)) and output else output
            marks.append((name, float(tensor.double().abs().sum()) if isinstance(tensor, Tensor) else None))

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in model.named_modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return marks
