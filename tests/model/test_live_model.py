"""A live model is trained as it is: what its modules have set is carried over; what cannot be is refused by name."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import loss_and_gradients, loss_and_gradients_in_stages, tiny_config, tokens_and_labels, whole_model
from family_configs import Configuration, configurations
from torch import nn

from evenpipe.errors import InputError
from evenpipe.model import (
    build_stage,
    check_forward,
    check_values,
    copy_parameters,
    describe,
    describe_modules,
    left_out,
)

# --- carried over ---------------------------------------------------------------------------------------------


def change(model: nn.Module, path: str, value: Any) -> None:
    """Set an attribute at the end of a path such as "model.layers.1.mlp"; `value` may be a function of the old one."""
    parent, _, name = path.rpartition(".")
    owner = model.config if parent == "config" else model.get_submodule(parent)
    setattr(owner, name, value(getattr(owner, name)) if callable(value) else value)


def half(value: Any) -> Any:
    return value * 0.5


CARRIED = [
    # family, what is changed, new value
    ("llama", "model.rotary_emb.inv_freq", half),
    ("llama", "model.layers.1.self_attn.scaling", half),
    ("gemma3_text", "model.embed_tokens.embed_scale", half),  # an unsaved buffer
    ("granite", "model.layers.3.residual_multiplier", 0.4),
    ("granite", "model.embedding_multiplier", 1.5),
    ("cohere2", "logit_scale", 0.7),
    ("olmo3", "model.norm.variance_epsilon", 0.1),
    ("llama", "config.pad_token_id", None),  # the embedding still has it
    ("llama", "config.pad_token_id", 5),  # the embedding has another one
    ("mixtral", "model.layers.1.mlp.gate.top_k", 1),
]


@pytest.mark.parametrize(("family", "path", "value"), CARRIED)
def test_what_modules_have_set_is_carried_over(family: str, path: str, value: Any) -> None:
    model, tokens = whole_model(tiny_config(family)), tokens_and_labels()
    before, _ = loss_and_gradients(model, *tokens)
    change(model, path, value)
    tokens[0][0, 3] = tokens[1][1, 5] = 5
    wanted, wanted_gradients = loss_and_gradients(model, *tokens)
    description = describe(model)
    check_forward(description)
    loss, gradients = loss_and_gradients_in_stages(description, [1, 3], *tokens)
    assert loss == pytest.approx(wanted, rel=1e-12)
    assert "pad_token_id" in path or wanted != pytest.approx(before, rel=1e-6)
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_frequencies_that_have_grown_with_a_sequence_are_carried_over() -> None:
    rotary = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = whole_model(tiny_config("llama", rope_parameters=rotary, max_position_embeddings=16))
    before = model.model.rotary_emb.inv_freq.clone()
    model(input_ids=torch.randint(5, 500, (1, 40)))
    grown = model.model.rotary_emb.inv_freq.clone()
    assert not torch.equal(grown, before)
    description = describe(model)
    check_forward(description)  # of few tokens: the model grows back meanwhile
    assert torch.equal(model.model.rotary_emb.inv_freq, grown) and model.model.rotary_emb.max_seq_len_cached == 40
    stage = build_stage(description, 1, 2, is_first=False, is_last=False)
    copy_parameters(stage, description)
    assert torch.equal(stage.whole.model.rotary_emb.inv_freq, grown)
    assert stage.whole.model.rotary_emb.max_seq_len_cached == 40


# --- refused --------------------------------------------------------------------------------------------------


class OtherMLP(transformers.models.llama.modeling_llama.LlamaMLP):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


class CpuOffload:
    """As accelerate's."""


class AdaptedLinear(nn.Linear):
    """As peft's."""

    __module__ = "peft.tuners.lora.layer"


def doubled(module, *arguments):
    return 2 * arguments[-1] if isinstance(arguments[-1], torch.Tensor) else None


def neftune_post_forward_hook(module, args, output):
    return output + torch.rand_like(output)


def with_own_config(attention) -> None:
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "eager"
    attention.config.hidden_act = "relu"


def hook(kind: str) -> Callable[[nn.Module], Any]:
    return lambda module: getattr(module, f"register_{kind}")(doubled)


def setting(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module, name, value)


