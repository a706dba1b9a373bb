"""Orders and programs as `torch.distributed.pipelining` (2.13) reads and writes them.

Its runtime knows two formats. "compute_only" is an order of F, B, I, W and OVERLAP_F_B, to which it adds communication
itself. "compute_comms" has everything: the hops, and the sharding of parameters (UNSHARD, RESHARD) and of gradients
(REDUCE_GRAD, which also divides them by the number of microbatches, so a file without it trains wrongly). In both,
stages find their rank by the rows, so any placement works. The runtime checks little, so we check what we write.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence

from evenpipe.errors import InputError
from evenpipe.schedule import (
    Item,
    Kind,
    Order,
    Pass,
    Program,
    Transfer,
    add_communication,
    check_order,
    check_program,
    parts_of,
)
from evenpipe.schedule.passes import HOP_KINDS, OFFLOAD_KINDS, SHARDING_KINDS
from evenpipe.schedule.text import cell_name

COMPUTE_KINDS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B})

GATHERED = 3
"""Number of stages of a device whose parameters are gathered at the same time, as in torch's own lowering."""


def to_torch(schedule: Order | Program, *, lowered: bool | None = None) -> str:
    """Return the CSV text of an order or program for `_PipelineScheduleRuntime._load_csv`.

    lowered: True writes format "compute_comms", with communication and sharding added where they are missing; False
    writes "compute_only", without either. By default a program is lowered, an order is not.

    Raises InputError for a pass that torch's runtime does not have, for stages that are not a chain, for an order that
    only evaluates (the runtime's `eval` needs none), and for an unsound one.
    """
    if schedule.forward_only:
        raise InputError("the order only evaluates, but torch's runtime reads orders that train; its eval() needs none")
    for device, row in enumerate(schedule.rows):
        for position, item in enumerate(row):
            why = _unspeakable(item)
            if why:
                raise InputError(f"device {device}, position {position}: {why}")
    if not schedule.placement.is_chain:
        raise InputError("torch's runtime knows chains of stages only; a stage of this order has several next to it")
    order = schedule.order if isinstance(schedule, Program) else schedule
    if lowered is None:
        lowered = isinstance(schedule, Program)
    if not lowered:
        check_order(order).raise_if_faulty()
        return _text([item for item in row if item is None or item.kind in COMPUTE_KINDS] for row in order.rows)
    if isinstance(schedule, Order):
        check_order(schedule).raise_if_faulty()
        schedule = add_communication(schedule)
    check_program(schedule).raise_if_faulty()
    return _text(_sharded([item for item in row if item is not None]) for row in schedule.rows)


def from_torch(text: str) -> Order | Program:
    """Read a CSV file of torch: a Program if it has communication or sharding in it, else an Order.

    Placement and number of microbatches follow from the rows. The result may be unsound, as torch writes and reads such
    files: use the checker. Raises InputError that names row and column of a cell that is not a pass.
    """
    try:
        rows = [[_cell(cell) for cell in row] for row in csv.reader(io.StringIO(text, newline=""))]
    except csv.Error as error:
        raise InputError(f"the file is not CSV: {error}") from None
    for number, row in enumerate(rows, start=1):
        for column, cell in enumerate(row, start=1):
            if _OLD_FULL_BACKWARD.fullmatch(cell):
                raise InputError(
                    f"{cell_name(number, column)}: '{cell}' is from an older torch, which wrote BW for today's B, "
                    "and B for today's I; write the file in the new letters"
                )
            if "\n" in cell or "\r" in cell:
                raise InputError(f"{cell_name(number, column)}: a quoted cell continues on the next line")
    plain = "\n".join(",".join(row) for row in rows)
    program = Program.from_csv(plain)
    lowered = any(isinstance(item, Transfer) or (item and item.kind in SHARDING_KINDS) for item in _cells(program))
    return program if lowered else Order.from_csv(plain)


def _unspeakable(item: Item | None) -> str:
    """Return why torch's runtime does not have `item`, and what to do; None if it has."""
    if item is None:
        return ""
    if isinstance(item, Transfer):
        if item.kind in HOP_KINDS:
            return _sliced(item, item.slice)
        return f"{item} is a collective of the vocabulary layers, which torch's runtime does not have; {_WITHOUT}"
    for part in parts_of(item):
        if part.kind in {Kind.R, *OFFLOAD_KINDS}:
            return (
                f"{part} recomputes, offloads or loads activations, which torch's runtime cannot schedule; "
                "take the order without it, and checkpoint inside the stage's module"
            )
        if part.kind not in COMPUTE_KINDS | SHARDING_KINDS:
            return f"{part} is a pass of the vocabulary layers, which torch's runtime does not have; {_WITHOUT}"
        if part.slice:
            return _sliced(part, part.slice)
    return ""


def _sliced(item: Item, slice_: int) -> str:
    cut = (
        f"{item} is for a slice of a sequence, but torch's runtime does not cut sequences; take an order without slices"
    )
    return cut if slice_ else ""


def _text(rows: Iterable[Sequence[Item | None]]) -> str:
    return "".join(",".join("" if item is None else str(item) for item in row) + "\n" for row in rows)


def _sharded(row: list[Item]) -> list[Item]:
    """Return `row` with the passes that gather and free parameters and reduce gradients, if it has none yet.

    A stage's gradients are reduced right after its last backward. The parameters of the next stages of the device are
    gathered ahead, for `GATHERED` of them at a time.
    """
    kinds = {item.kind for item in row}
    reduced = {item.stage for item in row if item.kind is Kind.REDUCE_GRAD}
    last_backward = {
        part.stage: position
        for position, item in enumerate(row)
        for part in (parts_of(item) if isinstance(item, Pass) else ())
        if part.kind in {Kind.B, Kind.W} and part.stage not in reduced
    }
    uses = [_stages(item) for item in row]
    gathered: list[int] = []
    result: list[Item] = []
    for position, item in enumerate(row):
        if uses[position] and not kinds & {Kind.UNSHARD, Kind.RESHARD}:
            wanted = _next_stages(uses, position)
            for stage in [stage for stage in gathered if stage not in wanted]:
                gathered.remove(stage)
                result.append(Pass(Kind.RESHARD, stage))
            for stage in wanted:
                if stage not in gathered:
                    gathered.append(stage)
                    result.append(Pass(Kind.UNSHARD, stage))
        result.append(item)
        result += [Pass(Kind.REDUCE_GRAD, stage) for stage in uses[position] if last_backward.get(stage) == position]
    return result + [Pass(Kind.RESHARD, stage) for stage in gathered]


def _stages(item: Item) -> tuple[int, ...]:
    """Return the stages whose parameters `item` uses."""
    parts = parts_of(item) if isinstance(item, Pass) and item.kind in COMPUTE_KINDS else ()
    return tuple(dict.fromkeys(part.stage for part in parts if part.stage is not None))


def _next_stages(uses: list[tuple[int, ...]], position: int) -> list[int]:
    """Return the next stages that the device runs from `position` on, up to `GATHERED`."""
    found: list[int] = []
    for stages in uses[position:]:
        found += [stage for stage in stages if stage not in found]
        if len(found) >= GATHERED:
            break
    return found


def _cells(program: Program) -> Iterator[Item | None]:
    return (item for row in program.rows for item in row)


def _cell(cell: str) -> str:
    """Return a cell without the spaces that torch ignores."""
    return re.sub(r"\s*([();])\s*", r"\1", cell.strip())


_WITHOUT = "take the order without them, as in vocabulary mode first-last"
_OLD_FULL_BACKWARD = re.compile(r"[0-9]+BW[0-9]+")
