"""With tensor ranks, every layout gives the loss, the gradients and the trained weights of transformers in one process.

Families x sizes of the axes x schedules x vocabulary modes x checkpointing x activations on the host x data
parallelism; three clipped steps of AdamW.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import reference
import torch
from harness import run_processes
from small_families import CONFIGS
from transformers import AutoModelForCausalLM

from evenpipe import Pipeline, newest_checkpoint
from evenpipe.errors import InputError
from evenpipe.model import describe

TOKENS, STEPS, CLIP = 8, 3, 0.5


@dataclass(frozen=True)
class Case:
    family: str
    replicas: int
    devices: int
    ranks: int
    schedule: str = "1f1b"
    mode: str = "vocab-2"
    checkpointing: str = "none"
    data_parallel: str = "replicate"
    microbatches: int = 4
    size: int = 1
    """Sequences of a microbatch."""
    overlap: str = "auto"

    @property
    def processes(self) -> int:
        return self.replicas * self.devices * self.ranks


@cache
def described(family: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norms of ones hide errors
    return describe(model)


@cache
def expected(family: str, sequences: int):
    model = copy.deepcopy(described(family).model).train()
    data = reference.batches(model.config.get_text_config().vocab_size, sequences, TOKENS, STEPS)
    optimizer = reference.adamw(model.parameters())
    losses, norms, gradients = [], [], {}
    for ids, labels in data:
        optimizer.zero_grad()
        loss = reference.loss_of(model, ids, labels)
        loss.backward()
        losses.append(loss.item())
        if not gradients:
            gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return data, losses, norms, gradients, {name: one.detach().clone() for name, one in model.named_parameters()}


def run_case(case: Case) -> str:
    """Return what is wrong on the first process."""
    data, losses, norms, gradients, weights = expected(case.family, case.replicas * case.microbatches * case.size)
    description = described(case.family)
    pipeline = Pipeline(
        description,
        schedule=case.schedule,
        vocabulary=case.mode,
        microbatches=case.microbatches,
        checkpointing=case.checkpointing,
        replicas=case.replicas,
        tensor_parallel=case.ranks,
        data_parallel=case.data_parallel,
        tensor_overlap=case.overlap,
        parameter_dtype=torch.float64,
        self_check=False,
    )
    own = slice(
        pipeline.replica * case.microbatches * case.size, (pipeline.replica + 1) * case.microbatches * case.size
    )
    optimizer = reference.adamw(list(pipeline.parameters()))
    found_losses, found_norms, found = [], [], {}
    for number, (ids, labels) in enumerate(data):
        pipeline.zero_grad()
        found_losses.append(pipeline.step(ids[own], labels[own]).loss)
        if number == 0:
            found = pipeline.full_gradients()
        found_norms.append(pipeline.clip_gradients(CLIP))
        optimizer.step()
    state = pipeline.full_state_dict()
    pipeline.close()
    if not state:
        return ""
    tolerance = 1e-6 if case.family in ("gemma2", "mixtral", "olmo2", "cohere2") else 1e-10
    trained = {name: weight for name, weight in state.items() if name in weights}
    errors = {
        "loss": max(abs(one / other - 1) for one, other in zip(found_losses, losses, strict=True)),
        "norm": max(abs(one / other - 1) for one, other in zip(found_norms, norms, strict=True)),
    }
    errors["gradient"], name = reference.worst(found, gradients)
    errors["weights"], _ = reference.worst(trained, weights)
    allowed = {"loss": tolerance, "norm": tolerance, "gradient": tolerance, "weights": 100 * tolerance}
    wrong = {key: f"{error:.1e}" for key, error in errors.items() if not error <= allowed[key]}
    return f"{case}: {wrong} ({name})" if wrong else ""


def run_cases(cases: list[Case]) -> list[str]:
    return [fault for case in cases if (fault := run_case(case))]


def check(cases: list[Case]) -> None:
    for processes in sorted({case.processes for case in cases}):
        faults = run_processes(run_cases, processes, [case for case in cases if case.processes == processes])
        assert not faults[0], "\n".join(faults[0])


GRIDS = ((1, 1, 2), (1, 2, 2), (1, 1, 4), (2, 1, 2))
MODES = ("first-last", "redistribute", "interlaced", "vocab-1", "vocab-2")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "v-half", "dualpipe-v", "po-h")
CHECKPOINTING = ("none", "full", "selective")
TIED = ("llama", "llama-tied")


def matrix() -> list[Case]:
    """Every family on one layout, and two families on all."""
    cases = [
        Case(family, 1, 2, 2, schedule, mode, checkpointing)
        for family, schedule, mode, checkpointing in itertools.product(CONFIGS, SCHEDULES, MODES, CHECKPOINTING)
    ]
    cases += [
        Case(family, *grid, "1f1b", mode, checkpointing, data_parallel)
        for family, grid, mode, checkpointing in itertools.product(TIED, GRIDS, MODES, CHECKPOINTING)
        for data_parallel in (("replicate", "shard") if grid[0] > 1 else ("replicate",))
    ]
    return cases


def test_every_layout_gives_the_gradients_of_one_process(sample) -> None:
    check(sample(matrix(), 12))


# --- checkpoints and export ---------------------------------------------------------------------------------------

LAYOUTS = (
    Case("", 1, 2, 2),
    Case("", 1, 4, 1, mode="first-last"),
    Case("", 2, 1, 2, data_parallel="shard"),
    Case("", 1, 2, 1, schedule="zb-h1", mode="redistribute"),
)
"""Layouts that train one step each, one after the other, on what the one before has saved."""
RESUMED = ("llama-tied", "phi3", "gpt2", "gpt-neox", "starcoder2")
SEQUENCES = 4


def step_of_layout(folder: Path, family: str, number: int) -> float:
    """Train one step on the checkpoint of the layout before, save it, and return the loss; the last one exports."""
    case, description = LAYOUTS[number], described(family)
    data = reference.batches(description.vocabulary_size, SEQUENCES, TOKENS, len(LAYOUTS))
    with contextlib.closing(
        Pipeline(
            description,
            schedule=case.schedule,
            vocabulary=case.mode,
            microbatches=SEQUENCES // case.replicas,
            replicas=case.replicas,
            tensor_parallel=case.ranks,
            data_parallel=case.data_parallel,
            parameter_dtype=torch.float64,
            seed=number,
            self_check=False,
        )
    ) as pipeline:
        optimizer = reference.adamw(list(pipeline.parameters()))
        if number:
            pipeline.load_checkpoint(newest_checkpoint(folder, pipeline.process_group), optimizer)
        own = slice(
            pipeline.replica * (SEQUENCES // case.replicas), (pipeline.replica + 1) * (SEQUENCES // case.replicas)
        )
        ids, labels = data[number]
        pipeline.zero_grad()
        loss = pipeline.step(ids[own], labels[own]).loss
        optimizer.step()
        pipeline.save_checkpoint(folder, number + 1, optimizer)
        pipeline.save_pretrained(folder / f"export-{number}")
    return loss


@pytest.mark.parametrize("family", RESUMED)
@pytest.mark.sampled(1)
def test_a_checkpoint_continues_in_any_layout(family: str, tmp_path: Path) -> None:
    model = copy.deepcopy(described(family).model)
    data = reference.batches(described(family).vocabulary_size, SEQUENCES, TOKENS, len(LAYOUTS))
    wanted = reference.train(model, data)
    losses = [
        run_processes(step_of_layout, case.processes, tmp_path, family, number)[0]
        for number, case in enumerate(LAYOUTS)
    ]
    assert losses == pytest.approx(wanted.losses, rel=1e-10)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / f"export-{len(LAYOUTS) - 1}", dtype=torch.float64)
    found = {name: one.detach() for name, one in exported.named_parameters()}
    error, name = reference.worst(found, wanted.weights)
    assert error < 1e-8, name


# --- traffic ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Log:
    """What a process has sent in one step."""

    bytes: dict[str, int]
    """Received over each communicator of the program."""
    collectives: dict[str, int]
    """Of tensor ranks, by pass (its kind) and operation."""


LAYERS, MICROBATCHES = 4, 4


def log_of_step(ranks: int, schedule: str, checkpointing: str) -> Log:
    description = described("llama")
    collectives: dict[str, int] = {}
    pipeline = Pipeline(
        description,
        schedule=schedule,
        microbatches=MICROBATCHES,
        checkpointing=checkpointing,
        tensor_parallel=ranks,
        communicators="per-kind",
        parameter_dtype=torch.float64,
        self_check=False,
    )
    exchange = None if pipeline._tensor is None else pipeline._tensor[1]
    for name in ("start_gather", "start_scatter", "sum", "table") if exchange is not None else ():

        def counted(tensor, name=name, call=getattr(exchange, name)):
            key = f"{''.join(filter(str.isalpha, exchange.during))} {name.removeprefix('start_')}"
            collectives[key] = collectives.get(key, 0) + 1
            return call(tensor)

        setattr(exchange, name, counted)
    ((ids, labels),) = reference.batches(description.vocabulary_size, MICROBATCHES, TOKENS, 1)
    communicators = list(pipeline._groups.communicators)
    before = {one.name: one.traffic.received_bytes for one in communicators}
    pipeline.step(ids, labels)
    received = {one.name: one.traffic.received_bytes - before[one.name] for one in communicators}
    names = pipeline.program.communicators
    pipeline.close()
    return Log({name: count for name, count in received.items() if name in names}, collectives)


def test_columns_carry_their_share_of_hops_and_vocabulary() -> None:
    """Hops, X, dX and rows of the embedding are shared by the tensor ranks; statistics are not, but merged before."""
    alone = run_processes(log_of_step, 2, 1, "1f1b", "none")
    shared = run_processes(log_of_step, 4, 2, "1f1b", "none")
    for device in range(2):
        expected = alone[device].bytes
        for name, count in expected.items():
            parts = [log.bytes[name] for log in shared[2 * device : 2 * device + 2]]
            if name == "STATISTICS":
                assert parts == [count, count]
            elif name.startswith("ROW"):
                assert sum(parts) == count  # as many as tokens that a column owns
            else:
                assert parts == [count / 2, count / 2], name


@pytest.mark.parametrize(("schedule", "checkpointing"), [("1f1b", "none"), ("zb-h1", "none"), ("1f1b", "full")])
def test_collectives_of_every_pass(schedule: str, checkpointing: str) -> None:
    """A layer has two blocks: each gathers before and scatters behind, in F and the other way round in B or I. Its
    input is gathered again for the weight gradients.

    Full checkpointing repeats a layer's forward without its last operation, and keeps the input. E, S and C add theirs.
    """
    logs = run_processes(log_of_step, 4, 2, schedule, checkpointing)
    first, last = logs[0].collectives, logs[2].collectives
    assert logs[0].collectives == logs[1].collectives and logs[2].collectives == logs[3].collectives
    blocks = 2 * LAYERS // 2 * MICROBATCHES  # of a device
    again = blocks if checkpointing == "full" else 0
    backward = "I" if schedule == "zb-h1" else "B"
    for log in (first, last):
        assert (log["F gather"], log["F scatter"]) == (blocks, blocks)
        assert log[f"{backward} gather"] == blocks * (2 if schedule == "1f1b" else 1)
        assert log[f"{backward} scatter"] == blocks + again // 2
        assert log.get("W gather", 0) == (blocks if schedule == "zb-h1" else 0)
        assert (log["S gather"], log["S table"], log["C scatter"]) == (MICROBATCHES,) * 3
    assert (first["F sum"], first[f"{backward} sum"]) == (MICROBATCHES, MICROBATCHES)
    assert "F sum" not in last and f"{backward} sum" not in last


# --- what else a run may ask for ------------------------------------------------------------------------------------

ROUTER = 0.5  # coefficient of the routers' loss: far above what transformers takes, so that a wrong one is seen


def exact(family: str, dtype: torch.dtype, **settings):
    """A model with noise, and the same numbers in every process."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    for name, value in settings.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def steps_without_zero_grad(schedule: str) -> tuple[float, str]:
    """Two batches whose gradients add up, with some parameters frozen; and equal bits on the ranks."""
    model = exact("qwen3", torch.float64)
    frozen = ("model.layers.1.self_attn.q_norm.weight", "model.layers.2.mlp.up_proj.weight", "model.norm.weight")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    data = reference.batches(61, 4, TOKENS, 2)
    pipeline = Pipeline(
        model, schedule=schedule, microbatches=2, tensor_parallel=2, parameter_dtype=torch.float64, self_check=False
    )
    for ids, labels in data:
        pipeline.step(ids, labels)
        reference.loss_of(model, ids, labels).backward()
    found = pipeline.full_gradients()
    shared = [one.tensor.grad for one in pipeline._held.shared if one.tensor.grad is not None]
    table = pipeline.gather_numbers([sum(number * float(one.sum()) for number, one in enumerate(shared, 1))])
    pipeline.close()
    ranks = 2
    for device in range(len(table) // ranks):
        assert table[ranks * device] == table[ranks * device + 1]
    if not found:
        return 0.0, ""
    wanted = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return reference.worst(found, wanted)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_of_several_steps_add_up(schedule: str) -> None:
    error, name = run_processes(steps_without_zero_grad, 4, schedule)[0]
    assert error < 1e-10, name


def router_loss(replicas: int) -> tuple[float, float, str]:
    model = exact("mixtral", torch.float64, output_router_logits=True, router_aux_loss_coef=ROUTER)
    ((ids, labels),) = reference.batches(61, 4, TOKENS, 1)
    labels = ids.clone()  # every microbatch counts alike
    pipeline = Pipeline(
        model,
        schedule="1f1b",
        microbatches=4 // replicas,
        tensor_parallel=2,
        replicas=replicas,
        parameter_dtype=torch.float64,
        self_check=False,
    )
    own = slice(pipeline.replica * 4 // replicas, (pipeline.replica + 1) * 4 // replicas)
    result = pipeline.step(ids[own], labels[own])
    found, value = pipeline.full_gradients(), result.router_loss
    pipeline.close()
    if not found:
        return 0.0, 0.0, ""
    losses = []
    for one in ids.split(1):
        output = model(input_ids=one, use_cache=False)
        losses.append(torch.stack([reference.loss_of(model, one, one), ROUTER * output.aux_loss]))
    mean = torch.stack(losses).mean(0)
    mean.sum().backward()
    wanted = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return abs(value / float(mean[1]) - 1), *reference.worst(found, wanted)


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_rank_has_its_share_of_the_routers_gradient(replicas: int) -> None:
    value_error, error, name = run_processes(router_loss, 4, replicas)[0]
    assert value_error < 1e-6 and error < 1e-6, name


def in_another_precision(compute_dtype: torch.dtype, compiled: bool, ranks: int) -> list[dict]:
    """Gradients of eight batches, and their losses."""
    model = exact("llama", torch.float32)
    pipeline = Pipeline(
        model,
        schedule="zb-h1",
        microbatches=2,
        tensor_parallel=ranks,
        compute_dtype=compute_dtype,
        compile_layers=compiled,
        self_check=False,
    )
    found = []
    for ids, _ in reference.batches(61, 2, TOKENS, 8 if compute_dtype == torch.bfloat16 else 2):
        pipeline.zero_grad()
        loss = pipeline.step(ids).loss
        found.append({"loss": loss, "gradients": pipeline.full_gradients()})
    pipeline.close()
    return found


def test_bf16_is_as_exact_as_in_one_process() -> None:
    errors = reference.Bf16Errors(exact("llama", torch.float32))
    found = run_processes(in_another_precision, 4, torch.bfloat16, False, 2)[0]
    for one, (ids, _) in zip(found, reference.batches(61, 2, TOKENS, 8), strict=True):
        errors.add(one["gradients"], one["loss"], ids)
    errors.check("tensor ranks")


def test_compiled_layers_give_the_same_gradients() -> None:
    model = exact("llama", torch.float32)
    found = run_processes(in_another_precision, 2, torch.float32, True, 2)[0]
    for one, (ids, _) in zip(found, reference.batches(61, 2, TOKENS, 2), strict=True):
        model.zero_grad()
        reference.loss_of(model, ids, ids).backward()
        error, name = reference.worst(one["gradients"], {key: value.grad for key, value in model.named_parameters()})
        assert error < 1e-5, name


def bad_input() -> None:
    pipeline = Pipeline(exact("llama", torch.float32), microbatches=1, tensor_parallel=2, self_check=False)
    with pytest.raises(
        InputError, match=r"7 tokens per sequence, expected a multiple of the 2 tensor ranks|refused by"
    ):
        pipeline.step(torch.ones(1, 7, dtype=torch.int64))
    assert pipeline.step(torch.ones(1, 8, dtype=torch.int64)).loss > 0
    pipeline.close()
    layers = [torch.nn.Linear(8, 8)]
    with pytest.raises(InputError, match="tensor_parallel: plain modules do not say how they could be cut"):
        Pipeline.from_modules(
            torch.nn.Embedding(9, 8), layers, None, torch.nn.Linear(8, 9), microbatches=1, tensor_parallel=2
        )


def test_bad_input_is_refused() -> None:
    run_processes(bad_input, 2)
