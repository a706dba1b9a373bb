"""A model cut into stages has the same loss and gradients as in transformers, to the last bit."""

from __future__ import annotations

import gc
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

# name, cuts, arguments of the forward
CUTS = [(name, tied, (1, 3)) for name in FAMILIES for tied in (False, True)]
CUTS += [(name, False, (1, 3)) for name in EXPERTS] + [("mixtral", True, (1, 3))]
EDGES = [
    ("no layer at the end", (2, 4)),
    ("no layer at the start", (0, 2)),
    ("no layer anywhere but the middle", (0, 4)),
    ("no layer in the middle", (2, 2)),
    ("one stage", ()),
    ("one layer per stage", (1, 2, 3)),
]


def assert_equal_to_whole(name: str, tied: bool, cuts, sequence: int = 12, **arguments) -> None:
    whole = whole_model(tiny_config(name, tied=tied))
    description = describe(whole)
    tokens, labels = tokens_and_labels(sequence=sequence)
    expected_loss, expected = loss_and_gradients(whole, tokens, labels, **arguments)
    loss, found = loss_and_gradients_in_stages(description, cuts, tokens, labels, **arguments)
    assert found.keys() == expected.keys()
    error = max(gradient_errors(found, expected).values())
    if name in SCALED:
        assert abs(loss - expected_loss) < ROUNDING and error < ROUNDING
    else:
        assert loss == expected_loss and error == 0.0


@pytest.mark.parametrize(("name", "tied", "cuts"), CUTS)
@pytest.mark.sampled(16)
def test_three_stages_equal_the_whole(name, tied, cuts) -> None:
    assert_equal_to_whole(name, tied, cuts)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "granite", "gemma3_text"])
@pytest.mark.parametrize(("what", "cuts"), EDGES, ids=[what for what, _ in EDGES])
def test_stages_without_layers_and_single_stages(name, what, cuts) -> None:
    assert_equal_to_whole(name, False, cuts)


@pytest.mark.parametrize("name", [*NAMED, *PROMISED_EXPERTS])
def test_padding_on_the_right_and_a_hole(name) -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, -4:] = mask[0, 2:5] = 0
    assert_equal_to_whole(name, False, (1, 3), attention_mask=mask)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "phi3"])
def test_given_positions(name) -> None:
    positions = torch.stack([torch.arange(12) + 5, torch.cat([torch.arange(7), torch.arange(5)])])
    assert_equal_to_whole(name, False, (1, 3), position_ids=positions)


def test_positions_that_a_model_does_not_take_are_refused() -> None:
    description = describe(whole_model(tiny_config("bloom")))
    stage = build_stage(description, 0, 2, is_first=True, is_last=False)
    with pytest.raises(InputError, match="BloomForCausalLM takes none"):
        stage(torch.zeros(1, 3, 64), position_ids=torch.arange(3)[None])


