"""Write docs/measurements.md from the files in benchmarks/results.

    python tools/measurements_page.py

`make figures` measures again first. A test compares the page with the files.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from evenpipe.train import doctor_page

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FILE = ROOT / "docs" / "measurements.md"
URL = "https://github.com/evenpipe/evenpipe/blob/main/benchmarks/results"
MIB, GIB = 2**20, 2**30

sys.path.append(str(ROOT / "benchmarks"))
from figures import FIGURES  # noqa: E402

BEGIN = """\
# Measurements

Every table is written from a file of results by `tools/measurements_page.py`. The line under it names the script of
`benchmarks/`, the processor, the commit and the day. `make figures` repeats all that this machine can measure. Several
GPUs have not been measured ([status](status.md)). "Error" is predicted over measured, less 1.
"""


def results(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return data


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(doctor_page.table(header, rows))


def source(*names: str) -> str:
    """Return the line that says how and when the figures were measured."""
    lines = []
    for name in names:
        data = results(name)
        cores = "" if data["machine"].startswith("NVIDIA") or "cores" not in data else f", {data['cores']} cores"
        lines.append(
            f"<small>[{name}.json]({URL}/{name}.json): `{FIGURES[name].command}`; {data['machine']}{cores}; commit"
            f" {data['commit']}, {data['date']}</small>"
        )
    return "  \n".join(lines)


def section(title: str, text: str, body: str, *names: str) -> str:
    parts = [f"## {title}" if title else "", text.strip(), body, source(*names)]
    return "\n\n".join(part for part in parts if part) + "\n"


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:+.{digits}f} %"


# --- on CPUs ---------------------------------------------------------------------------------------------------------


def vocabulary_modes() -> str:
    cases = results("balance_2_cores")["cases"]
    rows = []
    for arm in cases[0]["arms"]:
        name = "torch's `Schedule1F1B`" if arm == "torch 1F1B" else f"`{arm}`"
        rows.append([name, *(f"{case['arms'][arm]['step_seconds']:.2f} s" for case in cases)])
    best = [case["arms"]["vocab-2"] for case in cases]
    rows.append(["`vocab-2`, predicted", *(f"{arm['predicted_seconds']:.2f} s" for arm in best)])
    rows.append(
        ["`first-last` over `vocab-2`: steps / ideal", *(f"{a['vs_first_last']:.2f} / {a['ideal']:.2f}" for a in best)]
    )
    text = """
Steps alternate between the modes and torch's own runtime. Two processes with one thread each; a Llama of 8 layers, 512
wide; 16 microbatches of 128 tokens in fp32; medians of 8 steps. "Ideal" counts only layers and output layer.
"""
    header = ["output layer costs as much as", *(f"{case['ratio']:.0f} layers" for case in cases)]
    return section("Vocabulary modes", text, table(header, rows), "balance_2_cores")


def schedules() -> str:
    cases = results("balance_schedules")["cases"]
    rows = []
    for ratio in sorted({case["ratio"] for case in cases}):
        gains = [case["arms"]["vocab-2"]["vs_first_last"] for case in cases if case["ratio"] == ratio]
        spreads = [case["arms"]["vocab-2"]["busy_spread"] for case in cases if case["ratio"] == ratio]
        rows.append([f"{ratio:.0f} layers", f"{min(gains):.2f} to {max(gains):.2f}", f"{100 * max(spreads):.1f} %"])
    number = len({case["schedule"] for case in cases})
    text = f"The same with a model 256 wide and 8 microbatches, in {number} schedules:"
    header = ["output layer", "`first-last` over `vocab-2`, steps", "difference of the devices' busy time, at most"]
    return section("", text, table(header, rows), "balance_schedules")


def against_torch() -> str:
    rows = []
    for case in results("against_torch")["cases"]:
        low, middle, high = sorted(case["step_ratio"])
        ratio = case["tensor_bytes_ratio"]
        rows.append(
            [
                f"`{case['schedule']}`",
                {"none": "none", "full": "all layers"}[case["checkpointing"]],
                f"{middle:.2f} ({low:.2f} to {high:.2f})",
                f"{ratio:.2f}",
            ]
        )
    text = """
