"""`evenpipe doctor [--processes N] [-o PAGE.md]`."""

from __future__ import annotations

from pathlib import Path

from evenpipe.cli.declarations import Count
from evenpipe.cli.options import check_output
from evenpipe.cli.printing import progress_line, say, say_json


def run(*, processes: Count | None = None, output: Path | None = None, json_: bool = False) -> int:
    """Examine this machine: versions and links, gradients in every axis, speed of transfers and steps.

    --processes N                 number of processes; default: one per GPU, or 4 without one
    -o, --output FILE.md          write the page there, and its figures as JSON beside it

    Compares the gradients of small models with transformers in one process, for every axis that fits the processes,
    measures products, hops, collectives and copies, and compares steps with their predictions. Takes up to ten minutes.
    Whatever fails or hangs is a row of the page. The exit code is 1 if there is a fault.
    """
    import json

    import torch

    from evenpipe.given import write_text
    from evenpipe.train.doctor import doctor
    from evenpipe.train.doctor_page import page_text, page_values

    check_output(output, ".md")
    with progress_line() as show:
        outcomes = doctor(processes or torch.cuda.device_count() or 4, say=show)
    text, values = page_text(outcomes), page_values(outcomes)
    if output is not None:
        write_text(output, text)
        write_text(output.with_suffix(".json"), json.dumps(values, indent=1) + "\n")
    if json_:
        say_json(values)
    elif output is None:
        say(text)
    else:
        say(f"wrote {output}: {len(values['faulty'])} of {values['parts']} parts have a fault")
    return 1 if values["faulty"] else 0
