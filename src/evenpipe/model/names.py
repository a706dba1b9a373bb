"""Names on disk and names in memory.

transformers converts checkpoints while it loads and saves them: some names differ (GPT-NeoX's head is
`embed_out.weight` on disk and `lm_head.weight` in memory), and experts are stored one by one and held fused. Renaming
goes through transformers' own tables; what needs tensors to be merged or split is refused with the names.
"""

from __future__ import annotations

from collections.abc import Iterable

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key

from evenpipe.errors import InputError
from evenpipe.model.description import Description


def memory_names(description: Description, disk: Iterable[str]) -> dict[str, str]:
    """Name on disk -> name in memory, for the tensors that are stored as they are held; others are left out."""
    conversions = get_model_conversion_mapping(description.skeleton)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    held = description.skeleton.state_dict()
    found = {}
    for name in disk:
        renamed, pattern = rename_source_key(name, renamings, converters, description.skeleton.base_model_prefix, held)
        if pattern is None:
            found[name] = renamed
    return found


def disk_names(description: Description, names: Iterable[str]) -> dict[str, str]:
    """Name in memory -> name on disk, as `save_pretrained` of transformers would write it.

    Raises:
        InputError: for tensors that transformers stores merged or split (experts).
    """
    if description.config is None:
        return {name: name for name in names}
    conversions = get_model_conversion_mapping(description.skeleton, add_legacy=False)
    reverse = [entry.reverse_transform() for entry in reversed(conversions) if not isinstance(entry, PrefixChange)]
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    found = {}
    for name in names:
        renamed, pattern = rename_source_key(name, renamings, converters, reverse=True)
        if pattern is not None:
            form = "merges or splits it on disk, which is not supported"
            raise InputError(f"{name} of {description.architecture} cannot be written: transformers {form}.")
        found[name] = renamed
    return found
