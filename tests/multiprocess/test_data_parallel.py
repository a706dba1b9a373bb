"""Several pipelines side by side: programs of torch that gather and sum, what W adds behind a backward, and what is
refused.

Gradients, norms and trained weights of replicas and shards are compared with one process by tests/fuzz, and what is
held when with estimates by test_estimated_memory.py.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from harness import GROUP_TIMEOUT, run_processes
from small_llama import described
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from evenpipe import Pipeline
from evenpipe.communication.communicators import Communicators
from evenpipe.errors import InputError
from evenpipe.interop.torch_csv import from_torch, to_torch
from evenpipe.parallel import ShardedModule
from evenpipe.schedule import Program, generate

FP64, VOCABULARY, TOKENS = torch.float64, 97, 6


def make(kind: str, mode: str = "vocab-2", *, tied: bool = False, **options: Any) -> Pipeline:
    usual = {"microbatches": 3, "parameter_dtype": FP64, "self_check": False, "dp": 2, "data_parallel": kind}
    return Pipeline(described(VOCABULARY, tied, FP64), vocabulary=mode, **usual | options)


def data() -> tuple[Tensor, Tensor]:
    """Twelve rows, of which each replica takes its part."""
    return reference.batches(VOCABULARY, 12, TOKENS, 1)[0]


# --- when parameters are gathered and gradients summed ----------------------------------------------------------------


def lowered_by_torch(schedule: str) -> Program:
    """As torch's runtime reads it: three stages of a device are gathered at a time."""
    program = from_torch(to_torch(generate(schedule, 2, 3), lowered=True))
    assert isinstance(program, Program)
    return program


