"""Simulate schedules that a user names: at one size, with costs, in vocabulary modes.

Several schedules are compared for one model: each device does the same work in every schedule, so costs per stage,
which are those of the first schedule, are divided if another has more stages (`stage_costs`). Likewise, if modes with
and without sharded vocabulary layers are compared, the latter do the vocabulary work in the first and last stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from evenpipe.errors import InputError
from evenpipe.recipe.parallelism import Parallelism, for_replicas
from evenpipe.schedule.check import check_order, check_program
from evenpipe.schedule.costs import EQUAL_COSTS, EQUAL_SHARDING, HOST_COSTS, Costs
from evenpipe.schedule.files import read_schedule
from evenpipe.schedule.links import REPLICAS, Link
from evenpipe.schedule.order import Order
from evenpipe.schedule.placement import Edge
from evenpipe.schedule.planning import plan_order, with_offload
from evenpipe.schedule.program import Program
from evenpipe.schedule.registry import generate, options_of
from evenpipe.schedule.transforms.communication import add_communication
from evenpipe.schedule.vocabulary_mode import VocabularyMode
from evenpipe.simulate import Simulation, simulate
from evenpipe.words import count

from .stage_costs import costs_for_stages, with_whole_vocabulary

WHOLE = tuple(mode.value for mode in VocabularyMode if not mode.sharded)
"""Modes with whole vocabulary layers, on the first and last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One schedule in one vocabulary mode, and its simulation.

    name: as the user wrote it. mode: None for an unchanged file. costs: those of its own stages.
    """

    name: str
    mode: str | None
    schedule: Order | Program
    costs: Costs
    simulation: Simulation

    @property
    def stages_per_device(self) -> int | None:
        """Number of stages per device, or None if devices have different numbers."""
        placement = self.schedule.placement
        counts = {len(placement.stages_of(device)) for device in range(placement.devices)}
        return counts.pop() if len(counts) == 1 else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.name,
            "vocabulary": self.mode,
            "stages_per_device": self.stages_per_device,
            "stage_device": list(self.schedule.placement.stage_device),
            **self.simulation.to_dict(),
        }


def plan_cases(
    names: Sequence[str],
    *,
    devices: int | None = None,
    microbatches: int | None = None,
    vocabularies: Sequence[str] = (),
    costs: Costs | None = None,
    options: Mapping[str, Any] | None = None,
    offload: str | float = "scheduled",
    slices: int | None = None,
    edges: Sequence[Edge] = (),
    replicas: Parallelism | None = None,
) -> list[Case]:
    """Return every schedule of `names` (names, or CSV files, whose names end in .csv) in every mode of `vocabularies`.

    devices, microbatches: by default those of the first file. vocabularies: if empty, named schedules get no vocabulary
    passes, and files are unchanged. costs: equal ones by default; with `offload`, one forward of a stage stores 1 byte.
    options: of the generators; with several schedules each takes those that it has. offload: as for `plan_order`;
    programs stay unchanged. slices: as for `plan_order`; `costs` are those of one slice. edges: of the stages of
    files; chains by default. replicas: what they share, and when; None: there is one.

    Raises InputError for wrong names, sizes, options and files, with every fault of an unsound file.
    """
    files = {name: _sound(name, edges) for name in names if name.endswith(".csv")}
    for schedule in files.values():
        devices = schedule.devices if devices is None else devices
        microbatches = schedule.microbatches if microbatches is None else microbatches
    if devices is None or microbatches is None:
        missing = "devices" if devices is None else "microbatches"
        raise InputError(f"{missing}: not given, expected a whole number of at least 1")
    modes = list(dict.fromkeys(VocabularyMode.of(name).value for name in vocabularies))
    mixed = any(mode in WHOLE for mode in modes) and any(mode not in WHOLE for mode in modes)
    if costs is None:
        costs = EQUAL_COSTS if offload in ("scheduled", "none") else HOST_COSTS
        if replicas is not None:
            costs = replace(costs, links={REPLICAS: Link(bandwidth=1.0)}, sharding=EQUAL_SHARDING)
    given = dict(options or {})
    taken = {name: _options(name, given, alone=len(names) == 1) for name in names}
    for option in given:
        if not any(option in options for options in taken.values()):
            raise InputError(f"{option} is given, but none of {', '.join(names)} has this option")
    stages = None
    cases = []
    for name in names:
        with _errors_of(name, among=names):
            base = files.get(name)
            if base is None and (mixed or len(names) > 1):
                base = generate(name, devices, microbatches, **taken[name])
            own_costs = costs
            if base is not None:
                if (base.devices, base.microbatches) != (devices, microbatches):
                    size = f"{count(base.devices, 'device')} and {count(base.microbatches, 'microbatch')}"
                    raise InputError(f"schedule '{name}' is for {size}, not {devices} and {microbatches}")
                if slices is not None and name in files and base.slices != slices:
                    raise InputError(f"schedule '{name}' has sequences of {count(base.slices, 'slice')}, not {slices}")
                stages = base.placement.stages if stages is None else stages
                own_costs = costs_for_stages(costs, stages, base.placement.stages, f"schedule '{name}'")
            own_modes: list[str | None] = [*modes] or [None if name in files else "first-last"]
            for mode in own_modes:
                used = own_costs
                if mixed and mode in WHOLE and base is not None:
                    used = with_whole_vocabulary(own_costs, base.placement)
                file = files.get(name)
                if mode is None:
                    assert file is not None, "only files stay unchanged"
                    schedule = with_offload(file, used, offload) if isinstance(file, Order) else file
                elif isinstance(file, Program):
                    schedule = _program_in_mode(name, file, mode, used)
                else:
                    source = name if file is None else file
                    more = {**taken[name], "slices": slices, "offload": offload}
                    schedule = plan_order(source, devices, microbatches, mode, used, **more)
                if replicas is not None:
                    program = schedule if isinstance(schedule, Program) else add_communication(schedule, used)
                    schedule = for_replicas(program, replicas, tied=False)
                simulation = simulate(schedule, used)
                cases.append(Case(name=name, mode=mode, schedule=schedule, costs=used, simulation=simulation))
    return cases


@contextmanager
def _errors_of(name: str, *, among: Sequence[str]) -> Iterator[None]:
    """Add the name of the schedule to errors, if there are several."""
    try:
        yield
    except InputError as error:
        if len(among) == 1 or f"'{name}'" in str(error):
            raise
        raise InputError(f"schedule '{name}': {error}") from None


def _sound(path: str, edges: Sequence[Edge]) -> Order | Program:
    schedule = read_schedule(path, edges)
    report = check_program(schedule) if isinstance(schedule, Program) else check_order(schedule)
    try:
        report.raise_if_faulty()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return schedule


def _program_in_mode(name: str, program: Program, mode: str, costs: Costs) -> Program:
    """A program has fixed passes; another mode would also need other transfers."""
    order = program.order
    if plan_order(order, order.devices, order.microbatches, mode, costs) != order:
        raise InputError(f"schedule '{name}' has transfers, so no passes can be added for vocabulary mode {mode}")
    return program


def _options(name: str, given: Mapping[str, Any], *, alone: bool) -> dict[str, Any]:
    """Return the options for a schedule: all, for `generate` to refuse, or, among several schedules, those that it
    has."""
    if name.endswith(".csv"):
        return {}
    return dict(given) if alone else {option: value for option, value in given.items() if option in options_of(name)}
