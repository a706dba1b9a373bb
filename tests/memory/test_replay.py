"""The replay against what is known of schedules, and against real steps of one process, item by item."""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from transformers import LlamaConfig

from evenpipe import Pipeline
from evenpipe.memory.bytes import PartBytes, PassPeaks, StageBytes, StateBytes, VocabularyBytes
from evenpipe.memory.letters import this_cpu
from evenpipe.memory.pool import Pool
from evenpipe.memory.replay import OPTIMIZER_STEP, Replay
from evenpipe.memory.traced import StageTracer
from evenpipe.memory.vocabulary import VocabularyShape, batch_bytes, vocabulary_bytes
from evenpipe.memory.walk import SENDS_IN_FLIGHT, walk
from evenpipe.model import describe
from evenpipe.runtime import values
from evenpipe.schedule import Order, Pass, Placement, add_recompute, add_sharding, plan_program

NOTHING = StateBytes(parameters=0, gradients=0, optimizer=0)
NO_VOCABULARY = VocabularyBytes()


def counts(stored: int = 0, queued: int = 0, **others: int | PartBytes | PassPeaks) -> StageBytes:
    """A stage of which nothing has bytes but what is said."""
    return StageBytes(**({"input": 0, "output": 0, "stored": stored, "queued": queued} | others))


def peaks(name: str, devices: int, microbatches: int, stage: StageBytes, mode: str = "first-last", **options) -> list:
    _, program = plan_program(name, devices, microbatches, mode, **options)
    stages = dict.fromkeys(range(program.placement.stages), stage)
    return [Replay(program, device).memory(stages, NO_VOCABULARY, NOTHING).peak for device in range(devices)]


# --- how many are in flight: reference, section 3.5 -----------------------------------------------------------------


def test_stored_activations() -> None:
    stored = counts(stored=1)
    for p, m in ((4, 4), (4, 8), (4, 12), (8, 8), (8, 24), (3, 7), (5, 3)):
        assert peaks("gpipe", p, m, stored) == [m] * p
        assert peaks("1f1b", p, m, stored) == [min(m, p - i) for i in range(p)]
        assert peaks("zb-h1", p, m, stored) == [min(m, p - i) for i in range(p)]
    for p, m in ((4, 4), (4, 8), (8, 16)):
        for v in (2, 3):
            expected = [min(m * v, 2 * (p - i - 1) + (v - 1) * p + 1) for i in range(p)]
            assert peaks("interleaved", p, m, stored, stages_per_device=v) == expected
            assert peaks("looped-bfs", p, m, stored, stages_per_device=v) == [m * v] * p


@pytest.mark.parametrize(("p", "m"), [(4, 12), (8, 24)])
def test_what_waits_for_W_or_for_barriers_counts_as_well(p: int, m: int) -> None:
    """ZB-H1: p - i wait for B and i for W; ZB-H2: 2p - 1 - 2i and 2i; ZBV: 2p stages on every device. DualPipeV has one
    more where a forward and a backward run as one: it is the forward that begins. V-Half: about p stages of half a
    device's layers. One microbatch more for each barrier; an interlaced output layer takes half as much again."""
    stored, both = counts(stored=1), counts(stored=1, queued=1)
    assert peaks("zb-h1", p, m, both) == [p] * p
    assert peaks("zb-h2", p, m, both) == [2 * p - 1] * p
    assert peaks("zb-h2", p, m, stored) == [2 * p - 1 - 2 * i for i in range(p)]
    assert peaks("zbv", p, m, both) == [2 * p] * p
    assert peaks("dualpipe-v", p, m, both) == [2 * p + 1] * p
    half = peaks("v-half", p, m, both)
    assert max(half) <= p + 2 and max(half) - min(half) <= 2
    for mode, more in (("vocab-2", 1), ("vocab-1", 2)):
        assert peaks("1f1b", p, m, stored, mode) == [p - i + more for i in range(p)]
    assert max(peaks("1f1b", p, m, stored, "interlaced")) == 3 * p // 2


