"""Speed of GPUs and of the links between them: from data sheets for known GPUs, from files for measured ones.

A matrix product of f FLOPs takes f / (peak x product_fraction) x (1 + losses) + operation_seconds, so the achieved
fraction of the peak grows with the size (Hockney's law). The losses are

    inner_overhead / k           for filling and draining the tiles of the result, with an inner dimension of k
    half a wave / its elements   for the last wave of tiles, which is half full on average. Libraries split long inner
                                 dimensions to fill it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator

from evenpipe.declaration import ListOf, Names, NonNegativeInt, PositiveInt, Table, declare, from_table
from evenpipe.errors import InputError
from evenpipe.given import plain, read_toml, write_text
from evenpipe.schedule.cost_values import Factor, Rate, Time
from evenpipe.words import nearest, refused

from .measured_passes import MeasuredPasses
from .toml import toml_lines

GIB = 2**30
TILE = 128 * 256
"""Elements of the result that one multiprocessor computes at a time, in the large kernels of cuBLAS."""
SPLIT = 4096
"""Products with at least this inner dimension are split along it. Of 2048, 4096 and no split, this fits the published
profile on A100 best (tests/costs/test_analytic.py)."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of fused attention's backward, relative to its forward (arXiv 2307.08691, section 4.1)."""
Fraction = Annotated[float, Gt(0), Le(1)]


def _whole(value: Any) -> Any:
    """Convert a float such as 80e9, which a file may have, to an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a number, by dtype."""


@declare("wire")
class Wire:
    """A connection between two devices."""

    latency_seconds: Time
    """Time before the first byte arrives, for one message, as a program sees it."""
    bandwidth: Rate
    """Bytes per second and device, in one direction, for large messages."""

    def seconds(self, size: float) -> float:
        """Return the time of a message of `size` bytes."""
        return self.latency_seconds + size / self.bandwidth


