"""A model cut into stages has the same loss and gradients as in transformers, to the last bit; what stages hold."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import transformers
from families import (
    EXPERTS,
    FAMILIES,
    GROUPED,
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
from torch.utils._python_dispatch import TorchDispatchMode

from evenpipe.errors import InputError
from evenpipe.model import build_stage, copy_parameters, describe, gradient_errors, initialize

CUTS = [
    (1, 3),
    (2, 4),  # no layer at the end
    (0, 2),  # no layer at the start
    (0, 4),  # no layer anywhere but the middle
    (2, 2),  # no layer in the middle
    (),
    (1, 2, 3),
]
MASK = torch.tensor([[1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 8 + [0] * 4])  # a hole, and padding on the right
POSITIONS = torch.stack([torch.arange(12) + 5, torch.cat([torch.arange(7), torch.arange(5)])])
GIVEN = {"nothing": {}, "mask": {"attention_mask": MASK}, "positions": {"position_ids": POSITIONS}}
CASES = [
    # family, tied, cuts, what is given beside tokens
    *itertools.product(FAMILIES, (False, True), CUTS[:1], ("nothing",)),
    *itertools.product(EXPERTS, (False,), CUTS[:1], ("nothing",)),
    *itertools.product(("llama", "gpt2", "bloom", "granite", "gemma3_text"), (False,), CUTS[1:], ("nothing",)),
    *itertools.product((*NAMED, *PROMISED_EXPERTS), (False,), CUTS[:1], ("mask",)),
    *itertools.product(("llama", "gpt2", "gemma2", "phi3"), (False,), CUTS[:1], ("positions",)),
    ("mixtral", True, (1, 3), "nothing"),
]
SCALED = {"granite", "granitemoe"}  # logits are divided by 3, which no factor reproduces to the last bit


def test_stages_equal_the_whole(sample) -> None:
    for name, tied, cuts, given in sample(CASES, 14):
        case, arguments = (name, tied, cuts, given), GIVEN[given]
        whole = whole_model(tiny_config(name, tied=tied))
        tokens, labels = tokens_and_labels()
        expected_loss, expected = loss_and_gradients(whole, tokens, labels, **arguments)
        loss, gradients = loss_and_gradients_in_stages(describe(whole), cuts, tokens, labels, **arguments)
        assert gradients.keys() == expected.keys(), case
        error = max(abs(loss - expected_loss), *gradient_errors(gradients, expected).values())
        assert error <= (ROUNDING if name in SCALED else 0.0), case
    stage = build_stage(describe(tiny_config("bloom")), 0, 2, is_first=True, is_last=False)
    with pytest.raises(InputError, match="BloomForCausalLM takes none"):
        stage(torch.zeros(2, 12, 64), position_ids=POSITIONS)


# --- single stages ---------------------------------------------------------------------------------------------------


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


class ValuesRead(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*args, **(kwargs or {}))


def config_for_a_gpu(name: str) -> transformers.PreTrainedConfig:
    """Return a config with grouped experts, as on a GPU, and without rotary tables that grow with the sequence."""
    if name == "llama4_text":
        chunked = {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 8}
        config = transformers.Llama4TextConfig(**(GROUPED | chunked))
    else:
        config = tiny_config(name, **({"rope_parameters": None} if name == "phi3" else {}))
    config._experts_implementation = "grouped_mm" if name in EXPERTS else None
    return config


@pytest.mark.parametrize("name", [*FAMILIES, *EXPERTS, "llama4_text"])
@pytest.mark.sampled(4)
def test_no_value_is_read(name: str) -> None:
    """Or the host would wait for the GPU. On the device "meta" every operation that reads a value fails."""
    description = describe(config_for_a_gpu(name))
    for torch_device, dtype in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        for first, last in ((0, 1), (1, 3), (3, 4)):
            ends = {"is_first": first == 0, "is_last": last == 4}
            stage = build_stage(description, first, last, **ends, dtype=dtype, torch_device=torch_device)
            with ValuesRead() as values:
                stage(torch.ones(2, 12, 64, dtype=dtype, device=torch_device))
            assert values.count == 0


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