def test_inputs_of_microbatches_that_are_computed_again() -> None:
    order, _ = plan_program("1f1b", 4, 8, "first-last")
    _, program = plan_program(add_recompute(order), 4, 8, "first-last")
    stages = dict.fromkeys(range(4), counts(stored=100, input=1))
    first = Replay(program, 0).memory(stages, NO_VOCABULARY, NOTHING)
    assert first.terms["activations"] == 100 + 4, "four inputs, and one microbatch whole"


def test_the_bound_of_sends_is_that_of_the_runtime() -> None:
    assert SENDS_IN_FLIGHT == values.SENDS_IN_FLIGHT


# --- what is told ---------------------------------------------------------------------------------------------------


def test_terms_add_up_and_the_event_is_named() -> None:
    stage = counts(stored=10, input=3, output=3, peaks=PassPeaks(forward=14, backward=7))
    state = StateBytes(parameters=100, gradients=50, optimizer=200, copies=20, unsharded=5)
    _, program = plan_program("1f1b", 4, 8, "first-last")
    found = Replay(program, 0).memory(dict.fromkeys(range(4), stage), NO_VOCABULARY, state, batch=11, curve=True)
    assert sum(found.terms.values()) == found.peak
    assert found.terms["parameters"] == 125 and found.terms["buffers"] >= 11
    assert found.binding_event == "B of stage 0, microbatch 0"
    assert len(found.curve) == len(program.rows[0]) and found.curve[-1] == 386


def test_the_step_of_the_optimizer_may_be_what_binds() -> None:
    state = StateBytes(parameters=100, gradients=100, optimizer=200, step_peak=1000)
    _, program = plan_program("1f1b", 2, 2, "first-last")
    found = Replay(program, 1).memory({1: counts(stored=7)}, NO_VOCABULARY, state)
    assert (found.peak, found.binding_event) == (1400, OPTIMIZER_STEP)
    assert found.terms["transient"] == 1000 and sum(found.terms.values()) == 1400


@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize(
    ("sharing", "parts"),
    [({}, 3), ({"prefetch": 0}, 3), ({"reshard": True, "prefetch": 0}, 1), ({"reshard": True, "prefetch": 1}, 2)],
)
def test_as_many_parts_are_whole_as_are_gathered(sharing: dict, parts: int, microbatches: int) -> None:
    """Three stages per device: all of them, or only those that are needed; with `reshard` also those gathered ahead."""
    stage = counts(parameters=PartBytes(gathered=100, gathering_peak=30))
    _, program = plan_program("interleaved", 2, microbatches, "first-last", stages_per_device=3)
    shared = add_sharding(program, gathers=True, tied=False, **sharing)
    for device in range(2):
        memory = Replay(shared, device).memory(dict.fromkeys(range(6), stage), NO_VOCABULARY, NOTHING)
        assert memory.peak == 100 * parts + 30
        assert memory.terms["parameters"] == 100 * parts and memory.terms["transient"] == 30


def test_walks_have_few_moments() -> None:
    """A step repeats itself: time for one set of sizes does not grow with the microbatches."""
    short, long = (plan_program("1f1b", 4, m, "vocab-2")[1] for m in (16, 64))
    moments = [len(walk(program, 1, gradients_exist=True, buffers_exist=True).above) for program in (short, long)]
    assert moments[0] == moments[1] < 200


@pytest.mark.parametrize("mode", ["first-last", "interlaced", "vocab-1", "vocab-2"])
def test_nothing_is_left_of_any_schedule(mode: str, sample) -> None:
    """The walk itself asserts that everything held is dropped, once."""
    for name, p in sample(itertools.product(SCHEDULES, (1, 2, 4)), 6):
        if p == 1 and name in SEVERAL_STAGES_PER_DEVICE:
            continue
        _, program = plan_program(name, p, 2 * p, mode)
        for device in range(p):
            for exist in (False, True):
                walk(program, device, gradients_exist=exist, buffers_exist=exist)


SEVERAL_STAGES_PER_DEVICE = ("zbv", "v-half", "v-min", "dualpipe-v", "interleaved")
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", *SEVERAL_STAGES_PER_DEVICE)


def test_buffers_of_another_size_are_dropped() -> None:
    pool = Pool((34, 30))
    assert pool.take(0) == ([0], [])
    pool.give(0)
    assert pool.take(2) == ([], [])
    pool.give(2)
    assert pool.take(3) == ([1], [0])