REFUSED: list[tuple[str, Callable[[Any], Any], str]] = [
    # module, what is done to it, message
    ("layers.0.mlp", setting("__class__", OtherMLP), "layers.0.mlp is OtherMLP, and LlamaMLP in a Llama.* its config"),
    ("layers.2.mlp", setting("act_fn", nn.GELU()), r"layers.2.mlp.act_fn is GELU, and SiLUActivation in a Llama"),
    (
        "layers.2.mlp",
        lambda mlp: mlp.add_module("dropout", nn.Dropout(0.1)),
        "layers.2.mlp.dropout is Dropout, and missing in a LlamaForCausalLM built",
    ),
    (
        "layers.1.self_attn",
        hook("forward_hook"),
        r"layers.1.self_attn has a forward hook \(doubled\), and stages do not take over",
    ),
    ("layers.1.self_attn", hook("forward_pre_hook"), r"layers.1.self_attn has a forward pre hook \(doubled\)"),
    ("layers.1.self_attn", hook("full_backward_hook"), r"layers.1.self_attn has a backward hook \(doubled\)"),
    ("layers.1.self_attn", hook("full_backward_pre_hook"), r"layers.1.self_attn has a backward pre hook \(doubled\)"),
    (
        "embed_tokens",
        lambda embedding: embedding.register_forward_hook(neftune_post_forward_hook),
        r"embed_tokens has a forward hook \(.*neftune_post_forward_hook\)",
    ),
    (
        "layers.3.mlp",
        setting("forward", functools.partial(doubled, None)),
        "layers.3.mlp.forward is partial object, and the class's in a",
    ),
    (
        "layers.3.mlp",
        setting("forward", lambda hidden: hidden),
        "layers.3.mlp.forward is .*, and the class's in a LlamaForCausalLM built",
    ),
    ("layers.0.self_attn", with_own_config, "layers.0.self_attn.config is a LlamaConfig of its own"),
    (
        "layers",
        lambda layers: layers.__setitem__(0, torch.compile(layers[0])),
        "layers.0 is wrapped by torch.compile, .* and compile_layers=True",
    ),
    (
        "layers.0.mlp.up_proj",
        setting("__class__", AdaptedLinear),
        r"layers.0.mlp.up_proj is AdaptedLinear of peft, .*merge_and_unload",
    ),
    (
        "layers.1.self_attn",
        lambda attention: setattr(attention, "q_proj", nn.Sequential(attention.q_proj)),
        r"parameter model.layers.1.self_attn.q_proj.0.weight is of the shape \(\d+, \d+\), and missing in",
    ),
    (
        "layers.0.mlp",
        setting("_hf_hook", CpuOffload()),
        r"accelerate has put a CpuOffload on model.layers.0.mlp, .*remove_hook_from_module",
    ),
]


def test_what_stages_would_lose_is_refused_by_name(sample) -> None:
    whole = whole_model(tiny_config("llama"))
    for name, change_it, sentence in sample(REFUSED, 8):
        model = copy.deepcopy(whole)
        change_it(model.get_submodule(f"model.{name}"))
        with pytest.raises(InputError, match=rf"^model: .*{sentence}"):
            describe(model)


def test_a_model_without_values_is_described_but_has_nothing_to_copy() -> None:
    model = whole_model(tiny_config("llama"))
    model.model.layers[3].mlp.to("meta")
    check_forward(describe(model))
    with pytest.raises(InputError, match=r"^model: its parameter model.layers.3.mlp.*.weight has no values"):
        check_values(model)


