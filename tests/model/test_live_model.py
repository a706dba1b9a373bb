"""A live model is trained as it is: what its modules have set is carried over; what cannot be is refused by name."""

from __future__ import annotations

import contextlib
import copy
import functools

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


def scale_frequencies(model) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def scale_one_attention(model) -> None:
    model.model.layers[1].self_attn.scaling *= 0.5


def scale_embeddings(model) -> None:
    model.model.embed_tokens.embed_scale.mul_(0.5)  # an unsaved buffer


def scale_residuals(model) -> None:
    model.model.layers[3].residual_multiplier = 0.4


def scale_embeddings_by_attribute(model) -> None:
    model.model.embedding_multiplier = 1.5


def scale_logits(model) -> None:
    model.logit_scale = 0.7


def narrow_a_window(model) -> None:
    model.model.layers[2].self_attn.sliding_window = 3


def raise_an_epsilon(model) -> None:
    model.model.norm.variance_epsilon = 0.1


def forget_the_padding(model) -> None:
    model.config.pad_token_id = None  # the embedding still has it


def pad_later(model) -> None:
    model.config.pad_token_id = 5  # the embedding has another one


def choose_one_expert(model) -> None:
    model.model.layers[1].mlp.gate.top_k = 1


CARRIED = [
    ("llama", scale_frequencies),
    ("llama", scale_one_attention),
    ("gemma3_text", scale_embeddings),
    ("granite", scale_residuals),
    ("granite", scale_embeddings_by_attribute),
    ("cohere2", scale_logits),
    ("olmo3", raise_an_epsilon),
    ("llama", forget_the_padding),
    ("llama", pad_later),
    ("mixtral", choose_one_expert),
]


@pytest.mark.parametrize(("family", "change"), CARRIED)
def test_what_modules_have_set_is_carried_over(family: str, change) -> None:
    model, tokens = whole_model(tiny_config(family)), tokens_and_labels()
    before, _ = loss_and_gradients(model, *tokens)
    change(model)
    tokens[0][0, 3] = tokens[1][1, 5] = 5
    wanted, wanted_gradients = loss_and_gradients(model, *tokens)
    description = describe(model)
    check_forward(description)
    found, gradients = loss_and_gradients_in_stages(description, [1, 3], *tokens)
    assert found == pytest.approx(wanted, rel=1e-12)
    assert change in (forget_the_padding, pad_later) or wanted != pytest.approx(before, rel=1e-6)
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_a_changed_window_and_dropout_are_in_the_stages() -> None:
    model = whole_model(tiny_config("gpt2"), torch.float32)
    model.transformer.h[2].mlp.dropout.p = 0.25
    description = describe(model)
    stage = build_stage(description, 2, 4, is_first=False, is_last=True)
    assert stage.whole.transformer.h[2].mlp.dropout.p == 0.25
    assert stage.whole.transformer.h[3].mlp.dropout.p == 0.0
    model = whole_model(tiny_config("gemma2"))
    narrow_a_window(model)
    assert build_stage(describe(model), 2, 3, is_first=False, is_last=False).layers[2].self_attn.sliding_window == 3


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


def doubled(module, *given):
    return 2 * given[-1] if isinstance(given[-1], torch.Tensor) else None


def replace_a_block(model) -> None:
    model.model.layers[0].mlp.__class__ = OtherMLP


def replace_an_activation(model) -> None:
    model.model.layers[2].mlp.act_fn = nn.GELU()


def insert_a_module(model) -> None:
    model.model.layers[2].mlp.add_module("dropout", nn.Dropout(0.1))


def hook(kind: str):
    def add(model) -> None:
        getattr(model.model.layers[1].self_attn, f"register_{kind}")(doubled)

    return add


def make_noisy_embeddings(model) -> None:
    def neftune_post_forward_hook(module, args, output):
        return output + torch.rand_like(output)

    model.model.embed_tokens.register_forward_hook(neftune_post_forward_hook)


def replace_a_forward(model) -> None:
    mlp = model.model.layers[3].mlp
    mlp.forward = functools.partial(doubled, mlp)


