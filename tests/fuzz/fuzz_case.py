"""One random pipeline: its model, its layout, and what it does. Drawn from a seed and a number alone."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from families import EXPERTS, FAMILIES, PROMISED_EXPERTS
from random_orders import random_order

from evenpipe.errors import InputError
from evenpipe.recipe.parallelism import divisor_of
from evenpipe.schedule import MODES, Order, add_slices, generate
from evenpipe.schedule.generators import SCHEDULES
from evenpipe.schedule.registry import options_of

MODULES = "modules"
"""In place of a family: plain modules."""

WITHOUT_POSITIONS = {"bloom", MODULES}
"""Their sequences cannot be cut, and documents of a row not kept apart, either."""
WITHOUT_MASK = {MODULES}
TORCH_CLASSES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
GIVEN_AS = ("name", "order", "function", "file", "planned", "program", "program file")
FROZEN = ("embedding", "head", "layers", "all but layers", "vectors", "some", "some", "everything")
RULES_BROKEN = 0.02
"""How often a rule is not kept: then all processes have to refuse the pipeline, or the step."""

CHECKPOINTING = ("none", "full", "selective")


class Shown:
    """Prints the fields that are not at their defaults."""

    def __str__(self) -> str:
        shown = []
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
            if value != default:
                text = "[" + ", ".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)
                shown.append(f"{entry.name}={text}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, kw_only=True)
class Model(Shown):
    family: str
    layers: int
    vocabulary: int
    tied: bool = False
    padding: int | None = None
    """The token whose row of the embedding gets no gradient."""
    key_value_heads: int = 1
    head_bias: bool = False
    """Of plain modules."""
    norm: bool = True
    """Of plain modules."""
    unusual_layers: bool = False
    """Of plain modules: some are skipped, or pass no gradient on."""
    changes_input: bool = False
    """Of plain modules: some change their input in place, which checkpointing refuses, as torch's own does."""
    router_loss: float = 0.0
    """Its coefficient; 0: there is none."""
    frozen: str = "nothing"
    given_as: str = "live"
    differs: bool = False
    """Every replica has drawn weights for itself; those of the first one hold."""


@dataclass(frozen=True, kw_only=True)
class Given(Shown):
    """A schedule as `Pipeline` is given it."""

    name: str
    """Of `SCHEDULES` or torch's class; "random": any sound order."""
    options: dict[str, Any] = field(default_factory=dict)
    given_as: str = "name"
    recomputed: tuple[int, ...] = ()
    """Stages with R."""
    idle: bool = False
    """With empty slots here and there."""
    other_mode: str | None = None
    """The mode that a program is planned for, where it is not the pipeline's own."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Batch(Shown):
    """What one replica is given for one step."""

    sequences: int
    """Per microbatch."""
    tokens: int
    padded: bool = False
    positions: str = "default"
    weights: str = "default"
    labels: str = "default"


@dataclass(frozen=True, kw_only=True)
class Step(Shown):
    """Forward and backward of `batches`, and what is done with the gradients."""

    batches: tuple[tuple[Batch, ...], ...]
    """[accumulation][replica]."""
    evaluates: bool = False
    recorded: bool = False
    clips_to: float | None = None
    frozen: str | None = None
    """What is frozen from this step on; None: as before."""
    updates: bool = True
    clears: bool = True
    counts: str = "its own batch"
    """Over what a batch is a mean: "its own batch", the "labels" of all batches of the step, which makes them one
    batch, or the mean of its "batches" (`accumulate`)."""


@dataclass(frozen=True, kw_only=True)
class Case(Shown):
    seed: int
    number: int
    processes: int
    replicas: int = 1
    tp: int = 1
    cp: int = 1
    context_exchange: str = "keys"
    slices: int = 1
    ep: int = 1
    slice_ends: str = "of equal time"
    token_order: str = "balanced"
    """On context ranks; "random": any order."""
    tensor_overlap: str = "auto"
    documents: str = "joined"
    mesh: str = "none"
    model: Model
    schedule: Given
    microbatches: int
    vocabulary: str
    data_parallel: str = "replicate"
    gathering: dict[str, Any] = field(default_factory=dict)
    """When sharded parameters are gathered and freed."""
    loss: dict[str, Any] = field(default_factory=dict)
    layers_per_stage: tuple[int, ...] | None = None
    checkpointing: str | tuple[str, ...] = "none"
    compile_layers: bool = False
    costs: dict[str, Any] | None = None
    sequence_length: int | None = None
    communicators: str = "per-pair"
    offload: dict[str, Any] | None = None
    self_check: bool = False
    hooks: str = "none"
    """Of some parameters: "tensor" (`register_hook`), "accumulated" (`register_post_accumulate_grad_hook`) or both."""
    bf16: bool = False
    """Computes in bf16: one step, measured by the error of transformers' own bf16."""
    optimizer: str = "AdamW"
    share_on_host: float = 0.0
    fused: bool = False
    others_give: str = "nothing"
    """What processes pass that are not the first of their pipeline."""
    steps: tuple[Step, ...]
    saves: bool = False

    @property
    def devices(self) -> int:
        return self.processes // (self.replicas * self.cp * self.tp)

    @property
    def pipelines(self) -> list[list[int]]:
        """Ranks by [replica][device, context rank and tensor rank]."""
        ranks = list(range(self.processes))
        if self.mesh == "any":
            self.random("mesh").shuffle(ranks)
        if self.mesh == "none":  # pipelines are numbered outermost
            each = self.cp * self.tp
            rows = self.replicas * each
            return [
                [row + rank for row in range(replica * each, self.processes, rows) for rank in range(each)]
                for replica in range(self.replicas)
            ]
        each = self.processes // self.replicas
        return [ranks[first : first + each] for first in range(0, self.processes, each)]

    def random(self, *about: Any) -> random.Random:
        """Dice for what the fields leave open."""
        return random.Random(repr((self.seed, self.number, *about)))