class Hooked(transformers.LlamaForCausalLM):
    """Registers a hook on each of its layers, as every model built from its class does."""

    def __init__(self, config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.register_forward_hook(doubled)


def test_hooks_that_the_class_itself_registers_are_none_of_the_model() -> None:
    model, tokens = Hooked._from_config(tiny_config("llama"), dtype=torch.float64), tokens_and_labels()
    wanted, _ = loss_and_gradients(model, *tokens)
    check_forward(describe(model))
    found, _ = loss_and_gradients_in_stages(describe(model), [2], *tokens)
    assert found == pytest.approx(wanted, rel=1e-12)
    model.model.layers[2].mlp.register_forward_hook(doubled)
    with pytest.raises(InputError, match=r"^model: model.layers.2.mlp has a forward hook \(doubled\)"):
        describe(model)


def test_a_model_wrapped_by_torch_compile_is_refused() -> None:
    with pytest.raises(InputError, match=r"^model: the model is wrapped by torch.compile, .* compile_layers=True"):
        describe(torch.compile(whole_model(tiny_config("llama"))))
    layers = [torch.compile(nn.Linear(8, 8)), nn.Linear(8, 8)]
    with pytest.raises(InputError, match=r"^model: layers.0 is wrapped by torch.compile"):
        describe_modules(nn.Embedding(9, 8), layers, None, nn.Linear(8, 9, bias=False))


class Gain:
    def __init__(self, factor: float) -> None:
        self.factor = factor


class GainedMLP(transformers.models.llama.modeling_llama.LlamaMLP):
    def __init__(self, config) -> None:
        super().__init__(config)
        self.gain, self._shift = Gain(1.0), 0.0

    def forward(self, hidden):
        return self.gain.factor * super().forward(hidden) + self._shift


class Gained(transformers.LlamaForCausalLM):
    """Keeps a number in an object of its own, and one in a private attribute."""

    def __init__(self, config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = GainedMLP(config)


@pytest.mark.parametrize("name", ["gain", "_shift"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_no_comparison_of_attributes_shows_is_found_by_a_forward(name: str, dtype: torch.dtype) -> None:
    model = Gained._from_config(tiny_config("llama"), dtype=dtype).train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    description = describe(model)
    check_forward(description)
    mlp = model.model.layers[2].mlp
    if name == "gain":
        mlp.gain.factor = 1.5
    else:
        mlp._shift = 0.5
    with pytest.raises(InputError, match=r"^model: model.layers.2.mlp computes something else than in a Gained built"):
        check_forward(description)
    assert modes == [module.training for module in model.modules()]
    assert not any(module._forward_hooks for module in model.modules())


# --- left out, and left alone -----------------------------------------------------------------------------------


def test_what_changes_no_result_is_left_out_and_said() -> None:
    model = whole_model(tiny_config("llama"))
    assert left_out(model) == []
    for layer in model.model.layers:
        layer.compile()
    model.gradient_checkpointing_enable()
    compiled, recomputed = left_out(model)
    assert "compile() of model.layers.0 and 3 other modules is not taken over: compile_layers=True" in compiled
    assert "gradient_checkpointing_enable() is not taken over: activation_checkpointing='full'" in recomputed
    check_forward(describe(model))  # does not compile
    assert model.model.layers[0]._compiled_call_impl is not None


def outcome(source) -> str:
    try:
        description = describe(source)
    except InputError as error:
        return str(error)
    if description.model is not None:
        assert not any(key != "max_seq_len_cached" for one in description.changed.values() for key in one)
        check_forward(description)
    return ""


def use(model) -> None:
    """Do to a model what usual programs do before they hand it on."""
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    ids = torch.randint(4, 200, (1, 20))
    with contextlib.suppress(Exception):  # some families do not train or generate with their small config
        model.train()(input_ids=ids, use_cache=False).logits.float().mean().backward()
        model.eval()
        model.generate(input_ids=ids[:, :4], max_new_tokens=3, do_sample=False)
    model.config.use_cache = False
    model.requires_grad_(False)
    next(model.parameters()).requires_grad_(True)


def check_usual_model(configuration: Configuration) -> bool:
    """Return whether a model of this configuration can be built; check that describing it, new or used, ends as for its
    config."""
    config = configuration.build()
    try:
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    except Exception:  # families raise many types where a library is missing
        return False
    assert outcome(model) == outcome(config), configuration
    if outcome(config) == "":
        use(model)
        assert outcome(model) == "", configuration
    return True


def test_usual_models_are_not_refused(sample) -> None:
    for family in sample(("llama", "gemma3_text", "mixtral", "gpt2", "recurrent_gemma", "granite_swa", "bert"), 2):
        assert check_usual_model(Configuration(family))


@pytest.mark.slow
def test_usual_models_of_every_family_are_not_refused() -> None:
    every = [each for each in configurations() if str(each) != "big_bird (block sparse)"]  # a use changes its modules
    assert sum(map(check_usual_model, every)) > 200


def test_a_model_in_another_dtype_and_another_attention_is_not_refused() -> None:
    for dtype, family in (
        (torch.bfloat16, "gemma3_text"),
        (torch.float64, "ernie4_5_moe"),
        (torch.bfloat16, "granite"),
    ):
        assert outcome(whole_model(tiny_config(family), dtype)) == ""
    model = whole_model(tiny_config("llama"))
    model.set_attn_implementation("eager")
    assert outcome(model) == ""
    assert outcome(whole_model(tiny_config("llama")).to(torch.bfloat16)) == ""
