"""A case is played twice, by a pipeline and by one process, and what they observe is compared."""

from __future__ import annotations

import contextlib
from hashlib import sha256
from pathlib import Path

import torch
from fuzz_case import EXPERTS, MODES, MODULES, Case
from fuzz_model import FP64, data_of, freeze, live_model
from fuzz_pipeline import gathered, is_first, pipeline_of, tokens_in_any_order
from fuzz_sides import InProcesses, Observed, OneProcess, Update, judge_model, weight_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from evenpipe import Pipeline
from evenpipe.model.fp64 import InFp64
from evenpipe.schedule.passes import SHARDING_KINDS

LIMITS = {False: (1e-10, 1e-8), True: (1e-6, 1e-5)}
"""Relative errors, of one step and of weights after several; by whether layers of transformers are compiled: fused,
the fp32 numbers of their norms and of softmax are rounded at other places, and logits in one process differ by 5e-8
with and without it. In other cases what they compute in fp32 is fp64 (`InFp64`)."""

VANISHING = 1e-4
"""Of the norm of all tensors: the norm of one tensor below which its error is measured against this. The gradients of
queries and keys of a sequence of one token are nothing but rounding, for one."""


BF16_ERRORS, BF16_LOSS = 3.0, 2e-2
"""Times the error of transformers' own bf16; and of a loss, whose error there may be nothing by chance."""


def play(case: Case, side: InProcesses | OneProcess) -> Observed:
    """All that is seen on the way."""
    seen: Observed = []
    if case.hooks != "none":
        side.add_hooks()
    changed = False  # since the start: then errors are those of training
    for number, step in enumerate(case.steps):
        late = "late " if changed else ""
        batches = [
            [data_of(case, batch, number, place, replica) for replica, batch in enumerate(replicas)]
            for place, replicas in enumerate(step.batches)
        ]
        if step.frozen is not None:
            side.freeze(step.frozen, number)
        if step.evaluates:
            with _arithmetic(case):
                evaluated = side.evaluate(batches[-1])
            seen += _named(f"{late}evaluated", evaluated)
        total = sum(map(weight_of, batches)) if step.counts == "labels" else 0.0
        update = Update(total, len(batches)) if total or step.counts == "batches" else None
        for data in batches:
            with _arithmetic(case):
                stepped = side.step(data, step.recorded, update)
            seen += _named(f"{late}step", stepped)
        seen.append((f"{late}gradients of step {number}", side.gradients()))
        if step.clips_to is not None:
            seen.append((f"{late}norm", side.clip(step.clips_to)))
            if step.clips_to != float("inf"):
                seen.append((f"{late}clipped gradients", side.gradients()))
        if step.updates:
            side.update()
            changed = True
        if step.clears:
            side.clear()
    seen.append(("late weights", side.weights()))
    return seen


def _arithmetic(case: Case) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if _compiles_transformers(case) else InFp64()


def _named(where: str, observed: Observed) -> Observed:
    return [(f"{where}: {what}", value) for what, value in observed]


# --- the comparison ---------------------------------------------------------------------------------------------------