torch's `torch.distributed.pipelining` runs the same orders of the same model on the same two processes, with the whole
output layer on the last stage (`first-last`). Ratios below 1 are in favour of evenpipe; brackets give the 95 %
bootstrap interval of the median of 40 interleaved steps, bytes are those of the process with the worst ratio.
"""
    header = ["schedule", "recomputation", "step time, evenpipe over torch", "peak tensor bytes"]
    return section("Against torch's pipeline runtime", text, table(header, rows), "against_torch")


def head() -> str:
    rows = []
    for case in results("linear_cross_entropy_2_cores")["cases"]:
        arm = case["arms"]["evenpipe"]
        rows.append(
            [f"{case['vocabulary']:,}", case["dtype"], f"{arm['times_as_fast']:.2f}", f"{arm['memory_ratio']:.2f}"]
        )
    text = "A linear layer with cross-entropy, 2,048 tokens, 512 wide, forward and backward, against torch's."
    header = ["vocabulary", "dtype", "times as fast", "memory, ratio"]
    return section("`evenpipe.linear_cross_entropy`", text, table(header, rows), "linear_cross_entropy_2_cores")


def offload() -> str:
    rows = []
    for case in results("offload_memory")["cases"]:
        rows.append(
            [
                f"`{case['schedule']}`, {case['microbatches']} microbatches",
                {"none": "kept", "all": "in a file"}.get(case["activations"], case["activations"]),
                f"{max(case['grown']) / MIB:,.0f} MiB",
                f"{max(case['predicted']) / MIB:,.0f} MiB",
                f"{statistics.median(case['seconds']):.2f} s",
            ]
        )
    text = """
Growth of the resident memory of the fullest process during a step, with activations on it and in a file. Copies from a
GPU (`benchmarks/offload_gpu.py`) have not been measured yet.
"""
    header = ["schedule", "activations", "measured", "predicted", "step"]
    return section("Activations on the host", text, table(header, rows), "offload_memory")


def long_sequences() -> str:
    data = results("long_sequences_2_cores")
    rows = []
    for case in data["cases"]:
        rows.append(
            [
                case["slices"],
                f"{case['step_seconds']:.2f} s",
                f"{case['predicted_seconds']:.2f} s",
                f"{max(case['peak_bytes']) / MIB:,.0f} MiB",
                f"{max(case['estimated_bytes']) / MIB:,.0f} MiB",
            ]
        )
    tokens = data["settings"]["tokens"]
    text = f"Microbatches of one sequence of {tokens:,} tokens, cut into slices; 2 microbatches, 1F1B."
    header = ["slices", "step", "predicted", "peak memory", "estimated"]
    return section("Slices of sequences", text, table(header, rows), "long_sequences_2_cores")


def tensor_ranks() -> str:
    layouts = {
        "4 x 1": "4 devices",
        "2 x 2": "2 devices of 2 tensor ranks",
        "2 x 1, dp 2": "2 devices, 2 replicas",
        "1 x 4": "4 tensor ranks",
    }
    rows = []
    for case in results("tensor_ranks_2_cores")["cases"]:
        for arm, figures in case["arms"].items():
            rows.append(
                [
                    f"`{case['mode']}`",
                    layouts[arm],
                    f"{figures['step_seconds']:.2f} s",
                    f"{figures['held_bytes'] / MIB:.1f} MiB",
                ]
            )
    text = "Four processes on two cores; the output layer costs as much as 8 layers."
    header = ["mode", "layout", "step", "parameters and gradients"]
    return section("Tensor ranks", text, table(header, rows), "tensor_ranks_2_cores")


def tensor_overlap() -> str:
    rows = []
    for case in results("tensor_overlap_2_cores")["cases"]:
        seconds = case["seconds"]
        times = f"{seconds['none']:.3f} s", f"{seconds['ring']:.3f} s", f"{case['ratio']:.2f}"
        rows.append([f"`{case['schedule']}`", *times])
    text = 'Steps with `tensor_overlap` "none" and "ring". On a CPU, transfers share the cores with products.'
    header = ["schedule", "none", "ring", "ratio"]
    return section("", text, table(header, rows), "tensor_overlap_2_cores")


def slow_device() -> str:
    rows = []
    for case in results("slow_device_2_cores")["cases"]:
        before, after = case["measured_seconds"]
        times = f"{before:.3f} s", f"{after:.3f} s", f"{case['bound_seconds']:.3f} s"
        rows.append([f"`{case['schedule']}`", f"`{case['vocabulary']}`", *times, "yes" if case["taken"] else "no"])
    text = """
