"""Gradient hooks that users register on parameters: a step calls them as a single `backward` of its batch would.

A gradient of a step is computed in parts: by microbatches, by I or W, in the compute dtype or through a queue outside
autograd, and by other processes. So autograd must not call these hooks during the passes. Instead:

    before the passes   the hooks of a parameter and its `.grad` are set aside
    the passes, sums    `.grad` becomes the gradient of this step, complete for what this process holds
    after the result    one backward gives these gradients to the parameters: autograd calls hooks, adds to `.grad`

That backward is a chain of functions, one for each parameter with a hook, from the last parameter of the model to the
first. It is a real backward, so a hook may do anything that it may do in a single process: `register_multi_grad_hook`
and `queue_callback` work. It copies no gradient. It runs after the last collective of the step, so a hook that fails on
one process leaves no other process waiting.

    anchor -> [embedding] -> [layer 0] -> ... -> [head] -> end      forward: builds the chain
                   |             |                 |
               AccumulateGrad of each parameter                     backward: from the end

Hooks on an AccumulateGrad node itself are invisible from Python, and are not called once per step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.errors import InputError
from evenpipe.words import join

Hook = Callable[[Tensor], Any]
KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a parameter, each with a dictionary of hooks, or None."""


def lost_hooks(model: nn.Module) -> str | None:
    """Return a warning about hooks on the parameters of a live model, whose weights are copied; None without hooks."""
    names = [name for name, parameter in model.named_parameters() if any(getattr(parameter, kind) for kind in KINDS)]
    if not names:
        return None
    return (
        f"gradient hooks of the model are not taken over, from {join(names)}: register them on the parameters that"
        " pipeline.named_parameters() yields"
    )


@contextmanager
def set_aside(hooked: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Keep the hooks of these parameters and the gradients of earlier steps out of the step inside.

    Yields a dictionary that afterwards contains the gradients of the step, by name. Hooks and earlier gradients are
    restored in any case.
    """
    gradients: dict[str, Tensor] = {}
    aside = []
    for parameter in hooked.values():
        hooks = {kind: registered for kind in KINDS if (registered := getattr(parameter, kind)) is not None}
        aside.append((parameter, parameter.grad, hooks))
        parameter.grad = None
        for kind in hooks:
            setattr(parameter, kind, OrderedDict())  # not None: torch would still call the others
    try:
        yield gradients
        gradients.update((name, parameter.grad) for name, parameter in hooked.items() if parameter.grad is not None)
    finally:
        for parameter, gradient, hooks in aside:
            parameter.grad = gradient
            for kind, registered in hooks.items():
                setattr(parameter, kind, registered)


def call_hooks(hooked: Mapping[str, nn.Parameter], gradients: dict[str, Tensor]) -> None:
    """Call the hooks of these parameters with the gradients of the step, and add these to `.grad`.

    Args:
        hooked: in the order of the model.
        gradients: by name, for parameters that have one; empty afterwards.

    Raises:
        InputError: a hook returned something that cannot be a gradient; the message names the parameter.
        Exception: raised by a hook, with a note that names the parameter.
    """
    reached = ""

    def take(name: str) -> Tensor:
        nonlocal reached
        reached = name
        return gradients.pop(name)

    parameters = {name: parameter for name, parameter in hooked.items() if name in gradients}
    if not parameters:
        return
    with torch.enable_grad(), _checked(parameters):
        end = next(iter(gradients.values())).new_empty(0)  # on the parameters' device, so that one thread runs all
        for name, parameter in parameters.items():
            end = _Give.apply(end, parameter, take, name)
        try:
            torch.autograd.backward(end, torch.empty_like(end))
        except Exception as error:
            error.add_note(f"in a gradient hook of {reached}")
            raise


class _Give(torch.autograd.Function):
    """A link of the chain: its backward gives a parameter its gradient."""

    @staticmethod
    def forward(
        ctx: Any, previous: Tensor, parameter: nn.Parameter, take: Callable[[str], Tensor], name: str
    ) -> Tensor:
        ctx.take, ctx.name = take, name
        return previous.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return gradient, ctx.take(ctx.name), None, None


@contextmanager
def _checked(hooked: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Check what hooks return inside the context; torch's own message does not name the parameter.

    Hooks are replaced in their own dictionaries, because the handles that remove hooks refer to these.
    """
    unchecked = []
    for name, parameter in hooked.items():
        hooks: dict[int, Hook] = parameter._backward_hooks or {}
        for key, hook in hooks.items():
            unchecked.append((hooks, key, hook))
            hooks[key] = _check_result(hook, name)
    try:
        yield
    finally:
        for hooks, key, hook in unchecked:
            if key in hooks:
                hooks[key] = hook


def _check_result(hook: Hook, name: str) -> Hook:
    def call(gradient: Tensor) -> Tensor | None:
        result = hook(gradient)
        if result is not None and _kind(result) != _kind(gradient):
            raise InputError(
                f"{name}: its gradient hook returned {_kind(result)}; expected None or a gradient like its own,"
                f" {_kind(gradient)}"
            )
        return result

    return call


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} instead of a tensor"
    layout = "" if value.layout == torch.strided else f", {value.layout}"
    return f"{list(value.shape)} {value.dtype} on {value.device}{layout}"
