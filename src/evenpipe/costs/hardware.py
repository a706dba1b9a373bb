"""Speed of GPUs and the wires between them: data sheets of known ones, files of measured ones.

A matrix product of f FLOPs takes f / (peak x product_fraction) x waves + operation_seconds, so the achieved fraction of
the peak grows with the size (Hockney's law), and a result whose last wave of tiles is partly empty costs more.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError
from evenpipe.given import plain, read_toml, shown, write_text

from .measured_passes import MeasuredPasses, is_number
from .toml import toml_lines

GIB = 2**30
TILES = ((128, 256), (128, 128))
"""Rows and columns of a result that one multiprocessor computes at a time, for the large kernels of cuBLAS."""
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one number, by dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A connection between two devices."""

    latency_seconds: float
    """Time before the first byte arrives, for one message, as a program sees it."""
    bandwidth: float
    """Bytes per second and device, in one direction, for large messages."""

    def seconds(self, size: float) -> float:
        """Return the time of one message of `size` bytes."""
        return self.latency_seconds + size / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, its node, and the network of nodes."""

    name: str
    source: str
    """Source of the figures."""
    torch_device: str = "cuda"
    """"cuda", or "cpu" for processes of a host."""
    peak_flops: Mapping[str, float]
    """Peak FLOPs per second of matrix products, by dtype ("bf16", "fp32"), without sparsity."""
    product_fraction: float
    """Fraction of the peak that large matrix products reach."""
    attention_fraction: float
    """Fraction of the peak that fused attention reaches; masked products are not counted."""
    memory_bytes: int
    """Memory that a program can allocate, including the context."""
    memory_bandwidth: float
    """Bytes per second, read and written, of operations on large tensors."""
    operation_seconds: float
    """Time of the smallest operation."""
    devices_per_node: int
    """Devices that `inside` connects."""
    inside: Wire
    """Between devices of a node."""
    across: Wire
    """Between nodes, per device: each has its share of the network cards."""
    host_bandwidth: float
    """Bytes per second between a device and its host, in one direction."""
    units: int = 1
    """Multiprocessors, which a wave of tiles fills; 1: products have no waves."""
    contention: float = 1.0
    """Factor on compute while all devices of the node compute; for processes that share a host."""
    cores: int = 0
    """Processor cores that the processes of a host share; 0: no more devices compute at once than it has."""
    context_bytes: int = 0
    """Bytes that a process takes besides its tensors: the driver's context with the loaded kernels. 0: not measured."""
    passes: tuple[MeasuredPasses, ...] = ()
    """Measured models, whose times are corrected by these."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if not (is_number(value) and value > 0):
                raise InputError(f"hardware: {name} is {shown(value)}, expected a number above 0")
        for name in ("name", "source"):
            if not isinstance(getattr(self, name), str):
                raise InputError(f"hardware: {name} is {shown(getattr(self, name))}, expected a text")
        if self.torch_device not in ("cuda", "cpu"):
            raise InputError(f"hardware: torch_device is {shown(self.torch_device)}, expected 'cuda' or 'cpu'")
        for dtype, peak in self.peak_flops.items():
            if dtype not in ELEMENT_BYTES or not (is_number(peak) and peak > 0):
                what, accepted = plain(f"peak_flops.{dtype}"), ", ".join(ELEMENT_BYTES)
                raise InputError(f"hardware: {what} is {shown(peak)}, expected FLOPs per second of {accepted}")
        for name in ("product_fraction", "attention_fraction"):
            if getattr(self, name) > 1:
                raise InputError(f"hardware: {name} is {getattr(self, name)}, expected a number above 0, at most 1")
        for name in ("context_bytes", "cores"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise InputError(f"hardware: {name} is {shown(value)}, expected a whole number of at least 0")
        if self.contention < 1:
            raise InputError(f"hardware: contention is {self.contention}, expected a number of at least 1")

    def peak(self, dtype: str) -> float:
        """Return peak FLOPs per second of matrix products. Raises InputError for a dtype without a figure."""
        if dtype not in self.peak_flops:
            raise InputError(f"hardware {self.name} has no peak for {dtype}; it has {', '.join(self.peak_flops)}")
        return self.peak_flops[dtype]

    def product_seconds(self, flops: float, dtype: str, shape: tuple[float, float] | None = None) -> float:
        """Return the time of a matrix product of `flops`, ignoring memory; `shape`: of its result."""
        seconds = flops / (self.peak(dtype) * self.product_fraction)
        return seconds * (1.0 if shape is None else self.waves(*shape)) + self.operation_seconds

    def waves(self, rows: float, columns: float) -> float:
        """Return how much longer a product takes because its result consists of whole tiles, a wave of `units` at a
        time, and the last wave is as long as the others."""
        if self.units == 1:
            return 1.0
        needed = rows * columns / self.units
        best = math.inf
        for height, width in TILES:
            tiles = math.ceil(rows / height) * math.ceil(columns / width)
            best = min(best, math.ceil(tiles / self.units) * height * width)
        return max(1.0, best / needed)

    def streaming_seconds(self, size: float, operations: float = 1.0) -> float:
        """Return the time of operations that read and write `size` bytes in total."""
        return size / self.memory_bandwidth + operations * self.operation_seconds

    def slower(self, devices: int) -> float:
        """Return the slowdown of compute while so many devices of a node compute, relative to one: in proportion to
        those beyond the first, or beyond the cores, up to `contention`."""
        free = self.cores if 0 < self.cores < self.devices_per_node else 1
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
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the dict that `hardware_from_dict` takes, for JSON and TOML."""
        values = {**asdict(self), "peak_flops": dict(self.peak_flops)}
        return values | {"passes": [measured.to_dict() for measured in self.passes]}


