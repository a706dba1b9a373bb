"""A model cut into stages has the same loss and gradients as in transformers, to the last bit."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
import transformers
from families import (
    EXPERTS,
    FAMILIES,
    NAMED,
    PROMISED_EXPERTS,
    ROUNDING,
    build_stages,
    loss_and_gradients,
    loss_and_gradients_in_stages,
    tiny_config,
    tokens_and_labels,
    whole_model,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from evenpipe.errors import InputError
from evenpipe.model import build_stage, copy_parameters, describe, gradient_errors, initialize
from evenpipe.model.graph import graph_nodes
from evenpipe.model.stage import Relay

SCALED = {"granite", "granitemoe"}  # logits are divided by 3, which no factor reproduces to the last bit

EDGES = {
    "no layer at the end": (2, 4),
    "no layer at the start": (0, 2),
    "no layer anywhere but the middle": (0, 4),
    "no layer in the middle": (2, 2),
    "one stage": (),
    "one layer per stage": (1, 2, 3),
}


def assert_equal_to_whole(name: str, tied: bool, cuts, **arguments) -> None:
    whole = whole_model(tiny_config(name, tied=tied))
    description = describe(whole)
    tokens, labels = tokens_and_labels()
    expected_loss, expected = loss_and_gradients(whole, tokens, labels, **arguments)
    loss, gradients = loss_and_gradients_in_stages(description, cuts, tokens, labels, **arguments)
    assert gradients.keys() == expected.keys(), (name, tied, cuts)
    error = max(abs(loss - expected_loss), *gradient_errors(gradients, expected).values())
    assert error <= (ROUNDING if name in SCALED else 0.0), (name, tied, cuts)


def test_three_stages_equal_the_whole(sample) -> None:
    cases = [*itertools.product(FAMILIES, (False, True)), *((name, False) for name in EXPERTS), ("mixtral", True)]
    for name, tied in sample(cases, 7):
        assert_equal_to_whole(name, tied, (1, 3))


def test_stages_without_layers_and_single_stages(sample) -> None:
    families = ("llama", "gpt2", "bloom", "granite", "gemma3_text")
    for name, edge in sample(itertools.product(families, EDGES), 4):
        assert_equal_to_whole(name, False, EDGES[edge])


def test_padding_on_the_right_and_a_hole(sample) -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, -4:] = mask[0, 2:5] = 0
    for name in sample([*NAMED, *PROMISED_EXPERTS], 4):
        assert_equal_to_whole(name, False, (1, 3), attention_mask=mask)


def test_given_positions(sample) -> None:
    positions = torch.stack([torch.arange(12) + 5, torch.cat([torch.arange(7), torch.arange(5)])])
    for name in sample(("llama", "gpt2", "gemma2", "phi3"), 2):
        assert_equal_to_whole(name, False, (1, 3), position_ids=positions)
    stage = build_stage(describe(tiny_config("bloom")), 0, 2, is_first=True, is_last=False)
    with pytest.raises(InputError, match="BloomForCausalLM takes none"):
        stage(torch.zeros(1, 3, 64), position_ids=torch.arange(3)[None])


def test_a_stage_holds_only_its_own_memory() -> None:
    description = describe(tiny_config("llama", num_hidden_layers=8))
    stage = build_stage(description, 3, 5, is_first=False, is_last=False)
    own = sum(p.numel() for p in stage.parameters())
    places = [
        place for module in stage.whole.modules() for place in (vars(module), module._buffers, module._parameters)
    ]
    tensors = {value for place in places for value in place.values() if isinstance(value, torch.Tensor)}
    held = sum(t.untyped_storage().nbytes() for t in tensors)
    assert own == sum(p.numel() for i in (3, 4) for p in description.layer(i).parameters())
    assert held < 4 * own + 1000


def test_nothing_is_retained_after_a_forward() -> None:
    description = describe(whole_model(tiny_config("gemma3_text")))
    for stage in build_stages(description, (1, 3)):
        copy_parameters(stage, description)
        hidden = torch.randn(1, 6, 64, dtype=torch.float64, requires_grad=True)
        gc.collect()
        gc.disable()
        try:
            output = stage(hidden)
            seen = [weakref.ref(hidden), weakref.ref(output)]
            del hidden, output
            assert [reference() for reference in seen] == [None, None], "only reference cycles would need the collector"
        finally:
            gc.enable()


def test_a_failing_layer_leaves_nothing_behind() -> None:
    description = describe(whole_model(tiny_config("llama")))
    stage = build_stage(description, 1, 3, is_first=False, is_last=False, dtype=torch.float64)
    copy_parameters(stage, description)
    hidden = torch.randn(1, 6, 64, dtype=torch.float64)
    expected = stage(hidden)
    with pytest.raises(RuntimeError):
        stage(torch.randn(1, 6, 63, dtype=torch.float64))
    assert stage._relay == Relay(stage._relay.argument)
    assert torch.equal(stage(hidden), expected)


def test_thrown_away_work_builds_no_graph() -> None:
    """Check the graph of a middle stage: it must contain neither Granite's embedding multiplier nor its final norm."""
    description = describe(whole_model(tiny_config("granite")))
    middle = build_stage(description, 1, 3, is_first=False, is_last=False, dtype=torch.float64)
    last = build_stage(description, 3, 4, is_first=False, is_last=True, dtype=torch.float64)
    hidden = torch.randn(1, 6, 64, dtype=torch.float64)
    frozen = [parameter.requires_grad_(False) for parameter in (*middle.parameters(), *last.parameters())]
    assert frozen and middle(hidden).grad_fn is None and last(hidden).grad_fn is None
    hidden.requires_grad_()
    one_layer, two_layers = (
        build_stage(description, 1, last, is_first=False, is_last=False, dtype=torch.float64) for last in (2, 3)
    )
    sizes = [len([*graph_nodes(stage(hidden))]) for stage in (one_layer, two_layers)]
    assert sizes[1] - 1 == 2 * (sizes[0] - 1), "every node but that of the input belongs to a layer"


