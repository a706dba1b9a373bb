"""How many rows and pairs members of an expert group have: against a table of measured shares, and counted."""

import itertools

import pytest

from evenpipe.model.expert_rows import TRANSFERS, ExpertRows


@pytest.mark.parametrize(
    ("experts", "choices", "shares"),
    [
        (128, 8, {2: 0.25, 4: 0.45, 8: 0.67, 16: 0.82, 32: 0.92, 64: 0.97}),
        (8, 2, {2: 0.79, 4: 0.93, 8: 1.0}),
    ],
)
def test_members_that_a_token_meets(experts, choices, shares):
    """D / k: the share of pairs that have a row of their own."""
    for members, share in shares.items():
        found = ExpertRows(tokens=1024, choices=choices, experts=experts, members=members)
        assert round(found.met / choices, 2) == share
        assert found.rows == pytest.approx(1024 * found.met, abs=1)
        assert found.pairs == 1024 * choices
        assert found.traffic(64, 2, TRANSFERS["F"]) == 2 * sum(found.sent) * 64 * 2
        assert sum(found.sent) == pytest.approx(1024 * found.met * (members - 1) / members, abs=members)


def test_a_single_member_keeps_every_token():
    alone = ExpertRows(tokens=24, choices=3, experts=5)
    assert (alone.rows, alone.pairs, alone.own, alone.sent, alone.met) == (24, 72, 24, [0], 1.0)
    assert alone.traffic(64, 4, TRANSFERS["F"]) == 0


@pytest.mark.parametrize(("experts", "members"), [(7, 2), (5, 4), (16, 8), (6, 4)])
@pytest.mark.parametrize("choices", [1, 2, 3])
def test_every_set_of_experts_once(experts, members, choices):
    """The first member has the most experts; where there are too few, the last ones have none."""
    chosen = list(itertools.combinations(range(experts), choices))
    rows = ExpertRows(tokens=len(chosen), choices=choices, experts=experts, members=members)
    owners = [{expert // rows.local for expert in one} for one in chosen]
    goes = [sum(member in one for one in owners) for member in range(members)]
    assert [rows.own, *rows.sent[1:]] == goes
    assert rows.met == pytest.approx(sum(map(len, owners)) / len(chosen))
    assert rows.rows == goes[0] * members
    assert rows.pairs == sum(expert < rows.local for one in chosen for expert in one) * members


def test_skew_is_limited_by_what_there_is():
    twice = ExpertRows(tokens=100, choices=2, experts=8, members=2, skew=2.0)
    even = ExpertRows(tokens=100, choices=2, experts=8, members=2)
    assert (even.rows, even.pairs) == (157, 200)
    assert (twice.rows, twice.pairs) == (200, 400)
    assert ExpertRows(tokens=100, choices=2, experts=8, members=2, skew=9.0).pairs == 400
