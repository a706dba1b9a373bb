"""How many rows and pairs members of an expert group have: counted."""

import itertools

import pytest

from evenpipe.model.expert_rows import TRANSFERS, ExpertRows


def test_a_single_member_keeps_every_token():
    alone = ExpertRows(tokens=24, choices=3, experts=5)
    assert (alone.rows, alone.pairs, alone.own, alone.sent, alone.met) == (24, 72, 24, [0], 1.0)
    assert alone.traffic(64, 4, TRANSFERS["F"]) == 0


def test_every_set_of_experts_once():
    """The first member has the most experts; where there are too few, the last ones have none."""
    for (experts, members), choices in itertools.product([(7, 2), (5, 4), (16, 8), (6, 4)], (1, 2, 3)):
        sets = list(itertools.combinations(range(experts), choices))
        rows = ExpertRows(tokens=len(sets), choices=choices, experts=experts, members=members)
        owners = [{expert // rows.local for expert in chosen} for chosen in sets]
        goes = [sum(member in met for met in owners) for member in range(members)]
        assert [rows.own, *rows.sent[1:]] == goes
        assert rows.met == pytest.approx(sum(map(len, owners)) / len(sets))
        assert rows.rows == goes[0] * members
        assert rows.pairs == sum(expert < rows.local for chosen in sets for expert in chosen) * members
        assert rows.traffic(64, 2, TRANSFERS["F"]) == 2 * sum(rows.sent) * 64 * 2


def test_skew_is_limited_by_what_there_is():
    twice = ExpertRows(tokens=100, choices=2, experts=8, members=2, skew=2.0)
    even = ExpertRows(tokens=100, choices=2, experts=8, members=2)
    assert (even.rows, even.pairs) == (157, 200)
    assert (twice.rows, twice.pairs) == (200, 400)
    assert ExpertRows(tokens=100, choices=2, experts=8, members=2, skew=9.0).pairs == 400