Steps on two devices of which one takes 1.5 times as long, in the order arranged for equal devices and in the order
arranged by the measured passes. The bound holds for every order with as many microbatches in flight.
"""
    header = ["schedule", "mode", "equal devices", "measured passes", "bound", "taken"]
    return section("Orders arranged by measured passes", text, table(header, rows), "slow_device_2_cores")


def experts() -> str:
    rows = []
    ways = "pairs, nothing overlapped", "rows, nothing overlapped", "own rows first, 2 columns"
    for name in ("expert_exchange_2_cores", "expert_network_2_cores"):
        for case in results(name)["cases"]:
            if case["way"] not in ways or case.get("processes", 4) != 4:
                continue
            rate = case.get("megabytes_per_second")
            link = "TCP, 400 Mbit/s" if "network" in name else "shared memory" if rate is None else f"{rate:.0f} MB/s"
            times = (f"{1e3 * case['passes'][kind]['seconds']:.0f} ms" for kind in ("F", "B", "I"))
            rows.append([link, case["way"], *times])
    text = """
One layer of 16 experts, 4 of them per token, shared by 4 processes over a link of a given rate, and by 2 machines that
are network namespaces.
"""
    header = ["link", "exchange of rows", "F", "B", "I"]
    return section(
        "Experts shared by replicas", text, table(header, rows), "expert_exchange_2_cores", "expert_network_2_cores"
    )


def generation() -> str:
    rows = []
    for row in results("schedules")["rows"]:
        rows.append(
            [
                f"`{row['schedule']}`",
                row["devices"],
                f"{row['microbatches']:,}",
                f"{row['items']:,}",
                f"{row['wall_seconds']:.2f} s",
                f"{row['peak_mib']:,} MiB",
            ]
        )
    text = (
        "Time to generate, transform, prove and simulate a schedule with `vocab-2`, in processor seconds of one thread."
    )
    header = ["schedule", "devices", "microbatches", "passes and transfers", "time", "memory"]
    return section("Making schedules", text, table(header, rows), "schedules")


def planning() -> str:
    rows = []
    for case in results("plan_times_2_cores")["cases"]:
        rows.append([f"`{case['command']}`", f"{statistics.median(case['seconds']):.0f} s"])
    return section("Planning", "From the command to its end.", table(["command", "time"], rows), "plan_times_2_cores")


# --- predictions -----------------------------------------------------------------------------------------------------


def predicted_steps() -> str:
    cases = results("measured_2_cores")["cases"]
    modes = len({(case["schedule"], case["vocabulary"]) for case in cases})
    steps = max(abs(case["step_error"]) for case in cases)
    idle = max(abs(case["idle_error"]) for case in cases)
    text = f"""
Steps of {modes} schedules and modes with 1 to 16 microbatches, simulated from pass times that `evenpipe profile`
measured: all {len(cases)} are within {100 * steps:.1f} %, and the idle time of every device is within
{100 * idle:.1f} % of the step. The same on your machine:

<!-- run small -->
```sh
evenpipe train examples/zbv.toml --trace
evenpipe draw runs/zbv/traces/step-00000003.json -o measured.html
evenpipe profile examples/zbv.toml -o costs.toml
evenpipe simulate --compare zbv,1f1b --devices 2 --microbatches 8 --costs costs.toml
```
"""
    return section(
        "Predicted from measured passes",
        text,
        "![A step on two processes, measured and predicted](measured.svg)",
        "measured_2_cores",
    )


def planned() -> str:
    rows = []
    for case in results("planned_2_cores")["cases"]:
        rows.append(_planned(case, case["predicted_seconds"], case["step_seconds"]))
    for name in ("planned_axes_2_cores", "planned_experts_2_cores"):
        for case in results(name)["cases"]:
            row = _planned(case, case["predicted"]["seconds"], case["measured"]["seconds"])
            rows.append([f"16 experts, {row[0]}" if "experts" in name else row[0], *row[1:]])
    text = """
