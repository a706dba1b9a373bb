"""Runs the passes of a stage under the tracker, as the runtime executes them, one microbatch after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from evenpipe.experts.adopt import OwnExperts, Spread
from evenpipe.experts.routing import Routing
from evenpipe.layers.checkpointing import Checkpointing, Switch
from evenpipe.layers.entrance import StageGraph
from evenpipe.layers.weight_gradients import Entry, Gradients, SplitBackward, WeightGradients
from evenpipe.memory.bytes import PartBytes, PassPeaks, StageBytes
from evenpipe.memory.exchange import FirstMember, FirstRank
from evenpipe.memory.lines import Peak, at, highest
from evenpipe.memory.megatron import FusedSum
from evenpipe.memory.piece_bench import CarriedBytes, PieceBench
from evenpipe.memory.stretches import LineProfile, LineStretch, Profile, Stretch
from evenpipe.memory.tracker import Tracker
from evenpipe.model import ModuleStage, Stage
from evenpipe.model.transform import LayerTransform
from evenpipe.parallel.parameters import StageParameters
from evenpipe.parallel.running import Running
from evenpipe.recipe.offload import PAGE

KEY = (0, 0)
"""Stage and microbatch of the current microbatch."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Measurements of a run of layers, from which those of stages with more of the same layers are derived."""

    hidden: int
    """Bytes of the stage's input."""
    saves_input: bool
    """Whether the graph keeps the input."""
    output: int
    stored: int
    moved: tuple[int, ...]
    """Bytes copied to the host for each layer, and last for the rest of the stage."""
    queued: int
    profiles: dict[str, Profile]
    """By pass: "forward", "bare forward" (without a graph), "recompute", "backward", "input", "weight"; the last three
    also as "first ...", before gradients exist."""
    gradients: tuple[int, ...]
    """Bytes of the gradients of each layer's parameters, and last of parameters outside of layers."""
    input_gradients: tuple[int, ...]
    """The part of the gradients that I computes."""
    carried: tuple[CarriedBytes, ...] = ()
    """The carry of each layer, if sequences are cut into slices."""
    grown: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By pass, the bytes that each layer adds to the carry, which are not stored or queued."""
    gathered: int = 0
    """Bytes of the keys and values that a layer gathers from context ranks."""

    def over(self, indices: Sequence[int], traces: Sequence[Trace] = ()) -> StageBytes:
        """Return the measurements for a stage whose i-th layer is like layer `indices[i]` of the i-th trace. By default
        every trace is this one; the ends of the stage are always like those of this trace."""
        sources = list(zip(traces or [self] * len(indices), indices, strict=True))
        profiles = dict(self.profiles)
        if traces:
            end, last_end = (trace.profiles["forward"].end for trace in (self, traces[-1]))
            # The last layer's input, as large as its output, is freed right after the layer unless the layer keeps it.
            freed = self.output if end.retained - last_end.retained >= self.output else 0
            profiles["forward"] = replace(profiles["forward"], end=Stretch(last_end.above, end.retained - freed))
        total = {
            name: profile.over([trace.profiles[name].layers[index] for trace, index in sources])
            for name, profile in profiles.items()
        }
        extra = {
            name: total[name].retained - profile.over(profile.layers).retained
            for name, profile in self.profiles.items()
        }

        def total_of(name: str) -> int:
            return getattr(self, name)[-1] + sum(getattr(trace, name)[index] for trace, index in sources)

        def above(name: str) -> int:
            return total[name].above if name in total else 0

        split = "input" in total
        for name, grown in self.grown.items():
            if name in extra:
                extra[name] -= sum(trace.grown[name][index] for trace, index in sources) - sum(grown)
        carried = [trace.carried[index] for trace, index in sources] if self.carried else []
        return StageBytes(
            input=self.hidden,
            output=self.output,
            saves_input=self.saves_input,
            stored=self.stored + extra["forward"],
            moved=total_of("moved"),
            queued=self.queued + extra["forward"] + extra["input"] if split else 0,
            carried=sum(layer.keys for layer in carried),
            carried_gradients=sum(layer.gradients for layer in carried),
            parameters=PartBytes(
                gradients=total_of("gradients"), input_gradients=total_of("input_gradients") if split else 0
            ),
            peaks=PassPeaks(
                gathered=self.gathered,
                forward=above("forward"),
                backward=above("backward"),
                input=above("input"),
                weight=above("weight"),
                recompute=above("recompute"),
                bare_forward=above("bare forward") if "bare forward" in total else None,
                first_backward=above("first backward") if "first backward" in total else None,
                first_input=above("first input") if split else None,
                first_weight=above("first weight") if split else None,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LineTrace:
    """A trace for any number of sequences. Bytes are lines (`lines`); fields are those of `Trace`."""

    hidden: int
    kept_input: int
    """The part of `hidden` that the graph keeps."""
    output: int
    stored: int
    moved: tuple[tuple[int, ...], ...]
    """For each layer, the size of every tensor that can move; small tensors do not move."""
    queued: int
    profiles: dict[str, LineProfile]
    gradients: tuple[int, ...]
    input_gradients: tuple[int, ...]
    carried: tuple[CarriedBytes, ...] = ()
    grown: Mapping[str, Sequence[int]] = field(default_factory=dict)
    gathered: tuple[int, ...] = ()

    def at(self, sequences: int) -> Trace:
        """The trace for a number of sequences."""

        def all_at(sizes: Iterable[int]) -> tuple[int, ...]:
            return tuple(at(size, sequences) for size in sizes)

        hidden, output, stored, queued = all_at((self.hidden, self.output, self.stored, self.queued))
        return Trace(
            hidden=hidden,
            saves_input=at(self.kept_input, sequences) > 0,
            output=output,
            stored=stored,
            moved=tuple(sum(size for size in all_at(sizes) if size >= PAGE) for sizes in self.moved),
            queued=queued,
            profiles={name: profile.at(sequences) for name, profile in self.profiles.items()},
            gradients=all_at(self.gradients),
            input_gradients=all_at(self.input_gradients),
            carried=tuple(CarriedBytes(*all_at(layer)) for layer in self.carried),
            grown={name: all_at(sizes) for name, sizes in self.grown.items()},
            gathered=highest(self.gathered, sequences),
        )


class _Queue(WeightGradients):
    """The runtime's queue, which also reports each parameter that W reaches."""

    def __init__(self, on_reached: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._on_reached = on_reached

    def add(self, entry: Entry) -> None:
        parameter = entry.weight if isinstance(entry, FusedSum) else entry.parameters[0]
        entry.gradients = partial(self._gradients, parameter, entry.gradients)
        super().add(entry)

    def _gradients(self, parameter: nn.Parameter, gradients: Callable[[], Gradients]) -> Gradients:
        self._on_reached(parameter)
        return gradients()


class Bench:
    """Runs the passes of a stage.

    Args:
        stage: a stage whose tensors the tracker counts.
        names: names of its layers' modules, first to last.
        choices: the checkpointing of each layer.
        moves: for each layer, whether its saved tensors can go to the host; None: all can.
        argument: the name of the hidden states in the layers' signature.
        shape: shape of the hidden states, [sequences, tokens, hidden_size].
        dtype: dtype of the hidden states.
        exchange: the exchange of the tensor ranks that the stage was made for; None for a single rank.
        repeats: whether every forward runs as in R, for which tensor ranks keep more.
        piece_bench: the piece of every sequence, to which `shape` then refers; None: whole sequences.
        experts: whether our function runs the experts, instead of the one that the model's config names; or the member
            of a group whose experts the stage has.
        shares: called with the queue of weight gradients to change the stage before it runs.
        positions: number of position ids passed to the stage; None: one for each token of its hidden states.
        holds_input: whether the stage's input stays until the end of its backward.
    """

    def __init__(
        self,
        stage: ModuleStage | Stage,
        names: Sequence[str],
        choices: Sequence[str],
        *,
        argument: str,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        tracker: Tracker,
        moves: Sequence[bool] | None = None,
        exchange: FirstRank | None = None,
        repeats: bool = False,
        piece_bench: PieceBench | None = None,
        experts: FirstMember | bool = True,
        shares: Callable[[WeightGradients], None] | None = None,
        positions: int | None = None,
        holds_input: bool = False,
    ) -> None:
        self._stage, self._names = stage, names
        self._exchange, self._repeats, self._piece_bench = exchange, repeats, piece_bench
        ranks = 1 if exchange is None else exchange.size
        rows = shape[0], shape[1] // ranks, shape[2]
        self._shape, self._output_shape = shape if stage.is_first else rows, rows
        self._dtype = dtype
        self._anchor = torch.empty(0, dtype=dtype, requires_grad=True)
        self._tracker = tracker
        self._parameters = dict(StageParameters(stage, dtype, fp32_parameters=stage.fp32_parameters))
        self._queue, self._switch = _Queue(self._at_parameter), Switch()
        self._running = Running()
        self._positions, self._holds_input = positions, holds_input
        if shares is not None:
            shares(self._queue)
        layers = [stage.get_submodule(name) for name in names]
        transforms: list[LayerTransform] = []
        if experts:
            spread = None if experts is True else Spread(experts, Routing(self._running), experts.overlap)
            transforms.append(OwnExperts(self._queue, spread))
        transforms += [SplitBackward(self._queue), Checkpointing(choices, self._switch, torch.device("cpu"))]
        for transform in transforms:
            transform.apply(stage, dict(enumerate(layers)))
        self._index_of = {
            id(parameter): index for index, layer in enumerate(layers) for parameter in layer.parameters()
        }
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._enters, argument, index), with_kwargs=True)
        if layers:
            layers[-1].register_forward_hook(self._leaves_the_last, prepend=True)
        self._moves = [True] * len(names) if moves is None else moves
        self._index = 0
        self._seen: dict[int, bool] = {}
        self._moved: list[list[int]] = [[] for _ in range(len(names) + 1)]
        self._marks: list[LineStretch] = []
        self._weight_indices: list[int] = []
        self._began = 0
        self._input_gradients = (0,) * (len(names) + 1)
        self._profiles: dict[str, LineProfile] = {}

    def trace(self, *, whole: bool = True, split: bool, recompute: bool, from_start: bool = True) -> LineTrace:
        """Run every pass. from_start: whether to run them also before gradients of parameters exist, and to measure the
        bytes of copies to the host. Other arguments as for `StageTracer`."""
        gradients: tuple[int, ...] = ()
        # What other slices leave in a carry is known only after a first whole backward.
        for is_split in [False] * (whole or self._piece_bench is not None) + [True] * split:
            for master in self._parameters.values():
                master.grad = None if from_start else torch.empty_like(master)
            if from_start:
                self._microbatch(first=True, split=is_split)
                if not gradients:
                    self._find_moved()
            hidden, kept_input, output, stored, queued = self._microbatch(split=is_split)
            gradients = gradients or self._gradient_sizes()
        if recompute:
            self._repeat()
        trace = LineTrace(
            hidden=hidden,
            kept_input=kept_input,
            output=output,
            stored=stored,
            moved=tuple(map(tuple, self._moved)),
            queued=queued,
            profiles=self._profiles,
            gradients=gradients,
            input_gradients=self._input_gradients if split else (),
        )
        return trace if self._piece_bench is None else self._with_carry(trace, self._piece_bench)

    def _with_carry(self, trace: LineTrace, piece_bench: PieceBench) -> LineTrace:
        carried = piece_bench.carried([self._stage.get_submodule(name) for name in self._names])
        grown: dict[str, Sequence[int]] = {}
        if piece_bench.piece.is_first:
            grown["forward"] = [layer.keys for layer in carried]
        if piece_bench.piece.is_last:
            grown["input"] = [layer.gradients for layer in carried]
        elif piece_bench.piece.is_first:
            grown["input"] = [-layer.keys - layer.gradients for layer in carried]
        return replace(trace, carried=carried, grown=grown, gathered=piece_bench.gathered)

    # --- one microbatch -----------------------------------------------------------------------------------------

    def _microbatch(self, *, first: bool = False, split: bool = False) -> tuple[int, ...]:
        """Run F, and B or I and W. Return the bytes of the input, of the part of it that the graph keeps, of the
        output, and the stored and the queued bytes."""
        prefix, piece_bench = "first " if first else "", self._piece_bench
        if piece_bench is not None:
            piece_bench.begin()
        initial = self._live
        hidden = torch.empty(self._shape, dtype=self._dtype)
        size = self._live - initial
        self._running.stage_unit = KEY
        graph = self._forward(hidden, "forward", split=split)
        stored = self._live - initial - size
        held = [hidden] if self._holds_input else []
        del hidden
        kept_input = self._live - initial - stored
        if piece_bench is not None:
            piece_bench.turn()

        gradient = torch.empty(self._output_shape, dtype=self._dtype)
        output_size = self._tracker.measure(gradient.nbytes)
        if split:
            self._queue.begin(KEY)
        with self._passing(prefix + ("input" if split else "backward"), backwards=True):
            (input_gradient,) = graph.backward((gradient,))
        self._queue.under_way = self._running.stage_unit = None
        del graph, gradient
        held.clear()
        queued = self._live - initial - size
        if split and first:
            self._input_gradients = self._gradient_sizes()
        if split:
            with self._passing(f"{prefix}weight", backwards=True):
                self._queue.compute(KEY)
        del input_gradient
        assert first or self._live == initial, f"{self._live - initial} bytes of a microbatch are not freed"
        return size, kept_input, output_size, stored, queued

    def _repeat(self) -> None:
        """Run F without a graph, and R; the backward after it is like any other."""
        if self._piece_bench is not None:
            self._piece_bench.begin()
        hidden = torch.empty(self._shape, dtype=self._dtype)
        with torch.no_grad(), self._passing("bare forward"):
            output = self._run(hidden)
        del output
        self._running.stage_unit = KEY
        self._forward(hidden, "recompute", keep_all=True)

    @property
    def _live(self) -> int:
        """Live bytes without the carry."""
        return self._tracker.live - (0 if self._piece_bench is None else self._piece_bench.held)

    def _run(self, hidden: Tensor) -> Tensor:
        if self._piece_bench is not None:
            return self._piece_bench.run(self._stage, hidden)
        if self._positions is not None:
            return self._stage(hidden, position_ids=torch.arange(self._positions)[None])
        return self._stage(hidden)

    def _forward(self, hidden: Tensor, name: str, *, split: bool = False, keep_all: bool = False) -> StageGraph:
        graph = StageGraph(self._anchor)
        self._queue.under_way = KEY if split else None
        self._switch.off = keep_all
        if self._exchange is not None:
            self._exchange.repeats = keep_all or self._repeats
        with self._passing(name):
            output = self._run(*graph.enter((hidden,), (0,)))
        if self._exchange is not None:
            self._exchange.repeats = False
        self._switch.off = False
        self._queue.under_way = None
        graph.leave((output,))
        return graph

    def _gradient_sizes(self) -> tuple[int, ...]:
        """Return the bytes of existing gradients, per layer, and last for parameters outside of layers."""
        sizes = [0] * (len(self._names) + 1)
        for name, master in self._parameters.items():
            indices = [index for index, layer in enumerate(self._names) if name.startswith(f"{layer}.")]
            if master.grad is not None:
                sizes[indices[0] if indices else -1] += self._tracker.measure(master.grad.nbytes)
        return tuple(sizes)

    # --- bytes of copies ----------------------------------------------------------------------------------------

    def _find_moved(self) -> None:
        """Run F once more, as in `runtime/offload.py`, and find saved tensors by the layer that saves them first."""
        for tensor in (*self._stage.parameters(), *self._stage.buffers()):
            self._seen[tensor.untyped_storage()._cdata] = False
        self._index = len(self._names)
        if self._piece_bench is not None:
            self._piece_bench.begin()
        hidden = torch.empty(self._shape, dtype=self._dtype)
        keeps: list[Tensor] = []  # so that no storage id is reused

        def pack(tensor: Tensor) -> Tensor:
            storage, moves = tensor.untyped_storage(), self._index == len(self._names) or self._moves[self._index]
            if storage._cdata not in self._seen:
                self._seen[storage._cdata] = moves
                keeps.append(tensor.detach())
                if moves:
                    self._moved[self._index].append(self._tracker.measure(storage.nbytes()))
            return tensor.detach()

        self._switch.hooks = pack, _identity
        with saved_tensors_hooks(pack, _identity):
            self._run(hidden.requires_grad_())
        self._switch.hooks = None
        self._seen.clear()

    # --- stretches ----------------------------------------------------------------------------------------------

    def _mark(self, _: Any = None) -> None:
        """End the current stretch and begin the next one."""
        tracker = self._tracker
        self._marks.append(LineStretch(tracker.levels.above(self._began), tracker.live - self._began))
        self._begin()

    def _begin(self) -> None:
        """Begin a stretch."""
        self._began = self._tracker.live
        self._tracker.levels = Peak(self._began)

    @contextmanager
    def _passing(self, name: str, *, backwards: bool = False) -> Iterator[None]:
        """Record the profile of the pass that runs inside."""
        self._marks.clear()
        self._weight_indices.clear()
        self._begin()
        yield
        self._mark()
        marks, count = self._marks, len(self._names)
        if name.endswith("weight"):
            start, by_index = marks[:1], dict(zip(self._weight_indices, marks[1:], strict=True))
            layers, end = [by_index.get(index, LineStretch()) for index in range(count)], LineStretch()
        elif count:
            assert len(marks) == count + 2, f"{name}: {len(marks)} stretches; expected those of {count} layers"
            start, layers, end = marks[:1], marks[1:-1], marks[-1]
            if backwards:
                layers.reverse()
        else:
            start, layers, end = marks, [], LineStretch()
        self._profiles[name] = LineProfile(tuple(start), tuple(layers), end, backwards)

    def _enters(self, argument: str, index: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Called when a forward reaches a layer, and later when the backward leaves it."""
        self._index = index
        self._begins_at(args[0] if args else kwargs[argument])

    def _leaves_the_last(self, _: nn.Module, args: Any, output: Any) -> None:
        """Called when a forward leaves the layers, and later when the backward reaches them."""
        self._index = len(self._names)
        self._begins_at(output[0] if isinstance(output, (tuple, list)) else output)

    def _begins_at(self, hidden: Tensor) -> None:
        self._mark()
        if hidden.requires_grad and torch.is_grad_enabled():
            hidden.register_hook(self._mark)

    def _at_parameter(self, parameter: nn.Parameter) -> None:
        """Called when W reaches the entries of a layer, which are consecutive."""
        index = self._index_of.get(id(parameter))
        if index is not None and self._weight_indices[-1:] != [index]:
            self._mark()
            self._weight_indices.append(index)


def _identity(packed: Any) -> Tensor:
    tensor: Tensor = packed
    return tensor