def test_building_and_running_leave_the_random_state_and_the_default_dtype_alone() -> None:
    config = tiny_config("gpt2")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    description = describe(config)
    stage = build_stage(description, 0, 2, is_first=True, is_last=False, dtype=torch.bfloat16)
    initialize(stage, description, seed=1)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() == torch.float32
    stage(torch.zeros(1, 4, 64, dtype=torch.bfloat16))
    assert torch.equal(torch.get_rng_state(), state)


def test_rotary_tables_stay_in_fp32_and_parameters_have_the_dtype_that_was_asked_for() -> None:
    """Of Ernie too, whose routers transformers builds in fp32 for every dtype of the model."""
    expected = dict(whole_model(tiny_config("gemma3_text"), dtype=torch.float32).named_buffers())
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        stage = build_stage(describe(tiny_config("gemma3_text")), 1, 3, is_first=False, is_last=False, dtype=dtype)
        tables = {name: buffer for name, buffer in stage.named_buffers() if "inv_freq" in name}
        assert len(tables) == 4 and {parameter.dtype for parameter in stage.parameters()} == {dtype}
        assert all(
            table.dtype == torch.float32 and torch.equal(table, expected[name]) for name, table in tables.items()
        )
    for dtype in (torch.float32, torch.float64):
        stage = build_stage(describe(tiny_config("ernie4_5_moe")), 0, 4, is_first=True, is_last=True, dtype=dtype)
        assert {parameter.dtype for parameter in stage.parameters()} == {dtype}


