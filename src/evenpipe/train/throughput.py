"""Device utilization of a run: model FLOP/s, their share of the peak, and peak memory."""

from __future__ import annotations

import resource

import torch

from evenpipe.costs.hardware import known_gpu
from evenpipe.model import training_flops
from evenpipe.runtime.pipeline import Pipeline
from evenpipe.runtime.step_plan import DTYPES
from evenpipe.train.build import compute_dtype
from evenpipe.train.config import Config


class Throughput:
    """Model FLOP/s from tokens per second. Making one is collective."""

    def __init__(self, pipeline: Pipeline, config: Config) -> None:
        self._flops_per_token = training_flops(pipeline.description, config.data.sequence_length)
        peaks = [row[0] for row in pipeline.gather_numbers([_peak_flops(pipeline.torch_device, config)])]
        self._processes = len(peaks)
        self._peak = sum(peaks) if all(peaks) else None

    def teraflops_per_second(self, tokens_per_second: float) -> float:
        """Return model TFLOP/s of each process: `training_flops` per token * tokens per second / processes / 1e12."""
        return self._flops_per_token * tokens_per_second / self._processes / 1e12

    def utilization(self, tokens_per_second: float) -> float | None:
        """Return model FLOP/s relative to the peak of all GPUs (MFU, 0 to 1); None unless every peak is known."""
        return None if self._peak is None else self._flops_per_token * tokens_per_second / self._peak


def _peak_flops(torch_device: torch.device, config: Config) -> float:
    """Return the data-sheet peak of this process's GPU in FLOP/s; 0 if it is not known."""
    if torch_device.type != "cuda":
        return 0.0
    dtype = compute_dtype(config) or torch.bfloat16
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 0.0  # products in TF32, whose peak is not in the table
    known = known_gpu(torch.cuda.get_device_name(torch_device))
    return 0.0 if known is None else known.peak_flops.get(DTYPES[dtype], 0.0)


class PeakMemory:
    """Peak memory of this process: allocated on a GPU, since the last `restart` or `take`; on the CPU the largest
    resident set of the process so far."""

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self.of_run = 0
        """Largest peak so far, in bytes, as of the last call of a method."""

    def take(self) -> int:
        """Return the peak in bytes, and reset it."""
        peak = self._peak_bytes()
        self.of_run = max(self.of_run, peak)
        if self._torch_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._torch_device)
        return peak

    def restart(self) -> None:
        """Reset the peak: memory of evaluations and saves counts for the run, but not for steps."""
        self.take()

    def _peak_bytes(self) -> int:
        if self._torch_device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._torch_device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
