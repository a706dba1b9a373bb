"""`evenpipe profile CONFIG.toml [section.key=value ...] [-o COSTS.toml]`, or with `--from TRACE.json ...`.

`evenpipe profile --hardware [CONFIG.toml] [-o HARDWARE.toml]` measures the machine itself, for `plan`; with a
configuration, also the passes of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenpipe.cli.declarations import Count
from evenpipe.cli.options import whole_numbers
from evenpipe.cli.printing import say, say_json
from evenpipe.errors import InputError
from evenpipe.given import plain, shortened, write_text


def run(
    config: str | None = None,
    overrides: list[str] | None = None,
    *,
    from_: list[str] | None = None,
    steps: Count = 6,
    hardware: bool = False,
    microbatch_sizes: str | None = None,
    processes: Count | None = None,
    output: str | None = None,
    json_: bool = False,
) -> int:
    """Measure, and write or print.

    CONFIG.toml                   the configuration, as for evenpipe train
    [section.key=value]...        replace values of the configuration
    --from TRACE.json...          take the costs from traces of training (evenpipe train --trace) instead of running
                                  anything
    --steps N                     measured steps per form of backward
    --hardware                    measure this machine for plan: products, memory, messages, and with CONFIG.toml passes
                                  of its model
    --microbatch-sizes B[,B...]   with --hardware CONFIG.toml: sequences per measured microbatch; default: 1,4
    --processes N                 with --hardware: number of processes; default: as configured, or one per core
    -o, --output FILE.toml        write a file; without it, print the figures

    Trains a few steps of the configured model on random tokens, with all its processes at once, and measures every pass
    and transfer, in seconds. The file is for --costs of simulate, draw, check and search. Its times are valid for this
    model, number of stages, microbatch size and sequence length. With first-last, the output layer is part of the last
    stage.
    """
    from evenpipe.costs.cost_file import check_output

    if output is not None:
        check_output(output)
    traces = from_
    if traces and config is not None and not config.endswith(".toml"):  # `--from` takes all files behind it
        traces, config, overrides = [*traces, config, *(overrides or [])], None, None
    if hardware and traces:
        raise InputError("--hardware measures the machine; leave out --from")
    if hardware:
        values, toml = _measure_hardware(config, overrides or [], microbatch_sizes, processes, steps)
    else:
        for name, value in (("--processes", processes), ("--microbatch-sizes", microbatch_sizes)):
            if value is not None:
                raise InputError(f"{name} needs --hardware; without it, the configuration decides")
        values, toml = _measure_passes(config, overrides or [], traces or [], steps)
    if output is not None:
        write_text(output, toml)
    if json_:
        say_json(values)
    elif output is None:
        say(toml, end="")
    else:
        say(f"wrote {output}")
    return 0


def _measure_passes(
    path: str | None, overrides: list[str], traces: list[str], steps: int
) -> tuple[Mapping[str, Any], str]:
    """The costs of a configuration, or of traces: as values, and as the text of a file."""
    from evenpipe.costs import costs_of
    from evenpipe.costs.cost_file import costs_to_toml
    from evenpipe.schedule.trace_file import read_trace
    from evenpipe.train.config_file import load_config

    if (path is None) == (not traces):
        problem = "neither is" if path is None else "both are"
        raise InputError(f"profile needs either CONFIG.toml or --from TRACE.json, but {problem} given")
    if traces:
        measured = [read_trace(trace) for trace in traces]
        costs, about = costs_of(measured), measured[0].about
    else:
        assert path is not None
        config = load_config(path, overrides)

        from evenpipe.train.profile import profile

        result = profile(config, steps=steps)
        costs, about = result.costs, result.about
    known = ", ".join(shortened(plain(f"{key} {value}")) for key, value in about.items() if key != "step")
    return costs.to_dict(), costs_to_toml(costs, [f"Seconds per microbatch, measured: {known}"])


def _measure_hardware(
    path: str | None, overrides: list[str], microbatch_sizes: str | None, processes: int | None, steps: int
) -> tuple[Mapping[str, Any], str]:
    if microbatch_sizes is not None and path is None:
        raise InputError("--microbatch-sizes needs a model, but CONFIG.toml is missing")

    from evenpipe.costs.hardware import hardware_to_toml
    from evenpipe.plan.configuration_search import cores
    from evenpipe.train.config_file import load_config
    from evenpipe.train.hardware_profile import MICROBATCH_SIZES, profile_hardware

    config = None if path is None else load_config(path, overrides)
    if processes is None:
        processes = cores() if config is None else config.pipeline.processes
    sizes: tuple[int, ...] = MICROBATCH_SIZES
    if microbatch_sizes is not None:
        sizes = whole_numbers("microbatch_sizes", microbatch_sizes)
    hardware = profile_hardware(processes, config=config, sizes=sizes, steps=steps)
    return hardware.to_dict(), hardware_to_toml(hardware)