def replace_a_method(model) -> None:
    model.model.layers[3].mlp.forward = lambda hidden: hidden


def replace_a_config(model) -> None:
    attention = model.model.layers[0].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "eager"
    attention.config.hidden_act = "relu"


def wrap_a_layer(model) -> None:
    model.model.layers[0] = torch.compile(model.model.layers[0])


def adapt(model) -> None:
    class Linear(nn.Linear):
        pass

    Linear.__module__ = "peft.tuners.lora.layer"
    model.model.layers[0].mlp.up_proj.__class__ = Linear


def offload(model) -> None:
    class CpuOffload:
        pass

    model.model.layers[0].mlp._hf_hook = CpuOffload()


REFUSED = [
    (replace_a_block, "model.layers.0.mlp is OtherMLP, and LlamaMLP in a LlamaForCausalLM built from its config"),
    (replace_an_activation, r"model.layers.2.mlp.act_fn is GELU, and SiLUActivation in a LlamaForCausalLM built"),
    (insert_a_module, "model.layers.2.mlp.dropout is Dropout, and missing in a LlamaForCausalLM built"),
    (hook("forward_hook"), r"model.layers.1.self_attn has a forward hook \(doubled\), and stages do not take over"),
    (hook("forward_pre_hook"), r"model.layers.1.self_attn has a forward pre hook \(doubled\)"),
    (hook("full_backward_hook"), r"model.layers.1.self_attn has a backward hook \(doubled\)"),
    (hook("full_backward_pre_hook"), r"model.layers.1.self_attn has a backward pre hook \(doubled\)"),
    (make_noisy_embeddings, r"model.embed_tokens has a forward hook \(.*neftune_post_forward_hook\)"),
    (replace_a_forward, "model.layers.3.mlp.forward is partial object, and the class's in a"),
    (replace_a_method, "model.layers.3.mlp.forward is .*, and the class's in a LlamaForCausalLM built"),
    (replace_a_config, "model.layers.0.self_attn.config is a LlamaConfig of its own"),
    (wrap_a_layer, "model.layers.0 is wrapped by torch.compile, .* and compile_layers=True"),
    (adapt, r"model.layers.0.mlp.up_proj is Linear of peft, .*merge_and_unload"),
    (offload, r"accelerate has put a CpuOffload on model.layers.0.mlp, .*remove_hook_from_module"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_what_stages_would_lose_is_refused_by_name(change, sentence: str) -> None:
    model = whole_model(tiny_config("llama"))
    change(model)
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


def set_a_gain(model) -> None:
    model.model.layers[2].mlp.gain.factor = 1.5


def set_a_shift(model) -> None:
    model.model.layers[2].mlp._shift = 0.5


@pytest.mark.parametrize("change", [set_a_gain, set_a_shift])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_no_comparison_of_attributes_shows_is_found_by_a_forward(change, dtype: torch.dtype) -> None:
    model = Gained._from_config(tiny_config("llama"), dtype=dtype).train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    description = describe(model)
    check_forward(description)
    change(model)
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
    assert "gradient_checkpointing_enable() is not taken over: checkpointing='full'" in recomputed
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


FEW = ("llama", "gemma3_text", "mixtral", "gpt2", "recurrent_gemma", "granite_swa", "bert")


@pytest.mark.parametrize("family", FEW)
def test_usual_models_are_not_refused(family: str) -> None:
    assert check_usual_model(Configuration(family))


@pytest.mark.slow
def test_usual_models_of_every_family_are_not_refused() -> None:
    every = [one for one in configurations() if str(one) != "big_bird (block sparse)"]  # a use changes its modules
    assert sum(map(check_usual_model, every)) > 200


def test_a_model_in_another_dtype_and_another_attention_is_not_refused() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        for family in ("gemma3_text", "ernie4_5_moe", "granite"):
            assert outcome(whole_model(tiny_config(family), dtype)) == ""
    model = whole_model(tiny_config("llama"))
    model.set_attn_implementation("eager")
    assert outcome(model) == ""
    assert outcome(whole_model(tiny_config("llama")).to(torch.bfloat16)) == ""