_NUMBERS = (
    "product_fraction",
    "attention_fraction",
    "memory_bytes",
    "memory_bandwidth",
    "operation_seconds",
    "devices_per_node",
    "units",
    "host_bandwidth",
    "contention",
)


# --- known devices -------------------------------------------------------------------------------------------

_MATMUL = (
    "Products: the best of a scan of shapes (stas00/ml-engineering, compute/accelerator, Maximum Achievable Matmul"
    " FLOPS: A100 267.9, H100 792.1, H200 794.5, B200 1745.0 TFLOP/s) times 0.83"
)
TYPICAL_SHARE = 0.83
"""Share of the best shape's speed that products in a step reach, besides waves. Fitted to one figure: the forward of
four layers of hidden size 3072 on an A100-80G (arXiv 2411.05288, artifact), 10.5 ms. tests/costs/test_analytic.py shows
the errors elsewhere."""

_MEMORY = " Memory: total capacity in messages of torch. Bandwidths: data sheets, times 0.85 (HBM) and 0.8 (wires)."
"""Shares that copies and collectives of large tensors commonly reach; not fitted here."""

_HBM, _WIRES = 0.85, 0.8


def _gpu(  # noqa: PLR0917 - a row of the table below
    name: str,
    peaks: tuple[float, float],
    best_product: float,
    attention_fraction: float,
    units: int,
    gib: float,
    hbm: float,
    nvlink: float,
    network: float,
    host: float,
    source: str,
) -> Hardware:
    bf16, fp32 = peaks
    return Hardware(
        name=name,
        source=f"{source} {_MATMUL}.{_MEMORY}",
        peak_flops={"bf16": bf16 * 1e12, "fp16": bf16 * 1e12, "fp32": fp32 * 1e12},
        product_fraction=best_product / bf16 * TYPICAL_SHARE,
        attention_fraction=attention_fraction,
        units=units,
        memory_bytes=int(gib * GIB),
        memory_bandwidth=hbm * 1e9 * _HBM,
        operation_seconds=4e-6,
        devices_per_node=8,
        inside=Wire(latency_seconds=10e-6, bandwidth=nvlink * 1e9 * _WIRES),
        across=Wire(latency_seconds=20e-6, bandwidth=network * 1e9 * _WIRES),
        host_bandwidth=host * 1e9 * _WIRES,
    )


# name, TFLOP/s (bf16, fp32), best product TFLOP/s, attention, multiprocessors, GiB, GB/s of HBM, of NVLink and of the
# network (one direction), of PCIe. Attention, forward and backward together, head size 128, causal: FlashAttention-2
# reaches 0.55 to 0.6 of the peak on A100 (arXiv 2307.08691, figure 4) and 0.35 to 0.4 on H100; 3 reaches 0.55 to 0.65
# (arXiv 2407.08608, figures 5 and 6). B200: as H100 with 3. fp32 is without TF32.
_GPUS = (
    _gpu("A100-40G", (312, 19.5), 267.9, 0.55, 108, 39.4, 1555, 300, 25, 32, "NVIDIA A100 data sheet, SXM, 8 x HDR."),
    _gpu("A100-80G", (312, 19.5), 267.9, 0.55, 108, 79.15, 2039, 300, 25, 32, "NVIDIA A100 data sheet, SXM, 8 x HDR."),
    _gpu("H100-80G", (989.4, 66.9), 792.1, 0.45, 132, 79.1, 3350, 450, 50, 64, "NVIDIA H100 data sheet, SXM, 8 x NDR."),
    _gpu("H200", (989.4, 66.9), 794.5, 0.45, 132, 139.8, 4800, 450, 50, 64, "NVIDIA H200 data sheet, SXM, 8 x NDR."),
    _gpu("B200", (2250, 75), 1745, 0.45, 148, 178.35, 7700, 900, 50, 64, "NVIDIA HGX B200 data sheet, 8 x NDR."),
)
KNOWN: dict[str, Hardware] = {hardware.name: hardware for hardware in _GPUS}
"""By name. All are SXM devices, eight to a node, with one network card each."""

_NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100-40G",
    "NVIDIA A100-SXM4-80GB": "A100-80G",
    "NVIDIA H100 80GB HBM3": "H100-80G",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
}
"""Names of these devices in torch."""


def known_gpu(name: str) -> Hardware | None:
    """Return the known device with this name, here or in torch; None for any other."""
    return KNOWN.get(_NAMES.get(name, name))


# --- files ---------------------------------------------------------------------------------------------------


def find_hardware(name: str | Path) -> Hardware:
    """Return a known device by its name in `KNOWN` (case does not matter), or a file of `write_hardware`.

    Raises InputError for an unknown name, naming the nearest, and for a file that cannot be read.
    """
    text = str(name)
    by_lower = {known.lower(): hardware for known, hardware in KNOWN.items()}
    if text.lower() in by_lower:
        return by_lower[text.lower()]
    if text.endswith(".toml"):
        return read_hardware(text)
    begun = [known for known in KNOWN if known.startswith(text.upper())]
    near = (begun or difflib.get_close_matches(text.upper(), KNOWN, n=1, cutoff=0.0))[0]
    raise InputError(
        f"hardware '{text}' is unknown, did you mean '{near}'? Accepted: {', '.join(KNOWN)}, or a file .toml that"
        " `evenpipe profile --hardware` wrote"
    )


def read_hardware(path: str | Path) -> Hardware:
    """Read a file with one device. Raises InputError that names the file and the error."""
    values = read_toml(path)
    try:
        return hardware_from_dict(values)
    except InputError as error:
        raise InputError(f"{plain(path)}: {error}") from None


def hardware_from_dict(values: Mapping[str, Any]) -> Hardware:
    """The inverse of `Hardware.to_dict`. Raises InputError for an unknown or missing key and for a bad value."""
    given = dict(_known_keys("hardware", values, Hardware))
    for name in ("inside", "across"):
        given[name] = _wire_from_dict(name, given[name])
    if not isinstance(given["peak_flops"], Mapping):
        raise InputError(f"hardware: peak_flops is {shown(given['peak_flops'])}, expected a table of FLOPs by dtype")
    passes = given.pop("passes", [])
    if not isinstance(passes, (list, tuple)):
        raise InputError(f"hardware: passes is {shown(passes)}, expected tables")
    return Hardware(**given, passes=tuple(map(_passes_from_dict, passes)))


def _passes_from_dict(values: Any) -> MeasuredPasses:
    if not isinstance(values, Mapping):
        raise InputError(f"hardware: passes contains {shown(values)}, expected tables")
    _known_keys("hardware", values, MeasuredPasses, "passes.")
    if not isinstance(values["seconds"], Mapping):
        raise InputError(f"hardware: passes.seconds is {shown(values['seconds'])}, expected a table")
    return MeasuredPasses(**values)


def _wire_from_dict(name: str, values: Any) -> Wire:
    if not isinstance(values, Mapping):
        raise InputError(f"hardware: {name} is {shown(values)}, expected a table of latency_seconds and bandwidth")
    given = _known_keys(f"hardware: {name}", values, Wire)
    for key, value in given.items():
        least = 0 if key == "latency_seconds" else 1e-9
        if not is_number(value) or value < least:
            accepted = "above 0" if least else "of at least 0"
            raise InputError(f"hardware: {name}.{key} is {shown(value)}, expected a number {accepted}")
    return Wire(**given)


def _known_keys(where: str, values: Mapping[str, Any], kind: type, table: str = "") -> Mapping[str, Any]:
    """Return `values`. Raises InputError if their keys are not the fields of `kind`. table: begins keys in messages."""
    names = [entry.name for entry in fields(kind)]
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(shown(key), names, n=1, cutoff=0.0)[0]
            hint = f"accepted: {', '.join(names)}" if table else f"did you mean {near}?"
            raise InputError(f"{where}: unknown key {shown(f'{table}{key}')}, {hint}")
    for entry in fields(kind):
        if entry.name not in values and entry.default is MISSING:
            raise InputError(f"{where}: {table}{entry.name} is missing")
    return values


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
