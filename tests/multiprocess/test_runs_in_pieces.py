"""Sequences in pieces: the copies of every slice in a trace, and what is refused in a sentence.

Gradients are compared with one process by tests/fuzz.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_processes
from small_families import CONFIGS
from small_runs import Case, opened
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B

from evenpipe import OffloadOptions, Pipeline
from evenpipe.errors import InputError
from evenpipe.host.offload import Activations
from evenpipe.schedule import generate


def trace_of_slices() -> list[str]:
    """What was copied to the host and back in a step, by device."""
    Activations.smallest_bytes = 1
    case = Case("llama", devices=2, slices=2, microbatches=2)
    with contextlib.closing(opened(case, offload=OffloadOptions(activations="all"))) as pipeline:
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
        r"4 tokens per sequence; it must have a multiple of 4 and at least 8 \(two chunks for each",
    ),
    ({"input_ids": IDS[:, :14]}, r"14 tokens per sequence; it must have a multiple of 4 and at least 8"),
    (
        {"position_ids": PLACES.double()},
        r"position_ids is \[2, 16\] torch.float64; it must be \[2, 16\] torch.int64, as",
    ),
    ({"position_ids": PLACES.expand(3, 2, -1)}, r"position_ids is \[3, 2, 16\] torch.int64; it must be \[2, 16\]"),
    ({"position_ids": PLACES[:, :8]}, r"position_ids is \[2, 8\] torch.int64; it must be \[2, 16\]"),
    ({"position_ids": PLACES - 1}, "position_ids run from -1 to 14; they must be at least 0"),
    ({"position_ids": PLACES.tolist()}, "position_ids is list; it must be a torch.Tensor"),
]


def bad_steps() -> None:
    pipeline = opened(Case("llama", context_ranks=2, slices=2, microbatches=1))
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


PAIR = {"cp": 2}
PIPELINES: list[tuple[Callable[[], Pipeline], str]] = [
    (lambda: _modules(tp=2), "tp: plain modules do not say how they could be cut"),
    (lambda: _modules(slices=2), "slices: plain modules do not say where they attend to other tokens; expected 1"),
    (lambda: _modules(**PAIR), "cp: plain modules do not say where they attend to other tokens"),
    (lambda: _llama(slices=2, schedule="dualpipe-v"), "sequences cannot be cut in an order with .*OVERLAP_F_B, whose"),
    (lambda: _llama(slices=2, schedule=Schedule1F1B), "slices is 2; it must be 1, as in the order: only a schedule"),
    (lambda: _llama(slices=2, schedule=generate("1f1b", 2, 2)), "slices is 2; it must be 1, as in the order"),
    (lambda: _llama(slices=0), "slices is 0; it must be an integer of at least 1"),
    (lambda: _llama(slices=2, attention_dropout=0.1), "slices: attention_dropout is 0.1 in the model's config; it m"),
    (lambda: _llama(**PAIR, attention_dropout=0.1), "cp: attention_dropout is 0.1 in the model's config"),
    (
        lambda: _llama(**PAIR, context_exchange="heads", num_attention_heads=1, num_key_value_heads=1),
        "context_exchange: 'heads', but 2 context ranks cannot share 1 head; expected 'keys', or a divisor as",
    ),
    (
        lambda: _llama(cp=1, mesh=DeviceMesh("cpu", torch.arange(2).view(1, 2), mesh_dim_names=("pp", "cp"))),
        'cp is 1; it must be 2, the length of the mesh\'s axis "cp", or None',
    ),
    (lambda: _llama(cp=3), "cp is 3; it must be a divisor of 2, the number of processes"),
]


def bad_pipelines() -> None:
    warnings.simplefilter("ignore")  # of torch's schedules, which are not what they show
    with contextlib.closing(_llama()):  # or each refusal would end the watch, and the next pipeline start another
        for make, says in PIPELINES:
            with pytest.raises(InputError, match=says) as caught:
                make().close()
            assert "\n" not in str(caught.value)


def test_what_cannot_run_in_pieces_is_refused() -> None:
    run_processes(bad_pipelines, 2)
