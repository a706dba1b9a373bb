"""Analytic times corrected by measured passes: what was measured is predicted, and what was not follows from it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from evenpipe.costs.hardware import KNOWN, hardware_from_dict, read_hardware, write_hardware
from evenpipe.costs.measured_passes import (
    BARE,
    MEASURED,
    OUTPUT,
    PLAIN,
    STAGE,
    MeasuredPasses,
    fingerprint,
    passes_of,
    stage_passes,
    whole_passes,
)
from evenpipe.costs.timed_model import ends_of, layer_times, pass_costs
from evenpipe.costs.work import layers_of
from evenpipe.errors import InputError
from evenpipe.model import Description, describe
from evenpipe.plan.configuration_search import search_configurations
from evenpipe.plan.problem import Problem, problem_of
from evenpipe.plan.ranking import Ranking
from evenpipe.plan.space import Space
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Costs, Placement
from evenpipe.schedule.slice_costs import each_slice

SIZES = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=False)
HARDWARE = replace(KNOWN["H100-80G"], torch_device="cpu")  # without the factor of collectives beside passes
FACTORS = {name: 1.0 + 0.1 * place for place, name in enumerate(MEASURED)}
"""What everything really takes, over what is said of it: another factor for each kind."""
BESIDE = {"F": 1e-4, "B": 2e-4, "I": 3e-4, "W": 4e-4}
"""What a pass takes beside its layers, seconds."""


@cache
def description() -> Description:
    return describe(CONFIG)


def problem(*passes: MeasuredPasses, **changes: Any) -> Problem:
    options = {"gpus": 8, "sequence": 1024, "sequences_per_step": 64} | changes
    return problem_of(description(), replace(HARDWARE, passes=passes), **options)


def recipe(size: int = 1, devices: int = 4, mode: str = "vocab-2", **options: Any) -> Recipe:
    layers = (8 // devices,) * devices
    options = {"pp": devices, "microbatches": 8, "layers_per_stage": layers} | options
    return Recipe.of(microbatch_size=size, vocabulary=mode, **options)


def costs(problem: Problem, size: int = 1, devices: int = 4, mode: str = "vocab-2", **options: Any) -> Costs:
    return pass_costs(problem, recipe(size, devices, mode, **options), Placement.linear(devices))


@cache
def said_seconds(size: int = 1, **options: Any) -> dict[str, float]:
    """Seconds of all passes as they follow from shapes alone."""
    shards, whole = (costs(problem(), size, mode=mode, **options) for mode in ("vocab-2", "first-last"))
    seconds = passes_of(shards, bare=shards.F)
    return seconds | whole_passes(whole, (2, 2, 2, 2), seconds, bare=whole.F)


def measured(size: int, scale: float = 1.0, **changes: Any) -> MeasuredPasses:
    """A pipeline of four devices on a machine where everything takes `scale` times its factor."""
    model = description()
    values: dict[str, Any] = {
        "model": fingerprint(layers_of(model), model.vocabulary_size, model.hidden_size),
        "dtype": "bf16",
        "sequence": 1024,
        "microbatch_size": size,
        "devices": 4,
        "contention": 1.0,
        "seconds": {
            **{name: scale * FACTORS[name] * time for name, time in said_seconds(size).items()},
            **{STAGE[name]: scale * time for name, time in BESIDE.items()},
        },
    }
    return MeasuredPasses(**values | changes)


def test_other_pipelines_take_as_much_longer_as_the_measured_one(sample) -> None:
    assert set(measured(1).seconds) == set(MEASURED)
    for devices, mode in sample(itertools.product((1, 2, 4, 8), ("vocab-1", "vocab-2", "first-last")), 4):
        plain, corrected = costs(problem(), 1, devices, mode), costs(problem(measured(1)), 1, devices, mode)
        for name in "FBIW":
            before, after = getattr(plain, name), getattr(corrected, name)
            whole = mode == "first-last"
            middle = slice(1, -1) if whole else slice(None)  # without embedding and output layer
            factor = FACTORS[PLAIN[name] if whole else name]
            assert after[middle] == pytest.approx([factor * time + BESIDE[name] for time in before[middle]])
        if mode == "vocab-2":
            for name in ("S", "C", "T", "E", "G"):
                assert getattr(corrected, name) == pytest.approx(FACTORS[name] * getattr(plain, name))
            expected = {name: FACTORS[name] * time for name, time in plain.collectives.items()}
            assert corrected.collectives == pytest.approx(expected)
        assert corrected.p2p == pytest.approx(FACTORS["p2p"] * plain.p2p)


def test_measured_passes_hold_for_their_number_of_context_ranks() -> None:
    """With their exchange. Without passes of these ranks, only what they compute is corrected."""
    context = {"cp": 2, "context_exchange": "keys"}
    plain = costs(problem(), **context)
    twice = {name: 2 * time for name, time in passes_of(plain, bare=plain.F).items()}
    alone = measured(1, seconds={name: 3 * measured(1).seconds[name] / FACTORS[name] for name in "FIW"})
    of_two = costs(problem(alone, measured(1, seconds=twice, cp=2)), **context)
    for name in "FBIW":
        assert getattr(of_two, name) == pytest.approx([2 * time for time in getattr(plain, name)])
    corrected = costs(problem(alone), **context)
    assert pytest.approx([3 * time for time in plain.W]) == corrected.W
    for name in "FI":
        for before, after in zip(getattr(plain, name), getattr(corrected, name), strict=True):
            assert 2 * before < after < 3 * before
    for way, other in (("keys", "heads"), ("heads", "keys")):
        passes = {name: measured(1, cp=2, context_exchange=name, devices=2) for name in (way, other)}
        own = Recipe.of(pp=2, cp=2, context_exchange=way, microbatches=8)
        assert problem(*passes.values()).correction(own).ranks == (1, 2, way)
        assert problem(passes[other], measured(1)).correction(own).ranks == (1, 2, other)


@pytest.mark.parametrize("mode", ["vocab-2", "first-last"])
def test_measured_passes_hold_for_their_number_of_tensor_ranks(mode: str) -> None:
    """With their exchange. For another number of ranks, only what they compute is corrected."""
    shared = measured(1, seconds={name: 2 * time for name, time in said_seconds(tp=2).items()}, tp=2)
    alone = measured(1, seconds={name: 3 * measured(1).seconds[name] / FACTORS[name] for name in "FW"})
    plain, of_two = (costs(given, mode=mode, tp=2) for given in (problem(), problem(shared, alone)))
    for name in ("F", "B", "I", "W", *(("S", "C", "T") if mode == "vocab-2" else ())):
        before, after = (
            time if isinstance(time, tuple) else (time,) for time in (getattr(plain, name), getattr(of_two, name))
        )
        if mode == "vocab-2" or name == "W":
            assert after == pytest.approx([2 * time for time in before])
        assert sum(after) == pytest.approx(2 * sum(before))
    plain, corrected = costs(problem(), tp=2), costs(problem(alone), tp=2)
    for name in "FW":
        parts = zip(getattr(plain, name), plain.tensor_exchange[name], strict=True)
        assert getattr(corrected, name) == pytest.approx([3 * (time - part) + part for time, part in parts])
        assert corrected.tensor_exchange[name] == pytest.approx(plain.tensor_exchange[name])
    assert costs(problem(shared, alone), tp=4).F == costs(problem(alone), tp=4).F


@pytest.mark.parametrize("mode", ["vocab-2", "first-last"])
def test_layers_whose_input_alone_is_kept_have_forwards_that_keep_nothing(mode: str) -> None:
    def forwards(given: Problem, checkpointing: str | tuple[str, ...]) -> Sequence[float]:
        found = costs(given, mode=mode, activation_checkpointing=checkpointing).F
        assert isinstance(found, tuple)
        return [time - (BESIDE["F"] if given.hardware.passes else 0.0) for time in found[1:3]]

    whole = mode == "first-last"
    uncorrected, given = forwards(problem(), "none"), problem(measured(1))
    bare, kept = (FACTORS[PLAIN[name] if whole else name] for name in (BARE, "F"))
    assert forwards(given, "full") == pytest.approx([bare * time for time in uncorrected])
    assert forwards(given, "selective") == pytest.approx([kept * time for time in uncorrected])
    half = forwards(given, ("none", "full") * 4)
    assert half == pytest.approx([(bare + kept) / 2 * time for time in uncorrected])


def output_layer(given: Problem, devices: int = 4) -> dict[str, float]:
    """What the last stage takes with the output layer more than the one before it."""
    whole = costs(given, 1, devices, "first-last")
    return {name: getattr(whole, name)[-1] - getattr(whole, name)[-2] for name in "FBIW"}


@pytest.mark.parametrize("devices", [4, 8])  # of two, the other has the embedding
def test_the_whole_output_layer_takes_what_it_took(devices: int) -> None:
    plain, corrected = output_layer(problem(), devices), output_layer(problem(measured(1)), devices)
    assert corrected == pytest.approx({name: FACTORS[OUTPUT[name]] * time for name, time in plain.items()})


def test_what_was_not_measured_of_the_whole_output_layer_follows_from_its_shards() -> None:
    """Logits and dX are in S, dW is in T. Earlier versions measured no whole output layer."""
    plain, seconds = output_layer(problem()), measured(1).seconds
    for missing in (set(OUTPUT.values()), {OUTPUT["W"]}):
        left = {name: time for name, time in seconds.items() if name not in missing}
        corrected = output_layer(problem(measured(1, seconds=left)))
        forward = "S" if OUTPUT["F"] in missing else OUTPUT["F"]
        assert corrected["F"] == pytest.approx(FACTORS[forward] * plain["F"])
        assert corrected["W"] == pytest.approx(FACTORS["T"] * plain["W"])
        if OUTPUT["B"] in missing:
            assert corrected["B"] == pytest.approx(corrected["I"] + corrected["W"])


def test_the_output_layer_is_what_the_last_stage_has_beside_its_layers() -> None:
    cases: list[tuple[tuple[float, ...], tuple[int, ...], float | None, float]] = [
        # times of stages, their layers, of plain layers, of the output layer
        ((10, 9, 15), (2, 2, 3), 16 * 7 / 4, 15 - 16 * 3 / 4),  # of the first stage's 10, 3 are the embedding
        ((22,), (7,), None, 22 - 3 / 3 - 11),
        ((10, 9), (4, 4), 6 * 2, 9 - 6),
        ((10, 3), (4, 4), 6 * 2, 0),
    ]
    for times, layers, plain, seconds in cases:
        embedding = {1: 1.0, 2: 2.0, 3: 1.0}[len(layers)]
        found = whole_passes(Costs(F=times), layers, {"F": 11.0, "bare": 11.0, "E": embedding}, bare=times)
        assert found["output_F"] == pytest.approx(seconds)
        assert "output_bare" not in found
        for name in ("plain_F", "plain_bare"):
            assert found.get(name) == (None if plain is None else pytest.approx(plain))


def test_what_stands_beside_layers_follows_from_stages_of_two_sizes() -> None:
    """A forward of 3 + 2 seconds per layer, four layers on each of two devices; a shorter backward counts as none."""
    few, many = Costs(F=(11, 11), B=(9, 9), W=(4, 4)), Costs(F=(7, 7, 7, 7), B=(4, 4, 4, 4), I=(1, 1, 1, 1))
    found = stage_passes(few, many)
    assert found == {"stage_F": 3, "stage_B": 0}
    assert passes_of(few, bare=(10, 10), overhead=found) == {"F": 16, "B": 18, "W": 8, "bare": 14, "C": 0}
    whole = whole_passes(Costs(F=(11, 20)), (4, 4), {"F": 16}, overhead=found)
    assert whole == {"plain_F": 16, "output_F": 9}
    assert stage_passes(few, few) == {}
    for contradicting in ((13, 13, 13, 13), (20, 20, 6, 9)):  # would leave nothing for the layers: a disturbed machine
        found = stage_passes(few, Costs(F=contradicting))
        assert found == {"stage_F": 0}
        assert passes_of(Costs(F=few.F), overhead=found) == {"F": 22, "C": 0}


def test_between_two_sizes_times_grow_evenly() -> None:
    """If four sequences take eight times as long as one, two take 10/3 times as long."""
    given = problem(measured(1), measured(4, scale=2.0))
    for size, scale in ((1, 1.0), (2, 5 / 3), (4, 2.0), (8, 2.0)):
        plain, corrected = costs(problem(), size), costs(given, size)
        assert pytest.approx([scale * (FACTORS["F"] * time + BESIDE["F"]) for time in plain.F]) == corrected.F
        assert pytest.approx(scale * FACTORS["S"] * plain.S) == corrected.S


def scaled(sequence: int, scale: float) -> MeasuredPasses:
    """Passes of sequences of another length that take `scale` times what is said of them."""
    said = costs(problem(sequence=sequence), 1)
    seconds = {name: scale * time for name, time in passes_of(said, bare=said.F).items()}
    return measured(1, sequence=sequence, seconds=seconds)


@pytest.mark.parametrize("slices", [2, 3, 16])
@pytest.mark.parametrize(("whole", "short"), [(1.0, 2.0), (2.0, 1.0)])
def test_slices_take_longer_than_their_share_as_short_sequences_do(slices: int, whole: float, short: float) -> None:
    """An eighth of the tokens takes a quarter of the time: a seventh of it is there whatever the tokens are. Bounds
    assume that slices are never faster than whole sequences."""
    corrected = problem(scaled(1024, whole), scaled(128, short))
    before, after = (each_slice(costs(given, slices=slices)) for given in (problem(), corrected))
    ends = ends_of(corrected, recipe(slices=slices))
    for (start, end), plain, found in zip(pairwise((0, *ends)), before, after, strict=True):
        longer = 1 + (1024 / max(128, end - start) - 1) / 7 if short > whole else whole
        for name in "FBIW":
            assert getattr(found, name) == pytest.approx([longer * time for time in getattr(plain, name)])


def test_replicas_on_one_machine_wait_for_its_cores() -> None:
    """Contention is that of the passes. Two devices were measured, with contention 1.1. With a replica beside them,
    four processes are on two cores, which products alone showed to be 2.4 times slower. Times are those while one
    device of both replicas computes."""
    machine = replace(HARDWARE, devices_per_node=4, contention=2.4, cores=2)
    machine = replace(machine, passes=(measured(1, devices=2, contention=1.1),))
    given = replace(problem(), hardware=machine, gpus=4, known={})
    alone, both = Recipe.of(pp=2, microbatches=8), Recipe.of(pp=2, dp=2, microbatches=8)
    assert problem(measured(1)).contention(recipe(1, 8)) == 1
    assert problem(measured(1, contention=1.3)).contention(recipe(1, 8)) == pytest.approx(1.3)
    assert given.contention(alone) == pytest.approx(1.1)
    assert given.contention(both) == pytest.approx(2.4)
    times = [layer_times(given, one)[0].forward for one in (alone, both)]
    assert times[1] == pytest.approx(1.1 * times[0], rel=1e-3)


def test_only_the_same_model_is_corrected() -> None:
    others: list[dict[str, Any]] = [{"sequence": 512}, {"sequence": 2048}, {"dtype": "fp32"}, {"model": "another"}]
    for passes, changes in (*((passes, {}) for passes in others), ({}, {"kernels": "fused"})):
        given, plain = problem(measured(1, **passes), **changes), problem(**changes)
        assert layer_times(given, recipe(1)) == layer_times(plain, recipe(1)), (passes, changes)
    space = Space(pp=(8,), tp=(1,), cp=(1,), schedules=("1f1b",))
    found = search_configurations(problem(measured(1, model="another")), space, count=1, workers=1)
    assert "pass times from shapes alone" in Ranking(found, 1).text()


def test_files_hold_them(tmp_path: Path) -> None:
    hardware = replace(HARDWARE, passes=(measured(1), measured(4)))
    assert hardware_from_dict(hardware.to_dict()) == hardware
    write_hardware(hardware, tmp_path / "hardware.toml")
    passes = read_hardware(tmp_path / "hardware.toml").passes
    for read, written in zip(passes, hardware.passes, strict=True):
        assert read.seconds == pytest.approx(written.seconds, rel=1e-5)
        assert replace(read, seconds={}) == replace(written, seconds={})


def test_wrong_entries_are_one_sentence() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sequence": 0}, r"hardware.passes\[0\].sequence is 0; it must be an integer of at least 1"),
        ({"cp": 0}, "cp is 0; it must be an integer of at least 1"),
        ({"context_exchange": "auto"}, 'context_exchange is "auto"; it must be one of keys, heads'),
        ({"contention": 0.9}, "contention is 0.9; it must be a number of at least 1"),
        ({"seconds": {"F": -1}}, "seconds.F is -1; it must be a number of at least 0"),
        ({"seconds": {"Q": 1}}, 'seconds has no field "Q"; known: F, B, I, W'),
        ({"seconds": 3}, "seconds is 3; it must be a table of F, B"),
        ({"speed": 3}, r'hardware.passes\[0\] has no field "speed"; known: model, dtype'),
        ({"model": None}, "model is none; it must be text"),
    ]
    right = replace(HARDWARE, passes=(measured(1),)).to_dict()
    (entry,) = right["passes"]
    wrong = [(right | {"passes": [entry | changes]}, words) for changes, words in cases]
    without_dtype = {name: value for name, value in entry.items() if name != "dtype"}
    wrong.append((right | {"passes": [without_dtype]}, "dtype is missing; it must be text"))
    wrong.append((right | {"passes": 3}, "passes is 3; it must be a list of"))
    for values, words in wrong:
        with pytest.raises(InputError, match=words):
            hardware_from_dict(values)
