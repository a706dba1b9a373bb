"""`evenpipe schema [WHAT]`."""

from __future__ import annotations

import json
from typing import Literal

from evenpipe.cli.printing import say


def run(kind: Literal["config", "costs", "hardware", "trace"] = "config") -> int:
    """Print the JSON schema of a file, with which editors complete and check it.

    WHAT  config: a configuration of evenpipe train; costs: a file of --costs; hardware: a file of --hardware;
          trace: a trace of training

    For an editor with Taplo or Even Better TOML: evenpipe schema > evenpipe.schema.json, and as the first line of the
    configuration: #:schema ./evenpipe.schema.json
    """
    from evenpipe.declaration import file_schema

    match kind:
        case "config":
            from evenpipe.train.config_help import configuration_schema

            schema = configuration_schema()
        case "costs":
            from evenpipe.schedule import Costs

            schema = file_schema(Costs, "evenpipe cost file")
        case "hardware":
            from evenpipe.costs.hardware import Hardware

            schema = file_schema(Hardware, "evenpipe hardware file")
        case "trace":
            from evenpipe.schedule.trace_file import TraceTable

            schema = file_schema(TraceTable, "evenpipe trace")
    say(json.dumps(schema, indent=1))
    return 0
