"""With sequences in pieces, over context ranks or in slices or both, every layout gives the loss, gradients and trained
weights of transformers in one process.

Families x sizes of the axes x slices x schedules x vocabulary modes x checkpointing x activations on the host x data
parallelism, on rows of one document, packed rows and padded ones; three clipped steps of AdamW; evaluation in the order
of the rows.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass
from functools import cache

import reference
import torch
from harness import run_processes
from small_families import CONFIGS, USUAL
from torch.nn import functional
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, MixtralConfig

from evenpipe import Pipeline
from evenpipe.model import describe

TOKENS, STEPS, CLIP = 16, 3, 0.5
ALL = {
    **CONFIGS,
    "mixtral, router loss": lambda: MixtralConfig(
        **USUAL,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
        output_router_logits=True,
        router_aux_loss_coef=0.5,  # far above what is usual, so that a wrong one is seen
    ),
    "gpt-oss": lambda: GptOssConfig(  # sinks, windows
        **USUAL,
        head_dim=4,
        sliding_window=5,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "deepseek-v3": lambda: DeepseekV3Config(  # keys and values of two sizes
        **USUAL | {"num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=8,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
        experts_implementation="eager",
    ),
}
ROUNDS = ("gemma2", "mixtral", "mixtral, router loss", "olmo2", "cohere2", "gpt-oss", "deepseek-v3")
"""Families that compute parts in fp32."""
ROWS = ("whole", "packed", "padded")


@dataclass(frozen=True)
class Case:
    family: str
    replicas: int
    devices: int
    pieces: int
    ranks: int = 1
    schedule: str = "1f1b"
    mode: str = "vocab-2"
    checkpointing: str = "none"
    rows: str = "whole"
    data_parallel: str = "replicate"
    exchange: str = "keys"
    slices: int = 1
    ends: tuple[int, ...] | None = None
    """Of slices; None: as evenpipe cuts them."""
    microbatches: int = 4

    @property
    def processes(self) -> int:
        return self.replicas * self.devices * self.pieces * self.ranks

    @property
    def sequences(self) -> int:
        return self.replicas * self.microbatches


@cache
def described(family: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ALL[family](), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norms of ones hide errors
    return describe(model)


def given(rows: str, sequences: int) -> dict[str, torch.Tensor]:
    """What a batch has beside ids and labels."""
    places = torch.arange(TOKENS).expand(sequences, -1)
    if rows == "packed":
        restarted = places.clone()
        restarted[1::2, 5:] -= 5
        restarted[::3, 11:] = places[::3, 11:] - 11
        return {"position_ids": restarted}
    if rows == "padded":
        mask = torch.ones_like(places)
        mask[1::2, -3:] = 0
        return {"attention_mask": mask}
    return {}


def batches(vocabulary: int, rows: str, sequences: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = reference.batches(vocabulary, sequences, TOKENS, STEPS)
    mask = given(rows, sequences).get("attention_mask")
    return data if mask is None else [(ids, labels.masked_fill(mask == 0, -100)) for ids, labels in data]


def logits_and_loss(model, ids, labels, extra):
    """The mean over the valid tokens, and over the sequences (microbatches) of what their routers add."""
    if not getattr(model.config, "output_router_logits", False):
        logits = model(input_ids=ids, use_cache=False, **extra).logits[:, :-1]
        added = 0.0
    else:
        outputs = [
            model(input_ids=ids[one], use_cache=False, **{name: given[one] for name, given in extra.items()})
            for one in torch.arange(len(ids)).split(1)
        ]
        logits = torch.cat([output.logits[:, :-1] for output in outputs])
        added = model.config.router_aux_loss_coef * sum(output.aux_loss for output in outputs) / len(ids)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    return logits, loss + added


@cache
def expected(family: str, rows: str, sequences: int):
    model = copy.deepcopy(described(family).model).train()
    data = batches(model.config.get_text_config().vocab_size, rows, sequences)
    extra = given(rows, sequences)
    optimizer = reference.adamw(model.parameters())
    losses, norms, gradients = [], [], {}
    for ids, labels in data:
        optimizer.zero_grad()
        _, loss = logits_and_loss(model, ids, labels, extra)
        loss.backward()
        losses.append(loss.item())
        if not gradients:
            gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    ids, labels = data[0]
    with torch.no_grad():
        logits, loss = logits_and_loss(model.eval(), ids, labels, extra)
    logarithms = logits.log_softmax(-1).gather(2, labels[:, 1:, None].clamp(min=0))[..., 0]
    return data, losses, norms, gradients, weights, logarithms.masked_fill(labels[:, 1:] == -100, 0.0), loss.item()


def run_case(case: Case) -> str:
    """Return what is wrong."""
    data, losses, norms, gradients, weights, logarithms, evaluated = expected(case.family, case.rows, case.sequences)
    pipeline = Pipeline(
        described(case.family),
        schedule=case.schedule,
        vocabulary=case.mode,
        microbatches=case.microbatches,
        checkpointing=case.checkpointing,
        replicas=case.replicas,
        context_parallel=case.pieces,
        tensor_parallel=case.ranks,
        data_parallel=case.data_parallel,
        context_exchange=case.exchange,
        slices=case.slices,
        parameter_dtype=torch.float64,
        self_check=False,
    )
    if case.ends is not None:
        pipeline._pieces.ends[TOKENS] = case.ends
    own = slice(pipeline.replica * case.microbatches, (pipeline.replica + 1) * case.microbatches)
    extra = {name: one[own] for name, one in given(case.rows, case.sequences).items()}
    optimizer = reference.adamw(list(pipeline.parameters()))
    found_losses, found_norms, found = [], [], {}
    for number, (ids, labels) in enumerate(data):
        pipeline.zero_grad()
        found_losses.append(pipeline.step(ids[own], labels[own], **extra).loss)
        if number == 0:
            found = pipeline.full_gradients()
        found_norms.append(pipeline.clip_gradients(CLIP))
        optimizer.step()
    ids, labels = data[0]
    result = pipeline.evaluate(ids[own], labels[own], **extra)
    of_labels = result.log_probabilities[:, :-1]
    tolerance = 1e-6 if case.family in ROUNDS else 1e-10
    errors = {
        "loss": max(abs(one / other - 1) for one, other in zip(found_losses, losses, strict=True)),
        "norm": max(abs(one / other - 1) for one, other in zip(found_norms, norms, strict=True)),
        "evaluation": abs(result.loss / evaluated - 1),
        "log-probabilities": float((of_labels - logarithms[own]).abs().max()),
    }
    state, name = pipeline.full_state_dict(), ""
    pipeline.close()
    if state:
        errors["gradient"], name = reference.worst(found, gradients)
        errors["weights"], _ = reference.worst({name: one for name, one in state.items() if name in weights}, weights)
    steps = ("weights", "evaluation", "log-probabilities")
    wrong = {
        key: f"{error:.1e}" for key, error in errors.items() if not error <= tolerance * (100 if key in steps else 1)
    }
    return f"{case}: {wrong} ({name})" if wrong else ""


def run_cases(cases: list[Case]) -> list[str]:
    return [fault for case in cases if (fault := run_case(case))]


def check(cases: list[Case]) -> None:
    for processes in sorted({case.processes for case in cases}):
        faults = run_processes(run_cases, processes, [case for case in cases if case.processes == processes])
        assert not any(faults), "\n".join(dict.fromkeys(fault for one in faults for fault in one))


GRIDS = ((1, 1, 2, 1), (1, 2, 2, 1), (1, 1, 4, 1), (2, 1, 2, 1), (1, 1, 2, 2))
"""Replicas, devices, context ranks, tensor ranks."""
MODES = ("first-last", "redistribute", "interlaced", "vocab-1", "vocab-2")
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "po-h")
CHECKPOINTING = ("none", "full", "selective")
CUTS = ((1, None), (2, None), (3, None), (3, (4, 12, TOKENS)), (3, (1, 11, TOKENS)), (8, None))
"""Slices, and where they end."""


def fits(slices: int, ends: tuple[int, ...] | None, pieces: int = 1, ranks: int = 1) -> bool:
    """Whether every slice can be shared by the processes."""
    multiple = pieces * math.lcm(2, ranks) if pieces > 1 else ranks
    return slices * multiple <= TOKENS and all(end % multiple == 0 for end in ends or ())


def on_all_devices() -> list[Case]:
    """Every family, cut over two context ranks and into slices."""
    return [
        Case(family, 1, 2, 2, 1, schedule, mode, checkpointing, rows, "replicate", exchange, slices, ends)
        for family, schedule, mode, checkpointing, rows, exchange, (slices, ends) in itertools.product(
            ALL, SCHEDULES, MODES, CHECKPOINTING, ROWS, ("keys", "heads"), CUTS
        )
        if fits(slices, ends, 2) and schedule_takes(schedule, slices)
    ]


def one_after_the_other() -> list[Case]:
    """Every family, cut into slices only."""
    return [
        Case(family, 1, 2, 1, 1, schedule, mode, checkpointing, rows, slices=slices, ends=ends)
        for family, schedule, mode, checkpointing, rows, (slices, ends) in itertools.product(
            ALL, SCHEDULES, MODES, CHECKPOINTING, ROWS, CUTS
        )
        if slices > 1 and schedule_takes(schedule, slices)
    ]


def on_all_axes() -> list[Case]:
    """One family on every grid."""
    return [
        Case("llama-tied", *grid, "1f1b", mode, checkpointing, rows, data_parallel, exchange, slices, ends)
        for grid, mode, checkpointing, rows, exchange, (slices, ends), data_parallel in itertools.product(
            GRIDS, MODES, CHECKPOINTING, ROWS, ("keys", "heads"), CUTS, ("replicate", "shard")
        )
        if fits(slices, ends, *grid[2:])
    ]


def schedule_takes(schedule: str, slices: int) -> bool:
    """Activations on the host are moved by orders of whole sequences."""
    return slices == 1 or schedule != "po-h"


def test_every_family_in_pieces_has_the_gradients_of_one_process(sample) -> None:
    check(sample(on_all_devices(), 10))


def test_every_family_in_slices_has_the_gradients_of_one_process(sample) -> None:
    check(sample(one_after_the_other(), 10))


def test_every_grid_with_pieces_has_the_gradients_of_one_process(sample) -> None:
    check(sample(on_all_axes(), 10))