# --- against real steps ---------------------------------------------------------------------------------------------

HIDDEN, TOKENS, ROWS, LAYERS = 32, 48, 512, 4
MACHINE = this_cpu()


@dataclass(frozen=True)
class Case:
    order: str
    """Of one device; stages in a loop."""
    stages: int = 2
    mode: str = "first-last"
    checkpointing: str = "none"
    bf16: bool = False


def order_of(case: Case) -> Order:
    row = tuple(Pass.parse(text) for text in case.order.split())
    return Order(Placement(1, (0,) * case.stages), 3, (row,))


FUSED = "0F0 0F1 1F0 1B0 1F1 0F2 1B1 0B0 0B1 1F2 1B2 0B2"
SPLIT = "0F0 1F0 0F1 1I0 1F1 0I0 1W0 0F2 1B1 0I1 0W0 1F2 1I2 0B2 0W1 1W2"
AGAIN = "0F0 1F0 1B0 0F1 1F1 0R0 0I0 1R1 1B1 0F2 0W0 1F2 0B1 1R2 1I2 0R2 0B2 1W2"

CASES = [
    Case("0F0 0B0 0F1 0F2 0B1 0B2", stages=1),
    Case(FUSED),
    Case(FUSED, mode="vocab-2"),
    Case(FUSED, mode="vocab-1"),
    Case(SPLIT),
    Case(SPLIT, mode="vocab-2"),
    Case(AGAIN),
    Case(FUSED, checkpointing="full"),
    Case(AGAIN, checkpointing="full"),
    Case(FUSED, bf16=True),
    Case(SPLIT, bf16=True, mode="vocab-2"),
]


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=ROWS,
        hidden_size=HIDDEN,
        intermediate_size=80,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
    )


@cache
def tracer(compute: torch.dtype) -> StageTracer:
    return StageTracer(
        describe(config()), microbatch_size=1, sequence=TOKENS, compute_dtype=compute, backwards="both", recompute=True
    )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(2)
def test_every_item_of_a_real_step_holds_what_is_predicted(case: Case) -> None:
    """Within a few hundred bytes: scalars of the loss, and numbers per token that are gone before the next item."""
    compute = torch.bfloat16 if case.bf16 else torch.float32
    pipeline = Pipeline(
        config(),
        schedule=order_of(case),
        vocabulary=case.mode,
        microbatches=3,
        checkpointing=case.checkpointing,
        compute_dtype=compute,
        self_check=False,
    )
    ids = torch.randint(0, ROWS, (3, TOKENS), generator=torch.Generator().manual_seed(0))
    program, last = pipeline.program, case.stages - 1
    stages = {
        stage: tracer(compute).stage(
            *pipeline.layout.layers[stage],
            is_first=stage == 0,
            is_last=stage == last,
            checkpointing=case.checkpointing,
        )
        for stage in range(case.stages)
    }
    shape = VocabularyShape(rows=ROWS, hidden_size=HIDDEN, sequences=1, tokens=TOKENS, element=compute.itemsize)
    vocabulary = vocabulary_bytes(case.mode, 0, program.placement, shape, machine=MACHINE)
    matrix = PartBytes(gradients=4 * ROWS * HIDDEN)
    vocabulary = replace(vocabulary, parameters=matrix, embedding=replace(vocabulary.embedding, parameters=matrix))
    pipeline.step(ids)
    for exist in (True, False):
        if not exist:
            pipeline.zero_grad()
        gc.collect()
        with pipeline.count_bytes() as counted:
            pipeline.step(ids)
        parameters = counted.started["parameters"]
        state = StateBytes(parameters=parameters, gradients=parameters, optimizer=0, copies=counted.started["copies"])
        found = Replay(program, 0, gradients_exist=exist).memory(
            stages, vocabulary, state, batch=batch_bytes(3 * TOKENS, machine=MACHINE), curve=True
        )
        after = [one.after for one in counted.items()]
        off = [(str(item), by - of) for item, by, of in zip(program.rows[0], found.curve, after, strict=True)]
        wrong = [f"{item}: {difference:+d}" for item, difference in off if abs(difference) > 600]
        assert not wrong
        assert found.peak == pytest.approx(counted.peak, abs=1500)
