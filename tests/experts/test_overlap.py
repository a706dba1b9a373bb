"""What runs beside the exchange of experts: choices, and the formulas for the time of passes."""

from __future__ import annotations

import itertools

import pytest

from evenpipe.errors import InputError
from evenpipe.experts.overlap import Chosen, ExpertOptions, Layer, Overlap, Rates, Work, blocks, choose, times, work_of

LAYERS = {
    "Qwen3-30B-A3B": {"hidden_size": 2048, "width": 768, "experts": 128, "choices": 8, "tokens": 8192},
    "Mixtral-8x7B": {"hidden_size": 4096, "width": 14336, "experts": 8, "choices": 2, "tokens": 8192},
    "DeepSeek-V3": {"hidden_size": 7168, "width": 2048, "experts": 256, "choices": 8, "tokens": 4096},
}


def layer(name: str, members: int = 4) -> Layer:
    return Layer(**LAYERS[name], members=members)


def rates(gigabytes_per_second: float) -> Rates:
    return Rates(flops=500e12, memory=2.5e12, link=gigabytes_per_second * 1e9)


ON_A_VIRTUAL_CLOCK = {
    ("Qwen3-30B-A3B", 300): [(2.49, 3.96), (2.26, 3.71), (2.10, 3.62)],
    ("Qwen3-30B-A3B", 45): [(6.20, 7.45), (5.74, 5.45), (5.59, 5.37)],
    ("Mixtral-8x7B", 300): [(13.6, 26.2), (13.3, 26.0), (13.4, 26.2)],
    ("Mixtral-8x7B", 45): [(17.2, 29.6), (15.6, 27.5), (14.0, 26.7)],
    ("DeepSeek-V3", 300): [(7.89, 14.1), (7.47, 13.7), (7.67, 13.7)],
    ("DeepSeek-V3", 45): [(14.3, 20.2), (12.6, 16.7), (11.7, 16.2)],
}
"""Milliseconds of F and B over 4 members: nothing overlapped, 4 columns, own rows first and 4 columns. Messages and
order of real processes, whose clocks went on by what each product, copy and transfer would take."""


def test_formulas_are_within_10_percent_of_a_virtual_clock() -> None:
    for (name, speed), measured in ON_A_VIRTUAL_CLOCK.items():
        work = work_of(layer(name), rates(speed))
        plain = times(work, Overlap())
        passes = [(plain.F, plain.I + plain.W)]
        passes += [(overlapped.F, overlapped.B) for overlapped in (times(work, Overlap(4, n)) for n in (1, 2))]
        for ours, theirs in zip(passes, measured, strict=True):
            assert [1e3 * seconds for seconds in ours] == pytest.approx(theirs, rel=0.1), (name, speed)


def test_products_of_one_process_by_hand() -> None:
    """Each row is copied once for itself, and once for each of its experts."""
    for name, sizes in LAYERS.items():
        work, h, f = work_of(layer(name, members=1), rates(45)), sizes["hidden_size"], sizes["width"]
        pairs = sizes["tokens"] * sizes["choices"]
        products = work.arrives, work.leaves, work.gradient_arrives, work.gradient_leaves
        for product, into, out in zip(products, (h, f, h, 2 * f), (2 * f, h, f, h), strict=True):
            elements = pairs * (into + out), sizes["experts"] * into * out, (sizes["tokens"] + pairs) * h
            assert product.operations == pytest.approx(2 * pairs * into * out / 500e12)
            assert (product.pairs, product.weights, product.copies) == pytest.approx(
                tuple(2 * number / 2.5e12 for number in elements)
            )


def test_what_is_chosen_is_nearly_the_best() -> None:
    for name, speed, members in itertools.product(LAYERS, (10, 45, 100, 300, 900), (2, 4, 8)):
        work = work_of(layer(name, members), rates(speed))

        def taken(overlap: Overlap, work: Work = work) -> float:
            passes = times(work, overlap)
            return passes.F + passes.I

        chosen = choose(ExpertOptions(), layer(name, members), rates(speed)).overlap
        every = [Overlap(columns, arrivals) for columns in range(1, 9) for arrivals in (1, 2, members)]
        assert taken(chosen) <= 1.03 * min(map(taken, every)), (name, speed, members)


def test_without_costs_4_columns_and_own_rows_first() -> None:
    for width, columns in {64: 1, 512: 2, 2048: 4, 7168: 4}.items():
        narrow = Layer(tokens=64, hidden_size=width, width=64, experts=8, choices=2, members=4)
        chosen = choose(ExpertOptions(), narrow)
        assert chosen.overlap == Overlap(columns, 2), width
        assert chosen.reason.endswith("(costs are unknown), own rows first (costs are unknown)")


def test_what_is_given_is_taken() -> None:
    given = ExpertOptions(columns=3, arrivals=1)
    assert choose(given, layer("Qwen3-30B-A3B"), rates(45)) == Chosen(
        Overlap(3, 1), "3 blocks of columns (given), all rows at once (given)"
    )
    assert choose(ExpertOptions(arrivals=4), layer("Qwen3-30B-A3B")).overlap == Overlap(4, 4)
    assert choose(given, layer("Qwen3-30B-A3B", members=1)) == Chosen(Overlap(), "nothing travels")


def test_reasons_give_the_costs() -> None:
    assert choose(ExpertOptions(), layer("Mixtral-8x7B"), rates(300)).reason == (
        "4 blocks of columns (product 3.96 ms, transfer 0.327 ms, 0.025 ms for each block), "
        "all rows at once (forward and backward by parts, 1: 12.7 ms, 2: 13.5 ms, 4: 13.5 ms)"
    )


def test_other_values_are_refused() -> None:
    whole = 'it must be an integer of at least 1 or "auto"'
    refused = [
        ({"columns": 0}, f"experts.columns is 0; {whole}"),
        ({"columns": True}, f"experts.columns is true; {whole}"),
        ({"columns": 2.0}, f"experts.columns is 2.0; {whole}"),
        ({"arrivals": "all"}, f'experts.arrivals is "all"; {whole}'),
        ({"arrivals": -1}, f"experts.arrivals is -1; {whole}"),
        ({"arrivals": 3}, "experts.arrivals is 3; it must be 1, 2 or 4, the members of an expert group"),
    ]
    for options, sentence in refused:
        with pytest.raises(InputError) as caught:
            choose(ExpertOptions(**options), layer("Qwen3-30B-A3B"))
        assert str(caught.value) == sentence


def test_blocks_are_all_columns_in_whole_128() -> None:
    for width, count in itertools.product((1, 64, 100, 128, 512, 896, 7168), (1, 2, 3, 4, 8)):
        parts = list(blocks(width, count))
        assert len(parts) <= count
        assert [column for part in parts for column in range(width)[part]] == list(range(width))
        assert width % 128 or all(part.start % 128 == 0 for part in parts), (width, count)
