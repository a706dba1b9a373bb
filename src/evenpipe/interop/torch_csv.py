"""Orders and programs as `torch.distributed.pipelining` (2.13) reads and writes them.

Its runtime reads two formats. "compute_only" is an order of F, B, I, W and OVERLAP_F_B, to which it adds communication
itself. "compute_comms" has everything: the hops, and the sharding of parameters (UNSHARD, RESHARD) and of gradients
(REDUCE_GRAD, which also divides them by the number of microbatches, so a file without it trains incorrectly). In both,
the rows determine the rank of each stage, so any placement works. The runtime checks little, so we check what we write.
"""

from __future__ import annotations

import csv
import io
import re

from evenpipe.errors import InputError
from evenpipe.schedule import (
    Item,
    Kind,
    Order,
    Pass,
    Program,
    Transfer,
    add_communication,
    add_sharding,
    check_order,
    check_program,
    parts_of,
)
from evenpipe.schedule.passes import HOP_KINDS, OFFLOAD_KINDS, SHARDING_KINDS
from evenpipe.schedule.text import cell_name, rows_to_csv

COMPUTE_KINDS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B})

PREFETCHED = 2
"""Number of stages whose parameters are gathered ahead, as in torch's own lowering."""


def to_torch(schedule: Order | Program, *, lowered: bool | None = None) -> str:
    """The CSV text of an order or program for `_PipelineScheduleRuntime._load_csv`.

    lowered: True writes format "compute_comms", with communication and sharding added where they are missing; False
    writes "compute_only", without either. By default a program is lowered and an order is not.

    Raises InputError for a pass that torch's runtime does not support, for stages that are not a chain, for an order
    that only evaluates (the runtime's `eval` needs none), and for an invalid order or program.
    """
    if schedule.forward_only:
        raise InputError("the order only evaluates, but torch's runtime reads orders that train; its eval() needs none")
    for device, row in enumerate(schedule.rows):
        for position, item in enumerate(row):
            why = _unsupported_reason(item)
            if why:
                raise InputError(f"device {device}, position {position}: {why}")
    if not schedule.placement.is_chain:
        raise InputError("torch's runtime knows chains of stages only; a stage of this order has several next to it")
    if lowered is None:
        lowered = isinstance(schedule, Program)
    if not lowered:
        check_order(schedule.order).raise_if_faulty()
        return rows_to_csv(
            [item for item in row if item is None or item.kind in COMPUTE_KINDS] for row in schedule.order.rows
        )
    if isinstance(schedule, Order):
        check_order(schedule).raise_if_faulty()
        schedule = add_communication(schedule)
    check_program(schedule).raise_if_faulty()
    return rows_to_csv(add_sharding(schedule, gathers=True, tied=False, reshard=True, prefetch=PREFETCHED).rows)


def from_torch(text: str) -> Order | Program:
    """Read a CSV file of torch: a Program if it contains communication or sharding, else an Order.

    Placement and number of microbatches are inferred from the rows. The result may be invalid, because torch writes and
    reads such files too: use the checker. Raises InputError with the row and column of a cell that is not a pass.
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
    items = {item for row in program.rows for item in row if item is not None}
    lowered = any(isinstance(item, Transfer) or item.kind in SHARDING_KINDS for item in items)
    return program if lowered else Order.from_csv(plain)


def _unsupported_reason(item: Item | None) -> str:
    """Why torch's runtime does not support `item`, and what to do; empty if it does."""
    if item is None:
        return ""
    if isinstance(item, Transfer) and item.kind not in HOP_KINDS:
        return f"{item} is a collective of the vocabulary layers, which torch's runtime does not have; {_WITHOUT}"
    for component in parts_of(item) if isinstance(item, Pass) else (item,):
        if component.kind in {Kind.R, *OFFLOAD_KINDS}:
            return (
                f"{component} recomputes, offloads or loads activations, which torch's runtime cannot schedule; "
                "take the order without it, and checkpoint inside the stage's module"
            )
        if component.stage is None and component.kind is not Kind.OVERLAP_F_B:
            return f"{component} is a pass of the vocabulary layers, which torch's runtime does not have; {_WITHOUT}"
        if component.slice:
            return (
                f"{component} is for a slice of a sequence, but torch's runtime does not cut sequences; "
                "take an order without slices"
            )
    return ""


def _cell(cell: str) -> str:
    """A cell without the spaces that torch ignores."""
    return re.sub(r"\s*([();])\s*", r"\1", cell.strip())


_WITHOUT = "take the order without them, as in vocabulary mode first-last"
_OLD_FULL_BACKWARD = re.compile(r"[0-9]+BW[0-9]+")
