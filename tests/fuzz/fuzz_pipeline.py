"""The pipeline of a case, from all that `Pipeline` takes; and what the processes that play it share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fuzz_case import MODULES, TORCH_CLASSES, Case, base_order, torch_class
from fuzz_model import PlainModel, config_of, dtype_of, live_model, seed_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from evenpipe import LossOptions, OffloadOptions, Pipeline
from evenpipe.model import describe
from evenpipe.recipe.parallelism import divisor_of
from evenpipe.runtime import pieces
from evenpipe.schedule import Costs, Order, add_recompute, plan_order, plan_program

TIMEOUT_SECONDS = 300.0
COMPILATION_SECONDS = 1200.0
"""Limits of a wait, of most cases and of those that wait for one who compiles."""

# --- processes --------------------------------------------------------------------------------------------------------


def gathered(own: Any) -> list[Any]:
    """What every process has, by rank."""
    if not dist.is_initialized():
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


# --- its options ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def pipeline_of(case: Case, folder: Path) -> Iterator[Pipeline]:
    """Within, the pipeline is open. Torch would keep the groups of its mesh, and gloo polls for each of them."""
    mesh = mesh_of(case)
    try:
        with contextlib.closing(_open(case, folder, mesh)) as pipeline:
            yield pipeline
    finally:
        for group in mesh.get_all_groups() if mesh is not None else ():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def _open(case: Case, folder: Path, mesh: DeviceMesh | None) -> Pipeline:
    costs = None if case.costs is None else Costs(**case.costs)
    named = case.schedule.given_as == "name"
    options: dict[str, Any] = {
        "schedule": schedule_of(case, costs, folder),
        "schedule_options": case.schedule.options if named and case.schedule.options else None,
        "vocabulary": case.vocabulary,
        "microbatches": case.microbatches,
        "mesh": mesh,
        "dp": case.replicas if mesh is None else None,
        "tp": case.tp if mesh is None else None,
        "cp": case.cp if mesh is None else None,
        "context_exchange": case.context_exchange,
        "ep": case.ep,
        "slices": case.slices,
        "data_parallel": case.data_parallel,
        **case.gathering,
        "tensor_overlap": case.tensor_overlap,
        "documents": case.documents,
        "loss": LossOptions(**case.loss),
        "parameter_dtype": dtype_of(case),
        "compute_dtype": torch.bfloat16 if case.bf16 else None,
        "seed": seed_of(case),
        "layers_per_stage": case.layers_per_stage,
        "activation_checkpointing": case.checkpointing,
        "compile_layers": case.compile_layers,
        "costs": costs,
        "sequence_length": case.sequence_length,
        "communicators": case.communicators,
        "offload": offload_of(case, folder),
        "self_check": case.self_check,
        "timeout_seconds": COMPILATION_SECONDS if case.compile_layers else TIMEOUT_SECONDS,
    }
    if case.model.family == MODULES:
        plain = own_model(case)
        assert isinstance(plain, PlainModel)
        return Pipeline.from_modules(
            plain.embedding, list(plain.layers), plain.norm if case.model.norm else None, plain.head, **options
        )
    source: Any
    match case.model.given_as:
        case "live":
            source = own_model(case)
        case "description":
            source = describe(live_model(case))
        case "config":
            source = config_of(case)
        case "folder":
            source = folder / "given"
            if is_first():
                live_model(case).save_pretrained(source)  # type: ignore[operator]
            gathered(None)
    return Pipeline(source, **options)


def schedule_of(case: Case, costs: Costs | None, folder: Path) -> Any:
    """What `Pipeline` is given as its schedule."""
    given, devices, microbatches = case.schedule, case.devices, case.microbatches
    if given.name in TORCH_CLASSES:
        return torch_class(given.name)
    if given.given_as == "name":
        return given.name

    def order_of(devices: int, microbatches: int, slices: int = 1) -> Order:
        order = base_order(given, devices, microbatches, slices)
        if given.recomputed:
            order = add_recompute(order, given.recomputed)
        return with_empty_slots(order, case) if given.idle else order

    if given.given_as == "function":
        return order_of
    found: Any = order_of(devices, microbatches, case.slices)
    if given.given_as == "planned":
        found = plan_order(found, devices, microbatches, case.vocabulary, costs)
    if given.given_as.startswith("program"):
        found = plan_program(found, devices, microbatches, given.other_mode or case.vocabulary, costs)[1]
    if given.given_as.endswith("file"):
        file = folder / f"schedule-{dist.get_rank() if dist.is_initialized() else 0}.csv"
        file.write_text(found.to_csv())
        return file
    return found


def with_empty_slots(order: Order, case: Case) -> Order:
    dice, rows = case.random("idle"), []
    for row in order.rows:
        rows.append(tuple(slot for item in row for slot in ((None, item) if dice.random() < 0.2 else (item,))))
    return replace(order, rows=tuple(rows))


def mesh_of(case: Case) -> DeviceMesh | None:
    if case.mesh == "none" or case.processes == 1:
        return None
    sizes = (case.replicas, case.devices, case.cp, case.tp)
    table = torch.tensor(case.pipelines).view(sizes)
    if case.mesh == "pp dp":
        return DeviceMesh("cpu", table.transpose(0, 1), mesh_dim_names=("pp", "dp", "cp", "tp"))
    return DeviceMesh("cpu", table, mesh_dim_names=("dp", "pp", "cp", "tp"))


def offload_of(case: Case, folder: Path) -> OffloadOptions | None:
    if case.offload is None:
        return None
    return OffloadOptions(**case.offload | ({"directory": folder} if "directory" in case.offload else {}))


@contextlib.contextmanager
def tokens_in_any_order(case: Case) -> Iterator[None]:
    """Give tokens to context ranks in an order of the case's own, the same on all of them."""

    def places(start: int, end: int, ranks: int, positions: torch.Tensor | None) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * start + end)
        return list((start + torch.randperm(end - start, generator=generator)).chunk(ranks))

    with mock.patch.object(pieces, "places_of_ranks", places) if case.token_order == "random" else nullcontext():
        yield


def ends_of_slices(case: Case, tokens: int) -> list[int] | None:
    """Where the slices of sequences of so many tokens end in place of evenpipe's choice; None: where it chooses."""
    unit = divisor_of(case.cp, case.tp)
    if case.slice_ends != "random" or tokens % unit or tokens // unit < case.slices:
        return None
    inner = case.random("slices", tokens).sample(range(1, tokens // unit), case.slices - 1)
    return [*(unit * place for place in sorted(inner)), tokens]


def own_model(case: Case) -> nn.Module:
    """The live model, with weights of this replica's own where replicas differ."""
    model = live_model(case)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if case.model.differs and rank not in case.pipelines[0]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0 + rank)
    return model