Plans for this machine, from `evenpipe profile --hardware`. The plans with `dp`, `tp` or `cp` use four processes on two
cores, on which steps of the same plan differ by 15 to 35 % between runs.
"""
    header = ["plan", "predicted", "measured", "error"]
    names = "planned_2_cores", "planned_axes_2_cores", "planned_experts_2_cores"
    return section("Plans", text, table(header, rows), *names)


def _planned(case: dict[str, Any], predicted: float, measured: float) -> list[str]:
    return [
        f"{case['plan']}: `{case['configuration']}`",
        f"{predicted:.2f} s",
        f"{measured:.2f} s",
        percent(predicted / measured - 1),
    ]


def example_models() -> str:
    modes = "first-last", "redistribute", "vocab-1", "vocab-2"
    rows = []
    plans = json.loads((ROOT / "benchmarks" / "golden" / "plans.json").read_text(encoding="utf-8"))
    for model, result in plans.items():
        if not result["plans"]:
            rows.append([model, result["gpus"], "none fits", *[""] * len(modes)])
            continue
        best = result["plans"][0]
        seconds = {plan["vocabulary"]: plan["seconds"] for plan in result["vocabulary"]}
        more = (percent(seconds[mode] / best["seconds"] - 1) if mode in seconds else "" for mode in modes)
        rows.append([model, result["gpus"], f"`{best['name']}`", *more])
    text = """
The best plan of each model in `examples/models` on H100 with 80 GiB, sequences of 4,096 tokens and 8 sequences per GPU,
and how much longer the step of the best pipeline with each vocabulary mode is. These are predictions, from
`benchmarks/golden/plans.json`; `python benchmarks/golden.py --only plans` compares them with today's.
"""
    header = ["model", "GPUs", "best plan", *(f"`{mode}`" for mode in modes)]
    return section("Plans of example models", text, table(header, rows))


def published_steps() -> str:
    rows = []
    for name, group in results("published_steps")["summary"].items():
        fitted = "" if group["fitted"] is None else f"{100 * group['fitted']:.1f} %"
        rows.append([name, group["rows"], fitted, f"{100 * group['other']:.1f} %", percent(group["mean"])])
    text = """
Steps of Megatron-LM that others have measured, of Llama 3.1 8B, 70B and 405B on up to 256 GPUs, predicted from data
sheets and measurements of kernels. The share of the peak that products reach is fitted to every other row on H100 and
B200, and to another model on A100. Steps with context ranks on A100 and of 16,384 tokens are predicted too fast; the
reason is not known.
"""
    header = ["rows", "number", "mean error, fitted rows", "other rows", "mean with sign"]
    return section("Published steps", text, table(header, rows), "published_steps")


def published_rows() -> str:
    names = {
        "dgxc-25.02": "NVIDIA's recipes, 8 to 2,304 H100",
        "foundry-A100-80G": "LLM Foundry, FSDP on 8 to 64 A100, up to 4,096 tokens",
        "foundry-A100-80G, long": "LLM Foundry, 8,192 to 65,536 tokens",
        "torchtitan-A100": "torchtitan, FSDP on 64 A100",
        "zero-bubble": "zero-bubble paper, 8 to 32 A100",
    }
    groups: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for row in results("published_rows")["rows"]:
        if row["predicted"] is not None:
            groups[row["group"]].append(row)
    rows = []
    for name, members in groups.items():
        errors = [row["predicted"] / row["measured"] - 1 for row in members]
        inside = [row["likely"] is None or row["likely"][0] <= row["measured"] <= row["likely"][1] for row in members]
        rows.append(
            [
                names[name],
                len(members),
                f"{100 * statistics.mean(map(abs, errors)):.1f} %",
                percent(statistics.mean(errors)),
                percent(max(errors, key=abs)),
                f"{100 * statistics.mean(inside):.0f} %",
                sum(row["verdict"] == "does not fit" for row in members),
            ]
        )
    text = """
