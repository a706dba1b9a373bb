"""Whether a model draws random numbers in training: dropout, router noise, skipped layers."""

from __future__ import annotations

import re
from typing import Any

from torch.nn.modules.dropout import _DropoutNd

from evenpipe.model.description import Description

_NAME = re.compile(r"(?!classifier|summary).*(drop|jitter|noise)")
"""Heads for other tasks are not built."""


def may_draw(description: Description) -> bool:
    """Return whether layers of a model may draw random numbers in training. Plain modules always may, since a call of
    `torch.nn.functional.dropout` cannot be seen."""
    config = description.config
    if config is None:
        return True
    if any(_draws(holder) for holder in (config, config.get_text_config())):
        return True
    return any(map(_draws, description.skeleton.modules()))


def noise_of_routers(description: Description) -> tuple[str, float] | None:
    """Return the name and value of the config field that adds noise to routers in training; None: there is none."""
    config = description.config
    fields = {} if config is None else vars(config) | vars(config.get_text_config())
    return next(((name, float(value)) for name, value in fields.items() if "jitter" in name and _is_share(value)), None)


def _draws(holder: Any) -> bool:
    """Return whether a config or a module has a nonzero rate of dropout or noise."""
    if isinstance(holder, _DropoutNd):
        return holder.p > 0
    return any(_is_share(value) and _NAME.match(name) for name, value in vars(holder).items())


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
