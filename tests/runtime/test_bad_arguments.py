"""Wrong arguments of the public Python API: one sentence that names the argument, what it was given, what it takes."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

import evenpipe
from evenpipe.errors import InputError, RunError
from evenpipe.schedule import Order, plan_order
from evenpipe.train.config_file import config_from_dict

CONFIG = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, vocab_size=300)
IDS = torch.arange(32).reshape(4, 8)

MADE = [
    # arguments of Pipeline, words of the sentence
    ({"schedule": "1f1c"}, ['schedule is "1f1c"; it must be one of gpipe', 'did you mean "1f1b"?']),
    ({"schedule": 3}, ["schedule is int", "must be a name, an Order"]),
    (
        {
            "schedule": Order.from_csv(
                "0F0,1F0,2F0,3F0,3B0,2B0,1B0,0B0", edges=((0, 1), (0, 2), (1, 3), (2, 3)), microbatches=1
            ),
            "vocabulary": "first-last",
        },
        ["a graph of stages can be planned, simulated and drawn", "the runtime trains a chain only"],
    ),
    ({"vocabulary": "vocab-3"}, ['vocabulary is "vocab-3"; it must be one of', 'did you mean "vocab-2"?']),
    ({"microbatches": 0}, ["microbatches is 0", "at least 1"]),
    ({"microbatches": "4"}, ['microbatches is "4"', "an integer"]),
    ({"mesh": 3}, ["mesh is 3", "DeviceMesh"]),
    ({"model": None}, ["model = None", "neither a hub name, a folder"]),
    ({"model": torch.nn.Linear(2, 2)}, ["model = Linear", "Pipeline.from_modules"]),
    ({"compute_dtype": "fp7"}, ['compute_dtype is "fp7"', "torch.bfloat16"]),
    ({"activation_checkpointing": "some"}, ['checkpointing is "some"', '"none", "full", "selective"']),
    ({"activation_checkpointing": True}, ["activation_checkpointing is true"]),
    ({"activation_checkpointing": ["full", True, "none", "none"]}, ["activation_checkpointing[1] is true"]),
    ({"offload": "all"}, ['offload is "all"', "OffloadOptions"]),
    ({"data_parallel": "x"}, ['data_parallel is "x"', "replicate, shard"]),
    ({"layers_per_stage": [1, 2]}, ["layers_per_stage is [1, 2]", "4 layers"]),
    ({"timeout_seconds": -1}, ["timeout_seconds is -1", "above 0"]),
    ({"seed": "a"}, ['seed is "a"', "a whole number from 0"]),
    ({"costs": "costs.toml"}, ['costs is "costs.toml"', "it must be a Costs or none"]),
    ({"torch_device": "tpu"}, ["torch_device is 'tpu'", '"cpu" or "cuda"']),
    ({"pp": 2}, ["pp is 2; it must be 1, the number of processes that dp, cp and tp leave, or None"]),
    ({"tp": 2}, ["tp is 2", "a divisor of 1, the number of processes"]),
    ({"slices": 0}, ['slices is 0; it must be an integer of at least 1 or "auto"']),
    ({"recipe": 3}, ["recipe is 3", "must be a Recipe, or None"]),
    ({"recipe": evenpipe.Recipe.of(pp=2)}, ["recipe says pp = 2; it must say pp = 1, the sizes of the processes"]),
    ({"recipe": evenpipe.Recipe(), "schedule": "zbv"}, ["recipe: given together with schedule"]),
]

STEPS = [
    # what is called with a pipeline and its optimizer, words of the sentence
    (lambda pipeline, _: pipeline.step([[1, 2]]), ["input_ids is list", "torch.Tensor"]),
    (lambda pipeline, _: pipeline.step(None), ["input_ids", "given None", "[batch, sequence]"]),
    (lambda pipeline, _: pipeline.step(IDS.float()), ["input_ids is [4, 8] torch.float32", "torch.int64"]),
    (lambda pipeline, _: pipeline.step(IDS[:3]), ["input_ids has 3 sequences", "the 2 microbatches"]),
    (lambda pipeline, _: pipeline.step(IDS + 290), ["input_ids contains token", "0 to 299"]),
    (lambda pipeline, _: pipeline.step(IDS, IDS[:2]), ["labels is [2, 8]", "must be [4, 8]"]),
    (lambda pipeline, _: pipeline.step(IDS, IDS - 50), ["labels contains -", "0 to 299 or -100"]),
    (lambda pipeline, _: pipeline.step(IDS, accumulate=0), ["accumulate is 0", "1 or more"]),
    (lambda pipeline, _: pipeline.step(IDS, attention_mask=IDS[:2]), ["attention_mask is [2, 8]", "[4, 8]"]),
    (
        lambda pipeline, _: pipeline.step(IDS, token_weights=-torch.ones(4, 8)),
        ["token_weights contains -1", "at least 0"],
    ),
    (lambda pipeline, _: pipeline.evaluate([1]), ["input_ids is list", "torch.Tensor"]),
    (lambda pipeline, _: pipeline.clip_grad_norm_(0), ["max_norm is 0", "above 0"]),
    (lambda pipeline, optimizer: pipeline.save_checkpoint("new", -1, optimizer), ["step is -1", "0 or more"]),
    (lambda pipeline, _: pipeline.save_checkpoint("new", 1, 3), ["optimizer is 3", "as in torch.optim"]),
    (lambda pipeline, optimizer: pipeline.save_checkpoint("new", 1, optimizer, extra=print), ["extra is ", "JSON"]),
    (
        lambda pipeline, optimizer: pipeline.save_checkpoint("file", 1, optimizer),
        ["step 1 was not saved", "File exists"],
    ),
    (
        lambda pipeline, optimizer: pipeline.load_checkpoint("nowhere", optimizer),
        ["'nowhere' cannot be used", "missing"],
    ),
    (lambda pipeline, optimizer: pipeline.load_checkpoint("file", optimizer), ["'file' cannot be used", "directory"]),
    (lambda pipeline, _: pipeline.save_pretrained("file"), ["not written to 'file'", "File exists"]),
    (lambda pipeline, _: evenpipe.launch(print, processes=0), ["processes is 0", "at least 1"]),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    return tmp_path


def test_a_pipeline_that_cannot_be_made():
    missing = []
    for arguments, words in MADE:
        with pytest.raises(InputError) as caught:
            evenpipe.Pipeline(**{"model": CONFIG, "self_check": False, **arguments})
        missing += [(word, str(caught.value)) for word in words if word not in str(caught.value)]
    assert missing == []
    for name, nearest in (("scedule", "schedule"), ("seeds", "seed"), ("self_chek", "self_check")):
        with pytest.raises(TypeError, match=f"unknown argument '{name}'; known: .*; did you mean .{nearest}"):
            evenpipe.Pipeline(CONFIG, **{name: 1})


def test_calls_that_cannot_be_answered_leave_weights_and_files_as_they_were(folder):
    """In one pipeline, one after the other: none spoils it for the next."""
    pipeline = evenpipe.Pipeline(CONFIG, microbatches=2, self_check=False)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    before = [parameter.detach().clone() for parameter in pipeline.parameters()]
    missing = []
    for call, words in STEPS:
        with pytest.raises((InputError, RunError)) as caught:
            call(pipeline, optimizer)
        missing += [(word, str(caught.value)) for word in words if word not in str(caught.value)]
    assert missing == []
    assert all(map(torch.equal, before, pipeline.parameters()))
    assert (folder / "file").read_text() == "kept"
    assert {path.name for path in folder.iterdir()} <= {"file", "new"}
    assert evenpipe.newest_checkpoint("new") is None


def test_old_names_are_refused_with_the_new_ones() -> None:
    for old, new in (
        ("replicas", "dp"),
        ("tensor_parallel", "tp"),
        ("context_parallel", "cp"),
        ("expert_parallel", "ep"),
        ("checkpointing", "activation_checkpointing"),
    ):
        with pytest.raises(TypeError, match=f"unknown argument '{old}'; .*; {old} is {new} now"):
            evenpipe.Pipeline("model", **{old: 2})
        with pytest.raises(InputError, match=f"{old} is {new} now"):
            config_from_dict({"model": {"architecture": "llama"}, "pipeline": {old: 2}})
    with pytest.raises(InputError, match=r"has no option 'memory_limit'; .*; memory_limit is max_in_flight now"):
        plan_order("v-budget", 2, 4, "first-last", memory_limit=2)
    with pytest.raises(AttributeError, match="no attribute 'clip_gradients'; clip_gradients is clip_grad_norm_ now"):
        _ = object.__new__(evenpipe.Pipeline).clip_gradients
