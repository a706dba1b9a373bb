"""What `Pipeline` accepts, refuses, lets go of and says. What it computes is compared in tests/fuzz."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from families import tiny_config, whole_model
from harness import lines_logged, run_processes
from small_llama import described, llama
from torch import nn
from transformers import LlamaConfig

from evenpipe import LossOptions, Pipeline
from evenpipe.errors import InputError, RunError
from evenpipe.model import describe
from evenpipe.schedule import MODES, Order
from evenpipe.words import show

FP64 = torch.float64
IDS = torch.zeros(2, 4, dtype=torch.int64)


def make(mode: str | None = "vocab-2", **options) -> Pipeline:
    options = {"microbatches": 2, "parameter_dtype": FP64, "self_check": False, **options}
    return Pipeline(described(97, False, FP64), vocabulary=mode, **options)


# --- steps ------------------------------------------------------------------------------------------------------------

BAD_STEPS = {
    "input_ids: the first process": {"input_ids": None},
    "multiple of the 2 microbatches": {"input_ids": torch.zeros(3, 4, dtype=torch.int64)},
    "at most 32": {"input_ids": torch.zeros(2, 33, dtype=torch.int64)},
    "labels contains -1": {"input_ids": IDS, "labels": IDS - 1},
    "padding on the right": {"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])},
    "position_ids run from -1 to -1; they must be at least 0": {"input_ids": IDS, "position_ids": IDS - 1},
    "rows of ones followed by zeros": {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 0.5]] * 2)},
    "not a finite number": {"input_ids": IDS, "token_weights": torch.full((2, 4), float("nan"))},
}
NOT_OF_PLAIN_MODULES = {f"{name}: the model does not take it": name for name in ("position_ids", "attention_mask")}


def bad_steps() -> None:
    """One sentence on every process, before anything is sent; the pipeline goes on as if nothing had happened."""
    modules = nn.Embedding(97, 8), [nn.Linear(8, 8), nn.Linear(8, 8)], None, nn.Linear(8, 97)
    plain = Pipeline.from_modules(*modules, microbatches=1)
    learned = Pipeline(describe(whole_model(tiny_config("gpt2"))), microbatches=1, self_check=False)
    pipeline = make()
    cases = [
        *((pipeline, text, arguments) for text, arguments in BAD_STEPS.items()),
        *((plain, text, {"input_ids": IDS, name: IDS + 1}) for text, name in NOT_OF_PLAIN_MODULES.items()),
        (learned, "position_ids run from 10000", {"input_ids": IDS, "position_ids": IDS + 10_000}),
    ]
    for refusing, text, arguments in cases:
        with pytest.raises(InputError) as caught:
            refusing.step(**arguments)
        assert (text if refusing.device == 0 else "first process") in str(caught.value)
    for stepping in (pipeline, plain, learned):
        stepping.step(IDS)
    for wrong in ("1", 0, None, True):
        with pytest.raises(InputError, match=f"max_norm is {show(wrong)}; it must be a number above 0"):
            pipeline.clip_grad_norm_(wrong)
    pipeline.close()
    for method in (pipeline.step, pipeline.evaluate):
        with pytest.raises(InputError, match="the pipeline is closed"):
            method(IDS)


def test_bad_steps_are_one_sentence_on_every_process() -> None:
    run_processes(bad_steps, 2)


def under_autocast() -> None:
    """Neither silently in two dtypes nor an error from within the backward; outside of it everything is as ever."""
    ids = torch.arange(24).reshape(4, 6)
    for schedule in ("1f1b", "zb-h1"):
        pipeline = make(schedule=schedule)
        for run in (pipeline.step, pipeline.evaluate):
            with (
                torch.autocast("cpu", torch.bfloat16),
                pytest.raises(InputError, match=r"^torch.autocast is on, .*: Pipeline\(compute_dtype=torch.bfloat16\)"),
            ):
                run(ids)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            pipeline.step(ids)
        gradients = pipeline.full_gradients()
        if pipeline.device == 0:
            model = copy.deepcopy(described(97, False, FP64).model)
            reference.loss_of(model, ids, ids).backward()
            error, name = reference.worst(gradients, {name: one.grad for name, one in model.named_parameters()})
            assert error < 1e-10, f"{name}: {error:.1e}"
        pipeline.close()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.sampled(1)
def test_autocast_is_refused(processes: int) -> None:
    run_processes(under_autocast, processes)


# --- options; others are refused in tests/runtime/test_bad_arguments.py -----------------------------------------------

BAD_OPTIONS = {
    "layers_per_stage is [1, 2]": {"layers_per_stage": [1, 2]},
    "compute_dtype is torch.float32; it must be torch.float64": {"compute_dtype": torch.float32},
    "ignore_index is -1; it must be -100": {"loss": LossOptions(ignore_index=-1)},
    "soft_cap is 30.0; it must be None": {"loss": LossOptions(soft_cap=30.0)},
    "0D0 is missing": {"mode": "first-last", "schedule": Order.from_csv("0F0,0F1,0O0,0L0,0B0,0B1\n1F0,1B0,1F1,1B1")},
    'torch_device is "meta"; it must be "cpu" or "cuda"': {"torch_device": "meta"},
    "torch_device is 7, which is no device": {"torch_device": 7},
    'timeout_seconds is "9"; it must be a number': {"timeout_seconds": "9"},
    "vocabulary is none; it must be text": {"mode": None},
    "schedule: <lambda>(devices, microbatches) cannot": {"schedule": lambda: None},
    "schedule_options is 5; it must be a dictionary": {"schedule_options": 5},
    'layers_per_stage is "2"; it must be a list of integers': {"layers_per_stage": "2"},
    "loss is 5; it must be LossOptions": {"loss": 5},
    'compile_layers is "no"; it must be true or false': {"compile_layers": "no"},
}
if not torch.cuda.is_available():
    BAD_OPTIONS["torch_device is 'cuda', but torch finds no GPU"] = {"torch_device": "cuda"}
TOO_MANY_DEVICES = [("4 layers", {"mode": mode}) for mode in MODES]


def sentences_missing(cases: list[tuple[str, dict]]) -> list[str]:
    missing = []
    for text, options in cases:
        with pytest.raises(InputError) as caught:
            make(**options)
        if text not in str(caught.value):
            missing.append(f"{text!r} is not in {str(caught.value)!r}")
    return missing


def bad_options() -> list[str]:
    return sentences_missing([*BAD_OPTIONS.items()])


def test_bad_options_are_one_sentence(sample) -> None:
    assert run_processes(bad_options, 2) == [[]] * 2
    assert run_processes(sentences_missing, 5, sample(TOO_MANY_DEVICES, 1)) == [[]] * 5


# --- models and processes ---------------------------------------------------------------------------------------------


def lets_go(folder: str) -> None:
    model = llama(97, True, FP64)
    model.generation_config.temperature = 0.3
    seen = weakref.ref(model)
    pipeline = Pipeline(model, microbatches=1, parameter_dtype=FP64, self_check=False)
    del model
    gc.collect()
    assert seen() is None
    assert pipeline.description.skeleton.generation_config.temperature == 0.3
    pipeline.step(IDS)
    with pytest.raises(RunError, match="was not written"):
        pipeline.save_pretrained(f"{folder}/file/model")


def test_a_live_model_is_copied_and_a_folder_that_cannot_be_written_is_an_error_everywhere(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    run_processes(lets_go, 2, str(tmp_path))


def one_pipeline_without_a_group() -> int:
    """As under torchrun: the environment is there, and no process group yet."""
    assert not dist.is_initialized()
    pipeline = make()
    assert pipeline.devices == dist.get_world_size() == 2
    return pipeline.device


def test_under_torchrun_a_pipeline_opens_the_group_itself() -> None:
    assert run_processes(one_pipeline_without_a_group, 2, group=False) == [0, 1]


# --- what context ranks exchange by themselves: what moves less -------------------------------------------------------


def exchange(heads_of_keys: int, **options: Any) -> tuple[str | None, list[str]]:
    """What is said of it, and what is logged."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=heads_of_keys, vocab_size=64)
    with lines_logged(logging.INFO) as said:
        pipeline = Pipeline(config, microbatches=1, self_check=False, **options)
        pipeline.close()
    return pipeline.context_exchange, [line for line in said if line.startswith("context ranks exchange")]


EXCHANGES = [
    (4, {}, "heads: gathered keys would move 1.50 times as much"),
    (1, {}, "keys: heads for tokens would move 2.00 times as much"),  # the only head of keys is repeated
    (4, {"context_exchange": "keys"}, "keys: as given"),
    (4, {"slices": 2}, "keys: heads for tokens would move 1.00 times as much"),
]


def choices_are_said() -> None:
    for heads, options, expected in EXCHANGES:
        said = [f"context ranks exchange {expected}"] * (dist.get_rank() == 0)
        assert exchange(heads, cp=2, **options) == (expected, said)
    assert exchange(4) == (None, [])


def test_what_context_ranks_exchange_is_said() -> None:
    run_processes(choices_are_said, 2)