def as_torch_gathers(schedule: str, tied: bool) -> list[str]:
    """What a program has is kept, and what it lacks is added: torch gathers whole vocabulary layers with their
    stages."""
    program = lowered_by_torch(schedule)
    pipeline = make("shard", "first-last", tied=tied, schedule=program)
    found = pipeline.layout.program
    added = [item for row in found.rows for item in row if item and item.kind.value.endswith("_S")]
    kept = tuple(tuple(item for item in row if item not in added) for row in found.rows)
    assert kept == tuple(tuple(item for item in row if item) for row in program.rows)
    both_ends = found.placement.first_device == found.placement.last_device
    assert bool(added) == (tied and both_ends)
    loss = pipeline.step(*(part.chunk(2)[pipeline.replica] for part in data())).loss
    gradients = pipeline.full_gradients()
    pipeline.close()
    if dist.get_rank():
        return []
    expected = reference.train(copy.deepcopy(described(VOCABULARY, tied, FP64).model), [data()])
    error = max(abs(loss / expected.losses[0] - 1), reference.worst(gradients, expected.gradients)[0])
    return [] if error <= 1e-10 else [f"{schedule}, tied {tied}: {error:.1e}"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gis", "zbv", "dualpipe-v"])
@pytest.mark.sampled(1)
def test_a_program_of_torch_gathers_and_sums_where_it_says(schedule: str, tied: bool) -> None:
    faults = run_processes(as_torch_gathers, 4, schedule, tied)
    assert not faults[0], "\n".join(faults[0])


# --- bf16 -------------------------------------------------------------------------------------------------------------


def in_bf16(kind: str) -> None:
    """bf16 against fp32 in one process, measured by the error of bf16 in one process."""
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(0, VOCABULARY, (8, 8, 16), generator=generator).unbind()
    for schedule, mode in (("1f1b", "first-last"), ("zbv", "vocab-2")):
        errors = reference.Bf16Errors(copy.deepcopy(described(VOCABULARY, False, FP64).model).float())
        options = {"schedule": schedule, "microbatches": 2, "compute_dtype": torch.bfloat16}
        pipeline = make(kind, mode, parameter_dtype=torch.float32, **options)
        for ids in batches:
            pipeline.zero_grad()
            loss = pipeline.step(ids.chunk(2)[pipeline.replica]).loss
            for parameter in pipeline.parameters():
                assert parameter.dtype == parameter.grad.dtype == torch.float32
            gradients = pipeline.full_gradients()
            if dist.get_rank() == 0:
                errors.add(gradients, loss, ids)
        errors.check(f"{kind}, {schedule}, {mode}")
        pipeline.close()


@pytest.mark.parametrize("kind", ["replicate", "shard"])
@pytest.mark.slow
def test_bf16_errs_no_more_than_bf16_in_one_process(kind: str) -> None:
    run_processes(in_bf16, 4, kind)


RATE, STEPS = 1e-3, 8
MASTERS: list[dict[str, Any]] = [
    {"dp": 2, "schedule": "zbv"},
    {"dp": 1, "schedule": "1f1b"},
    {"dp": 2, "data_parallel": "shard", "schedule": "zb-h1"},
    {"dp": 1, "tp": 2, "schedule": "1f1b"},
]


def fp32_masters_in_one_process(exact: nn.Module, batches: Sequence[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights in fp32 that AdamW has trained with gradients of a model in `dtype`, which follows them."""
    model = reference.rounded(exact) if dtype == torch.bfloat16 else copy.deepcopy(exact)
    masters = {name: nn.Parameter(one.detach().clone()) for name, one in exact.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=RATE)
    for ids in batches:
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:]).backward()
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    return {name: one.detach() for name, one in masters.items()}


def trained_with_masters(options: dict[str, Any]) -> tuple[float, float]:
    """Errors of weights after some steps in bf16, ours and those of one process, against fp32 in one process."""
    exact = copy.deepcopy(described(VOCABULARY, False, FP64).model).float()
    batches = torch.randint(0, VOCABULARY, (STEPS, 8, 16), generator=torch.Generator().manual_seed(0)).unbind()
    dtypes = {"compute_dtype": torch.bfloat16, "parameter_dtype": torch.float32}
    pipeline = make("replicate", microbatches=2, **dtypes | options)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=RATE)
    for ids in batches:
        pipeline.step(ids.chunk(pipeline.replicas)[pipeline.replica])
        optimizer.step()
        pipeline.zero_grad()
    ours = pipeline.full_state_dict()
    pipeline.close()
    if dist.get_rank():
        return 0.0, 0.0
    assert all(one.dtype == torch.float32 for one in ours.values())
    wide, narrow = (fp32_masters_in_one_process(exact, batches, dtype) for dtype in (torch.float32, torch.bfloat16))

    def error(weights: Mapping[str, Tensor]) -> float:
        return math.sqrt(sum(float((weights[name] - one).square().sum()) for name, one in wide.items()))

    return error(ours), error(narrow)


@pytest.mark.parametrize("options", MASTERS, ids=str)
@pytest.mark.sampled(1)
def test_fp32_masters_of_bf16_parameters_err_no_more_than_in_one_process(options: dict[str, Any]) -> None:
    (ours, one_process), *_ = run_processes(trained_with_masters, 4, options)
    print(f"{options}: {ours:.3e} against {one_process:.3e}")
    assert 0 < ours <= 1.5 * one_process


def in_two_passes() -> None:
    """The trap: I ends the backward, and FSDP2's own hooks would reduce before W has added the weight gradients.

    bf16 products, fp32 sums over microbatches and over replicas, of values that bf16 sums would round away.
    """
    everyone = range(dist.get_world_size())
    shards = Communicators([("dp", [everyone])], timeout_seconds=GROUP_TIMEOUT.total_seconds())["dp"]
    with torch.device("meta"):
        linear = nn.Linear(2, 3, bias=False)
        holder = nn.ModuleList([linear, nn.LayerNorm(3, bias=False)])
    options = {"compute_dtype": torch.bfloat16, "label": "a layer", "fp32_parameters": ("1.weight",)}
    sharded = ShardedModule(holder, [*holder], shards, torch_device=torch.device("cpu"), **options)
    (_, held), (_, kept) = sharded
    for one in (held, kept):
        assert one.tensor.isnan().all()
        one.fill(torch.ones(one.placement.shape))
    master, start = held.tensor, held.placement.ranges(0)[0].start
    sharded.gather()
    sharded.ready()
    weight = linear.weight
    assert holder[1].weight.dtype == torch.float32 and holder[1].weight.tolist() == [1.0] * 3 and len(kept.tensor) < 3
    assert weight.dtype == torch.bfloat16 and weight.shape == (3, 2)
    hidden = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    (hidden @ weight.detach().t()).sum().backward()  # I
    assert hidden.grad.tolist() == [[3, 3]]
    for value in (256.0, 1.0, 1.0):  # W of three microbatches: 256 + 1 is 256 in bf16
        weight.grad = torch.full((3, 2), value, dtype=torch.bfloat16)
        for hook in weight._post_accumulate_grad_hooks.values():
            hook(weight)
    assert weight.grad is None
    sharded.reduce()
    sharded.free()
    sharded.finish()
    assert master.grad.dtype == torch.float32
    assert master.grad.tolist() == [[2 * 258.0] * 2] * len(master)
    assert start + len(master) <= 3


def test_what_w_adds_after_the_backward_is_summed_in_fp32() -> None:
    run_processes(in_two_passes, 2)


# --- bad input -------------------------------------------------------------------------------------------


class WithNumber(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.number = nn.Parameter(torch.tensor(1.0))


def bad_input() -> None:
    def on_mesh(shape: tuple[int, ...], *names: str) -> dict[str, Any]:
        table = torch.arange(math.prod(shape)).view(shape)
        mesh = DeviceMesh("cpu", table, mesh_dim_names=names, _init_backend=False)  # without groups, which take time
        return {"mesh": mesh, "dp": None}

    for text, options in {
        'one named "pp"': on_mesh((2, 2), "dp", "tp"),
        "axes {'sp': 2} beside": on_mesh((2, 2), "sp", "pp"),
        "tp is 3; it must be a divisor of 2": {"tp": 3, "dp": 2},
        "tp is 0; it must be a whole number": {"tp": 0},
        "tp is 4; it must be 2": on_mesh((2, 2), "tp", "pp") | {"tp": 4},
        "cp is 4; it must be 2": on_mesh((2, 2), "cp", "pp") | {"cp": 4},
        "ep is 4; it must be 1, since LlamaForCausalLM": on_mesh((4, 1), "ep", "pp"),
        "1 x 2 processes (dp x pp, ranks": {
            "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))["pp"],
            "dp": None,
        },
        "dp is 3; it must be a divisor of 4": {"dp": 3},
        "dp is 0; it must be a whole number": {"dp": 0},
        "dp is 4; it must be 2": on_mesh((2, 2), "dp", "pp") | {"dp": 4},
        'data_parallel is "sharded"; it must be one of replicate': {"data_parallel": "sharded"},
    }.items():
        with pytest.raises(InputError) as caught:
            Pipeline(described(VOCABULARY, False, FP64), microbatches=1, **options)
        assert text in str(caught.value)
    layers = [WithNumber() for _ in range(2)]
    with pytest.raises(InputError, match=r"layers\.0\.number of .* is a single number"):
        Pipeline.from_modules(
            nn.Embedding(9, 8), layers, None, nn.Linear(8, 9), microbatches=1, dp=2, data_parallel="shard"
        )
    with pytest.raises(InputError, match="1 x 3 processes"):
        Pipeline(described(VOCABULARY, False, FP64), mesh=DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("pp",)))


def one_refuses(pipeline: Pipeline) -> None:
    """A batch that one first process refuses is refused by all, and nothing is lost."""
    good, bad = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int64)
    for refusing in range(2):
        with pytest.raises(InputError) as caught:
            pipeline.step(bad if pipeline.replica == refusing else good)
        said = "first process of the pipeline" if pipeline.device else "3 sequences"
        assert (said if pipeline.replica == refusing else "first process of another pipeline") in str(caught.value)
    assert pipeline.step(good).loss > 0


def wrong_input() -> None:
    with contextlib.closing(make("replicate", microbatches=2)) as pipeline:  # or each refusal would end the watch
        bad_input()
        one_refuses(pipeline)


def test_bad_input_is_one_sentence_on_every_process() -> None:
    run_processes(wrong_input, 4)
