"""Which device holds which stage, and how stages follow each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from evenpipe.errors import InputError


@dataclass(frozen=True, slots=True)
class Placement:
    """`stage_device[stage]` is the device of each stage; every device holds at least one.

    Stages form a chain: stage 0 takes the embedded tokens, each further stage the output of the one before, and the
    last one feeds the output layer.
    """

    devices: int
    stage_device: tuple[int, ...]
    _stages_of: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise InputError(f"devices must be at least 1, not {self.devices}")
        for stage, device in enumerate(self.stage_device):
            if not 0 <= device < self.devices:
                raise InputError(f"stage {stage} is placed on device {device}, but devices are 0 to {self.devices - 1}")
        holders = set(self.stage_device)
        empty = next((device for device in range(self.devices) if device not in holders), None)
        if empty is not None:
            raise InputError(f"device {empty} holds no stage; every device needs at least one")
        held: list[list[int]] = [[] for _ in range(self.devices)]
        for stage, device in enumerate(self.stage_device):
            held[device].append(stage)
        object.__setattr__(self, "_stages_of", tuple(map(tuple, held)))

    @classmethod
    def linear(cls, devices: int) -> Placement:
        """Return one stage per device, in order: 0 1 2 3."""
        return cls.looped(devices, 1)

    @classmethod
    def looped(cls, devices: int, stages_per_device: int) -> Placement:
        """Return a round-robin placement: 0 1 2 3 0 1 2 3 for two stages per device (arXiv 2104.04473, section 2.2)."""
        if stages_per_device < 1:
            raise InputError(f"stages per device must be at least 1, not {stages_per_device}")
        return cls(devices, tuple(range(devices)) * stages_per_device)

    @classmethod
    def v_shape(cls, devices: int) -> Placement:
        """Return a V: 0 1 2 3 3 2 1 0, so that device 0 holds both ends (arXiv 2405.15362)."""
        return cls(devices, (*range(devices), *reversed(range(devices))))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_device)

    @property
    def first_device(self) -> int:
        """Device of stage 0."""
        return self.stage_device[0]

    @property
    def last_device(self) -> int:
        """Device of the last stage."""
        return self.stage_device[-1]

    def device_of(self, stage: int) -> int:
        """Return the device that holds `stage`."""
        return self.stage_device[stage]

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Return the stages that `device` holds, ascending."""
        return self._stages_of[device]

    def predecessors(self, stage: int) -> tuple[int, ...]:
        """Return the stages whose output `stage` takes."""
        return (stage - 1,) if stage > 0 else ()

    def successors(self, stage: int) -> tuple[int, ...]:
        """Return the stages that take the output of `stage`."""
        return (stage + 1,) if stage < self.stages - 1 else ()
