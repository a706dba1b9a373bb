"""`evenpipe explain MODEL --gpus N ...`."""

from __future__ import annotations

from evenpipe.cli.declarations import Count
from evenpipe.cli.options import SEQUENCE, Gpus, bytes_of, read_model
from evenpipe.cli.printing import progress_line, say, say_json

SEQUENCES_PER_GPU = 8
"""Default batch: enough microbatches for a pipeline of all GPUs."""


def run(
    model: str,
    *,
    gpus: Gpus,
    hardware: str = "H100-80G",
    gpu_memory: str | None = None,
    sequence: Count | None = None,
    batch: Count | None = None,
    pp: Count | None = None,
    tp: Count | None = None,
    kernels: str = "transformers",
    output: str | None = None,
    json_: bool = False,
) -> int:
    """Print figures, one picture, and the next commands.

    MODEL              hub name, folder or config.json
    --batch SEQUENCES  per step over all GPUs; default: 8 per GPU
    --pp P             devices of the pipeline, at least 2; default: the best from 4 on
    --tp T             tensor parallelism; default: the best
    -o, --output FILE  write the picture as a page (.html), .svg, .png or .json instead of printing it

    Needs no GPU and no weights: times are computed from the shapes of the model and the speed of the hardware, memory
    as by evenpipe estimate.

    exit codes: 0 done, 2 the input is wrong
    """
    from evenpipe.schedule.collection import collecting_rarely

    with collecting_rarely():
        from evenpipe.costs.hardware import find_hardware
        from evenpipe.draw import check_file, draw, terminal
        from evenpipe.plan.explanation import explain
        from evenpipe.plan.problem import problem_of

    if output is not None:
        check_file(output)
    machine = find_hardware(hardware)
    description = read_model(model)
    problem = problem_of(
        description,
        machine,
        gpus=gpus,
        sequence=sequence or min(SEQUENCE, description.maximum_length or SEQUENCE),
        sequences_per_step=batch or SEQUENCES_PER_GPU * gpus,
        memory_bytes=bytes_of(gpu_memory),
        dtype="fp32" if machine.torch_device == "cpu" else "bf16",
        kernels=kernels,
    )
    problem.bytes.keep_traces()
    with progress_line() as show:
        explanation = explain(problem, model, pp=pp, tp=tp, progress=show)
    if output is not None:
        draw(explanation.timelines(), output, title=f"{model}: one step", unit_seconds=1.0)
    if json_:
        say_json(explanation.to_dict())
        return 0
    say(f"{explanation.text()}\n")
    if output is None:
        print(terminal(explanation.timelines(), unit_seconds=1.0, overview=True))
    else:
        say(f"wrote {output}\n")
    say("\n".join(["Next commands", *(f"  {command}" for command in explanation.commands())]))
    return 0
