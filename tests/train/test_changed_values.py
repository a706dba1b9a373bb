"""What is said of the configuration of a run that continues with another one."""

from __future__ import annotations

import json
from dataclasses import asdict

from evenpipe.train.changed_values import changed_values
from evenpipe.train.config import Config
from evenpipe.train.config_file import config_from_dict

BASE = {
    "model": {"architecture": "llama", "config": {"hidden_size": 64, "rope_parameters": {"factor": 2.0}}},
    "data": {"files": ["a.txt"], "sequence_length": 64},
    "optimizer": {"name": "sgd", "options": {"momentum": 0.9}},
}


def made(**sections: dict[str, object]) -> Config:
    return config_from_dict({name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {**BASE, **sections}})


def saved(config: Config) -> dict[str, object]:
    return json.loads(json.dumps(asdict(config)))


CHANGES = [
    ({}, {}),
    ({"pipeline": {"microbatches": 8}}, {"pipeline.microbatches": "none -> 8"}),
    (
        {"training": {"seed": 1}, "optimizer": {"learning_rate": 1e-4, "clip_norm": "none"}},
        {
            "optimizer.learning_rate": "0.0003 -> 0.0001",
            "optimizer.clip_norm": "1.0 -> none",
            "training.seed": "0 -> 1",
        },
    ),
    ({"optimizer": {"options": {"momentum": 0.8}}}, {"optimizer.options.momentum": "0.9 -> 0.8"}),
    (
        {"optimizer": {"options": {"nesterov": True}}},
        {"optimizer.options.nesterov": "none -> true", "optimizer.options.momentum": "0.9 -> none"},
    ),
    (
        {"model": {"config": {"hidden_size": 64, "rope_parameters": {"factor": 4.0}}}},
        {"model.config.rope_parameters.factor": "2.0 -> 4.0"},
    ),
    ({"data": {"files": ["a.txt", "b.txt"]}}, {"data.files": '["a.txt"] -> ["a.txt", "b.txt"]'}),
    ({"checkpoint": {"resume_from": 80}}, {"checkpoint.resume_from": "none -> 80"}),
    ({"output": {"log_every_steps": 1, "tensorboard": True}}, {}),
]


def test_every_changed_value_is_said() -> None:
    for change, said in CHANGES:
        assert changed_values(saved(made()), made(**change)) == said


def test_fields_that_another_version_has_or_had() -> None:
    """One that is new had its default."""
    before = saved(made())
    del before["checkpoint"]["resume_from"], before["experts"]
    assert changed_values(before, made()) == {}
    assert changed_values(before, made(checkpoint={"resume_from": 3})) == {"checkpoint.resume_from": "none -> 3"}
    before = saved(made())
    before["training"]["turbo"] = True
    assert changed_values(before, made()) == {"training.turbo": "true -> none"}
