"""torch's record of the last operations of every process group, for a run that failed."""

from __future__ import annotations

from pathlib import Path

import torch


def write_flight_recorder(folder: Path, rank: int) -> None:
    """Write the record of this process as JSON into `folder`: each operation with its group, sizes and state. Write
    nothing if there are no operations.

    torch keeps TORCH_FR_BUFFER_SIZE operations (default: 2,000). It has no public function for the record yet.

    Raises OSError.
    """
    library = torch._C._distributed_c10d
    # The first function records only NCCL groups, the second one only gloo groups.
    for name, kind in (("_dump_nccl_trace_json", "nccl"), ("_dump_fr_trace_json", "gloo")):
        dump = getattr(library, name, None)
        content: bytes = b"" if dump is None else dump()
        if b'"entries":[{' in content:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{kind}-{rank}.json").write_bytes(content)
