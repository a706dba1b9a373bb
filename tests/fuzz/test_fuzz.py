"""The gradients of everything, by the pipelines of `make fuzz`; that a wrong one is found; how cases are drawn."""

from __future__ import annotations

import json
import random

import pytest
import rows_of_runs
from families import EXPERTS, FAMILIES
from fuzz_case import MODULES, Case, draw
from fuzz_run import run, shape
from run_fuzz import SIDES, faults_of_resumed_runs, figures_of, table
from sampling import choose

from evenpipe.schedule import MODES, SCHEDULES
from evenpipe.train.position import saved_position

SEED = 0
DRAWN, QUICK, ALL = 300, 20, 250
"""Pipelines that are drawn, and of these the ones that run, with `--quick` and without."""
pytestmark = pytest.mark.usefixtures("own_fork_server")


def test_pairs_of_everything_are_right_or_refused(request: pytest.FixtureRequest) -> None:
    """A covering array: as many pairs of schedules, modes, axes, families, precisions and all other sides as possible
    are among the pipelines that run."""
    options = request.config.option
    drawn = [draw(options.seed, number) for number in range(1000, 1000 + DRAWN)]
    drawn = [case for case in drawn if not (options.quick and case.compile_layers)]  # tens of seconds for each layer
    chance = random.Random(options.seed)
    cases = choose(drawn, QUICK if options.quick else ALL, chance, lambda case: [side(case) for side in SIDES.values()])
    numbers = [case.number for case in cases]
    verdicts = list(run(options.seed, numbers))
    assert f"{len(numbers)} pipelines tried" in table(verdicts, 1.0)
    assert json.loads(json.dumps(figures_of(verdicts, [], options.seed, 1.0)))["tried"] == len(numbers)
    assert sorted(verdict.case.number for verdict in verdicts) == numbers
    wrong = [
        f"run_fuzz.py --seed {options.seed} --only {verdict.case.number}: {verdict.case}: {verdict.complaints}"
        for verdict in verdicts
        if verdict.complaints
    ]
    assert not wrong, "\n".join(wrong)
    least = 1 / 2 if options.quick else 2 / 3  # about a seventh is refused: of 20 by chance sometimes a third
    assert sum(verdict.word == "right" for verdict in verdicts) >= least * len(numbers)


def test_resumed_runs_read_each_row_once_and_a_wrong_position_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not faults_of_resumed_runs(SEED, range(20))
    monkeypatch.setattr(rows_of_runs, "saved_position", lambda rows, opened: saved_position(rows + 1, opened))
    assert faults_of_resumed_runs(SEED, range(20))


def test_a_gradient_that_is_off_by_a_millionth_is_found() -> None:
    (number,) = [number for number in range(1000) if fits(draw(SEED, number))][:1]
    (right,), (wrong,) = list(run(SEED, [number])), list(run(SEED, [number], damage="a gradient"))
    assert right.word == "right", right
    assert wrong.word == "wrong"
    assert any("gradients of step 0" in complaint for complaint in wrong.complaints)


def fits(case: Case) -> bool:
    """Quick, and with gradients to 1e-10 on a first process that holds some."""
    plain = case.model.family == MODULES and case.model.frozen == "nothing" and case.vocabulary == "first-last"
    return plain and case.processes == 2 and case.steps[0].batches[0][0].tokens > 2 and not case.compile_layers


def test_a_process_that_fails_is_a_wrong_case_and_the_others_go_on() -> None:
    numbers = [number for number in range(100) if draw(SEED, number).processes == 1][:3]
    verdicts = list(run(SEED, numbers, damage=f"case {numbers[1]}"))
    assert [verdict.case.number for verdict in verdicts] == numbers
    assert [verdict.word == "wrong" for verdict in verdicts] == [False, True, False]
    assert "damaged" in verdicts[1].complaints[0]


def test_a_case_is_drawn_from_its_seed_and_number_alone() -> None:
    cases = [draw(SEED, number) for number in range(1000, 1400)]
    assert cases[7:9] == [draw(SEED, 1007), draw(SEED, 1008)]
    assert cases[:9] != [draw(SEED + 1, number) for number in range(1000, 1009)]
    assert {case.model.family for case in cases} == {MODULES, *FAMILIES, *EXPERTS}
    assert all(sorted({str(value_of(case)) for case in cases}) for value_of in SIDES.values())
    assert {case.vocabulary for case in cases} == set(MODES)
    assert {case.schedule.name for case in cases} > {"random", *SCHEDULES}
    assert {(case.processes, case.replicas) for case in cases} >= {(1, 1), (2, 2), (3, 1), (4, 2), (4, 4)}
    ranks = [case for case in cases if case.tp == 2 and case.cp == 1]
    assert {(case.replicas, case.devices) for case in ranks} == {(1, 1), (1, 2), (2, 1)}
    assert {(case.tp, case.cp) for case in cases} >= {(2, 2), (4, 1), (1, 4)}
    context = {(case.context_exchange, case.slices) for case in cases if case.cp == 2}
    assert context == {(exchange, slices) for exchange in ("keys", "heads") for slices in (1, 2, 3)}
    whole = [draw(SEED, number) for number in range(400)]  # their bits are kept
    assert {(case.tp, case.cp, case.slices) for case in whole} == {(1, 1, 1)}


def test_sentences_of_one_shape_are_counted_together() -> None:
    sentences = ["schedule 'zbv' has 2 stages, not 3", "schedule 'v-min' has 2 stages, not 1"]
    assert {shape(sentence) for sentence in sentences} == {"schedule '..' has N stages, not N"}
