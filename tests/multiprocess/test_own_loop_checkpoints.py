"""A loop of one's own that is stopped and started again goes on as if it had not stopped: weights, moments, learning
rates and what else it saved, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_processes
from transformers import AutoModelForCausalLM, LlamaConfig

import evenpipe
from evenpipe.checkpoints.lock import claim
from evenpipe.errors import InputError
from evenpipe.train.export import export_checkpoint

VOCABULARY = 103
RATE = 3e-3
STEPS = 6

rates = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], rates.LRScheduler]] = {
    "LambdaLR": lambda one: rates.LambdaLR(one, lambda step: (step + 1) / 3 if step < 2 else 1 / step),
    "OneCycleLR": lambda one: rates.OneCycleLR(one, RATE, STEPS),  # moves the moments' decay too
}


def batch(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(step))


def model(**changes: object) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **changes,
    )


def two_groups(pipeline: evenpipe.Pipeline) -> list[dict[str, object]]:
    """Vectors first: on every process the same number of groups."""
    parameters = list(pipeline.parameters())
    return [
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0, "lr": RATE / 2},
        {"params": [one for one in parameters if one.dim() >= 2]},
    ]


def run(
    folder: Path, mode: str, scheduler_name: str, until: int, tied: bool = False
) -> list[tuple[float, list[float], float]]:
    """Goes on from the newest checkpoint to a step, and saves; loss, learning rates and weight decay of its steps."""
    pipeline = evenpipe.Pipeline(model(tie_word_embeddings=tied), vocabulary=mode, microbatches=2, self_check=False)
    optimizer = torch.optim.AdamW(two_groups(pipeline), lr=RATE)
    scheduler = SCHEDULERS[scheduler_name](optimizer)
    step, rows = 0, []
    checkpoint = evenpipe.newest_checkpoint(folder)
    if checkpoint is not None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.7  # not the value that was saved
        extra = pipeline.load_checkpoint(checkpoint, optimizer, scheduler)
        step = checkpoint.step
        assert extra == {"seen": [step, None]}
    while step < until:
        step += 1
        used = [group["lr"] for group in optimizer.param_groups]
        assert used == scheduler.get_last_lr()
        rows.append((pipeline.step(batch(step)).loss, used, optimizer.param_groups[1]["weight_decay"]))
        pipeline.clip_gradients(1.0)
        optimizer.step()
        scheduler.step()
        pipeline.zero_grad()
    path = pipeline.save_checkpoint(folder, step, optimizer, scheduler, {"seen": (step, None)})
    assert path == folder / f"step-{step:08d}"
    return rows


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", ["first-last", "vocab-2"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_stopped_and_started_again_it_is_the_same_run_bit_for_bit(
    tmp_path: Path, scheduler: str, mode: str, tied: bool
) -> None:
    whole = run_processes(run, 2, tmp_path / "whole", mode, scheduler, STEPS, tied)
    first = run_processes(run, 2, tmp_path / "parts", mode, scheduler, 3, tied)
    second = run_processes(run, 2, tmp_path / "parts", mode, scheduler, STEPS, tied)
    assert [before + after for before, after in zip(first, second, strict=True)] == whole
    assert len({tuple(used) for _, used, _ in whole[0]}) > 2, "a schedule that does nothing tests nothing"


LAYOUTS = [(4, "vocab-2"), (2, "first-last"), (3, "vocab-1"), (1, "vocab-2"), (2, "interlaced")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tied", [False, True])
def test_it_goes_on_with_other_processes_and_modes(tmp_path: Path, tied: bool) -> None:
    whole = run_processes(run, 1, tmp_path / "whole", "vocab-2", "LambdaLR", len(LAYOUTS), tied)[0]
    rows = []
    for until, (processes, mode) in enumerate(LAYOUTS, start=1):
        rows += run_processes(run, processes, tmp_path / "parts", mode, "LambdaLR", until, tied)[-1]
    assert [row[1:] for row in rows] == [row[1:] for row in whole]
    assert [row[0] for row in rows] == pytest.approx([row[0] for row in whole], rel=1e-6)


def test_what_it_saved_becomes_a_folder_of_transformers(tmp_path: Path) -> None:
    run_processes(run, 2, tmp_path / "loop", "vocab-2", "LambdaLR", 2)
    exported = AutoModelForCausalLM.from_pretrained(export_checkpoint(tmp_path / "loop", tmp_path / "model"))
    loss = run_processes(evaluate, 2, tmp_path / "loop")[0]
    with torch.no_grad():
        assert exported.eval()(input_ids=batch(0), labels=batch(0)).loss.item() == pytest.approx(loss, rel=1e-6)


def evaluate(folder: Path) -> float:
    """Without an optimizer, and from the folder of one checkpoint."""
    pipeline = evenpipe.Pipeline(model(), microbatches=2, self_check=False)
    pipeline.load_checkpoint(folder / "step-00000002")
    return pipeline.evaluate(batch(0)).loss


# ---- damage, and a second run


def newest(folder: Path) -> int | None:
    checkpoint = evenpipe.newest_checkpoint(folder)
    return None if checkpoint is None else checkpoint.step


def test_a_damaged_checkpoint_is_passed_over_and_never_begun_anew_in_place_of(tmp_path: Path) -> None:
    assert run_processes(newest, 2, tmp_path / "loop") == [None, None]
    for until in (1, 2):
        run_processes(run, 2, tmp_path / "loop", "vocab-2", "LambdaLR", until)
    assert run_processes(newest, 2, tmp_path / "loop") == [2, 2]
    for path in sorted((tmp_path / "loop").glob("step-*"), reverse=True):
        file = next(path.glob("__0_*"))
        file.write_bytes(file.read_bytes()[:-1])
        if path.name.endswith("2"):
            assert run_processes(newest, 2, tmp_path / "loop") == [1, 1]
    with pytest.raises(InputError, match=r"no sound checkpoint .*step-00000002: .*or an empty folder"):
        run_processes(newest, 2, tmp_path / "loop")
    with pytest.raises(InputError, match="is one checkpoint, expected the folder of all checkpoints"):
        newest(tmp_path / "loop" / "step-00000001")


def test_one_run_at_a_time_saves_in_a_folder(tmp_path: Path) -> None:
    claim(tmp_path)  # a run in this process
    with pytest.raises(InputError, match="expected another folder, or that this process ends first"):
        run_processes(run, 2, tmp_path, "vocab-2", "LambdaLR", 1)
    assert not list(tmp_path.glob("step-*"))


def save_twice(folder: Path) -> list[str]:
    (folder / "step-00000001.0123.tmp").mkdir(parents=True)
    pipeline = evenpipe.Pipeline(model(), microbatches=2, self_check=False)
    for step in (1, 2):
        pipeline.save_checkpoint(folder, step, None, keep=1)
    dist.barrier()
    return sorted(path.name for path in folder.glob("step-*"))


def test_the_first_save_removes_what_a_killed_run_left_half_written(tmp_path: Path) -> None:
    assert run_processes(save_twice, 1, tmp_path / "loop") == [["step-00000002"]]


# ---- what does not fit is refused, and nothing has changed


def loads(folder: Path, what: str) -> None:
    config = model(num_key_value_heads=4) if what == "model" else model(rms_norm_eps=1e-3 if what == "norm" else 1e-6)
    pipeline = evenpipe.Pipeline(config, microbatches=2, self_check=False)
    parameters = list(pipeline.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(two_groups(pipeline), lr=RATE)
    scheduler: object = SCHEDULERS["LambdaLR"](optimizer)
    if what == "optimizer":
        optimizer = torch.optim.SGD(two_groups(pipeline), lr=RATE)
        scheduler = SCHEDULERS["LambdaLR"](optimizer)
    elif what == "one group":
        optimizer = torch.optim.AdamW(parameters, lr=RATE)
        scheduler = None
    elif what == "three groups":
        groups = two_groups(pipeline)
        optimizer = torch.optim.AdamW([*groups, {"params": [torch.nn.Parameter(torch.zeros(1))]}], lr=RATE)
        optimizer.param_groups[-1]["params"] = []
        scheduler = SCHEDULERS["LambdaLR"](optimizer)
    elif what == "scheduler":
        scheduler = rates.ExponentialLR(optimizer, 0.9)
    elif what == "scheduler of another":
        scheduler = SCHEDULERS["LambdaLR"](torch.optim.AdamW(two_groups(pipeline), lr=RATE))
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        pipeline.load_checkpoint(folder / "step-00000001", optimizer, scheduler)
    finally:
        assert all(torch.equal(*pair) for pair in zip(before, parameters, strict=True))
        assert not optimizer.state


REFUSED = {
    "optimizer": "optimizer: it is SGD, but the checkpoint .* was saved with AdamW",
    "one group": "are in one group, but have different options in the checkpoint",
    "three groups": "scheduler: the optimizer has 3 groups here and had 2 in",
    "scheduler": "scheduler: it is ExponentialLR, but the checkpoint .* was saved with LambdaLR",
    "scheduler of another": "scheduler: it schedules another optimizer",
    "norm": "rms_norm_eps is now 0.001, was 1e-06",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_processes(run, 2, folder, "vocab-2", "LambdaLR", 1)
    return folder


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.sampled(2)
def test_what_does_not_fit_is_refused(saved: Path, what: str) -> None:
    with pytest.raises(InputError, match=REFUSED[what]):
        run_processes(loads, 2, saved, what)


def saves(folder: Path, what: str) -> None:
    pipeline = evenpipe.Pipeline(model(), microbatches=2, self_check=False)
    optimizer = torch.optim.AdamW(two_groups(pipeline)[pipeline.device :], lr=RATE)
    scheduler = SCHEDULERS["LambdaLR"](optimizer)
    arguments = {
        "step": (folder, -1, optimizer),
        "extra": (folder, 1, optimizer, None, [1]),
        "extra of tensors": (folder, 1, optimizer, None, {"loss": torch.zeros(1)}),
        "optimizer": (folder, 1, "adamw"),
        "groups": (folder, 1, optimizer, scheduler),
    }
    pipeline.save_checkpoint(*arguments[what])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("step", "step: -1, expected a whole number of steps, 0 or more"),
        ("extra", r"extra: \[1\], expected a table of JSON values, or None"),
        ("extra of tensors", "Tensor is not JSON serializable; expected JSON values"),
        ("optimizer", "optimizer: 'adamw', expected an optimizer as in torch.optim, or None"),
        (
            "groups",
            "2 groups on process 0 and 1 on process 1, expected the same number on every process, with empty ones",
        ),
    ],
)
@pytest.mark.sampled(2)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, what: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        run_processes(saves, 2, tmp_path, what)
    assert not list(tmp_path.glob("step-*"))
