"""A process that holds some experts of every layer draws and reads only these: the same as the whole model's."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import transformers
from families import EXPERTS, tiny_config
from family_configs import SETTINGS, small_config
from safetensors import safe_open

from evenpipe.memory.tracker import Tracker
from evenpipe.model import build_stage, describe, initialize, load_parameters
from evenpipe.model import weight_files as weight_files_module
from evenpipe.model.description import Description
from evenpipe.model.experts import fused_experts
from evenpipe.model.placement import Cut, TensorPlacement

DRAWN = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe", "nemotron_h"]
OTHERS = ["nemotron_h", "qwen3_5_moe_text", "aria_text", "jamba", "qwen3_next", "exaone_moe", "minimax_m3_vl_text"]
"""Types that are not in `families.py`."""


def config_of(name: str, **changes) -> transformers.PreTrainedConfig:
    if name in EXPERTS:
        return tiny_config(name, **changes)
    return small_config(name, SETTINGS.get(name, {}) | {"tie_word_embeddings": False} | changes)


def fused(description: Description) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters [experts, ...]."""
    return {
        f"{name}.{key}": tuple(parameter.shape)
        for name, module in fused_experts(description.skeleton).items()
        for key, parameter in module.named_parameters(recurse=False)
    }


def placements(
    description: Description, member: int, members: int, columns: tuple[int, int] | None = None
) -> dict[str, TensorPlacement]:
    """Return how a member of an expert group holds the experts; `columns`: its tensor rank, and the number of ranks,
    which cut the last dimension."""
    held = {}
    for name, shape in fused(description).items():
        cuts = [Cut(("ep",), member, members)]
        if columns is not None:
            cuts.append(Cut(("tp",), *columns, dimension=len(shape) - 1))
        held[name] = TensorPlacement(shape, tuple(cuts))
    return held


def stage_of(description: Description, held: dict[str, TensorPlacement] | None = None):
    return build_stage(description, 0, description.layers, is_first=True, is_last=True, held=held)


@pytest.fixture
def read(monkeypatch) -> dict[str, int]:
    """Return name on disk -> elements that were read of it."""
    counts: dict[str, int] = {}

    def count(name: str, tensor: torch.Tensor) -> torch.Tensor:
        counts[name] = counts.get(name, 0) + tensor.numel()
        return tensor

    class Slice:
        def __init__(self, name: str, inner) -> None:
            self._name, self._inner, self.get_shape = name, inner, inner.get_shape

        def __getitem__(self, places):
            return count(self._name, self._inner[places])

    class File:
        def __init__(self, path: str, framework: str) -> None:
            self._file = safe_open(path, framework=framework)
            self.keys = self._file.keys

        def get_tensor(self, name: str):
            return count(name, self._file.get_tensor(name))

        def get_slice(self, name: str):
            return Slice(name, self._file.get_slice(name))

    monkeypatch.setattr(weight_files_module, "safe_open", File)
    return counts


def check_parts(description: Description, fill: Callable[..., None], members: int, columns: int | None = None) -> None:
    """Check that the parts of all members are those of a whole stage; all fill theirs by `fill`."""
    whole = stage_of(description)
    fill(whole)
    expected = dict(whole.named_parameters())
    assert not any(parameter.isnan().any() for parameter in expected.values())
    for member, rank in itertools.product(range(members), range(columns or 1)):
        held = placements(description, member, members, columns and (rank, columns))
        part = stage_of(description, held)
        fill(part)
        for name, parameter in part.named_parameters():
            own = expected[name] if name not in held else held[name].of(expected[name])
            assert torch.equal(parameter, own), (name, member, rank)


PARTS = [(2, None), (3, None), (7, None), (2, 2)]
"""Members and columns: also members that hold more experts than others, or none."""


def test_members_draw_their_experts_alike(sample) -> None:
    for name, (members, columns) in sample(itertools.product(DRAWN, PARTS), 2):
        description = describe(config_of(name))
        check_parts(description, functools.partial(initialize, description=description, seed=3), members, columns)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*EXPERTS, *OTHERS])
def test_members_read_only_their_experts(name: str, sample, tmp_path, read: dict[str, int]) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(tmp_path)
    description = describe(tmp_path)
    shapes = fused(description)
    elements: list[tuple[int, int]] = []

    def fill(stage) -> None:
        read.clear()
        load_parameters(stage, description, tmp_path)
        held = sum(stage.get_parameter(name).numel() for name in shapes)
        elements.append((sum(read.values()), held))

    for members, columns in sample(PARTS if name in DRAWN else PARTS[:1], 1):
        elements.clear()
        check_parts(description, fill, members, columns)
        (all_read, all_held), *parts = elements
        assert columns or all(all_read - of_part == all_held - held for of_part, held in parts)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DRAWN)
def test_every_expert_has_a_seed_of_its_own(name: str) -> None:
    """`test_initialization.py` compares their distribution."""
    description = describe(config_of(name))
    stage = stage_of(description)
    initialize(stage, description, 0)
    matrices = [stage.get_parameter(key) for key in fused(description) if key.endswith("down_proj")]
    first_rows = [tuple(expert.flatten()[:8].tolist()) for experts in matrices for expert in experts]
    assert len(set(first_rows)) == len(first_rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_nobody_draws_a_whole_tensor(name: str) -> None:
    """The bytes above those of the parameters do not grow with the number of experts, but for the routers' rows."""
    above = []
    for experts in (8, 128):
        description = describe(config_of(name, num_local_experts=experts, num_hidden_layers=2))
        for members in (1, 4):
            stage = stage_of(description, placements(description, 0, members))
            with Tracker() as tracker:
                tracker.add(*stage.parameters(), *stage.buffers())
                with tracker.span() as span:
                    initialize(stage, description, 0)
            above.append(span.above)
    tensor = 4 * max(torch.Size(shape).numel() for shape in fused(description).values())
    routers = 4 * (128 - 8) * (64 + 1)
    assert max(above) - min(above) <= routers < tensor / 50
