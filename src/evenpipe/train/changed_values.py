"""Which values of the configuration have changed since a checkpoint was saved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from evenpipe.declaration import default_of
from evenpipe.train.config import Config
from evenpipe.train.config_file import sections
from evenpipe.words import show


def changed_values(saved: Mapping[str, Any], config: Config) -> dict[str, str]:
    """Return what has changed, by field: `{"training.seed": "0 -> 1"}`.

    saved: the configuration in a checkpoint. A field that it lacks, because it is from an older version, had its
    default value. A list of one item equals the item, as in a configuration.
    """
    earlier, current = _flat(_with_defaults(saved)), _flat(json.loads(json.dumps(asdict(config))))
    names = [*current, *(name for name in earlier if name not in current)]
    return {
        name: f"{show(earlier.get(name))} -> {show(current.get(name))}"
        for name in names
        if current.get(name) not in (earlier.get(name), [earlier.get(name)])
        and [current.get(name)] != earlier.get(name)
    }


def _with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: json.loads(json.dumps(default_of(section))) | dict(values.get(name) or {})
        for name, section in sections().items()
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their dotted names."""
    return dict(_leaves(values, prefix))


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
