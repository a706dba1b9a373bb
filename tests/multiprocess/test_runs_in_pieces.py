"""What else a run may ask for with sequences in pieces: checkpoints that continue in any layout, exports, steps that
add up, sequences of several lengths; and what is refused in a sentence."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from drawn_runs import TOKENS, Case, continue_in_all, described, opened, steps_of_several_lengths
from harness import run_processes
from small_families import CONFIGS
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B

from evenpipe import OffloadOptions, Pipeline
from evenpipe.errors import InputError
from evenpipe.host.offload import Activations
from evenpipe.model.fp64 import InFp64
from evenpipe.schedule import generate

# --- checkpoints and export -------------------------------------------------------------------------------------------


def layouts(family: str, tied: bool) -> list[Case]:
    """Layouts that train one step each, one after the other, on what the one before has saved."""
    return [
        Case(family, 1, 1, 2, tied=tied),
        Case(family, 2, 1, 1, data_parallel="shard", mode="first-last", tied=tied, slices=2),
        Case(family, 1, 2, 1, schedule="zb-h1", mode="redistribute", tied=tied, slices=3),
        Case(family, 1, 2, 2, schedule="zbv", exchange="heads", tied=tied, slices=2),
        Case(family, 2, 1, 2, data_parallel="shard", tied=tied),
        Case(family, 1, 1, 1, tied=tied),
    ]


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gemma2", False), ("gpt2", True)])
@pytest.mark.sampled(1)
def test_a_checkpoint_continues_in_any_layout(family: str, tied: bool, tmp_path: Path) -> None:
    continue_in_all(layouts(family, tied), tmp_path)


# --- several steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", 1, 2, 1, slices=2, schedule="zb-h1"),
        Case("llama", 1, 1, 2, slices=2),
        Case("llama", 1, 1, 2, exchange="heads", tied=True),
        Case("llama", 1, 2, 2, schedule="zbv", mode="first-last"),
    ],
    ids=["slices", "both", "heads", "keys"],
)
@pytest.mark.sampled(2)
def test_gradients_of_several_lengths_add_up(case: Case) -> None:
    error, name = run_processes(steps_of_several_lengths, case.processes, case)[0]
    assert error < 1e-10, name


def step_on_a_mesh(exchange: str) -> tuple[float, str]:
    """Context ranks are in another order on the second device."""
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [3, 2]]), mesh_dim_names=("pp", "cp"))
    case = Case("llama", 1, 2, 2, exchange=exchange, slices=2)
    ((ids, labels),) = reference.batches(61, 2, TOKENS, 1)
    with InFp64(), contextlib.closing(opened(case, 2, mesh=mesh)) as pipeline:
        model = copy.deepcopy(described(*case.model).model)
        pipeline.step(ids, labels)
        reference.loss_of(model, ids, labels).backward()
        found = pipeline.full_gradients()
    return reference.worst(found, {name: one.grad for name, one in model.named_parameters()}) if found else (0.0, "")


@pytest.mark.parametrize("exchange", ["keys", "heads"])
def test_processes_may_be_in_any_order(exchange: str) -> None:
    error, name = run_processes(step_on_a_mesh, 4, exchange)[0]
    assert error < 1e-10, name


def trace_of_slices() -> list[str]:
    """What was copied to the host and back in a step, by device."""
    Activations.smallest_bytes = 1
    case = Case("llama", 1, 2, 1, slices=2)
    with contextlib.closing(opened(case, 2, offload=OffloadOptions(activations="all"))) as pipeline:
        result = pipeline.step(torch.ones(2, 16, dtype=torch.int64), record_passes=True)
        trace = pipeline.trace(result)
    return [] if trace is None else [str(copy.item) for device in trace.devices for copy in device.copies]


def test_a_trace_tells_the_copies_of_every_slice() -> None:
    found = run_processes(trace_of_slices, 2)[0]
    assert set(found) == {
        f"{stage}{kind}{unit}" for stage in (0, 1) for kind in "OL" for unit in ("0", "0.1", "1", "1.1")
    }


# --- what is refused --------------------------------------------------------------------------------------------------

IDS = torch.ones(2, 16, dtype=torch.int64)
PLACES = torch.arange(16).expand(2, -1)
STEPS: list[tuple[dict[str, Any], str]] = [
    (
        {"input_ids": IDS[:, :4]},
        r"4 tokens per sequence, expected a multiple of 4 and at least 8 \(two chunks for each",
    ),
    ({"input_ids": IDS[:, :14]}, r"14 tokens per sequence, expected a multiple of 4 and at least 8"),
    ({"position_ids": PLACES.double()}, r"position_ids: \[2, 16\] torch.float64, expected \[2, 16\] torch.int64 as"),
    ({"position_ids": PLACES.expand(3, 2, -1)}, r"position_ids: \[3, 2, 16\] torch.int64, expected \[2, 16\]"),
    ({"position_ids": PLACES[:, :8]}, r"position_ids: \[2, 8\] torch.int64, expected \[2, 16\]"),
    ({"position_ids": PLACES - 1}, "position_ids: from -1 to 14, expected at least 0"),
    ({"position_ids": PLACES.tolist()}, "position_ids: list, expected a torch.Tensor"),
]


def bad_steps() -> None:
    pipeline = opened(Case("llama", 1, 1, 2, slices=2), 1)
    for given, says in STEPS:
        with pytest.raises(InputError, match=f"{says}|refused by") as caught:
            pipeline.step(**{"input_ids": IDS} | given)
        assert "\n" not in str(caught.value)
    assert pipeline.step(IDS, position_ids=PLACES).loss > 0
    pipeline.close()


def test_a_bad_batch_is_refused_and_the_next_one_runs() -> None:
    run_processes(bad_steps, 2)


def _modules(**options: Any) -> Pipeline:
    parts = torch.nn.Embedding(9, 8), [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)], None, torch.nn.Linear(8, 9)
    return Pipeline.from_modules(*parts, microbatches=1, **options)


def _llama(**options: Any) -> Pipeline:
    known = ("attention_dropout", "num_attention_heads", "num_key_value_heads")
    settings = {name: options.pop(name) for name in known if name in options}
    return Pipeline(CONFIGS["llama"](**settings), microbatches=2, self_check=False, **options)


PAIR = {"context_parallel": 2}
PIPELINES: list[tuple[Callable[[], Pipeline], str]] = [
    (lambda: _modules(slices=2), "slices: plain modules do not say where they attend to other tokens, expected 1"),
    (lambda: _modules(**PAIR), "context_parallel: plain modules do not say where they attend to other tokens"),
    (lambda: _llama(slices=2, schedule="dualpipe-v"), "sequences cannot be cut in an order with .*OVERLAP_F_B, whose"),
    (lambda: _llama(slices=2, schedule=Schedule1F1B), "slices: 2, expected 1, as in the given order: only a schedule"),
    (lambda: _llama(slices=2, schedule=generate("1f1b", 2, 2)), "slices: 2, expected 1, as in the given order"),
    (lambda: _llama(slices=0), "slices: 0, expected a whole number of at least 1"),
    (lambda: _llama(slices=2, compile_layers=True, checkpointing="full"), "compile_layers: True, expected False with"),
    (lambda: _llama(slices=2, attention_dropout=0.1), "slices: attention_dropout is 0.1 in the model's config, expec"),
    (lambda: _llama(**PAIR, attention_dropout=0.1), "context_parallel: attention_dropout is 0.1 in the model's config"),
    (
        lambda: _llama(**PAIR, context_exchange="heads", num_attention_heads=1, num_key_value_heads=1),
        "context_exchange: 'heads', but 2 context ranks cannot share 1 head; expected 'keys', or a divisor as",
    ),
    (
        lambda: _llama(
            context_parallel=1, mesh=DeviceMesh("cpu", torch.arange(2).view(1, 2), mesh_dim_names=("pp", "cp"))
        ),
        'context_parallel: 1, expected 2, the length of the mesh\'s axis "cp", or None',
    ),
    (lambda: _llama(context_parallel=3), "context_parallel: 3, expected a divisor of 2, the number of processes"),
]


def bad_pipelines() -> None:
    warnings.simplefilter("ignore")  # of torch's schedules, which are not what they show
    for make, says in PIPELINES:
        with pytest.raises(InputError, match=says) as caught:
            make().close()
        assert "\n" not in str(caught.value)


def test_what_cannot_run_in_pieces_is_refused() -> None:
    run_processes(bad_pipelines, 2)
