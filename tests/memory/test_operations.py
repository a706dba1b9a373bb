"""Operations on tensors without elements, against the operations of torch that they stand for, counted on the CPU."""

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from evenpipe.memory.kernels import PRESETS, Kernels
from evenpipe.memory.operations import Operations
from evenpipe.memory.sketch import Remade, Sketch, Tape
from evenpipe.memory.tracker import Tracker

ROWS, SIZE, WIDTH = 6, 16, 24
WEIGHT, BIAS = torch.randn(WIDTH, SIZE), torch.randn(WIDTH)
VECTOR = torch.randn(SIZE)
TABLE = torch.randn(ROWS, SIZE)


def norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def sketched_norm(operations, x):
    deviation = operations.inverse_root(operations.offset(operations.mean(operations.power(x), ROWS)), "")
    return operations.times_rows(x, deviation)


def centred(x):
    return (x - x.mean(-1, keepdim=True)).pow(2)


def half(x):
    return torch.cat((-x[..., SIZE // 2 :], x[..., : SIZE // 2]), dim=-1)


def rotated(x):
    return x * TABLE + half(x) * TABLE


def sketched_rotated(operations, x, table):
    def half(x):
        first, second = operations.part(x, x.elements // 2), operations.part(x, x.elements // 2)
        return operations.together((operations.scaled(second), first))

    return operations.add(operations.times_table(x, table), operations.times_table(half(x), table))


def gated(x):
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def sketched_gated(operations, x):
    gate, up = operations.parts(x, [x.elements // 2] * 2)
    return operations.times(operations.elementwise(gate), up)


PARAMETER, OFFSET = VECTOR.clone().requires_grad_(), VECTOR.clone().requires_grad_()
LINEAR = (WEIGHT.clone().requires_grad_(), BIAS.clone().requires_grad_())
PARAMETERS = (PARAMETER, OFFSET, *LINEAR)

# name -> (torch's, ours)
OPERATIONS = {
    "add": (lambda x: x + x, lambda o, x, t: o.add(x, x)),
    "scale": (lambda x: x * 0.5, lambda o, x, t: o.scaled(x)),
    "to bf16 and back": (lambda x: x.bfloat16().float(), lambda o, x, t: o.to(o.to(x, 2), 4)),
    "power": (lambda x: x.pow(3), lambda o, x, t: o.power(x)),
    "silu": (functional.silu, lambda o, x, t: o.elementwise(x)),
    "tanh": (torch.tanh, lambda o, x, t: o.elementwise(x, saves_result=True)),
    "softmax": (lambda x: x.softmax(-1), lambda o, x, t: o.elementwise(x, saves_result=True)),
    "norm without weight": (norm, lambda o, x, t: sketched_norm(o, x)),
    "difference from the mean": (centred, lambda o, x, t: o.power(o.minus_rows(x, o.mean(x, ROWS)))),
    "times a weight": (lambda x: PARAMETER * x, lambda o, x, t: o.times_weight(x, SIZE, 4, first=True)),
    "layer norm": (
        lambda x: functional.layer_norm(x, (SIZE,), PARAMETER, OFFSET),
        lambda o, x, t: o.norm(x, ROWS, SIZE, (4, 4)),
    ),
    "linear": (
        lambda x: functional.linear(x, LINEAR[0]),
        lambda o, x, t: o.linear(x, ROWS * WIDTH, SIZE * WIDTH, 0, ""),
    ),
    "linear with bias": (
        lambda x: functional.linear(x, *LINEAR),
        lambda o, x, t: o.linear(x, ROWS * WIDTH, SIZE * WIDTH, WIDTH, ""),
    ),
    "product": (lambda x: (x[None] @ x.t()[None])[0], lambda o, x, t: o.product(x, x, ROWS * ROWS)),
    "rotation": (rotated, lambda o, x, t: sketched_rotated(o, x, t)),
    "gate": (gated, lambda o, x, t: sketched_gated(o, x)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_counts_what_torch_allocates(name):
    """What the forward keeps, the most within it, and the most within the backward."""
    theirs, ours = OPERATIONS[name]
    for parameter in PARAMETERS:
        parameter.grad = torch.zeros_like(parameter)
    hidden = torch.randn(ROWS, SIZE, requires_grad=True)
    with Tracker() as tracker:
        tracker.add(hidden, TABLE, *PARAMETERS, *(one.grad for one in PARAMETERS))
        with tracker.span() as forward:
            output = theirs(hidden)
        gradient = torch.ones_like(output)
        edge = get_gradient_edge(output)
        del output
        with tracker.span() as backward:
            torch.autograd.backward((edge,), (gradient,))

    tape = Tape()
    operations = Operations(tape)
    x, table = tape.new(ROWS * SIZE, 4), tape.new(ROWS * SIZE, 4)
    x.node = tape.leaf()
    before = tape.meter.live
    tape.meter.reset()
    result = ours(operations, x, table)
    assert tape.meter.live - before == forward.kept
    assert tape.meter.peak - before == forward.above
    given = tape.new(result.elements, result.element)
    root = result.node
    del result
    before = tape.meter.live
    tape.meter.reset()
    gradients = tape.backward(root, [given])
    assert tape.meter.peak - before == backward.above
    assert [one.bytes for one in gradients] == [hidden.grad.nbytes]


def begun() -> tuple[Tape, Operations, Sketch]:
    tape = Tape()
    x = tape.new(100, 4)
    x.node = tape.leaf()
    return tape, Operations(tape), x


def test_nothing_is_left():
    tape, operations, x = begun()
    result = operations.times(operations.elementwise(x), x)
    given = [tape.new(100, 4)]
    root = result.node
    del result
    gradients = tape.backward(root, given)
    assert tape.meter.live == x.bytes + gradients[0].bytes


def test_what_runs_again_keeps_its_input_alone():
    tape, operations, x = begun()

    def function(one: Sketch) -> Sketch:
        return operations.elementwise(operations.elementwise(operations.elementwise(one)))

    result = tape.checkpointed(function, x)
    assert tape.meter.live == x.bytes + result.bytes
    given = [tape.new(100, 4)]
    root = result.node
    del result
    tape.meter.reset()
    before = tape.meter.live
    gradients = tape.backward(root, given)
    # Again: what two of the three saved beside the input, and then one gradient beside the one that is there.
    assert tape.meter.peak - before == 3 * 400
    assert len(gradients) == 1


def test_what_is_made_again_is_not_kept():
    tape, operations, x = begun()
    middle = operations.elementwise(x)
    middle.storage.again = Remade(tape, middle.bytes, "")
    result = operations.elementwise(middle)
    assert tape.meter.live == 3 * 400
    del middle
    assert tape.meter.live == 2 * 400
    given = [tape.new(100, 4)]
    root = result.node
    del result
    tape.meter.reset()
    before = tape.meter.live
    assert len(tape.backward(root, given)) == 1
    assert tape.meter.peak - before == 2 * 400


def test_context_parallelism_holds_the_keys_of_others():
    """While attention runs: their keys and values; in its backward their gradients too."""
    tape, operations, x = begun()
    query, key, value = operations.parts(x, [60, 20, 20])
    sizes = {"size": 60, "rows": 6}

    def most(others: int) -> tuple[int, int]:
        tape.meter.reset()
        before = tape.meter.live
        result = operations.flash_attention(query, key, value, others=others, **sizes)
        forward = tape.meter.peak - before
        given, root = [tape.new(60, 4)], result.node
        del result
        before = tape.meter.live
        tape.meter.reset()
        tape.backward(root, given)
        return forward, tape.meter.peak - before

    alone, together = most(0), most(120)
    assert together[0] - alone[0] == 120 * 4
    assert together[1] > alone[1]


def test_presets_are_what_they_say():
    assert PRESETS["transformers"] == Kernels()
    assert PRESETS["megatron"].loss == "in-place"
    assert all(PRESETS[name].attention == "flash" for name in ("fused", "megatron", "transformer-engine"))