Four other sources, each with the layout and the options that it names (`benchmarks/published/README.md`). One constant
is fitted to torchtitan's rows: collectives between nodes lengthen the passes beside them by half of their time. All of
these runs fitted in memory. LLM Foundry's kernel for long sequences is not timed.
"""
    header = ["rows", "number", "mean error", "with sign", "worst", "in the range of the plan", '"does not fit"']
    return section("", text, table(header, rows), "published_rows")


def published_models() -> str:
    cells: dict[tuple[str, int, str, str], dict[int, str]] = {}
    for case in results("published_models_a100")["cases"]:
        if case["kind"] != "step" or case["tokens"] != 2048 or case["mode"] == "interlaced":
            continue
        if case["schedule"] != ("v-half" if case["model"] in ("7B", "30B") else "1f1b"):
            continue
        key = case["model"], case["devices"], case["schedule"], case["mode"]
        paper = "" if case["paper_mfu"] is None else f" ({100 * case['paper_mfu']:.1f})"
        cells.setdefault(key, {})[case["vocabulary"]] = f"{100 * case['mfu']:.1f}{paper}"
    vocabularies = sorted({vocabulary for row in cells.values() for vocabulary in row})
    rows = []
    for (model, devices, schedule, mode), row in cells.items():
        rows.append([f"{model}, {devices}", f"`{schedule}`", f"`{mode}`", *(row.get(v, "") for v in vocabularies)])
    text = """