class DtypesOfProducts(TorchFunctionMode):
    """Records the floating dtypes of layer norms, matrix products and look-ups."""

    def __init__(self):
        super().__init__()
        self.seen: dict[str, set[frozenset[torch.dtype]]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (functional.layer_norm, functional.linear, functional.embedding):
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            dtypes = frozenset(tensor.dtype for tensor in tensors if tensor.is_floating_point())
            self.seen.setdefault(func.__name__, set()).add(dtypes)
        return func(*args, **kwargs)


# first layer, last layer, owns the start, owns the end
PLACES = [(0, 2, True, False), (1, 3, False, False), (2, 2, False, False), (2, 4, False, True), (4, 4, False, True)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [*FAMILIES, *PROMISED_EXPERTS])
def test_what_stands_in_computes_in_the_dtype_of_the_hidden_states(name) -> None:
    """Parameters are replaced by bf16 copies, as in the runtime. Include GPT-NeoX, StarCoder2, Phi and GPT-2: they end
    in a layer norm, and accelerators refuse mixed dtypes."""
    description = describe(whole_model(tiny_config(name)))
    for first, last, is_first, is_last in PLACES:
        ends = {"is_first": is_first, "is_last": is_last}
        stage = build_stage(description, first, last, **ends, dtype=torch.float32, compute_dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in stage.parameters()} <= {torch.float32}
        copy_parameters(stage, description)
        for parameter in stage.parameters():
            parameter.data = parameter.data.bfloat16()
        head = stage.whole.get_submodule(description.structure.head_module)
        received = []
        head.register_forward_pre_hook(lambda module, args, received=received: received.append(args[0].dtype))
        with DtypesOfProducts() as products:
            result = stage(torch.randn(2, 6, 64, dtype=torch.bfloat16))
        assert all(dtypes == {frozenset([torch.bfloat16])} for dtypes in products.seen.values()), products.seen
        assert result.dtype == head.weight.dtype == torch.bfloat16
        assert received == ([torch.bfloat16] if first < last or is_last else [])


def test_a_result_of_another_dtype_is_refused() -> None:
    """Use Mamba's layers, which return fp32 for every input: messages between stages have one dtype."""
    config = transformers.MambaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=4, residual_in_fp32=True)
    stage = build_stage(describe(config), 0, 2, is_first=True, is_last=False, dtype=torch.bfloat16)
    initialize(stage, describe(config), seed=0)
    with pytest.raises(InputError, match=r"layers \[0, 2\) of MambaForCausalLM returned \[1, 3, 64\] torch.float32"):
        stage(torch.zeros(1, 3, 64, dtype=torch.bfloat16))


def test_attention_is_what_transformers_chooses() -> None:
    """Expect SDPA if the family supports it (for Gemma 2 this depends on the version), else eager."""
    for name in ("llama", "gemma2", "gemma3_text"):
        config = build_stage(describe(tiny_config(name)), 0, 1, is_first=True, is_last=False).whole.config
        assert config._attn_implementation == whole_model(tiny_config(name)).config._attn_implementation
        assert name == "gemma2" or config._attn_implementation == "sdpa"


def test_dropout_is_allowed_and_draws() -> None:
    description = describe(tiny_config("gpt2", resid_pdrop=0.5))
    stage = build_stage(description, 1, 2, is_first=False, is_last=False)
    initialize(stage, description, seed=0)
    hidden = torch.randn(1, 6, 64)
    assert not torch.equal(stage(hidden), stage(hidden))
    stage.eval()
    assert torch.equal(stage(hidden), stage(hidden))


def test_ranges_that_make_no_sense() -> None:
    description = describe(tiny_config("llama"))
    for first, last, is_first, is_last, sentence in (
        (0, 5, True, True, r"layers \[0, 5\) are not within the 4 layers"),
        (3, 2, False, False, r"layers \[3, 2\) are not within"),
        (1, 2, True, False, "cannot be the first stage"),
        (1, 2, False, True, "cannot be the last stage"),
    ):
        with pytest.raises(InputError, match=sentence):
            build_stage(description, first, last, is_first=is_first, is_last=is_last)
