"""A loop of one's own that is stopped and started again goes on as if it had not stopped: weights, moments, learning
rates and what else it saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import describe, run_outcomes, run_processes
from small_families import CONFIGS
from transformers import LlamaConfig

import evenpipe
from evenpipe.checkpoints.lock import claim
from evenpipe.errors import InputError

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
    return CONFIGS["llama"](vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, **changes)


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
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        pipeline.zero_grad()
    path = pipeline.save_checkpoint(folder, step, optimizer, scheduler, {"seen": (step, None)})
    assert path == folder / f"step-{step:08d}"
    pipeline.close()
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


# ---- damage, and a second run


def find_after_damage(folder: Path) -> None:
    """Find the newest checkpoint in an empty folder, and then while the two of it are damaged one after the other. What
    a killed run left half written is removed by the first save."""
    (folder / "step-00000001.0123.tmp").mkdir(parents=True, exist_ok=True)
    assert evenpipe.newest_checkpoint(folder) is None
    for until in (1, 2):
        run(folder, "vocab-2", "LambdaLR", until)
    assert not list(folder.glob("*.tmp"))
    for step in (2, 1):
        assert evenpipe.newest_checkpoint(folder).step == step
        dist.barrier()
        if dist.get_rank() == 0:
            file = next((folder / f"step-{step:08d}").glob("__0_*"))
            file.write_bytes(file.read_bytes()[:-1])
        dist.barrier()
    with pytest.raises(InputError, match=r"no sound checkpoint .*step-00000002: .*or an empty folder"):
        evenpipe.newest_checkpoint(folder)
    with pytest.raises(InputError, match="is one checkpoint; expected the folder of all checkpoints"):
        evenpipe.newest_checkpoint(folder / "step-00000001")


def test_a_damaged_checkpoint_is_passed_over_and_never_begun_anew_in_place_of(tmp_path: Path) -> None:
    run_processes(find_after_damage, 2, tmp_path / "loop")


def test_one_run_at_a_time_saves_in_a_folder(tmp_path: Path) -> None:
    claim(tmp_path)  # a run in this process
    with pytest.raises(InputError, match="expected another folder, or that this process ends first"):
        run_processes(run, 2, tmp_path, "vocab-2", "LambdaLR", 1)
    assert not list(tmp_path.glob("step-*"))


# ---- what does not fit is refused, and nothing has changed


def loads(folder: Path, case: str) -> None:
    config = model(rms_norm_eps=1e-3 if case == "norm" else 1e-6)
    pipeline = evenpipe.Pipeline(config, microbatches=2, self_check=False)
    groups = two_groups(pipeline)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=RATE)
    scheduler: object = SCHEDULERS["LambdaLR"](optimizer)
    match case:
        case "optimizer":
            optimizer = torch.optim.SGD(groups, lr=RATE)
            scheduler = SCHEDULERS["LambdaLR"](optimizer)
        case "one group":
            optimizer = torch.optim.AdamW(pipeline.parameters(), lr=RATE)
            scheduler = None
        case "three groups":
            optimizer = torch.optim.AdamW([*groups, {"params": [torch.nn.Parameter(torch.zeros(1))]}], lr=RATE)
            optimizer.param_groups[-1]["params"] = []
            scheduler = SCHEDULERS["LambdaLR"](optimizer)
        case "scheduler":
            scheduler = rates.ExponentialLR(optimizer, 0.9)
        case "scheduler of another":
            scheduler = SCHEDULERS["LambdaLR"](torch.optim.AdamW(groups, lr=RATE))
    parameters = list(pipeline.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        pipeline.load_checkpoint(folder / "step-00000001", optimizer, scheduler)
    finally:
        assert all(torch.equal(*pair) for pair in zip(before, parameters, strict=True))
        assert not optimizer.state
        pipeline.close()


LOADS_REFUSED = {
    "optimizer": "optimizer: it is SGD, but the checkpoint .* was saved with AdamW",
    "one group": "are in one group, but have different options in the checkpoint",
    "three groups": "scheduler: the optimizer has 3 groups here and had 2 in",
    "scheduler": "scheduler: it is ExponentialLR, but the checkpoint .* was saved with LambdaLR",
    "scheduler of another": "scheduler: it schedules another optimizer",
    "norm": "rms_norm_eps is now 0.001, was 1e-06",
}


def check_what_is_refused(folder: Path) -> None:
    run(folder / "saved", "vocab-2", "LambdaLR", 1)
    for case, words in LOADS_REFUSED.items():
        with pytest.raises(InputError, match=words):
            loads(folder / "saved", case)
    with contextlib.closing(evenpipe.Pipeline(model(), microbatches=2, self_check=False)) as pipeline:
        optimizer = torch.optim.AdamW(two_groups(pipeline)[pipeline.device :], lr=RATE)
        with pytest.raises(InputError, match="Tensor is not JSON serializable; expected JSON values"):
            pipeline.save_checkpoint(folder / "never", 1, optimizer, None, {"loss": torch.zeros(1)})
        words = "2 groups on process 0 and 1 on process 1; expected the same number on every process, with empty ones"
        with pytest.raises(InputError, match=words):
            pipeline.save_checkpoint(folder / "never", 1, optimizer, SCHEDULERS["LambdaLR"](optimizer))
    assert not list((folder / "never").glob("step-*"))


def test_what_does_not_fit_and_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    run_processes(check_what_is_refused, 2, tmp_path)


# ---- parameters that were frozen when the checkpoint was saved

FROZEN = ("model.layers.0.mlp.up_proj.weight", "model.layers.3.self_attn.q_proj.weight", "lm_head.weight")


def load_with_more_to_train(folder: Path) -> None:
    """Save with parameters on several processes frozen, load with all trained, and take a step."""
    for trains_all in (False, True):
        pipeline = evenpipe.Pipeline(model(), schedule="zbv", microbatches=2, self_check=False)
        for name, parameter in pipeline.named_parameters():
            parameter.requires_grad_(trains_all or name not in FROZEN)
        optimizer = torch.optim.AdamW([part for part in pipeline.parameters() if part.requires_grad], lr=RATE)
        if trains_all:
            pipeline.load_checkpoint(folder / "step-00000001", optimizer)
        pipeline.step(batch(int(trains_all)))
        optimizer.step()
        if not trains_all:
            pipeline.save_checkpoint(folder, 1, optimizer)
        pipeline.close()


def test_one_process_names_newly_trained_parameters_once(tmp_path: Path) -> None:
    outcomes = run_outcomes(load_with_more_to_train, 2, tmp_path)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], describe(outcomes)
    first, second, third = (f"'{name}'" for name in sorted(FROZEN))
    printed = "".join(outcome.printed for outcome in outcomes)
    assert printed.count("has no optimizer state of") == 1
    words = f"has no optimizer state of {first}, {second} and {third}, which are trained now: theirs begins anew"
    assert words in printed