def draw(seed: int, number: int) -> Case:
    """The case of a seed and a number. What was added later is drawn from `FIRST_WITH_RANKS` on: the bits of earlier
    cases are kept."""
    case = _draw_whole(seed, number)
    if number < FIRST_WITH_RANKS:
        return case
    for change in (
        _with_tensor_ranks,
        _in_pieces,
        _with_shared_experts,
        _with_unusual_layers,
        _with_means,
        _with_hooks,
        _with_options_of_axes,
        _with_documents,
    ):
        case = change(case)
    return _in_bf16(case)


FIRST_WITH_RANKS = 1000


def _with_tensor_ranks(case: Case) -> Case:
    dice = case.random("tensor ranks")
    if case.processes > 2 or case.model.family == MODULES or dice.random() < 0.3:
        return case

    ranks = dice.choice((2, 2, 4)) if case.processes == 1 and case.model.family not in TWO_HEADS else 2

    def shared(batch: Batch) -> Batch:
        return replace(batch, tokens=batch.tokens + -batch.tokens % ranks * (dice.random() > RULES_BROKEN))

    steps = _steps_of(case, shared)
    return replace(case, processes=ranks * case.processes, tp=ranks, steps=steps)


TWO_HEADS = {"phi3"}
"""Families whose settings hold for heads of one size."""


