"""The form of a model before training: the text of its files, and the dtype of every tensor as stored.

A trained model is written in the same form, so that it differs from the original only where it was trained.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.dynamic_module_utils import get_relative_import_files

from evenpipe.errors import InputError
from evenpipe.given import find_file
from evenpipe.model.config_changes import BOOKKEEPING
from evenpipe.model.description import Description
from evenpipe.model.structure import persistent_buffers
from evenpipe.model.weight_files import WeightFiles

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files that a model with image or sound inputs needs for them."""
BYTES = "surrogateescape"
"""Error handler that preserves bytes that are not UTF-8."""
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""By their names in safetensors."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES.values()}


@dataclass(frozen=True, slots=True)
class Origin:
    """The files of a folder or hub name, and the dtypes of the tensors of the folder or of a live model."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Text by file name; no config.json for a live model or for fresh weights."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """By name in memory; empty for fresh weights."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values: the most frequent dtype once, and the names of tensors with another dtype."""
        names = {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()}
        usual = Counter(names.values()).most_common(1)[0][0] if names else None
        unusual = {name: dtype for name, dtype in names.items() if dtype != usual}
        return {"files": dict(self.files), "dtype": usual, "other_dtypes": unusual}

    @classmethod
    def from_json(cls, values: Any, names: Iterable[str]) -> Origin:
        """Read the result of `to_json` for a model whose floating-point tensors have these names.

        Raises:
            InputError: the values are something else; they may come from anywhere.
        """
        try:
            files, usual = {str(name): str(text) for name, text in values["files"].items()}, values["dtype"]
            dtypes = {} if usual is None else {name: values["other_dtypes"].get(name, usual) for name in names}
            origin = cls(files, {name: _DTYPES[dtype] for name, dtype in dtypes.items()})
        except (AttributeError, KeyError, TypeError) as error:
            raise InputError(f"the origin of the model is damaged ({error!r})") from error
        for name in files:
            if name not in (CONFIG, GENERATION_CONFIG, *PROCESSOR_FILES) and not is_code(name):
                raise InputError(f"the origin of the model has a file {name!r}, which no model has")
        return origin


def read_files(description: Description) -> dict[str, str]:
    """Return the non-weight files of a description's folder or hub name, or a live model's generation config, and the
    Python code that came with the model."""
    if description.config is None:
        return {}
    paths = {} if description.source is None else _files(description, description.source)
    for kind in (type(description.skeleton), type(description.config)):
        paths |= {path.name: path for path in code_of(kind)}
    files = {name: path.read_bytes().decode(errors=BYTES) for name, path in paths.items()}
    generation = getattr(description.model, "generation_config", None)
    return files if generation is None else {**files, GENERATION_CONFIG: generation_text(generation)}


def generation_text(generation: GenerationConfig) -> str:
    """Return a generation_config.json as transformers writes it, even with values that it warns about."""
    return generation.to_json_string(keys_to_pop=["compile_config"])


def stored_dtypes(description: Description, names: Iterable[str]) -> dict[str, torch.dtype]:
    """Return the dtypes of some of the description's tensors in its live model or folder; empty for fresh weights.

    Only the files with these tensors are opened, and only their headers are read.
    """
    if description.config is None:
        return {}
    if description.model is not None:
        tensors = (*description.model.named_parameters(), *persistent_buffers(description.model))
        return {name: tensor.dtype for name, tensor in tensors if tensor.is_floating_point()}
    if description.source is None:
        return {}
    files = WeightFiles(description, description.source)
    dtypes: dict[str, torch.dtype] = {}
    for name in names:
        stored_under = name
        if description.tied and name == description.embedding_name and name not in files.stored:
            stored_under = description.head_name  # older programs may have saved it only under this name
        kinds = files.kinds(stored_under)
        if kinds and kinds <= STORED_DTYPES.keys():
            dtypes[name] = functools.reduce(torch.promote_types, (STORED_DTYPES[kind] for kind in kinds))
    return dtypes


def _files(description: Description, source: str) -> dict[str, Path]:
    """Return the paths of non-weight files; those for other inputs only if the whole model is trained."""
    config = find_file(source, CONFIG)
    if config is None:
        return {}
    names = [GENERATION_CONFIG]
    if json.loads(config.read_bytes()).get("model_type") == description.config.model_type:
        names += PROCESSOR_FILES
    paths = {name: find_file(source, name) for name in names}
    return {CONFIG: config, **{name: path for name, path in paths.items() if path is not None}}


def code_of(kind: type) -> list[Path]:
    """Return the Python files that came with a model, config or tokenizer of this class, without transformers' own
    code."""
    if not kind.__module__.startswith("transformers_modules."):
        return []
    file = sys.modules[kind.__module__].__file__
    assert file is not None
    return [Path(file), *map(Path, get_relative_import_files(file))]


def is_code(name: str) -> bool:
    """Return whether the file name is that of Python code in a model folder."""
    return name.endswith(".py") and name.removesuffix(".py").isidentifier()


def changed_config(text: str, config: Any, dtype: torch.dtype | None) -> str | None:
    """Return a config.json with the values of `config` and, if given, another dtype. Unchanged values and keys unknown
    to transformers are preserved; if nothing changes, the text is returned unchanged.

    None: `text` is the config of another model, such as one that contains this model.
    """
    original = json.loads(text)
    if original.get("model_type") != config.model_type:
        return None
    old, new = type(config).from_dict(json.loads(text)).to_dict(), config.to_dict()
    changes = {
        name: value
        for name, value in json.loads(json.dumps(new)).items()
        if not BOOKKEEPING.fullmatch(name) and old.get(name) != new[name]
    }
    if (
        original.get("architectures")
        and config.architectures
        and config.architectures[0] not in original["architectures"]
    ):
        changes["architectures"] = config.architectures
    values = original | changes
    if dtype is not None:
        values = _with_dtype(values, str(dtype).removeprefix("torch."))
    return text if values == original else json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _with_dtype(values: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config's values, and those of nested configs, with another dtype under the name that they use for it."""
    names = {"dtype", "torch_dtype"} & values.keys() or {"dtype"}
    inner = {name: value for name, value in values.items() if name.endswith("_config") and isinstance(value, dict)}
    inner = {name: value for name, value in inner.items() if {"dtype", "torch_dtype"} & value.keys()}
    return {
        **values,
        **{name: _with_dtype(value, dtype) for name, value in inner.items()},
        **dict.fromkeys(names, dtype),
    }
