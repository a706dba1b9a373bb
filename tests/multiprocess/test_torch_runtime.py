"""Our orders in torch's own runtime: gradients as in one process, from compute-only files and from lowered ones."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from evenpipe.interop import to_torch
from evenpipe.schedule import SCHEDULES, Order, generate, without_offload

HIDDEN, TOKENS = 8, 3
BATCH_PER_MICROBATCH = 2


def stage_module(stage: int) -> nn.Module:
    """A transformer layer that is the same in every process."""
    torch.manual_seed(stage)
    return nn.TransformerEncoderLayer(HIDDEN, 2, 12, dropout=0.0, batch_first=True, norm_first=True).double()


def batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = (microbatches * BATCH_PER_MICROBATCH, TOKENS, HIDDEN)
    return tuple(torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def reference(stages: int, microbatches: int) -> tuple[list[nn.Module], float]:
    """The whole model after one step in one process, and its loss."""
    modules = [stage_module(stage) for stage in range(stages)]
    hidden, target = batch(microbatches)
    for module in modules:
        hidden = module(hidden)
    loss = loss_of(hidden, target)
    loss.backward()
    return modules, loss.item()


def run_in_torch(order: Order, text: str, file_format: str, folder: Path, replicas: int) -> None:
    """One step of this process in torch's runtime, compared with `reference`.

    With several replicas parameters are sharded over them (FSDP2), and every replica has the same data.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    mesh = init_device_mesh("cpu", (order.devices, replicas), mesh_dim_names=("pp", "dp"))
    device, group, stages = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), order.placement.stages
    modules = {stage: stage_module(stage) for stage in order.placement.stages_of(device)}
    if replicas > 1:
        for module in modules.values():
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    held = [PipelineStage(module, stage, stages, torch.device("cpu"), group=group) for stage, module in modules.items()]
    runtime = _PipelineScheduleRuntime(held, order.microbatches, loss_fn=loss_of)
    file = folder / f"{file_format}-{dist.get_rank()}.csv"
    file.write_text(text, encoding="utf-8")
    runtime._load_csv(str(file), format=file_format)

    inputs, target = batch(order.microbatches)
    losses = []
    runtime.step(*([inputs] if 0 in modules else []), target=target if stages - 1 in modules else None, losses=losses)

    expected, loss = reference(stages, order.microbatches)
    for stage, module in modules.items():
        for (name, found), wanted in zip(module.named_parameters(), expected[stage].parameters(), strict=True):
            gradient = found.grad.full_tensor() if replicas > 1 else found.grad
            error = (gradient - wanted.grad).norm() / wanted.grad.norm()
            assert error < 1e-10, f"{file_format}: gradient of stage {stage}, {name} is off by {error:.1e}"
    if stages - 1 in modules:
        assert abs(torch.stack(losses).mean().item() - loss) < 1e-10


def step_in_torch(order: Order, folder: Path, replicas: int = 1) -> None:
    for file_format, lowered in (("compute_only", False), ("compute_comms", True)):
        run_in_torch(order, to_torch(order, lowered=lowered), file_format, folder, replicas)


CASES = [
    *((schedule, 3, 5, {}) for schedule in SCHEDULES),
    ("gpipe", 2, 1, {}),
    ("1f1b", 1, 3, {}),
    ("interleaved", 2, 4, {"stages_per_device": 3}),
    ("gis", 2, 4, {"stages_per_device": 4, "group_size": 1}),
    ("zbv", 4, 8, {}),
    ("dualpipe-v", 2, 5, {"overlap": False}),
    ("dualpipe-v", 4, 9, {}),
]


@pytest.mark.parametrize(("schedule", "devices", "microbatches", "options"), CASES)
@pytest.mark.sampled(1)
def test_gradients_in_torch_are_those_of_one_process(schedule, devices, microbatches, options, tmp_path):
    order = without_offload(generate(schedule, devices, microbatches, **options))  # torch has no copies to the host
    run_processes(step_in_torch, devices, order, tmp_path)


def test_any_sound_order_runs_in_torch(tmp_path):
    text = "0F0,1F0,,,4F0,4B0,,,1B0,0B0,0F1,1F1,4F1,4I1,1B1,4W1,0B1\n,,2F0,3F0,,,3I0,2I0,3W0,2W0,2F1,3F1,3B1,2B1"
    run_processes(step_in_torch, 2, Order.from_csv(text), tmp_path)


@pytest.mark.slow
def test_sharded_parameters_are_gathered_where_the_lowered_file_says(tmp_path):
    """Eight stages on two devices, so that some are freed and gathered again; torch asserts that they are there."""
    order = generate("gis", 2, 3, stages_per_device=4)
    run_processes(step_in_torch, 4, order, tmp_path, 2)
