"""Reads a model's config from a folder or the hub, and refuses a bad one in one sentence before building anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from evenpipe.errors import InputError
from evenpipe.given import hub_options, nearest_path
from evenpipe.model.structure import first_line

LARGEST: dict[str, int] = {
    "vocab_size": 2**26,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_hidden_layers": 2**14,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**20,
}
"""The largest accepted value of each size, by transformers' common names: hundreds of times the values of models today.
A model is built (without storage) and probed before its shapes are checked, and a config that is wrong by orders of
magnitude would fill the memory first."""


def read_config(name: str, trust_remote_code: bool = False, *, field: str = "model") -> PreTrainedConfig:
    """Return the config of a folder, a JSON file or a hub name.

    Args:
        field: the user's option whose value is `name`, for messages.

    Raises:
        InputError: the config is missing, transformers refuses it, or one of its sizes makes no sense.
    """
    values = None
    try:
        options = {} if Path(name).exists() else hub_options()
        values = PreTrainedConfig.get_config_dict(name, **options)[0]  # {} for a folder without a config.json
        check_sizes(values)
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
    except InputError as error:
        raise InputError(f"{field} = {name!r}: {error}") from None
    except Exception as error:  # transformers raises many types on a damaged file
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{field} = {name!r} comes with Python code of its own, which is run only with trust_remote_code ="
                " true."
            ) from error
        fault = "has a config that transformers refuses; expected a JSON object with the fields of a language model"
        if isinstance(error, OSError) or values == {}:
            fault = "is neither a folder with a config.json nor a model that the hub gives out"
        raise InputError(f"{field} = {name!r} {fault} ({first_line(error)}){nearest_path(name) or '.'}") from error


def check_sizes(values: Mapping[str, Any]) -> None:
    """Refuse sizes below 1, absurdly large ones, and heads that cannot share keys and values.

    Args:
        values: a config's values as in its JSON. transformers itself checks values that are not numbers.

    Raises:
        InputError: names the field as in the config.
    """
    family_names = _family_names(values.get("model_type"))
    sizes = {
        name: value
        for name in LARGEST
        if isinstance(value := values.get(family_names.get(name, name), values.get(name)), int)
        and not isinstance(value, bool)
    }
    for name, value in sizes.items():
        if not 1 <= value <= LARGEST[name]:
            field = family_names.get(name, name)
            raise InputError(f"{field} is {value} in the model's config; it must be from 1 to {LARGEST[name]}")
    heads, shared = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if heads is not None and shared is not None and heads % shared:
        raise InputError(
            f"num_key_value_heads is {shared} in the model's config; it must divide {heads}, its num_attention_heads"
        )
    if isinstance(values.get("text_config"), Mapping):
        check_sizes(values["text_config"])


def _family_names(model_type: Any) -> Mapping[str, str]:
    """Return transformers' common name -> the family's name, if it differs: `num_hidden_layers` -> `n_layer`."""
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    return CONFIG_MAPPING[model_type].attribute_map if known else {}
