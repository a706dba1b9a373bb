"""Megatron's layout strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.errors import InputError
from evenpipe.interop import StageLayout, from_megatron
from evenpipe.schedule import Placement


def test_the_layout_of_deepseek_v3() -> None:
    layout = from_megatron("Et*3|(tt|)*29,m|L")
    assert layout.layers == (3, *[2] * 29, 0, 0)
    assert sum(layout.layers) == 61
    assert [number for number, stage in enumerate(layout.stages) if stage.embedding or stage.loss] == [0, 31]
    assert [number for number, stage in enumerate(layout.stages) if stage.prediction_layers] == [30]
    assert layout.placement(16) == Placement.looped(16, 2)
    assert layout.placement(32) == Placement.linear(32)
    assert layout.stages[0] == StageLayout(embedding=True, layers=3, prediction_layers=0, loss=False)
    assert layout.stages[30] == StageLayout(embedding=False, layers=0, prediction_layers=1, loss=False)


def test_layers_per_stage() -> None:
    """Repeated letters and groups: below."""
    layers = {"EL": (0,), "E,t,t|t,t,L": (2, 2), "Et,*,2|tL,": (2, 1), "E||L": (0, 0, 0), "Et|tm*2L": (1, 1)}
    assert {text: from_megatron(text).layers for text in layers} == layers


pieces = st.one_of(
    st.sampled_from(["t", "|"]).map(lambda letter: (letter, letter)),
    st.tuples(st.sampled_from(["t", "|"]), st.integers(0, 12)).map(lambda p: (f"{p[0]}*{p[1]}", p[0] * p[1])),
)


def joined(parts: list[tuple[str, str]]) -> tuple[str, str]:
    return "".join(short for short, _ in parts), "".join(long for _, long in parts)


groups = st.tuples(st.lists(pieces, min_size=1, max_size=4).map(joined), st.integers(0, 5)).map(
    lambda p: (f"({p[0][0]})*{p[1]}", p[0][1] * p[1])
)


@given(st.lists(st.one_of(pieces, groups, st.just((",", ""))), max_size=8).map(joined))
def test_any_layout_is_what_it_is_written_out(texts: tuple[str, str]) -> None:
    short, long = texts
    stages = f"E{long}L".split("|")
    layout = from_megatron(f"E{short},L")
    assert layout.layers == tuple(stage.count("t") for stage in stages)
    assert [stage.loss for stage in layout.stages].index(True) == len(stages) - 1


REFUSED = [
    # layout, message
    ("", "layout '' has no layers; it must start with E and end with L, as in Et|tL"),
    ("tE|L", "layout 'tE|L', position 1: t is first, where the embedding, E, is expected"),
    ("Et|t", "layout 'Et|t', position 4: t is last, where the loss, L, is expected"),
    ("Et|EtL", "position 4: a second E; the embedding must appear exactly once"),
    ("Et|LtL", "position 4: a second L; the loss must appear exactly once"),
    ("Et|mt|L", "position 5: t after an m; multi-token prediction comes after all decoder layers"),
    ("Et|m|mL", "position 6: m on a second stage; all multi-token prediction layers must be on one stage"),
    ("Et*|L", "position 3: a * without a number after it"),
    ("Et*2*3L", "position 5: '*' where E, t, m, L, | or ( is expected"),
    ("E(tt|L", "position 2: a group that is not closed"),
    ("Ett|)L", "position 5: ')' where E, t, m, L, | or ( is expected"),
    ("E(tt|)L", "position 7: no * and number after the group that opens at position 2"),
    ("E()*2L", "position 2: an empty group"),
    ("E((t)*2|)*2L", "position 3: a group inside the one that opens at position 2; groups do not nest"),
    ("E t|L", "position 2: ' ' where E, t, m, L, | or ( is expected"),
    ("Ex|L", "position 2: 'x' where E, t, m, L, | or ( is expected"),
    ("E(x)*2|L", "position 3: 'x' where E, t, m, L, | or ) is expected"),
    ("Et*999999999999999999L", "position 2: more than 100000 layers and stages"),
]


def test_errors_name_the_position_and_what_is_accepted() -> None:
    for text, message in REFUSED:
        with pytest.raises(InputError) as error:
            from_megatron(text)
        assert message in str(error.value), text
    for devices in (0, -1, 2, 4):
        with pytest.raises(InputError, match=f"the layout has 3 stages, which {devices} devices cannot share evenly"):
            from_megatron("Et|t|tL").placement(devices)
