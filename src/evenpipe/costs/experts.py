"""Seconds of the experts of a layer, including the exchange between the replicas that share them.

The formulas are those by which `experts.overlap` chooses what overlaps with the exchange. Each tensor rank holds a
shard of every expert's width, and exchanges whole rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenpipe.experts.overlap import Chosen, Layer, Rates, Times, choose, times, work_of

from .work import CAST_BYTES, ExpertWork

if TYPE_CHECKING:
    from .analytic import Setting


def chosen_overlap(experts: ExpertWork, hidden_size: int, setting: Setting) -> Chosen:
    """Return what overlaps with the exchange."""
    return choose(setting.axes.experts.options, *_work(experts, hidden_size, setting))


def times_of_experts(experts: ExpertWork, hidden_size: int, setting: Setting) -> tuple[Times, float]:
    """Return the seconds of passes, and of the activation alone, which is all that "selective" checkpointing
    recomputes."""
    layer, rates = _work(experts, hidden_size, setting)
    work = work_of(layer, rates)
    return times(work, choose(setting.axes.experts.options, layer, rates).overlap), work.gate


def one_way_seconds(experts: ExpertWork, hidden_size: int, setting: Setting) -> float:
    """Return the seconds of sending all rows to their experts, or back."""
    return work_of(*_work(experts, hidden_size, setting)).one_way


def first_product_bytes(experts: ExpertWork, hidden_size: int, setting: Setting) -> float:
    """Return the bytes of the first product for all (row, chosen expert) pairs, which is saved for the backward."""
    layer = _layer(experts, hidden_size, setting)
    return layer.bytes_per_element * layer.routed.pairs * layer.width * (2 if layer.gated else 1)


def _layer(experts: ExpertWork, hidden_size: int, setting: Setting) -> Layer:
    return Layer(
        tokens=setting.tokens,
        hidden_size=hidden_size,
        width=max(1, experts.width // setting.tensor),
        experts=experts.count,
        choices=experts.choices,
        members=setting.axes.experts.members.size,
        gated=experts.gated,
        bytes_per_element=setting.element,
        skew=setting.axes.experts.skew,
    )


def _work(experts: ExpertWork, hidden_size: int, setting: Setting) -> tuple[Layer, Rates]:
    layer = _layer(experts, hidden_size, setting)
    return layer, _rates(layer, setting)


def _rates(layer: Layer, setting: Setting) -> Rates:
    hardware, members = setting.hardware, setting.axes.experts.members
    flops = hardware.peak(setting.product_dtype) * hardware.product_fraction
    if setting.casts:
        # For each row of a gated expert, the forward casts hidden_size + width elements and the backward hidden_size +
        # 2 x width; all products of the row take 18 x hidden_size x width FLOPs.
        elements = 1 / (9 * layer.width) + 1 / (6 * layer.hidden_size)
        flops = 1 / (1 / flops + elements * CAST_BYTES / hardware.memory_bandwidth)
    return Rates(
        flops=flops,
        memory=hardware.memory_bandwidth,
        link=members.exchange_bandwidth(hardware) if members.size > 1 else 1.0,
        latency=members.latency_seconds(hardware),
        launch=hardware.operation_seconds,
    )
