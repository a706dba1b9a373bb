"""Describes a model once, from a name, a config or a live model, for all other code."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from evenpipe.errors import InputError
from evenpipe.model.config import check_sizes, read_config
from evenpipe.model.edge import EdgeSpec, hidden_of_width
from evenpipe.model.families import adapt, answers_for, check_live
from evenpipe.model.interface import counted_positions, probe_counted_positions, probe_position_rows, takes
from evenpipe.model.live import Attributes, changed_attributes, check_wrappers, set_attributes
from evenpipe.model.logits import forward_of_logits, probe_logits
from evenpipe.model.probe import output_of_first_layer, probe
from evenpipe.model.router_loss import RouterLoss, probe_router_loss, wants_router_loss, without_router_loss
from evenpipe.model.rules import undisturbed
from evenpipe.model.spec import ModelSpec, Spec
from evenpipe.model.structure import (
    Structure,
    build_skeleton,
    embedding_of,
    find_layers,
    first_line,
    layers_of,
    module_name,
    persistent_buffers,
    uncuttable,
)
from evenpipe.words import nearest, refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A causal language model as the pipeline sees it. Names are the names in Hugging Face's model in memory."""

    config: Any
    """A copy of the user's config. None for a model of plain modules."""
    architecture: str
    """Class name, for messages."""
    structure: Structure
    skeleton: Any = field(repr=False)
    """The whole model on the meta device, fp32: names and shapes. For plain modules: the modules themselves."""
    logit_scale: float = 1.0
    """Logits are multiplied by this, before the soft-cap."""
    soft_cap: float | None = None
    """Logits become cap * tanh(logits / cap)."""
    router_loss: RouterLoss | None = None
    """Added to the loss of a mixture of experts whose config sets `output_router_logits`."""
    position_rows: int | None = None
    """Position ids must be below this, since they index a table (learned positions); None: no table outside layers."""
    counts_positions: bool = False
    """Without position ids, the model numbers the tokens that are not padding (`counted_positions`)."""
    source: str | None = None
    """Hub name or folder with the weights; None: fresh weights, or the weights of `model`."""
    model: Any = field(default=None, repr=False)
    """A live model from which the stages copy their weights."""
    changed: Attributes = field(default_factory=dict, repr=False)
    """Attributes whose values differ from a model built from its config; set in the skeleton and in every stage."""
    spec: Spec | None = field(default=None, repr=False)
    """The user's answers about the family, also for small copies of the model."""
    trust_remote_code: bool = False
    transforms: tuple[Any, ...] = field(default=(), repr=False)
    """`LayerTransform`s that have changed the layers of the skeleton, and that change the layers of every stage."""
    plain: Description | None = field(default=None, repr=False)
    """The same model without transforms; None: there are none."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(layers_of(self.skeleton, self.structure.layers_name))

    @property
    def hidden_size(self) -> int:
        """Columns of the embedding matrix and of the head."""
        return self._embedding.weight.shape[1]

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding matrix: tokens that the model reads."""
        return self._embedding.weight.shape[0]

    @property
    def head_rows(self) -> int:
        """Rows of the head: tokens that the model predicts. Some families have fewer than in the embedding (images)."""
        return self._head.weight.shape[0]

    def rows_of(self, name: str) -> int:
        """Return the rows of a vocabulary matrix, or the entries of the head's bias."""
        return self.vocabulary_size if name == self.embedding_name else self.head_rows

    @property
    def padding_index(self) -> int | None:
        """Row of the embedding that starts at zero and gets no gradient from the embedding."""
        return self._embedding.padding_idx

    @property
    def tied(self) -> bool:
        """Embedding and head are one matrix, called `embedding_name`; no parameter is then called `head_name`."""
        return self._embedding.weight is self._head.weight

    @property
    def embedding_name(self) -> str:
        """Name of the embedding matrix."""
        return f"{self.structure.embedding_module}.weight"

    @property
    def head_name(self) -> str:
        """Name of the head's matrix."""
        return f"{self.structure.head_module}.weight"

    @property
    def head_bias_name(self) -> str | None:
        """Name of the head's bias, the first one if it has several; None if there is none."""
        bias = self._head.bias
        if bias is None:
            return None
        return next((name for name, parameter in self.skeleton.named_parameters() if parameter is bias), None)

    @property
    def vocabulary_names(self) -> tuple[str, ...]:
        """Parameters that are sharded by rows and belong to no stage."""
        names = (self.embedding_name, None if self.tied else self.head_name, self.head_bias_name)
        return tuple(name for name in names if name is not None)

    @property
    def maximum_length(self) -> int | None:
        """`max_position_embeddings`, if the config has it."""
        length = (
            None if self.config is None else getattr(self.config.get_text_config(), "max_position_embeddings", None)
        )
        return length if isinstance(length, int) and length > 0 else None

    @property
    def longest_sequence(self) -> int | None:
        """Number of tokens that the model's positions allow; None: any number."""
        rows = self.position_rows
        if rows is not None and self.counts_positions and self.padding_index is not None:
            rows -= self.padding_index + 1  # positions begin after the padding position
        limits = [limit for limit in (self.maximum_length, rows) if limit is not None]
        return min(limits, default=None)

    def adapt(self, model: PreTrainedModel) -> None:
        """Apply `ModelSpec.adapt` to a newly built model of the family, of any size."""
        adapt(model, answers_for(model.config, self.spec))

    @property
    def _embedding(self) -> nn.Embedding:
        return embedding_of(self.skeleton, self.structure.embedding_module)

    @property
    def _head(self) -> nn.Linear:
        return self.skeleton.get_submodule(self.structure.head_module)

    def takes(self, argument: str) -> bool:
        """Return whether the model's forward has a parameter of that name; plain modules take hidden states only."""
        return self.config is not None and takes(type(self.skeleton), argument)

    def positions_of(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Return position ids [batch, sequence] if the model counts them from token ids, which stages do not have;
        None: 0, 1, 2, ..."""
        if not self.counts_positions:
            return None
        assert self.padding_index is not None
        return counted_positions(token_ids, self.padding_index)

    def edge(self, layer: int, dtype: torch.dtype, *, outer: bool = False) -> EdgeSpec:
        """Return what a layer receives in a computation in `dtype`, or after the last layer, what it returns.

        The first layer receives only hidden states, and only the hidden states that the last layer returns are used.

        outer: return instead what enters the operations before all layers, rows of the embedding; or what leaves the
            operations after them, the input of the head.
        """
        if outer:
            return EdgeSpec((hidden_of_width(self.hidden_size).computed_in(dtype),))
        structure = self.structure
        handed_on = structure.handed_on[: None if layer < self.layers else 1] if layer else (structure.entering,)
        return EdgeSpec(tuple(tensor.computed_in(dtype) for tensor in handed_on))

    def layer(self, index: int) -> nn.Module:
        """Return one layer of the skeleton."""
        return self.skeleton.get_submodule(f"{self.structure.layers_name}.{index}")

    def layer_config(self, index: int) -> Any:
        """Return the config of a layer; layers may differ in it (Gemma 4's head sizes). None for plain modules."""
        if self.config is None:
            return None
        config = self.config.get_text_config()
        return config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Name -> shape of every parameter and every saved buffer; a tied head is not listed."""
        tensors = (*self.skeleton.named_parameters(), *persistent_buffers(self.skeleton))
        return {name: tensor.shape for name, tensor in tensors}

    @property
    def added(self) -> frozenset[str]:
        """Names of the parameters that transforms have added; they are neither loaded nor written."""
        return frozenset() if self.plain is None else frozenset(self.shapes.keys() - self.plain.shapes.keys())


def describe(
    source: str | Path | PreTrainedConfig | nn.Module, *, spec: Spec | None = None, trust_remote_code: bool = False
) -> Description:
    """Describe a model without reading its weights.

    Args:
        source: a hub name or local folder (its weights are used), a transformers config (fresh weights), or a live
            transformers model (its weights are copied into the stages).
        spec: answers about the family that replace what probing finds: a `ModelSpec`, or a function of the config that
            returns it.
        trust_remote_code: run Python code that comes with a hub model. Off by default.

    Raises:
        InputError: not a causal language model of transformers, or one that cannot be cut exactly; one sentence gives
            the reason.
    """
    if isinstance(source, nn.Module):
        check_wrappers(source)
    live, name = None, None
    model_class: type[PreTrainedModel] | None = None
    if isinstance(source, PreTrainedModel):
        live, model_class, config = source, type(source), source.config
    elif isinstance(source, nn.Module):
        raise InputError(
            f"model = {type(source).__name__} is no transformers model: use Pipeline.from_modules for other modules."
        )
    elif isinstance(source, PreTrainedConfig):
        config = source
    elif isinstance(source, (str, Path)):
        name = str(source)
        config = read_config(name, trust_remote_code)
    else:
        raise InputError(
            f"model = {source!r} is neither a hub name, a folder, a transformers config nor a transformers model."
        )
    config = copy.deepcopy(config)
    check_sizes(config.to_dict())
    if getattr(config, "quantization_config", None):
        raise InputError("quantization_config is set in the model's config, and quantised weights cannot be trained.")
    for key, value in vars(config).items():
        if key.endswith("layerdrop") and value:
            raise InputError(f"{key} = {value} skips layers at random, which stages cannot: set it to 0.0.")
    if model_class is None and type(config) not in AutoModelForCausalLM._model_mapping and not trust_remote_code:
        raise InputError(f"model_type = {config.model_type!r} has no causal language model in transformers.")
    with undisturbed(), torch.enable_grad():
        return _describe(config, model_class, live, name, spec=spec, trust_remote_code=trust_remote_code)


def _describe(
    config: PreTrainedConfig,
    model_class: Any,
    live: PreTrainedModel | None,
    name: str | None,
    *,
    spec: Spec | None,
    trust_remote_code: bool,
) -> Description:
    try:
        skeleton = build_skeleton(config, torch.float32, model_class, trust_remote_code)
    except Exception as error:  # families raise many types on a config that makes no sense to them
        raise InputError(
            f"transformers cannot build a causal language model from this {type(config).__name__} "
            f"({first_line(error)})."
        ) from error
    architecture, model_class = type(skeleton).__name__, type(skeleton)
    if type(skeleton.config) is not type(config):  # the config contains several models: take the language model's
        config = config.get_text_config()
    for configuration in (config, getattr(config, "text_config", None)):
        if shared := getattr(configuration, "num_kv_shared_layers", None):
            raise InputError(
                f"num_kv_shared_layers = {shared} lets layers use the keys and values of others, and between stages"
                " only hidden states travel: it has to be 0."
            )
    answers = answers_for(config, spec)
    changed: Attributes = {}
    if live is not None:
        check_live(live)
        skeleton, changed = _as_live(architecture, live, skeleton, answers, config)
    adapt(skeleton, answers)
    embedding, head = _ends(skeleton, answers)
    check_ends(architecture, embedding, head)
    assert isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)
    layers = _answered(skeleton, "layers_name", answers.layers_name, nn.ModuleList)
    layers_name = find_layers(skeleton) if layers is None else module_name(skeleton, layers)
    embedding_module, head_module = module_name(skeleton, embedding), module_name(skeleton, head)
    check_sharing(architecture, skeleton, embedding, head)

    fresh = build_skeleton(without_router_loss(config), torch.float64, model_class)
    set_attributes(fresh, changed)
    adapt(fresh, answers)
    structure = probe(fresh, layers_name, embedding_module, head_module, answers)
    # `fresh` now runs on hidden states without layers and weights.
    if answers.logit_scale is None and answers.soft_cap is None:
        scale, cap = probe_logits(architecture, forward_of_logits(fresh, structure), head.weight.shape[0])
    else:
        scale, cap = answers.logit_scale or 1.0, answers.soft_cap
    takes_position_ids, padding = takes(model_class, "position_ids"), embedding.padding_idx
    router_loss, rows, counts = None, answers.position_rows, answers.counts_positions
    if wants_router_loss(config):
        router_loss = answers.router_loss or probe_router_loss(fresh, structure)
    if rows is None and takes_position_ids:
        rows = probe_position_rows(fresh, structure)
    if counts is None:
        counts = takes_position_ids and padding is not None and probe_counted_positions(fresh, structure, padding)
    elif counts and padding is None:
        raise refused("spec.counts_positions", counts, f"false, since {architecture} has no padding token")
    return Description(
        config=config,
        architecture=architecture,
        structure=structure,
        skeleton=skeleton,
        logit_scale=scale,
        soft_cap=cap,
        router_loss=router_loss,
        position_rows=rows,
        counts_positions=counts,
        source=name,
        model=live,
        changed=changed,
        spec=spec,
        trust_remote_code=trust_remote_code,
    )


def _as_live(
    architecture: str, live: PreTrainedModel, skeleton: PreTrainedModel, answers: ModelSpec, config: PreTrainedConfig
) -> tuple[PreTrainedModel, Attributes]:
    """Compare a live model with a skeleton. Return the skeleton, tied and set like the model, and what was set.

    `config` is corrected if it contradicts the tie.
    """
    _check_parameters(architecture, live, skeleton)
    embedding, head = _ends(skeleton, answers)
    if isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear):  # others are adapted, or refused later
        names = module_name(skeleton, embedding), module_name(skeleton, head)
        live_embedding, live_head = map(live.get_submodule, names)
        check_sharing(architecture, live, live_embedding, live_head)
        tied = live_embedding.weight is live_head.weight
        if tied != (embedding.weight is head.weight):
            skeleton = _tied_otherwise(architecture, config, type(skeleton), answers, tied)
    changed = _changes(live, skeleton)
    set_attributes(skeleton, changed)
    return skeleton, changed


def _changes(live: PreTrainedModel, skeleton: PreTrainedModel) -> Attributes:
    """Return the attributes in which a live model differs from its skeleton, except because of its dtype."""
    try:
        changed = changed_attributes(live, skeleton)
    except InputError:
        if live.dtype == torch.float32:
            raise
        changed = {"": {}}
    if changed and live.dtype != torch.float32:
        return changed_attributes(live, build_skeleton(skeleton.config, live.dtype, type(skeleton)))
    return changed


def check_compute_dtype(description: Description, compute_dtype: torch.dtype) -> None:
    """Check that layers return hidden states in the dtype that travels between stages. Mamba's may return fp32.

    The first step finds the other cases (`EdgeSpec.check`).

    Raises:
        InputError: they return another dtype; the sentence names the config's option that causes it.
    """
    if description.config is None or compute_dtype.itemsize >= torch.float32.itemsize:
        return
    model = build_skeleton(description.config, compute_dtype, type(description.skeleton))
    description.adapt(model)
    returned = output_of_first_layer(model, description.structure.layers_name)
    returned = returned[0] if isinstance(returned, (tuple, list)) else returned
    expected = description.edge(1, compute_dtype).tensors[0].dtype
    if not isinstance(returned, torch.Tensor) or returned.dtype == expected:
        return
    settings = vars(description.config.get_text_config()).items()
    options = [name for name, value in settings if value is True and "fp32" in name]
    remedy = f"set {options[0]} to false in the model's config" if options else "compute in torch.float32"
    raise InputError(
        f"compute_dtype = {compute_dtype}: the layers of {description.architecture} return {returned.dtype}, which does"
        f" not travel between stages that compute in another dtype; {remedy}."
    )


def _ends(model: PreTrainedModel, answers: ModelSpec) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the modules that embed the tokens and give the logits, unchecked."""
    try:
        embedding = _answered(model, "embedding_module", answers.embedding_module, nn.Embedding)
        head = _answered(model, "head_module", answers.head_module, nn.Linear)
        return embedding or model.get_input_embeddings(), head or model.get_output_embeddings()
    except NotImplementedError:
        reason = "it does not say which modules embed its tokens and give its logits"
        raise uncuttable(type(model).__name__, reason) from None


def _answered(model: nn.Module, answer: str, name: str | None, kind: type[nn.Module]) -> nn.Module | None:
    """Return the module that a spec names, if any."""
    modules = {known: module for known, module in model.named_modules() if isinstance(module, kind)}
    if name is not None and not modules.get(name):
        accepted = f"an nn.{kind.__name__} of {type(model).__name__}{nearest(name, modules)}"
        raise refused(f"spec.{answer}", name, accepted)
    return None if name is None else modules[name]


def check_sharing(
    architecture: str, model: nn.Module, embedding: nn.Module, head: nn.Module, layers: str | None = None
) -> None:
    """Refuse shared parameters, except a tied head: their names might end up on two stages.

    layers: the name of a module list of `model`; each of its layers may use a parameter twice.
    Two parameters in the same memory are always refused: an optimizer would update the same numbers twice.
    """
    ends = [(module_name(model, end), end) for end in (embedding, head)]
    other_modules = [
        (prefix, module)
        for prefix, module in model.named_modules(remove_duplicate=False)
        if module is not embedding and module is not head
    ]
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in (*ends, *other_modules):
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{attribute}"
            first_name, first_parameter = first.setdefault(parameter.data_ptr() or id(parameter), (name, parameter))
            tied = module is head and parameter is first_parameter is embedding.weight
            # The head's bias may have a second name (BERT); the probe refuses a forward that uses that one.
            tied |= parameter is first_parameter is head.bias and layers is None
            in_one_layer = (
                parameter is first_parameter and _layer_of(first_name, layers) == _layer_of(name, layers) is not None
            )
            if first_name != name and not tied and not in_one_layer:
                raise uncuttable(architecture, f"its parameters {first_name} and {name} are one tensor")


def _layer_of(name: str, layers: str | None) -> str | None:
    """Return the number of the layer with the parameter `name`; None outside the list `layers`."""
    return name.split(".")[1] if layers and name.startswith(f"{layers}.") else None


def _tied_otherwise(
    architecture: str, config: PreTrainedConfig, model_class: Any, answers: ModelSpec, tied: bool
) -> PreTrainedModel:
    """Return the skeleton of a live model that is tied or untied contrary to its config.

    `config` is corrected.
    """
    for configuration in (config, config.get_text_config()):
        configuration.tie_word_embeddings = tied
    skeleton = build_skeleton(config, torch.float32, model_class)
    embedding, head = _ends(skeleton, answers)
    assert isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)
    if (embedding.weight is head.weight) != tied:
        held, built = ("one tensor", "two") if tied else ("two tensors", "one")
        raise InputError(
            f"model: its embedding and its output layer are {held}, and {built} in a {architecture} built from its"
            " config, whatever tie_word_embeddings says."
        )
    return skeleton


def _check_parameters(architecture: str, live: nn.Module, skeleton: nn.Module) -> None:
    """Refuse live models whose parameters differ from those of their config, from which stages are built."""
    held, known = (
        {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
        for model in (live, skeleton)
    )
    for name in (*held, *known):
        if held.get(name) != known.get(name):
            raise InputError(
                f"model: its parameter {name} is {_shape(held.get(name))}, and {_shape(known.get(name))} in a"
                f" {architecture} built from its config; modules put in by hand cannot be cut into stages."
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of the shape {shape}"


def check_ends(architecture: str, embedding: nn.Module | None, head: nn.Module | None) -> None:
    """Check that the vocabulary matrices are an `nn.Embedding` and an `nn.Linear` of the same width."""
    if not isinstance(embedding, nn.Embedding) or [*embedding._parameters] != ["weight"]:
        raise uncuttable(architecture, f"its input embedding is {type(embedding).__name__}, not an nn.Embedding")
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        raise uncuttable(architecture, "its input embedding uses max_norm, scale_grad_by_freq or sparse gradients")
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise uncuttable(architecture, f"its output layer is {type(head).__name__}, not an nn.Linear")
    if embedding.weight.shape[1] != head.weight.shape[1]:
        shapes = f"{tuple(embedding.weight.shape)} and its output layer {(head.weight.shape[0], head.weight.shape[1])}"
        raise uncuttable(architecture, f"its embedding is {shapes}, and their widths must agree")
