"""Converts between tensors on disk and tensors in memory.

transformers converts checkpoints when it loads and saves them. Some names differ (GPT-NeoX's head is `embed_out.weight`
on disk and `lm_head.weight` in memory), and some tensors have another form: a layer's experts are separate tensors on
disk and one tensor [experts, ...] in memory. This module applies transformers' own tables to one in-memory tensor at a
time, so that no process needs memory for a whole model.

        disk                                                        memory
    ...experts.0.w1.weight, ...experts.7.w3.weight   <- converter -> ...experts.gate_up_proj
    embed_out.weight                                 <- renaming  -> lm_head.weight
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from evenpipe.errors import InputError
from evenpipe.model.description import Description
from evenpipe.model.structure import first_line
from evenpipe.words import count


@dataclass(slots=True)
class Stored:
    """How a tensor in memory is stored: unchanged under one name, or in parts that a converter combines."""

    parts: list[tuple[str, str]] = field(default_factory=list)
    """(name on disk, matching pattern of the converter), in the order that the converter requires."""
    first_name: str = ""
    """Name in memory that identifies the converter: the name of its first tensor."""
    converter: WeightConverter | None = None

    @property
    def disk_name(self) -> str | None:
        """Name on disk if the tensor is stored unchanged, else None."""
        return self.parts[0][0] if self.converter is None else None

    def of_entries(self, entries: range, count: int) -> tuple[Stored, slice] | None:
        """Return how some entries of the first dimension are stored, and which rows of every part they need. None if
        they need all of every part.

        Args:
            entries: the requested entries, such as some of a layer's experts.
            count: the number of all entries.
        """
        if self.converter is None:
            return self, slice(entries.start, entries.stop)
        operations = self.converter.operations
        numbers = Counter(pattern for _, pattern in self.parts)
        if not all(map(_keeps_entries, operations)):
            return None
        if not isinstance(operations[0], MergeModulelist):  # parts are [count, ...]
            return (self, slice(entries.start, entries.stop)) if set(numbers.values()) == {1} else None
        if set(numbers.values()) != {count}:
            return None
        passed: Counter[str] = Counter()
        parts = []
        for disk, pattern in self.parts:
            if passed[pattern] in entries:
                parts.append((disk, pattern))
            passed[pattern] += 1
        return replace(self, parts=parts), slice(None)


def _keeps_entries(operation: ConversionOps) -> bool:
    """Return whether every entry of the result's first dimension depends only on the same entry of its parts."""
    match operation:
        case MergeModulelist():
            return operation.dim == 0
        case Concatenate() | Chunk():
            return operation.dim > 0
        case Transpose():  # the check compares shapes of whole tensors
            return not operation.check_dims and operation.dim0 > 0 and operation.dim1 > 0
    return False


def stored_tensors(description: Description, disk: Iterable[str]) -> dict[str, Stored]:
    """Return name in memory -> how that tensor is stored.

    Args:
        disk: all names on disk.
    """
    conversions = get_model_conversion_mapping(description.skeleton)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, held = description.skeleton.base_model_prefix, description.skeleton.state_dict()
    by_memory_name: dict[str, Stored] = {}
    for name in sorted(disk, key=_natural):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, held)
        if renamed not in held and name in held:  # the name on disk was already correct
            renamed, pattern = name, None
        if pattern is None:
            by_memory_name.setdefault(renamed, Stored([(name, name)], renamed))
            continue
        converter = by_pattern[pattern]
        stored = by_memory_name.setdefault(renamed, Stored([], renamed, converter))
        if stored.converter is not converter:
            continue  # stored in both forms: use the first
        stored.parts.append((name, pattern))
        for target in converter.target_patterns[1:]:  # one tensor on disk is several in memory
            by_memory_name.setdefault(renamed.replace(converter.target_patterns[0], target), stored)
    return by_memory_name


def put_together(
    description: Description, name: str, stored: Stored, read: Callable[[str], torch.Tensor]
) -> torch.Tensor:
    """Return the tensor in memory from its parts on disk.

    Args:
        read: returns the tensor of a name on disk; without storage if only the shape is needed.

    Raises:
        InputError: the parts do not fit together.
    """
    if stored.converter is None:
        return read(stored.parts[0][0])
    converter = copy.deepcopy(stored.converter)
    for disk, pattern in stored.parts:
        converter.add_tensor(stored.first_name, disk, pattern, read(disk))  # type: ignore[arg-type]
    try:
        made = _converted(converter, stored.first_name, description)
    except Exception as error:  # transformers raises many types when parts are missing or of different shapes
        raise InputError(
            f"{name} cannot be put together from {stored.parts[0][0]} and the"
            f" {count(len(stored.parts) - 1, 'other tensor')} of it ({first_line(error)})."
        ) from error
    if name not in made:
        raise InputError(f"{name} cannot be put together: {stored.parts[0][0]} makes {', '.join(sorted(made))}.")
    return made[name]


def disk_tensors(
    description: Description, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator of (name on disk, tensor) as `save_pretrained` of transformers would write them.

    Args:
        tensors: (name in memory, tensor) of the whole model, in any order, consumed lazily. Tensors that are merged on
            disk are kept until the last part arrives.

    Raises:
        InputError: a part of a merged tensor is missing.
    """
    return iter(tensors) if description.config is None else _to_disk(description, tensors)


def _to_disk(
    description: Description, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    conversions = get_model_conversion_mapping(description.skeleton, add_legacy=False)
    reverse = [entry.reverse_transform() for entry in reversed(conversions) if not isinstance(entry, PrefixChange)]
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    groups = _groups(description.skeleton.state_dict(), converters)
    waiting: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        first_name, pattern, converter = _converter_of(name, converters)
        if converter is None:
            yield _renamed(name, renamings), tensor
            continue
        parts = waiting.setdefault(first_name, {})
        parts[name] = (pattern, tensor)
        if len(parts) < len(groups[first_name]):
            continue
        del waiting[first_name]
        used = copy.deepcopy(converter)
        for member in groups[first_name]:
            used.add_tensor(first_name, member, *parts[member])  # type: ignore[arg-type]
        parts.clear()
        for disk, converted in _converted(used, first_name, description).items():
            yield _renamed(disk, renamings), converted
    if waiting:
        missing = sorted(
            {member for first in waiting for member in groups[first]}
            - {name for parts in waiting.values() for name in parts}
        )
        raise InputError(f"{missing[0]} of {description.architecture} is missing: it is stored with others in one.")


def _converted(converter: WeightConverter, first_name: str, description: Description) -> dict[str, torch.Tensor]:
    """Return the results of a converter that has all its tensors."""
    model = description.skeleton
    made = converter.convert(first_name, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _converter_of(name: str, converters: list[WeightConverter]) -> tuple[str, str, WeightConverter | None]:
    """Return (name that identifies the converter, its pattern, the converter); None if the tensor is stored
    unchanged."""
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return renamed, pattern, converter
    return name, name, None


def _groups(names: Mapping[str, torch.Tensor], converters: list[WeightConverter]) -> dict[str, list[str]]:
    """Return name that identifies a converter -> its tensors in memory, in the order that the converter requires."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=_natural):
        first_name, _, converter = _converter_of(name, converters)
        if converter is not None:
            groups.setdefault(first_name, []).append(name)
    return groups


def _renamed(name: str, renamings: list[WeightRenaming]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts `experts.10` after `experts.9`."""
    return [(0, int(component), "") if component.isdigit() else (1, 0, component) for component in name.split(".")]