MFU in % of the models of the Vocabulary Parallelism paper ([arXiv 2411.05288](https://arxiv.org/abs/2411.05288)) on
A100, 128 microbatches of 2,048 tokens, simulated from data sheets; brackets give the measurements of the paper. Here,
`redistribute` is the best of several splits. The paper measured gains of `vocab-1` over `redistribute` at 256k of 29,
37 and 58 %.
"""
    header = ["model, devices", "schedule", "mode", *(f"{vocabulary // 1000}k" for vocabulary in vocabularies)]
    return section("The paper's models", text, table(header, rows), "published_models_a100")


# --- on one GPU ------------------------------------------------------------------------------------------------------


def one_gpu() -> str:
    names = {
        "evenpipe": "evenpipe, `vocab-2`, fp32 parameters",
        "Trainer": "transformers' Trainer, bf16 autocast",
        "loop": "a plain loop, bf16 autocast, loss in 8 chunks",
        "loop, bf16": "the same, all in bf16",
    }
    rows = []
    for case in results("gpu_one_h100")["cases"]:
        tokens, mfu, peak = f"{case['tokens_per_second']:,.0f}", f"{100 * case['mfu']:.1f} %", case["peak_bytes"]
        rows.append([names.get(case["name"], case["name"]), tokens, mfu, f"{peak / MIB:,.0f} MiB"])
    text = """
A Llama of 1.35B parameters (16 layers, 2,048 wide, 128,256 tokens), 4 microbatches of 2 x 4,096 tokens, fused AdamW,
not compiled. With one device, `first-last` needs 12,023 MiB less than `vocab-2`, which keeps a second microbatch in
flight.
"""
    header = ["", "tokens/s", "MFU", "peak memory"]
    return section("One H100", text, table(header, rows), "gpu_one_h100")


def output_layer() -> str:
    rows = []
    for case in results("gpu_output_layer_h100")["cases"]:
        if case["products"] != 3:
            continue
        peak = f"{case['peak_bytes'] / MIB:,.0f} MiB" if "peak_bytes" in case else ""
        name = case["name"].replace(", auto: S + T", "").replace("three products", "the three products alone")
        rows.append([name, f"{1e3 * case['seconds']:.1f} ms", f"{100 * case['share']:.0f} %", peak])
    text = "Output layer and loss, forward and backward: 4,096 tokens, 4,096 wide, 128,256 rows, bf16."
    header = ["", "time", "speed of the products", "peak memory"]
    return section("One H100: output layer", text, table(header, rows), "gpu_output_layer_h100")


def shards() -> str:
    rows = []
    for case in results("gpu_shards_h100")["cases"]:
        seconds = sum(case["seconds"][kind] for kind in ("S", "C", "T") if kind in case["seconds"])
        paper = "" if case["paper_efficiency"] is None else f"{100 * case['paper_efficiency']:.0f} %"
        efficiency = f"{100 * case['efficiency']:.0f} %"
        rows.append([f"`{case['mode']}`", case["devices"], f"{1e3 * seconds:.2f} ms", efficiency, paper])
    text = """
One shard of that layer on p devices. Efficiency is the time of the whole layer over p times the time of a shard; the
paper's is from A100.
"""
    header = ["mode", "p", "S, C and T", "efficiency", "paper"]
    return section("One H100: shards", text, table(header, rows), "gpu_shards_h100")


def planned_gpu() -> str:
    rows = []
    for case in results("gpu_planned_steps_h100")["cases"]:
        planned, measured = case["predicted"], case["measured"]
        times = []
        for key in ("seconds", "F", "B"):
            error = percent(planned[key] / measured[key] - 1, 0)
            times.append(f"{1e3 * measured[key]:.0f} / {1e3 * planned[key]:.0f} ms ({error})")
        peaks = f"{measured['bytes'] / GIB:.2f} / {planned['bytes'] / GIB:.2f} GiB"
        rows.append([case["case"], *times, peaks])
    text = """
Layers of real models with fp32 parameters, bf16 products and 4 microbatches: measured / planned. Plans take a share of
the peak that fits steps of many GPUs; one GPU alone reaches more.
"""
    header = ["layers", "step", "F", "B", "peak memory"]
    return section("One H100: plans", text, table(header, rows), "gpu_planned_steps_h100")


def gpu_memory() -> str:
    rows = []
    for case in results("gpu_memory_h100")["cases"]:
        errors = [device["estimated"] / device["allocated"] - 1 for device in case["devices"]]
        peak = max(device["allocated"] for device in case["devices"])
        rows.append([case["case"], f"{peak / MIB:,.0f} MiB", f"{percent(min(errors))} to {percent(max(errors))}"])
    text = """
Processes that share the GPU, a model 1,024 wide: `torch.cuda.max_memory_allocated` and the error of the estimate.
Transfers go through host memory here, which holds tensors longer than a network would.
"""
    header = ["case", "peak of the fullest device", "error of the estimates"]
    return section("One H100: memory", text, table(header, rows), "gpu_memory_h100")


def gpu_passes() -> str:
    text = """
Matrix products, attention, and the passes of Llama 3 8B. The constants of `costs/hardware.py` and `costs/work.py` for
this card come from these files.
"""
    return section("One H100: products and passes", text, "", "gpu_products_h100", "gpu_pass_times_h100")


def gpu_gradients() -> str:
    data = results("gpu_test")
    cases = data["cases"].values()
    text = f"""
Four processes that share the GPU have the gradients of one process: {sum(case["passed"] for case in cases)} of
{len(data["cases"])} cases pass, with vocabulary shards, tensor ranks, context ranks, slices, shared experts, sharded
replicas, offload, checkpointing and compiled layers.
"""
    return section("One H100: gradients", text, "", "gpu_test")


SECTIONS = (
    *(vocabulary_modes, schedules, against_torch, head, offload, long_sequences, tensor_ranks),
    *(tensor_overlap, slow_device, experts),
    *(
        generation,
        planning,
        predicted_steps,
        planned,
        example_models,
        published_steps,
        published_rows,
        published_models,
    ),
    *(one_gpu, output_layer, shards, planned_gpu, gpu_memory, gpu_passes, gpu_gradients),
)


def draw() -> str:
    """Return the page."""
    return "\n".join([BEGIN, *(section() for section in SECTIONS)])


def main() -> None:
    FILE.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