def outcome_of(case: Case, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Plays a case; what is wrong and the hashes of what was seen, on every process. Raises what the pipeline
    raises. folder: the same for all processes, and for this case alone; it stays, since a process may be refused before
    another one writes its schedule."""
    folder.mkdir(exist_ok=True)
    with tokens_in_any_order(case), pipeline_of(case, folder) as pipeline:
        if case.bf16:
            return outcome_in_bf16(case, pipeline, folder / "narrow")
        fresh = pipeline.full_state_dict() if case.model.given_as == "config" else {}
        found = play(case, InProcesses(case, pipeline))
        scalars = [(what, value) for what, value in found if isinstance(value, (int, float))]
        complaints = _differences_between_processes(gathered(scalars))
        whole = has_whole_tensors(pipeline)
        hashes = {"programs": hash_of_programs(pipeline), "seen": hash_of(found)} if whole else {}
        own = _saved(case, pipeline, folder / "saved") if case.saves and case.model.family != MODULES else []
        if whole:
            own += compare(case, found, play(case, OneProcess(case, judge_model(case, fresh))))
        everywhere = gathered((own, hashes))
        complaints += [text for texts, _ in everywhere for text in texts]
        return complaints, next(one for _, one in everywhere if one)


def outcome_in_bf16(case: Case, pipeline: Pipeline, folder: Path) -> tuple[list[str], dict[str, str]]:
    """As `outcome_of`. Rounding is a throw of dice: the gradients of all parameters together may be as far from fp32 as
    a few times those of transformers' own bf16, which keeps some parameters in fp32."""
    ((batches,),) = (step.batches for step in case.steps)
    data = [data_of(case, batch, 0, 0, replica) for replica, batch in enumerate(batches)]
    side = InProcesses(case, pipeline)
    loss = dict(side.step(data, recorded=False, update=None))["loss"]
    gradients = side.gradients()
    stages = () if pipeline._state.sharded else pipeline._state.held.stages.values()  # shards are gathered in a step
    dtypes = {name: str(tensor.dtype) for stage in stages for name, tensor in stage.named_parameters()}
    dtypes = {name: dtype for held in gathered(dtypes) for name, dtype in held.items()}
    complaints: list[str] = []
    hashes: dict[str, str] = {}
    if is_first():  # transformers writes nothing on another rank
        live_model(case).save_pretrained(folder)  # type: ignore[operator]
    gathered(None)
    if has_whole_tensors(pipeline):
        hashes = {"programs": hash_of_programs(pipeline), "seen": hash_of([("loss", loss), ("gradients", gradients)])}
        model = judge_model(case, {})
        narrow_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        narrow_model.config._experts_implementation = "eager"
        freeze(narrow_model.named_parameters(), case, case.model.frozen)
        complaints += _other_dtypes(dtypes, narrow_model)
        exact, narrow = OneProcess(case, model), OneProcess(case, narrow_model)
        exact_loss, narrow_loss = (dict(one.step(data, recorded=False, update=None))["loss"] for one in (exact, narrow))
        if not abs(loss - exact_loss) <= BF16_ERRORS * abs(narrow_loss - exact_loss) + BF16_LOSS:
            complaints.append(f"the loss in bf16 is {loss}; expected {exact_loss} ({narrow_loss} in one process)")
        wanted = exact.gradients()
        if gradients.keys() != wanted.keys():
            complaints.append(f"gradients in bf16: {sorted(gradients.keys() ^ wanted.keys())} on one side only")
        else:
            error, yardstick = (_distance(side, wanted) for side in (gradients, narrow.gradients()))
            if not error <= BF16_ERRORS * yardstick + VANISHING:
                complaints.append(f"gradients in bf16 are off by {error:.1e}, in one process by {yardstick:.1e}")
    everywhere = gathered((complaints, hashes))
    return [text for texts, _ in everywhere for text in texts], next(one for _, one in everywhere if one)


def _distance(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative error of all tensors together."""
    squares = sum(float((gradients[name].double() - exact[name]).square().sum()) for name in exact)
    return (squares / (sum(float(tensor.double().square().sum()) for tensor in exact.values()) or 1.0)) ** 0.5


def _other_dtypes(dtypes: dict[str, str], narrow: nn.Module) -> list[str]:
    """What is computed with in another dtype than in transformers, which keeps some parameters in fp32."""
    expected = {name: str(tensor.dtype) for name, tensor in (*narrow.named_parameters(), *narrow.named_buffers())}
    return [
        f"{name} is computed with as {dtype}; expected {expected[name]}"
        for name, dtype in sorted(dtypes.items())
        if expected.get(name, dtype) != dtype
    ]


def has_whole_tensors(pipeline: Pipeline) -> bool:
    """The first process of the first replica, whatever its rank."""
    return pipeline.device == pipeline.replica == pipeline.context_rank == pipeline.tensor_rank == 0


def hash_of_programs(pipeline: Pipeline) -> str:
    """Of what is computed and communicated in a step and in an evaluation, without work for replicas."""
    layout = pipeline.layout
    text = [repr(sorted(layout.communicators.items())), repr(layout.layers)]
    for program in (layout.program, layout.evaluation):
        cells = [[str(item) for item in row if item and item.kind not in SHARDING_KINDS] for row in program.rows]
        text += [",".join(row) for row in cells]
    return sha256("\n".join(text).encode()).hexdigest()


def hash_of(observed: Observed) -> str:
    """Of every bit that was seen."""
    digest = sha256()
    for what, value in observed:
        digest.update(what.encode())
        tensors = value if isinstance(value, dict) else {"": torch.tensor(value)}
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu().contiguous()
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _differences_between_processes(seen: list[Observed]) -> list[str]:
    return [
        f"{what} is {value!r} on process 0 and {other!r} on process {rank}"
        for rank, theirs in enumerate(seen)
        for (what, value), (_, other) in zip(seen[0], theirs, strict=True)
        if repr(value) != repr(other)
    ]


def _compiles_transformers(case: Case) -> bool:
    return case.compile_layers and case.model.family != MODULES


def compare(case: Case, found: Observed, wanted: Observed) -> list[str]:
    """What differs by more than it may, in a line each."""
    one_step, several = LIMITS[_compiles_transformers(case)]
    complaints = []
    for (what, value), (expected_what, expected) in zip(found, wanted, strict=True):
        assert what == expected_what
        limit = several if what.startswith("late") else one_step
        if isinstance(expected, dict):
            complaints += [f"{what}: {text}" for text in _tensors_differ(value, expected, limit)]
        else:
            error = abs(value - expected) / max(abs(expected), VANISHING)
            if not error <= limit:
                complaints.append(f"{what}: {value!r}; expected {expected!r} (off by {error:.1e})")
    return complaints


def _tensors_differ(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> list[str]:
    complaints = [f"there is no {name}" for name in wanted.keys() - found.keys()]
    complaints += [f"there should be no {name}" for name in found.keys() - wanted.keys()]
    norm = sum(float(one.double().square().sum()) for one in wanted.values()) ** 0.5
    for name in wanted.keys() & found.keys():
        if found[name].shape != wanted[name].shape:
            complaints.append(f"{name} is {list(found[name].shape)}; expected {list(wanted[name].shape)}")
            continue
        difference = float(torch.linalg.vector_norm((found[name] - wanted[name]).double()))
        own = float(torch.linalg.vector_norm(wanted[name].double()))
        error = difference / (max(own, VANISHING * norm) or 1.0)
        if not error <= limit:
            complaints.append(f"{name} is off by {error:.1e} (its norm {own:.1e} of {norm:.1e})")
    return sorted(complaints)


def _saved(case: Case, pipeline: Pipeline, folder: Path) -> list[str]:
    """The folder that a pipeline writes holds its bits, for transformers and for another pipeline."""
    held = pipeline.full_state_dict()
    pipeline.save_pretrained(folder)
    gathered(None)
    read: dict[str, Tensor] = {}
    if case.model.family not in EXPERTS:  # whose folder does not say how products of experts are computed in fp64
        with contextlib.closing(
            Pipeline(
                folder,
                vocabulary=case.random("read").choice(MODES),
                layers_per_stage=[0] * (case.processes - 1) + [case.model.layers],
                parameter_dtype=FP64,
                self_check=False,
            )
        ) as again:
            read = again.full_state_dict()
    if not held and not read:
        return []
    bits = AutoModelForCausalLM.from_pretrained(folder, dtype=FP64).state_dict()
    return _other_bits("saved", held, bits) + _other_bits("read again", read, bits)


def _other_bits(where: str, found: dict[str, Tensor], bits: dict[str, Tensor]) -> list[str]:
    """`bits` are those that transformers loads, which has some routers in fp32 only."""
    complaints = [f"{where}: there is no {name}" for name in found.keys() - bits.keys()]
    same = {name: torch.equal(bits[name], found[name].to(bits[name].dtype)) for name in found.keys() & bits.keys()}
    return complaints + [f"{where}: {name} has other bits" for name in same if not same[name]]
