"""An estimate as text: a table by device and term, the verdict for the GPU, and the paper's estimate."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.model import Description
from evenpipe.recipe.parallelism import AXES
from evenpipe.sizes import GIB
from evenpipe.words import count, table

from .bytes import TERMS
from .estimate import Estimate
from .paper import FEASIBLE, PaperEstimate


def text(description: Description, estimate: Estimate, paper: PaperEstimate | None = None) -> str:
    """Return the report."""
    lines = [*_head(description, estimate), "", *_table(estimate), "", *_card(estimate)]
    if paper is not None:
        lines += ["", *_paper(estimate, paper)]
    return "\n".join(lines)


def _head(description: Description, estimate: Estimate) -> list[str]:
    parallelism, settings = estimate.recipe.parallelism, estimate.settings
    elements = sum(parameter.numel() for parameter in description.skeleton.parameters())
    axes = [f"{name} {size}" for name in AXES if (size := getattr(parallelism, name)) > 1]
    if parallelism.zero:
        axes.append(f"zero {parallelism.zero}")
    dtypes = settings.dtypes
    cut = f" in {settings.slices} slices" if settings.slices > 1 else ""
    return [
        f"{description.architecture}: {count(description.layers, 'layer')}, {elements / 1e9:.3g} B parameters,"
        f" vocabulary {description.vocabulary_size}",
        f"{count(parallelism.gpus, 'GPU')}{': ' + ', '.join(axes) if axes else ''}",
        f"{estimate.schedule}, {estimate.recipe.vocabulary}, {count(estimate.recipe.microbatches, 'microbatch')} of"
        f" {settings.microbatch_size} x {settings.sequence} tokens{cut},"
        f" {dtypes.compute} with gradients in {dtypes.gradients}",
    ]


def _table(estimate: Estimate) -> list[str]:
    several = any(len(device.stages) > 1 for device in estimate.devices)
    unit, size = _unit(max(device.peak_allocated for device in estimate.devices))
    moves = any(device.host for device in estimate.devices)
    terms = [term for term in TERMS if term != "carry" or any(device.terms[term] for device in estimate.devices)]
    head = ["device", *(["stages"] if several else []), "layers", *terms, "allocated", "reserved"]
    head += [*(["on the host"] if moves else []), "peak during"]
    rows = []
    for device in estimate.devices:
        figures = [*(device.terms[term] for term in terms), device.peak_allocated, device.peak_reserved]
        figures += [device.host] if moves else []
        rows.append(
            [
                str(device.device),
                *([",".join(map(str, device.stages))] if several else []),
                str(device.layers),
                *(f"{figure / size:.2f}" for figure in figures),
                device.binding_event,
            ]
        )
    return [f"{unit} on each GPU of a device, at its peak:", *_aligned(head, rows), *_keys(estimate)]


def _keys(estimate: Estimate) -> list[str]:
    """Return lines about the memory of keys and values of other pieces of a sequence."""
    lines = []
    if estimate.settings.slices > 1:
        lines.append("carry: keys and values of sequences whose slices are under way, and their gradients")
    gathered = max(device.gathered for device in estimate.devices)
    if gathered:
        lines.append(
            f"gathered keys: a layer has {_size(gathered)} of keys and values of all context ranks, in transient"
        )
    return lines


def _unit(largest: int) -> tuple[str, int]:
    return ("GiB", GIB) if largest >= GIB else ("MiB", 1 << 20)


def _card(estimate: Estimate) -> list[str]:
    device = estimate.fullest
    process = device.process.process
    if process.high == device.peak_allocated:
        requirement = f"device {device.device} needs {_size(device.peak_allocated)} for tensors"
    else:
        libraries = count(device.process.communicators, "communicator")
        requirement = (
            f"device {device.device} needs {_size(process.low)} to {_size(process.high)}:"
            f" {_size(device.peak_allocated)} for tensors, plus the driver, {libraries} and unused parts"
            " of the allocator's segments"
        )
    if estimate.memory is None:
        return [f"{requirement}.", "Give --gpu-memory or --hardware to learn whether it fits."]
    verdict = f"{estimate.verdict}: {requirement}; available: {_size(estimate.memory)}"
    lines = [f"{verdict}."]
    for label in ("does not fit", "at risk"):
        same = [str(peer.device) for peer in estimate.devices if peer.verdict == label and peer is not device]
        if same:
            lines.append(f"{label} too: device{'s' if len(same) > 1 else ''} {', '.join(same)}.")
    return lines


def _paper(estimate: Estimate, paper: PaperEstimate) -> list[str]:
    ours = estimate.devices[0]
    states = sum(ours.terms[name] for name in ("parameters", "gradients", "optimizer"))
    remaining = ours.peak_allocated - states
    lines = [
        "The formula of arXiv 2411.06465, for the first device only:",
        *_aligned(
            ["", "states", "activations and the rest", "sum"],
            [
                ["paper", _size(paper.states), _size(paper.activations), _size(paper.total)],
                ["device 0", _size(states), _size(remaining), _size(ours.peak_allocated)],
            ],
        ),
    ]
    if estimate.memory is not None:
        share = paper.total / estimate.memory
        answer = "accepts" if paper.fits(estimate.memory) else "rejects"
        lines.append(f"{100 * share:.0f} % of the card: its rule ({100 * FEASIBLE:.0f} %) {answer} it.")
    return lines


def _size(size: float) -> str:
    unit, bytes_of_unit = _unit(round(size))
    return f"{size / bytes_of_unit:.2f} {unit}"


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align figures to the right, and the last column to the left if it contains words."""
    words = head[-1][:1].isalpha() and not rows[0][-1][:1].isdigit()
    return table((head, *rows), left=(0, len(head) - 1) if words else (0,))
