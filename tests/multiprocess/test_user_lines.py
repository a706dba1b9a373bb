"""An error that comes back from `launch` shows the line of the user's own program, whatever lies below it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import evenpipe


class Layer(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ torch.ones(3, 5)  # the user's mistake


def pipeline_of(*layers: nn.Module) -> evenpipe.Pipeline:
    return evenpipe.Pipeline.from_modules(
        nn.Embedding(32, 8), layers, None, nn.Linear(8, 32, bias=False), microbatches=2, self_check=False
    )


IDS = torch.arange(8).view(2, 4)


def gives_text() -> None:
    pipeline = pipeline_of(nn.Linear(8, 8), nn.Linear(8, 8))
    pipeline.step("text")  # type: ignore[arg-type]


def calls_two_methods() -> None:
    pipeline = pipeline_of(nn.Linear(8, 8), nn.Linear(8, 8))
    if dist.get_rank() == 0:
        pipeline.full_state_dict()
    else:
        pipeline.step(IDS)


def multiplies_wrongly() -> None:
    pipeline = pipeline_of(Layer(8, 8), Layer(8, 8))
    pipeline.step(IDS)


def reads_no_json() -> None:
    json.loads("{")


def refuses() -> None:
    raise evenpipe.InputError("size: 3, expected 4")


CASES: list[tuple[Callable[[], None], type[Exception], list[tuple[str, str]]]] = [
    # the error, and the lines of this file that it shows, each with its function
    (gives_text, evenpipe.InputError, [("gives_text", 'pipeline.step("text")')]),
    (
        calls_two_methods,
        evenpipe.InputError,
        [("calls_two_methods", "pipeline.full_state_dict()"), ("calls_two_methods", "pipeline.step(IDS)")],
    ),
    (multiplies_wrongly, evenpipe.RunError, [("forward", "return hidden @ torch.ones(3, 5)")]),
    (reads_no_json, evenpipe.RunError, [("reads_no_json", 'json.loads("{")')]),
    (refuses, evenpipe.InputError, [("refuses", 'raise evenpipe.InputError("size: 3, expected 4")')]),
]


@pytest.mark.parametrize(("function", "kind", "lines"), CASES)
def test_the_line_of_the_program_comes_first(
    function: Callable[[], None],
    kind: type[Exception],
    lines: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(kind) as caught:
        evenpipe.launch(function, processes=2, torch_device="cpu")
    notes = [note.splitlines() for note in caught.value.__notes__]
    assert all(note[0].startswith("in process") for note in notes)
    shown = [(note[1].strip(), note[2].strip().partition("  #")[0]) for note in notes]
    own = [line.strip().partition("  #")[0] for line in Path(__file__).read_text().splitlines()]
    for name, text in lines:
        begin = next(number for number, line in enumerate(own) if line.startswith(f"def {name}("))
        place = f'File "{__file__}", line {own.index(text, begin) + 1}, in {name}'
        assert (place, text) in shown
    if kind is evenpipe.InputError:  # then nothing of what lies below
        library = str(Path(evenpipe.__file__).parent)
        assert not any(library in line for note in notes for line in note)
