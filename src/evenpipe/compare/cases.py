"""Simulate schedules that a user names: at one size, with costs, in vocabulary modes.

A step always has the same work, whether a schedule is simulated alone or compared with others:

* Costs per stage are those of a stage of the first (or only) schedule. Equal costs, the default, are those of a device.
  A schedule with more stages divides them, so that a device does the same work (`costs_for_stages`).
* The vocabulary layers are part of every step: as passes of all devices if the mode shards them, otherwise in the
  passes of the first and last stage (`with_whole_vocabulary`), even in a file that is used unchanged.
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

from .stage_costs import check_vocabulary_times, costs_for_stages, with_whole_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One schedule in one vocabulary mode, and its simulation.

    name: as the user wrote it. mode: None for an unchanged file. costs: for the stages of this schedule, including
    unsharded vocabulary layers.
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

    @property
    def lost(self) -> float:
        """The share of the step in which devices do not compute, averaged over devices."""
        return 1 - self.simulation.timeline.mean_busy

    def to_dict(self) -> dict[str, Any]:
        """The case as a dict for JSON."""
        return {
            "schedule": self.name,
            "vocabulary": self.mode,
            "stages_per_device": self.stages_per_device,
            "stage_device": list(self.schedule.placement.stage_device),
            "lost": self.lost,
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
    """Every schedule of `names` (names, or CSV files, whose names end in .csv) in every mode of `vocabularies`.

    devices, microbatches: by default those of the first file. vocabularies: if empty, named schedules are balanced, and
    files are unchanged. costs: equal by default; with `offload`, one forward of a device stores 1 byte. options: of the
    generators; with several schedules, each uses those that it has. offload: as for `plan_order`; programs stay
    unchanged. slices: as for `plan_order`; `costs` are those of a slice. edges: between the stages of files; chains
    by default. replicas: what they share, and when; None if there is only one.

    Raises InputError for wrong names, sizes, options and files, listing every fault of an invalid file.
    """
    files = {name: _sound(name, edges) for name in names if name.endswith(".csv")}
    for schedule in files.values():
        devices = schedule.devices if devices is None else devices
        microbatches = schedule.microbatches if microbatches is None else microbatches
    if devices is None or microbatches is None:
        missing = "devices" if devices is None else "microbatches"
        raise InputError(f"{missing} is missing; it must be a whole number of at least 1")
    modes = list(dict.fromkeys(VocabularyMode.of(name) for name in vocabularies))
    all_options = dict(options or {})
    schedule_options = {name: _options(name, all_options, is_single=len(names) == 1) for name in names}
    for option in all_options:
        if not any(option in known for known in schedule_options.values()):
            raise InputError(f"{option} is given, but none of {', '.join(names)} has this option")
    stages = None if costs is not None else devices
    costs = _equal_costs(offload, replicas) if costs is None else costs
    cases = []
    for name in names:
        with _errors_of(name, among=names):
            file = files.get(name)
            if file is not None:
                _check_size(name, file, devices, microbatches, slices)
            # Placements do not depend on the number of microbatches.
            base = file or generate(name, devices, min(microbatches, 2 * devices), **schedule_options[name])
            stages = base.placement.stages if stages is None else stages
            schedule_costs = costs_for_stages(costs, stages, base.placement.stages, f"schedule '{name}'")
            schedule_modes: list[VocabularyMode | None] = [*modes] or [
                VocabularyMode.of("balanced") if file is None else None
            ]
            for mode in schedule_modes:
                sharded = (mode or base.vocabulary).sharded
                used = schedule_costs if sharded else with_whole_vocabulary(schedule_costs, base.placement)
                if mode is not None and sharded:
                    check_vocabulary_times(used, mode)
                if mode is None:
                    assert file is not None, "only files stay unchanged"
                    schedule = with_offload(file, used, offload) if isinstance(file, Order) else file
                elif isinstance(file, Program):
                    schedule = _program_in_mode(name, file, mode, used)
                else:
                    source = name if file is None else file
                    kwargs = {**schedule_options[name], "slices": slices, "offload": offload}
                    schedule = plan_order(source, devices, microbatches, mode, used, **kwargs)
                if replicas is not None:
                    program = schedule if isinstance(schedule, Program) else add_communication(schedule, used)
                    schedule = for_replicas(program, replicas, tied=False)
                simulation = simulate(schedule, used)
                value = None if mode is None else mode.value
                cases.append(Case(name=name, mode=value, schedule=schedule, costs=used, simulation=simulation))
    return cases


def _check_size(name: str, file: Order | Program, devices: int, microbatches: int, slices: int | None) -> None:
    if (file.devices, file.microbatches) != (devices, microbatches):
        size = f"{count(file.devices, 'device')} and {count(file.microbatches, 'microbatch')}"
        raise InputError(f"schedule '{name}' is for {size}, not {devices} and {microbatches}")
    if slices not in (None, file.slices):
        raise InputError(f"schedule '{name}' has sequences of {count(file.slices, 'slice')}, not {slices}")


def _equal_costs(offload: str | float, replicas: Parallelism | None) -> Costs:
    """The default costs of a device, as if it had one stage."""
    costs = EQUAL_COSTS if offload in ("scheduled", "none") else HOST_COSTS
    if replicas is None:
        return costs
    return replace(costs, links={REPLICAS: Link(bandwidth=1.0)}, sharding=EQUAL_SHARDING)


@contextmanager
def _errors_of(name: str, *, among: Sequence[str]) -> Iterator[None]:
    """Add the name of the schedule to errors if there are several schedules."""
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


def _program_in_mode(name: str, program: Program, mode: VocabularyMode, costs: Costs) -> Program:
    """Return the program if it has the passes of the mode. They are fixed: another mode would need other transfers."""
    order = program.order
    if plan_order(order, order.devices, order.microbatches, mode, costs) != order:
        raise InputError(f"schedule '{name}' has transfers, so no passes can be added for vocabulary mode {mode}")
    return program


def _options(name: str, options: Mapping[str, Any], *, is_single: bool) -> dict[str, Any]:
    """The options for a schedule: all of them for a single one, so that `generate` refuses those that it does not have;
    among several schedules, only those that it has."""
    if name.endswith(".csv"):
        return {}
    known = options if is_single else options_of(name)
    return {option: value for option, value in options.items() if option in known}
