"""An order: for each device, the list of its compute passes; and the base class of orders and programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from evenpipe.errors import InputError
from evenpipe.words import count, refused

from .passes import Item, Kind, Pass, Rows, Transfer, parts_in
from .placement import Edge, Placement
from .text import cell_name, infer, rows_from_csv, rows_to_csv
from .vocabulary_mode import VocabularyMode


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The rows of an `Order` or a `Program`: what each device does, in order.

    None is an idle slot, which has no effect. `vocabulary` says which vocabulary passes there are: FIRST_LAST for none,
    VOCAB_2 or VOCAB_1; other modes are replaced by the one of these with the same passes (`VocabularyMode.of_rows`).
    With `forward_only` it evaluates: it has F, and E, S and C if the vocabulary layers are sharded. If `slices` is more
    than 1, every sequence is cut into that many slices, and a pass processes one slice of a microbatch: a unit.
    """

    placement: Placement
    microbatches: int
    rows: tuple[tuple[Item | None, ...], ...]
    vocabulary: VocabularyMode = VocabularyMode.FIRST_LAST
    forward_only: bool = False
    slices: int = 1

    def __post_init__(self) -> None:
        if len(self.rows) != self.devices:
            raise InputError(
                f"the order has {count(len(self.rows), 'row')} for {count(self.devices, 'device')}; each device has one"
            )
        for name in ("microbatches", "slices"):
            number = getattr(self, name)
            if not isinstance(number, int):
                raise refused(name, number, "a whole number")
            if number < 1:
                raise refused(name, number, "at least 1")
        mode = VocabularyMode.of(self.vocabulary).of_rows(forward_only=self.forward_only)
        object.__setattr__(self, "vocabulary", mode)

    def _repr_html_(self) -> str:
        """The picture of a step, for notebooks."""
        from .picture import html_of_order

        return html_of_order(self.order, repr(self))

    @property
    def size(self) -> str:
        """The size in words."""
        numbers = (self.devices, "device"), (self.placement.stages, "stage"), (self.microbatches, "microbatch")
        words = ", ".join(count(number, noun) for number, noun in numbers)
        return words if self.slices == 1 else f"{words} of {count(self.slices, 'slice')}"

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.placement.devices

    @property
    def units(self) -> int:
        """Number of units: slices of all microbatches. Slice s of microbatch i is unit i * `slices` + s."""
        return self.microbatches * self.slices

    @property
    def order(self) -> Order:
        """The compute passes alone."""
        rows = tuple(tuple(item for item in row if isinstance(item, Pass)) for row in self.rows)
        return Order(self.placement, self.microbatches, rows, self.vocabulary, self.forward_only, self.slices)

    def to_csv(self) -> str:
        """One line per device, readable by `from_csv` and, if torch supports all its kinds, by torch's runtime."""
        return rows_to_csv(self.rows)

    @classmethod
    def from_csv(
        cls,
        text: str,
        *,
        placement: Placement | None = None,
        edges: Sequence[Edge] = (),
        microbatches: int | None = None,
        vocabulary: str | None = None,
        forward_only: bool | None = None,
        slices: int | None = None,
    ) -> Self:
        """Read rows. Missing arguments are inferred from the rows, and members and communicators of transfers from the
        placement; the stages form a chain by default.

        A transfer that no pass of this placement needs keeps empty members, and the checker reports it. Raises
        InputError naming row and column of a cell that is not a pass; only programs have transfers.
        """
        rows = rows_from_csv(text)
        cls._check_items(rows)
        known = {"microbatches": microbatches, "vocabulary": vocabulary, "forward_only": forward_only, "slices": slices}
        fields = infer(rows, placement, edges, known)
        return cls(rows=cls._addressed(rows, fields), **fields)

    @classmethod
    def _check_items(cls, rows: Rows) -> None:
        """Raise InputError for an item that such rows cannot contain."""

    @classmethod
    def _addressed(cls, rows: Rows, fields: dict[str, Any]) -> Any:
        """`rows` with the members of transfers."""
        return rows


@dataclass(frozen=True, slots=True)
class Order(DeviceRows):
    """The passes of each device, in order; the dependencies of each pass follow from them (`Rules`)."""

    rows: tuple[tuple[Pass | None, ...], ...]

    def __repr__(self) -> str:
        return f"<Order: {self.size}, {count(sum(item is not None for row in self.rows for item in row), 'pass')}>"

    @property
    def order(self) -> Order:
        """This order."""
        return self

    def passes(self, device: int) -> Iterator[Pass]:
        """The passes of a device, without idle slots."""
        return (item for item in self.rows[device] if item is not None)

    def splits_backward(self, device: int) -> bool:
        """Whether a backward of this device is split into I and W."""
        return any(item.kind is Kind.I for item in parts_in(self.rows[device]))

    @classmethod
    def _check_items(cls, rows: Rows) -> None:
        for number, row in enumerate(rows, start=1):
            for column, item in enumerate(row, start=1):
                if isinstance(item, Transfer):
                    raise InputError(f"{cell_name(number, column)}: '{item}' is a transfer; an order has passes only")