def _in_pieces(case: Case) -> Case:
    dice, given, family = case.random("pieces"), case.schedule, case.model.family
    unfit = family in WITHOUT_POSITIONS
    if dice.random() < 0.4 or (unfit and dice.random() > RULES_BROKEN):
        return case
    changes: dict[str, Any] = {"self_check": case.self_check or (unfit and family != MODULES)}
    from_replicas = case.processes > 2  # in place of more processes
    ranks = dice.choice((1, 2, 2)) if not from_replicas or case.replicas % 2 == 0 else 1
    if ranks > 1:
        if not from_replicas:
            ranks = dice.choice((2, 2, 2, 3, 4))
        changes |= {"replicas": case.replicas // 2} if from_replicas else {"processes": ranks * case.processes}
        changes["cp"] = ranks
        cannot_share = 2 % ranks or case.tp > 1  # the heads of a tensor rank
        only_keys = cannot_share and dice.random() > RULES_BROKEN
        changes["context_exchange"] = "keys" if only_keys else dice.choice(("keys", "heads"))
    slices = dice.choice((1, 2, 2, 3)) if ranks > 1 else dice.choice((2, 2, 3))
    joint = given.name in ("dualpipe-v", *TORCH_CLASSES) or (given.name == "random" and given.given_as == "function")
    if joint and dice.random() > RULES_BROKEN:
        slices = 1
    if ranks == slices == 1:
        return case
    if given.given_as == "function" and slices > 1:  # it is given units, which become slices before R
        changes["schedule"] = replace(given, recomputed=())
    number = divisor_of(ranks, case.tp)

    def divided(batch: Batch) -> Batch:
        if batch.tokens > 128 or dice.random() < RULES_BROKEN:
            return batch
        return replace(batch, tokens=max(-(-batch.tokens // number), slices) * number)

    case = replace(case, **changes, slices=slices)
    return replace(case, steps=_steps_of(case, divided))


def _with_shared_experts(case: Case) -> Case:
    dice = case.random("experts")
    unfit = case.model.family not in EXPERTS or case.compile_layers
    if case.replicas == 1 or (unfit and dice.random() > RULES_BROKEN) or dice.random() < 0.2:
        return case
    members = [count for count in range(2, case.replicas + 1) if case.replicas % count == 0]
    return replace(case, ep=dice.choice(members))


def _with_unusual_layers(case: Case) -> Case:
    if case.model.family != MODULES or case.compile_layers or case.random("unusual layers").random() < 0.3:
        return case
    changes = case.checkpointing == "none" or set(case.checkpointing) == {"none"}
    return replace(case, model=replace(case.model, unusual_layers=True, changes_input=changes))


def _with_means(case: Case) -> Case:
    dice = case.random("means")
    means = ("its own batch", "its own batch", "labels", "labels", "batches")
    return replace(case, steps=tuple(replace(step, counts=dice.choice(means)) for step in case.steps))


def _with_hooks(case: Case) -> Case:
    dice = case.random("hooks")
    hooks = dice.choice(("none", "none", "none", "tensor", "accumulated", "both"))
    if case.model.unusual_layers and hooks != "none":
        hooks = "tensor"  # the others are called for zeros, too, where one process has nothing
    return replace(case, hooks=hooks)


def _with_options_of_axes(case: Case) -> Case:
    dice, changes = case.random("options of axes"), {}
    if case.tp > 1:
        changes["tensor_overlap"] = dice.choice(("auto", "none", "ring"))
    if case.cp > 1 and dice.random() < 0.3:
        changes["token_order"] = "random"
    if case.slices > 1 and dice.random() < 0.4:
        changes["slice_ends"] = "random"
    if case.data_parallel == "shard":
        changes["gathering"] = dice.choice(({}, {"reshard": True, "prefetch": 0}, {"reshard": True}, {"prefetch": 1}))
    return replace(case, **changes)


def _with_documents(case: Case) -> Case:
    """Rows of several documents that do not see each other, without what one process cannot tell apart."""
    dice = case.random("documents")
    unfit = case.model.family in WITHOUT_POSITIONS or case.model.router_loss
    if dice.random() > 0.25 or unfit or case.compile_layers:
        return case

    def packed(batch: Batch) -> Batch:
        padded = batch.padded and dice.random() < RULES_BROKEN
        return replace(batch, padded=padded, positions=dice.choice(("default", "packed", "packed", "packed")))

    return replace(case, documents="separate", steps=_steps_of(case, packed))


KEPT_IN_FP32 = ("ernie4_5_moe", "deepseek_v3")
"""Families with parameters that transformers does not round to bf16."""


def _in_bf16(case: Case) -> Case:
    """With a model that transformers can save, so that it also loads it in bf16."""
    dice = case.random("bf16")
    model, batch = case.model, case.steps[0].batches[0][0]
    if model.family == MODULES or model.given_as == "config" or case.compile_layers or dice.random() > 0.1:
        return case
    batches = (tuple(Batch(sequences=batch.sequences, tokens=max(batch.tokens, 4)) for _ in range(case.replicas)),)
    return replace(
        case,
        bf16=True,
        hooks="none",
        loss={},
        saves=False,
        model=replace(
            model, family=dice.choice((model.family, *KEPT_IN_FP32)), given_as="live", differs=False, router_loss=0.0
        ),
        steps=(Step(batches=batches),),
    )


def _steps_of(case: Case, change: Callable[[Batch], Batch]) -> tuple[Step, ...]:
    return tuple(
        replace(step, batches=tuple(tuple(map(change, replicas[: case.replicas])) for replicas in step.batches))
        for step in case.steps
    )


def _draw_whole(seed: int, number: int) -> Case:
    dice = random.Random(f"{seed} {number}")
    processes = dice.choices((1, 2, 3, 4), (1, 3, 3, 4))[0]
    replicas = dice.choice([count for count in (1, 1, 1, 2, 3, 4) if processes % count == 0])
    devices = processes // replicas
    vocabulary = dice.choice(MODES)
    while True:
        microbatches = dice.choices(range(1, 10), (4, 6, 6, 5, 3, 2, 1, 1, 1))[0]
        given = _draw_schedule(dice, devices)
        try:
            stages = base_order(given, devices, microbatches).placement.stages
            break
        except InputError:
            if dice.random() < 0.02:  # most draws should run; some are to be refused
                stages = devices
                break
    recomputed = tuple(stage for stage in range(stages) if dice.random() < 0.6)
    if given.given_as != "name" and dice.random() < 0.25:
        given = replace(given, recomputed=recomputed)
    layers, layers_per_stage = _draw_layers(dice, stages)
    model = _draw_model(dice, layers)
    count = dice.choices((1, 2, 3), (6, 3, 2))[0]
    bytes_known = dice.random() < 0.2
    return Case(
        seed=seed,
        number=number,
        processes=processes,
        replicas=replicas,
        mesh=dice.choices(("none", "dp pp", "pp dp", "any"), (5, 1, 1, 1))[0],
        model=model,
        schedule=given,
        microbatches=microbatches,
        vocabulary=vocabulary,
        data_parallel=dice.choice(("replicate", "shard")),
        loss=_draw_loss(dice, model.family),
        layers_per_stage=layers_per_stage,
        checkpointing=_draw_checkpointing(dice, layers),
        compile_layers=dice.random() < 0.006 and processes * layers <= 4,  # tens of seconds for each layer
        costs=_draw_costs(dice, stages, devices, bytes_known) if bytes_known or dice.random() < 0.2 else None,
        sequence_length=dice.choice((None, None, None, 1, 64)),
        communicators=dice.choices(("per-pair", "per-kind", "one"), (3, 1, 1))[0],
        offload=_draw_offload(dice, layers, stages, bytes_known) if dice.random() < 0.25 else None,
        self_check=dice.random() < 0.03,
        optimizer=dice.choice(("AdamW", "AdamW", "HostAdamW")),
        share_on_host=dice.choice((0.0, 0.3, 0.7, 1.0)),
        fused=dice.random() < 0.3,
        others_give=dice.choice(("nothing", "nothing", "the same", "nonsense")),
        steps=tuple(_draw_step(dice, model, replicas, microbatches, last=index == count - 1) for index in range(count)),
        saves=dice.random() < 0.08,
    )


# --- the schedule -----------------------------------------------------------------------------------------------------


def base_order(given: Given, devices: int, microbatches: int, slices: int = 1) -> Order:
    """The order before R and empty slots are put into it. Raises InputError where there is none of this size."""
    if given.name == "random":
        return random_order(given.seed, devices, microbatches, devices + given.seed % 4, slices)
    if slices > 1:
        return add_slices(base_order(given, devices, microbatches * slices), slices)
    if given.name in TORCH_CLASSES:
        from evenpipe.interop import from_torch_schedule

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of orders that torch itself does not run as it shows them
            return from_torch_schedule(torch_class(given.name), devices, microbatches, **given.options)
    return generate(given.name, devices, microbatches, **given.options)


def torch_class(name: str) -> Any:
    from torch.distributed.pipelining import schedules

    return schedules.get_schedule_class(name)


def _draw_schedule(dice: random.Random, devices: int) -> Given:
    name = dice.choices(("named", "random", "torch"), (14, 5, 1))[0]
    seed, idle = dice.randrange(2**30), dice.random() < 0.2
    other = dice.choices(("first-last", dice.choice(MODES), None), (4, 1, 8))[0]
    if name == "random":
        return Given(name=name, given_as=dice.choice(GIVEN_AS[1:]), idle=idle, other_mode=other, seed=seed)
    if name == "torch":
        name = dice.choice(TORCH_CLASSES)
        several = name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
        return Given(name=name, options={"stages_per_device": dice.choice((2, 3))} if several else {})
    name = dice.choice(list(SCHEDULES))
    choices: dict[str, Callable[[], Any]] = {
        "stages_per_device": lambda: dice.randint(1, 3),
        "group_size": lambda: dice.randint(1, 6),
        "max_in_flight": lambda: dice.choice((dice.randint(3, 9), tuple(dice.randint(3, 9) for _ in range(devices)))),
        "weight_share": lambda: dice.random(),
        "squeeze": lambda: dice.random() < 0.5,
        "overlap": lambda: dice.random() < 0.5,
    }
    known = [option for option in options_of(name) if option in choices]
    options = {option: choices[option]() for option in known if dice.random() < 0.5}
    given_as = dice.choices(GIVEN_AS, (16, 1, 1, 1, 1, 1, 1))[0]
    if given_as == "name":
        return Given(name=name, options=options)
    return Given(name=name, options=options, given_as=given_as, idle=idle, other_mode=other, seed=seed)


def _draw_layers(dice: random.Random, stages: int) -> tuple[int, tuple[int, ...] | None]:
    """Layers of the model, and of each stage where that is said."""
    if dice.random() < 0.7:
        fewer = dice.random() < RULES_BROKEN
        return max(2, stages + (-1 if fewer else dice.randint(0, 2))), None
    layers = dice.randint(2, stages + 2)  # fewer than stages: some have none
    cuts = sorted(dice.randint(0, layers) for _ in range(stages - 1))
    return layers, tuple(last - first for first, last in zip([0, *cuts], [*cuts, layers], strict=True))


def _draw_costs(dice: random.Random, stages: int, devices: int, bytes_known: bool) -> dict[str, Any]:
    def of(count: int) -> Any:
        return dice.randint(1, 9) if dice.random() < 0.3 else tuple(dice.randint(0, 9) for _ in range(count))

    costs = {kind: of(stages) for kind in "FBIW"}
    costs |= {kind: of(devices) for kind in "SCTEG"}
    costs["p2p"] = dice.choice((0, 0.5, 3))
    if dice.random() < 0.5:
        costs["collectives"] = {name: dice.randint(0, 4) for name in ("broadcast", "statistics", "reduce", "embedding")}
    if bytes_known:
        costs["bytes"] = dice.randint(1, 5)
    return costs


def _draw_offload(dice: random.Random, layers: int, stages: int, bytes_known: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "activations": dice.choice(("scheduled", "none", "free", "all", "all", *[dice.randint(5, 40)] * bytes_known)),
        "streams": dice.choice((1, 2)),
    }
    if dice.random() < 0.5:
        options["layers"] = tuple(dice.choice(("offload", "offload", "keep")) for _ in range(layers))
    if dice.random() < 0.5:
        options["copy_time"] = dice.choice((0, 0.1, 2, tuple(dice.random() for _ in range(stages))))
    if dice.random() < 0.4:
        options |= {"host_memory": dice.choice((4096, 16384, 65536)), "when_full": "keep"}
    elif dice.random() < 0.2:
        options["host_memory"] = 2**26
    if dice.random() < 0.2:
        options["directory"] = "the case's own"
    return options


# --- the model --------------------------------------------------------------------------------------------------------


def _draw_model(dice: random.Random, layers: int) -> Model:
    family = dice.choice([*FAMILIES, *FAMILIES, *EXPERTS, *[MODULES] * 8])
    vocabulary = dice.choice(
        (dice.randint(1, 8), dice.randint(5, 40), dice.randint(60, 300), dice.choice((8, 64, 96, 97)))
    )
    frozen = dice.choice(FROZEN) if dice.random() < 0.25 else "nothing"
    dense = family not in EXPERTS
    ways = ["live", "live", "live", "description"] if family != MODULES else ["live"]
    if family != MODULES and frozen == "nothing":
        ways += ["config"]
        if dense:  # a folder does not say that experts are to be computed one by one
            ways += ["folder"]
    given_as = dice.choice(ways)
    return Model(
        family=family,
        layers=layers,
        vocabulary=vocabulary,
        tied=dice.random() < 0.4,
        padding=dice.choice((None, 0, vocabulary - 1, vocabulary // 2)),
        key_value_heads=dice.choice((1, 2)),
        head_bias=family == MODULES and dice.random() < 0.5,
        norm=family != MODULES or dice.random() < 0.7,
        # Of a single row, layers may choose all experts alike: then no gradient is left but rounding errors.
        router_loss=0.5 if family in PROMISED_EXPERTS and dice.random() < 0.5 and vocabulary > 1 else 0.0,
        frozen=frozen,
        given_as=given_as,
        differs=given_as == "live" and dice.random() < 0.3,
    )


def _draw_loss(dice: random.Random, family: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if dice.random() < 0.2:
        options["label_smoothing"] = dice.choice((0.1, 0.5, 1.0))
    if dice.random() < 0.2:
        options["z_loss"] = dice.choice((1e-4, 0.1))
    if dice.random() < 0.2:
        options["entropy"] = True
    if dice.random() < 0.3:
        options["keep"] = "nothing"
    if dice.random() < 0.3:
        options["rows_per_block"] = dice.randint(1, 9)
    if dice.random() < 0.3:
        options["kernels"] = "torch"
    often = 0.4 if family == MODULES else RULES_BROKEN / 2  # others say themselves what they do to their logits
    if dice.random() < often:
        options["soft_cap"] = dice.choice((0.5, 3.0))
    if dice.random() < often:
        options["logit_scale"] = dice.choice((-1.5, 0.3, 4.0))
    return options


def _draw_checkpointing(dice: random.Random, layers: int) -> str | tuple[str, ...]:
    if dice.random() < 0.5:
        return "none"
    if dice.random() < 0.6:
        return dice.choice(CHECKPOINTING)
    return tuple(dice.choice(CHECKPOINTING) for _ in range(layers))


# --- what is done with it ---------------------------------------------------------------------------------------------


def _draw_step(dice: random.Random, model: Model, replicas: int, microbatches: int, *, last: bool) -> Step:
    accumulated = dice.choices((1, 2), (4, 1))[0]
    return Step(
        batches=tuple(
            tuple(_draw_batch(dice, model, microbatches) for _ in range(replicas)) for _ in range(accumulated)
        ),
        evaluates=dice.random() < 0.25,
        recorded=dice.random() < 0.1,
        clips_to=dice.choice((None, None, float("inf"), 1e-3, 0.3, 1e3)),
        frozen=dice.choice(("nothing", *FROZEN)) if dice.random() < 0.15 else None,
        updates=last or dice.random() < 0.9,
        clears=dice.random() < 0.8,
    )


def _draw_batch(dice: random.Random, model: Model, microbatches: int) -> Batch:
    labels = ["default"] * 3 + ["given"] * 4 + ["none"] + ["a silent microbatch"] * (microbatches > 1)
    positions, padded = dice.choice(("default", "default", "shifted", "packed")), dice.random() < 0.25
    if model.family in WITHOUT_POSITIONS and dice.random() > RULES_BROKEN:
        positions = "default"
    if model.family in WITHOUT_MASK and dice.random() > RULES_BROKEN:
        padded = False
    wrong = dice.choice(("labels", "tokens")) if dice.random() < RULES_BROKEN / 4 else None
    return Batch(
        sequences=dice.choices((1, 2, 3), (3, 3, 1))[0],
        tokens=129 if wrong == "tokens" else dice.choice((1, 2, dice.randint(3, 12), dice.randint(3, 12))),
        padded=padded,
        positions=positions,
        weights=dice.choice(("default", "default", "default", "random", "some zero", "single")),
        labels="too large" if wrong == "labels" else dice.choice(labels),
    )