def test_parameters_have_the_names_of_the_whole_and_each_exists_once() -> None:
    whole = whole_model(tiny_config("gpt2"))
    description = describe(whole)
    stages = build_stages(description, (1, 3))
    names = [name for stage in stages for name, _ in stage.named_parameters()] + [*description.vocabulary_names]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    assert "transformer.wpe.weight" in dict(stages[0].named_parameters())
    assert {"transformer.ln_f.weight", "transformer.ln_f.bias"} <= dict(stages[2].named_parameters()).keys()
    assert {name.split(".")[2] for name, _ in stages[1].named_parameters()} == {"1", "2"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_parameters_have_the_dtype_that_was_asked_for(dtype) -> None:
    """Include Ernie's routers, which transformers builds in fp32 for every dtype of the model."""
    description = describe(tiny_config("ernie4_5_moe"))
    stage = build_stage(description, 0, 4, is_first=True, is_last=True, dtype=dtype)
    assert {parameter.dtype for parameter in stage.parameters()} == {dtype}


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


def size_of_graph(output: torch.Tensor) -> int:
    return len([*graph_nodes(output)])


def test_thrown_away_work_builds_no_graph() -> None:
    """Check the graph of a middle stage: it must contain neither Granite's embedding multiplier nor its final norm."""
    description = describe(whole_model(tiny_config("granite")))
    middle = build_stage(description, 1, 3, is_first=False, is_last=False, dtype=torch.float64)
    last = build_stage(description, 3, 4, is_first=False, is_last=True, dtype=torch.float64)
    hidden = torch.randn(1, 6, 64, dtype=torch.float64)
    frozen = [parameter.requires_grad_(False) for parameter in (*middle.parameters(), *last.parameters())]
    assert frozen and middle(hidden).grad_fn is None and last(hidden).grad_fn is None
    hidden.requires_grad_()
    one = size_of_graph(build_stage(description, 1, 2, is_first=False, is_last=False, dtype=torch.float64)(hidden))
    two = size_of_graph(build_stage(description, 1, 3, is_first=False, is_last=False, dtype=torch.float64)(hidden))
    assert two - 1 == 2 * (one - 1), "every node but that of the input belongs to a layer"


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rotary_tables_stay_in_fp32(dtype) -> None:
    stage = build_stage(describe(tiny_config("gemma3_text")), 1, 3, is_first=False, is_last=False, dtype=dtype)
    tables = {name: buffer for name, buffer in stage.named_buffers() if "inv_freq" in name}
    expected = dict(whole_model(tiny_config("gemma3_text"), dtype=torch.float32).named_buffers())
    assert len(tables) == 4
    for name, table in tables.items():
        assert table.dtype == torch.float32 and torch.equal(table, expected[name])
    assert {parameter.dtype for parameter in stage.parameters()} == {dtype}


class DtypesOfProducts(TorchFunctionMode):
    """Records the floating dtypes of layer norms, matrix products and look-ups."""

    def __init__(self):
        super().__init__()
        self.seen: dict[str, set[frozenset[torch.dtype]]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (functional.layer_norm, functional.linear, functional.embedding):
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            dtypes = frozenset(tensor.dtype for tensor in given if tensor.is_floating_point())
            self.seen.setdefault(func.__name__, set()).add(dtypes)
        return func(*args, **kwargs)


def in_bfloat16(description, first, last, compute_dtype=torch.bfloat16, **ends):
    """Return a stage whose fp32 parameters are replaced by bf16 copies, as in the runtime."""
    stage = build_stage(description, first, last, **ends, dtype=torch.float32, compute_dtype=compute_dtype)
    assert {parameter.dtype for parameter in stage.parameters()} <= {torch.float32}
    copy_parameters(stage, description)
    for parameter in stage.parameters():
        parameter.data = parameter.data.bfloat16()
    return stage


# first layer, last layer, owns the start, owns the end
PLACES = [(0, 2, True, False), (1, 3, False, False), (2, 2, False, False), (2, 4, False, True), (4, 4, False, True)]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [*FAMILIES, *PROMISED_EXPERTS])
def test_what_stands_in_computes_in_the_dtype_of_the_hidden_states(name) -> None:
    """Include GPT-NeoX, StarCoder2, Phi and GPT-2: they end in a layer norm, and accelerators refuse mixed dtypes."""
    description = describe(whole_model(tiny_config(name)))
    for first, last, is_first, is_last in PLACES:
        stage = in_bfloat16(description, first, last, is_first=is_first, is_last=is_last)
        head = stage.whole.get_submodule(description.structure.head_module)
        received = []
        head.register_forward_pre_hook(lambda module, args, received=received: received.append(args[0].dtype))
        with DtypesOfProducts() as products:
            result = stage(torch.randn(2, 6, 64, dtype=torch.bfloat16))
        assert all(dtypes == {frozenset([torch.bfloat16])} for dtypes in products.seen.values()), products.seen
        assert result.dtype == head.weight.dtype == torch.bfloat16
        assert received == ([torch.bfloat16] if first < last or is_last else [])


@pytest.mark.parametrize("name", ["gpt_neox", "starcoder2", "phi", "gpt2"])
def test_without_the_compute_dtype_the_layer_norm_that_stands_in_mixes(name) -> None:
    """Check that the test above can fail."""
    description = describe(whole_model(tiny_config(name)))
    stage = in_bfloat16(description, 1, 3, compute_dtype=None, is_first=False, is_last=False)
    with DtypesOfProducts() as products:
        stage(torch.randn(2, 6, 64, dtype=torch.bfloat16))
    assert frozenset([torch.bfloat16, torch.float32]) in products.seen["layer_norm"]


def test_a_result_of_another_dtype_is_refused() -> None:
    """Use Mamba's layers, which return fp32 for every input: messages between stages have one dtype."""
    config = transformers.MambaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=4, residual_in_fp32=True)
    stage = build_stage(describe(config), 0, 2, is_first=True, is_last=False, dtype=torch.bfloat16)
    initialize(stage, describe(config), seed=0)
    with pytest.raises(InputError, match=r"layers \[0, 2\) of MambaForCausalLM returned \[1, 3, 64\] torch.float32"):
        stage(torch.zeros(1, 3, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text"])
def test_attention_is_what_transformers_chooses(name) -> None:
    """Expect SDPA if the family supports it (for Gemma 2 this depends on the version), else eager."""
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


@pytest.mark.parametrize(
    ("first", "last", "is_first", "is_last", "text"),
    [
        (0, 5, True, True, r"layers \[0, 5\) are not within the 4 layers"),
        (3, 2, False, False, r"layers \[3, 2\) are not within"),
        (1, 2, True, False, "cannot be the first stage"),
        (1, 2, False, True, "cannot be the last stage"),
    ],
)
def test_ranges_that_make_no_sense(first, last, is_first, is_last, text) -> None:
    with pytest.raises(InputError, match=text):
        build_stage(describe(tiny_config("llama")), first, last, is_first=is_first, is_last=is_last)
