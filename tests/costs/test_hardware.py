"""Hardware: data sheets, the law of matrix products, files, and wrong input."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from evenpipe.costs.collectives import Axes, Axis
from evenpipe.costs.hardware import KNOWN, Hardware, Wire, find_hardware, known_gpu, read_hardware, write_hardware
from evenpipe.errors import InputError

PRODUCTS = Path(__file__).resolve().parents[2] / "benchmarks/results/gpu_products_h100.json"

# data sheets: TFLOP/s in 16 bits without sparsity, GB of memory as sold, TB/s of memory, GB/s of NVLink (one direction)
DATA_SHEETS = {
    "A100-40G": (312, 40, 1.555, 300),
    "A100-80G": (312, 80, 2.039, 300),
    "H100-80G": (989.4, 80, 3.35, 450),
    "H200": (989.4, 141, 4.8, 450),
    "B200": (2250, 192, 8.0, 900),
}


def achieved(hardware: Hardware, flops: float) -> float:
    """The fraction of the peak that a matrix product reaches."""
    return flops / hardware.product_seconds(flops, "bf16") / hardware.peak("bf16")


def test_known_devices_stay_below_their_data_sheets() -> None:
    for name, (tera, sold, memory, nvlink) in DATA_SHEETS.items():
        hardware = KNOWN[name]
        assert hardware.peak("bf16") == tera * 1e12
        assert 0.4 < hardware.product_fraction < 0.87, "no scan of shapes found more than 86 % on any of them"
        assert 0.9 * sold * 1e9 < hardware.memory_bytes < sold * 2**30
        assert 0.7 * memory * 1e12 < hardware.memory_bandwidth < memory * 1e12
        assert hardware.inside.bandwidth < nvlink * 1e9 and hardware.across.bandwidth < hardware.inside.bandwidth


def test_products_approach_their_fraction_of_the_peak() -> None:
    hardware = KNOWN["H100-80G"]
    fractions = [achieved(hardware, 2.0 * size**3) for size in (256, 512, 1024, 2048, 4096, 8192)]
    assert fractions == sorted(fractions)
    assert fractions[0] < 0.02 and 0.98 * hardware.product_fraction < fractions[-1] < hardware.product_fraction
    half = hardware.operation_seconds * hardware.peak("bf16") * hardware.product_fraction
    assert achieved(hardware, half) == pytest.approx(hardware.product_fraction / 2)


def test_products_lose_time_on_short_inner_dimensions_and_in_half_a_wave() -> None:
    plain = replace(KNOWN["A100-80G"], operation_seconds=1e-12, inner_overhead=0.0, units=1)
    flops = 2.0 * 2048 * 3072 * 1024
    large = plain.product_seconds(flops, "bf16")

    def loss(shape: tuple[float, float, float], **changes: float) -> float:
        return replace(plain, **changes).product_seconds(flops, "bf16", shape) / large - 1

    assert loss((2048, 3072, 1024)) == pytest.approx(0)
    assert loss((2048, 3072, 1024), inner_overhead=80.0) == pytest.approx(80 / 1024)
    half_a_wave = 108 * 128 * 256 / 2 / (2048 * 3072)
    assert loss((2048, 3072, 1024), units=108) == pytest.approx(half_a_wave)
    assert loss((2048, 3072, 65536), units=108) == pytest.approx(half_a_wave / 16), "a long one is split"


def test_products_on_an_h100_are_as_measured() -> None:
    """Alone they are faster than in a step, but depend on their shape in the same way: 360 products of layers, whole
    and of one of four tensor ranks."""
    cases = json.loads(PRODUCTS.read_text(encoding="utf-8"))["cases"]
    alone = replace(KNOWN["H100-80G"], product_fraction=0.82, memory_bandwidth=0.85 * 3350e9)
    off = []
    for case in cases:
        if case["experts"] > 1 or not case["inner"]:
            continue
        rows, columns, inner = case["rows"], case["columns"], case["inner"]
        moved = 2.0 * (rows * inner + inner * columns + rows * columns)
        product = alone.product_seconds(2.0 * rows * columns * inner, "bf16", (rows, columns, inner))
        off.append(abs(max(product, alone.streaming_seconds(moved)) / case["seconds"] - 1))
    assert len(off) == 360
    assert statistics.mean(off) < 0.035 and max(off) < 0.2


def test_attention_on_an_h100_is_as_measured() -> None:
    cases = json.loads(PRODUCTS.read_text(encoding="utf-8"))["cases"]
    of_kernel = {"cudnn": KNOWN["H100-80G"], "flash": KNOWN["H100-80G"].with_flash_attention()}
    found = 0
    for case, (kernel, hardware), heads in itertools.product(cases, of_kernel.items(), (8, 32)):
        if case["name"] == f"{kernel}, {heads} heads of 128" and case["rows"] >= 4096:
            found += 1
            flops = 2 * 2.0 * heads * 128 * case["rows"] ** 2 / 2
            seconds = hardware.attention_seconds(flops, "bf16")["FB".index(case["kind"])]
            assert seconds == pytest.approx(case["seconds"], rel=ATTENTION_REACHED[kernel]), case
    assert found == 2 * 16


ATTENTION_REACHED = {"cudnn": 0.15, "flash": 0.3}
"""Largest deviations; of FlashAttention-2 with 8 heads, which has few blocks to share."""


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    for known in KNOWN.values():
        hardware = replace(known, name='a "name"', memory_bandwidth=1.5e12)
        write_hardware(hardware, tmp_path / "hardware.toml")
        read = read_hardware(tmp_path / "hardware.toml")
        assert read.name == hardware.name and read.memory_bytes == hardware.memory_bytes
        for field in ("product_fraction", "memory_bandwidth", "operation_seconds"):
            assert getattr(read, field) == pytest.approx(getattr(hardware, field), rel=1e-5)
        assert read.inside.bandwidth == pytest.approx(hardware.inside.bandwidth, rel=1e-5)


def test_names_of_hardware() -> None:
    assert find_hardware("h100-80g") is KNOWN["H100-80G"]
    assert known_gpu("NVIDIA H100 80GB HBM3") is known_gpu("H100-80G") is KNOWN["H100-80G"]
    assert known_gpu("NVIDIA H100 PCIe") is None, "which is slower"
    for name in ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA B200"):
        assert known_gpu(name) in KNOWN.values()


def test_what_is_wrong_with_hardware_is_said(tmp_path: Path) -> None:
    texts = {
        "name = 3 =": "is not TOML",
        'name = "x"': "is missing",
        "speed = 3": 'hardware has no field "speed"; known: name',
    }
    path = tmp_path / "wrong.toml"
    for text, words in texts.items():
        path.write_text(text)
        with pytest.raises(InputError, match=words) as caught:
            find_hardware(path)
        assert str(path) in str(caught.value)
    figures = [
        ("memory_bytes", 0, "hardware.memory_bytes is 0; it must be an integer of at least 1"),
        ("product_fraction", 1.2, "product_fraction is 1.2"),
        ("contention", 0.5, "contention is 0.5"),
        ("attention_backward_fraction", 1.5, "attention_backward_fraction is 1.5"),
        ("flash_share", 0, "flash_share is 0"),
        ("inner_overhead", -1.0, "hardware.inner_overhead is -1.0; it must be a number of at least 0"),
        ("cores", -1, "hardware.cores is -1; it must be an integer of at least 0"),
        ("peak_flops", {"fp7": 1e12}, 'hardware.peak_flops has no field "fp7"; known: bf16'),
    ]
    for field, value, words in figures:
        with pytest.raises(InputError, match=words):
            replace(KNOWN["H200"], **{field: value})
    with pytest.raises(InputError, match=r'hardware is "h100"; it must be one of .*; did you mean "H100-80G"'):
        find_hardware("h100")
    with pytest.raises(InputError, match="cannot be read"):
        find_hardware("nowhere.toml")
    with pytest.raises(InputError, match="has no peak for int8"):
        KNOWN["H200"].peak("int8")


def test_devices_slow_each_other_from_the_first_or_from_the_last_core_on() -> None:
    slower = {0: [1, 1.5, 2, 2.5], 1: [1, 1.5, 2, 2.5], 2: [1, 1, 1.75, 2.5], 3: [1, 1, 1, 2.5], 4: [1, 1.5, 2, 2.5]}
    for cores, expected in slower.items():
        machine = replace(KNOWN["H200"], devices_per_node=4, contention=2.5, cores=cores)
        assert [machine.slower(devices) for devices in (1, 2, 3, 4)] == pytest.approx(expected), cores


# --- collectives ---------------------------------------------------------------------------------------------

FAST, SLOW = Wire(latency_seconds=1e-6, bandwidth=100e9), Wire(latency_seconds=10e-6, bandwidth=10e9)
MACHINE = replace(KNOWN["H100-80G"], inside=FAST, across=SLOW, devices_per_node=8)


def test_a_ring_moves_all_but_one_part_past_each_device() -> None:
    axis = Axis(4)
    assert axis.gather_seconds(MACHINE, 8e9) == pytest.approx(2e-6 + 6e9 / 100e9)
    assert axis.broadcast_seconds(MACHINE, 8e9) == pytest.approx(2e-6 + 8e9 / 100e9)
    assert axis.hop_seconds(MACHINE, 1e9) == pytest.approx(1e-6 + 1e-2)
    assert Axis(1).gather_seconds(MACHINE, 1e9) == Axis(1).hop_seconds(MACHINE, 1e9) == 0.0


def test_across_nodes_all_cards_of_a_node_carry_the_ring() -> None:
    assert Axis(8).wire(MACHINE) == FAST
    assert Axis(16).wire(MACHINE).bandwidth == 80e9, "eight members of a node, a card each"
    assert Axis(4, 4).wire(MACHINE).bandwidth == 20e9, "two members of a node"
    assert Axis(4, 8).wire(MACHINE) == SLOW, "one"
    assert Axis(2, 8).hop_seconds(MACHINE, 1e9) == pytest.approx(10e-6 + 0.1)


def test_axes_are_numbered_from_tensor_to_pipeline() -> None:
    axes = Axes.of(dp=4, tp=2, cp=2, pp=8)
    assert (axes.tensor, axes.context, axes.pipeline) == (Axis(2, 1), Axis(2, 2), Axis(8, 16))
    assert axes.replicas.size == 8
    shared = Axes.of(dp=8, tp=2, cp=1, pp=2, ep=4).experts
    assert (shared.members, shared.replicas) == (Axis(4, 2), Axis(2, 8))
