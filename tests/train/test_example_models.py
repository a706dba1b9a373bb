"""Configurations of real models, as hubs have them: a plan for each can be written, and describes the same model."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenpipe.cli.model_argument import read_model
from evenpipe.errors import InputError
from evenpipe.model import Description, describe
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.planned_config import configured_model, model_tables

MODELS = sorted((Path(__file__).resolve().parents[2] / "examples" / "models").glob("*.json"))


def text_shapes(description: Description) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of the language model."""
    names = {name.replace("model.language_model.", "model."): shape for name, shape in description.shapes.items()}
    images = ("model.vision_tower.", "model.multi_modal_projector.")
    return {name: tuple(shape) for name, shape in names.items() if not name.startswith(images)}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_run_of_the_same_model_is_written(path: Path) -> None:
    planned = read_model(str(path))
    tables = model_tables(planned, str(path))
    written = describe(configured_model(config_from_dict({**tables, "pipeline": {"processes": 2}})))
    assert text_shapes(written) == text_shapes(planned)


def configured(**fields: object) -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, **fields}
    tables = {"model": {"architecture": "qwen3_moe", "config": config}, "data": {"corpus": "python-standard-library"}}
    configured_model(config_from_dict(tables))


def test_fields_that_only_the_model_reads_are_accepted() -> None:
    configured(head_dim=32)
    with pytest.raises(InputError, match=r"model\.config\.head_dimension is no field of Qwen3MoeConfig"):
        configured(head_dimension=32)