@declare("hardware", unwrap_single=False)
class Hardware:
    """One device, its node, and the network of nodes."""

    name: str
    source: str
    """Source of the figures."""
    torch_device: Literal["cuda", "cpu"] = "cuda"
    """"cuda", or "cpu" for processes of a host."""
    peak_flops: Mapping[Annotated[str, Names((*ELEMENT_BYTES, "fp8"))], Rate]
    """Peak FLOPs per second of matrix products, by dtype ("bf16", "fp32", "fp8"), without sparsity."""
    product_fraction: Fraction
    """Fraction of the peak that large matrix products reach."""
    attention_fraction: Fraction
    """Fraction of the peak that the forward of fused attention reaches; masked products are not counted."""
    memory_bytes: Annotated[int, Ge(1), BeforeValidator(_whole)]
    """Memory that a program can allocate, including the context."""
    memory_bandwidth: Rate
    """Bytes per second, read and written, of operations on large tensors."""
    operation_seconds: Rate
    """Time of the smallest operation."""
    devices_per_node: PositiveInt
    """Devices that `inside` connects."""
    inside: Table[Wire]
    """Between devices of a node."""
    across: Table[Wire]
    """Between nodes, per device: each has its share of the network cards."""
    host_bandwidth: Rate
    """Bytes per second between a device and its host, in one direction."""
    units: PositiveInt = 1
    """Multiprocessors, which a wave of tiles fills; 1: products have no waves."""
    attention_backward_fraction: Fraction | None = None
    """Likewise of its backward; None: as the forward."""
    attention_start_seconds: Time = 0.0
    """Time of the forward of fused attention besides that, as its longest tiles begin and end; the backward takes as
    much longer as it has more products."""
    flash_share: Fraction = 1.0
    """Speed of FlashAttention-2 relative to the fastest fused attention, which takes no masks of pieces of sequences:
    those have this speed, too."""
    inner_overhead: Time = 0.0
    """Length of an inner dimension that a product takes as long for as to fill and drain its tiles."""
    contention: Factor = 1.0
    """Factor on compute while all devices of the node compute; for processes that share a host."""
    cores: NonNegativeInt = 0
    """Processor cores that the processes of a host share; 0: no more devices compute at once than it has."""
    context_bytes: NonNegativeInt = 0
    """Bytes that a process takes besides its tensors: the driver's context with the loaded kernels. 0: not measured."""
    passes: ListOf[Table[MeasuredPasses]] = ()
    """Measured models, whose times are corrected by these."""

    def peak(self, dtype: str) -> float:
        """Return peak FLOPs per second of matrix products. Raises InputError for a dtype without a figure."""
        if dtype not in self.peak_flops:
            raise InputError(f"hardware {self.name} has no peak for {dtype}; it has {', '.join(self.peak_flops)}")
        return self.peak_flops[dtype]

    def product_seconds(self, flops: float, dtype: str, shape: tuple[float, float, float] | None = None) -> float:
        """Return the time of a matrix product of `flops`, ignoring memory. shape: rows and columns of the result, and
        the inner dimension; None if all are large."""
        seconds = flops / (self.peak(dtype) * self.product_fraction)
        return seconds * (1.0 if shape is None else 1 + self._losses(*shape)) + self.operation_seconds

    def _losses(self, rows: float, columns: float, inner: float) -> float:
        """Return the losses of a product of this shape, relative to the time of its FLOPs."""
        wave = 0.0 if self.units == 1 else self.units * TILE / 2 * min(1.0, SPLIT / inner)
        return self.inner_overhead / inner + wave / (rows * columns)

    def attention_seconds(self, flops: float, dtype: str) -> tuple[float, float]:
        """Return the forward and backward times of fused attention whose forward computes `flops`."""
        start = self.attention_start_seconds
        fractions = self.attention_fraction, self.attention_backward_fraction or self.attention_fraction
        forward, backward = (flops / (self.peak(dtype) * fraction) + start for fraction in fractions)
        return forward + self.operation_seconds, ATTENTION_BACKWARD * backward + self.operation_seconds

    def with_flash_attention(self) -> Hardware:
        """Return the same hardware with FlashAttention-2 instead of the fastest fused attention."""
        backward = self.attention_backward_fraction
        return replace(
            self,
            attention_fraction=self.attention_fraction * self.flash_share,
            attention_backward_fraction=None if backward is None else backward * self.flash_share,
            flash_share=1.0,
        )

    def streaming_seconds(self, size: float, operations: float = 1.0) -> float:
        """Return the time of operations that read and write `size` bytes in total."""
        return size / self.memory_bandwidth + operations * self.operation_seconds

    def slower(self, devices: int) -> float:
        """Return the slowdown of compute while `devices` devices of a node compute, relative to one. It grows linearly
        with the devices beyond the first (or beyond the number of cores), up to `contention`."""
        free = with_own_cores(self.cores, self.devices_per_node)
        return 1 + (self.contention - 1) * max(0, devices - free) / max(1, self.devices_per_node - free)

    def slowed(self, factor: float) -> Hardware:
        """Return the same hardware with slower compute and memory."""
        if factor == 1:
            return self
        return replace(
            self,
            peak_flops={dtype: peak / factor for dtype, peak in self.peak_flops.items()},
            memory_bandwidth=self.memory_bandwidth / factor,
            operation_seconds=self.operation_seconds * factor,
            attention_start_seconds=self.attention_start_seconds * factor,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the dict that `hardware_from_dict` accepts, for JSON and TOML."""
        values = {**asdict(self), "peak_flops": dict(self.peak_flops)}
        return values | {"passes": [measured.to_dict() for measured in self.passes]}


# --- known devices -------------------------------------------------------------------------------------------

_SHARES = (
    "Shares of products and attention: evenpipe, benchmarks/published_steps.py. Memory: total capacity in messages of"
    " torch. Bandwidths: data sheets, times 0.75 (HBM), 0.7 (NVLink) and 0.8 (network and PCIe)."
)

_HBM, _NVLINK, _WIRES = 0.75, 0.7, 0.8
"""Fractions of the data sheets' bandwidths that a step reaches. Copies alone reach more of the memory bandwidth. For
steps on B200, 0.67 fits the memory and NVLink (all-gather and reduce-scatter), and 23 microseconds or more fit
transfers inside a node (MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json)."""


class _Speed(NamedTuple):
    """Speed of an architecture, as fractions of its peak."""

    products: float
    attention: tuple[float, float]
    """Forward and backward, causal, with heads of 128."""
    flash: float
    """`Hardware.flash_share`."""
    units: int
    """`Hardware.units`."""


# Products: fitted to entire steps. H100-94G and B200: to the steps that benchmarks/published_steps.py calls fitted;
# A100: to those of tests/costs/test_analytic.py; other H100: to Llama 3 405B on 8192 H100, 430 TFLOP/s each (arXiv
# 2407.21783, table 4), where 0.59 would give 403 to 419, depending on how attention is counted. Products that run alone
# are faster (0.82 on an H100, 0.45 to 0.65 in SimuMax's table of B200, named above), because during a step a card is at
# its power limit. A single H100 that trains reaches 0.7 (benchmarks/results/gpu_planned_steps_h100.json). H100 limited
# to 500 W: to Llama 3.1 8B with FSDP and torch.compile on 8 of them, 6 667 tokens/s each (torchtitan, performance.md).
# Waves are ignored except on A100.
# Attention: A100 with FlashAttention-2 (arXiv 2307.08691, figures 4 and 5); H100 measured from 2 048 to 32 768 tokens
# (benchmarks/results/gpu_products_h100.json), with cuDNN, which torch takes there from 2.11 on (pytorch/pytorch, pull
# request 162073), and with FlashAttention-2; B200 by the same table, FlashAttention-2 as in sgl-project/sglang, pull
# request 33655.
_AMPERE = _Speed(0.76, (0.6, 0.55), 1.0, units=108)
_HOPPER = _Speed(0.62, (0.65, 0.57), 0.55, units=1)
_HOPPER_HBM2E = _HOPPER._replace(products=0.59)
_HOPPER_500W = _HOPPER._replace(products=0.51)
_BLACKWELL = _Speed(0.435, (0.58, 0.4), 0.35, units=1)

_INNER, _OPERATION, _ATTENTION = 80.0, 7e-6, 50e-6
"""`inner_overhead`, `operation_seconds` and `attention_start_seconds`. With these, the predictions for 360 single
products of layers on an H100 are off by 3 % on average (the same file), and so are those for forwards of attention. The
table of B200 has 55 microseconds."""


def _gpu(  # noqa: PLR0917 - a row of the table below
    name: str,
    peaks: tuple[float, ...],
    speed: _Speed,
    gib: float,
    hbm: float,
    nvlink: float,
    network: float,
    host: float,
    per_node: int,
    source: str,
) -> Hardware:
    return Hardware(
        name=name,
        source=f"NVIDIA {source}. {_SHARES}",
        peak_flops={
            name: peak * 1e12 for name, peak in zip(("bf16", "fp16", "fp32", "fp8"), (peaks[0], *peaks), strict=False)
        },
        product_fraction=speed.products,
        inner_overhead=_INNER,
        units=speed.units,
        attention_fraction=speed.attention[0],
        attention_backward_fraction=speed.attention[1],
        attention_start_seconds=_ATTENTION,
        flash_share=speed.flash,
        memory_bytes=int(gib * GIB),
        memory_bandwidth=hbm * 1e9 * _HBM,
        operation_seconds=_OPERATION,
        devices_per_node=per_node,
        inside=Wire(latency_seconds=20e-6, bandwidth=nvlink * 1e9 * _NVLINK),
        across=Wire(latency_seconds=30e-6, bandwidth=network * 1e9 * _WIRES),
        host_bandwidth=host * 1e9 * _WIRES,
    )


# name, TFLOP/s (bf16, fp32 without TF32, fp8), GiB, GB/s of HBM, of NVLink, of the network and to the host (each in one
# direction), number of GPUs connected by NVLink. Each GPU has one network card.
_GPUS = (
    _gpu("A100-40G", (312, 19.5), _AMPERE, 39.4, 1555, 300, 25, 32, 8, "A100 data sheet, SXM, 8 x HDR"),
    _gpu("A100-80G", (312, 19.5), _AMPERE, 79.15, 2039, 300, 25, 32, 8, "A100 data sheet, SXM, 8 x HDR"),
    _gpu("H100-80G", (989.4, 66.9, 1978.9), _HOPPER, 79.1, 3350, 450, 50, 64, 8, "H100 data sheet, SXM, 8 x NDR"),
    _gpu("H100-94G", (989.4, 66.9, 1978.9), _HOPPER_HBM2E, 93.1, 2400, 450, 25, 64, 4, "H100 SXM, HBM2e, 4 x NDR200"),
    _gpu("H100-96G", (989.4, 66.9, 1978.9), _HOPPER_500W, 95.0, 2400, 450, 50, 64, 8, "H100 HBM2e, 500 W, 8 x NDR"),
    _gpu("H100-NVL", (835, 60, 1671), _HOPPER, 93.1, 3900, 300, 50, 64, 2, "H100 NVL data sheet, pairs, NDR"),
    _gpu("H200", (989.4, 66.9, 1978.9), _HOPPER, 139.8, 4800, 450, 50, 64, 8, "H200 data sheet, SXM, 8 x NDR"),
    _gpu("B200", (2250, 75, 4500), _BLACKWELL, 178.35, 7700, 900, 50, 64, 8, "HGX B200 data sheet, 8 x NDR"),
    _gpu("GB200", (2500, 80, 5000), _BLACKWELL, 184.3, 8000, 900, 50, 225, 72, "GB200 NVL72 data sheet, NDR"),
    _gpu("GB300", (2500, 80, 5000), _BLACKWELL, 276.6, 8000, 900, 100, 225, 72, "GB300 NVL72 data sheet, XDR"),
)
KNOWN: dict[str, Hardware] = {hardware.name: hardware for hardware in _GPUS}
"""By name."""

_NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100-40G",
    "NVIDIA A100-SXM4-80GB": "A100-80G",
    "NVIDIA H100 80GB HBM3": "H100-80G",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA GB300": "GB300",
}
"""Names by torch's name of the device."""


def known_gpu(name: str) -> Hardware | None:
    """Return the known device with this name, ours or torch's; None if there is none."""
    return KNOWN.get(_NAMES.get(name, name))


# --- files ---------------------------------------------------------------------------------------------------


def find_hardware(name: str | Path) -> Hardware:
    """Return a known device by its name in `KNOWN` (case-insensitive), or the device in a file of `write_hardware`.

    Raises InputError for an unknown name, suggesting the nearest one, and for a file that cannot be read.
    """
    text = str(name)
    by_lower = {known.lower(): hardware for known, hardware in KNOWN.items()}
    if text.lower() in by_lower:
        return by_lower[text.lower()]
    if text.endswith(".toml"):
        return read_hardware(text)
    begun = [known for known in KNOWN if known.startswith(text.upper())]
    near = f'; did you mean "{begun[0]}"?' if begun else nearest(text, KNOWN)
    accepted = f"one of {', '.join(KNOWN)}, or a file .toml that `evenpipe profile --hardware` wrote{near}"
    raise refused("hardware", text, accepted)


def read_hardware(path: str | Path) -> Hardware:
    """Read a file with one device. Raises InputError that names the file and the error."""
    values = read_toml(path)
    try:
        return hardware_from_dict(values)
    except InputError as error:
        raise InputError(f"{plain(path)}: {error}") from None


def with_own_cores(cores: int, processes: int) -> int:
    """Return how many processes of a machine can compute at the same time without slowing each other down; `cores` is 0
    if they do not share cores."""
    return cores if 0 < cores < processes else 1


def hardware_from_dict(values: Any) -> Hardware:
    """The inverse of `Hardware.to_dict`. Raises InputError for an unknown or missing key and for a bad value."""
    return from_table(Hardware, values)


def write_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write a file that `read_hardware` reads. Raises InputError if it cannot be written."""
    write_text(path, hardware_to_toml(hardware))


def hardware_to_toml(hardware: Hardware) -> str:
    """Return TOML with figures first, then tables."""
    figures: list[str] = []
    tables: list[str] = []
    for name, value in hardware.to_dict().items():
        if isinstance(value, list):
            for table in value:
                tables += ["", f"[[{name}]]", *toml_lines(table)]
        elif isinstance(value, Mapping):
            tables += ["", f"[{name}]", *toml_lines(value)]
        else:
            figures += toml_lines({name: value})
    return "\n".join([*figures, *tables]) + "\n"
