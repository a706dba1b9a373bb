"""Builds a transformers causal language model without weights, a skeleton, and strips it for a stage.

Its structure is found by running it, not by reading names (`probe.py`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from evenpipe.errors import InputError
from evenpipe.model.edge import EdgeTensor
from evenpipe.model.rules import restore_buffers

PROBE_BATCH, PROBE_SEQUENCE = 2, 3
_FOLDERS = {module: Path(str(module.__file__)).parent for module in (torch, transformers)}
_NO_MODELS = (
    str(Path(__file__).parents[1]),
    str(_FOLDERS[torch]),
    *(str(_FOLDERS[transformers] / folder) for folder in ("utils", "integrations")),
)
"""Paths of code that calls models' code, or is called by it."""


@dataclass(frozen=True, slots=True)
class PassedTensor:
    """A tensor that each layer returns besides the hidden states, and that the next layer takes."""

    entry: int
    """Its index in the tuple that a layer returns."""
    position: int
    """Its position among a layer's arguments."""
    argument: str

    def replaced(self, args: tuple, kwargs: dict, tensor: torch.Tensor | None) -> tuple[tuple, dict]:
        """Return the arguments of a call with another tensor in its place."""
        if self.position < len(args):
            return (*args[: self.position], tensor, *args[self.position + 1 :]), kwargs
        return args, {**kwargs, self.argument: tensor}


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Names and forms for the cut. Module and parameter names are the whole model's."""

    layers_name: str
    """The `nn.ModuleList` of transformer layers, e.g. `model.layers`."""
    embedding_module: str
    head_module: str
    layer_argument: str = "hidden_states"
    """Name of a layer's first argument, for families that pass the hidden states by keyword."""
    returns: int = 0
    """0: layers return a tensor; k > 0: a tuple of k entries, hidden states first."""
    first_parameters: tuple[str, ...] = ()
    """Parameters outside the layers that act before them (learned positions) or never on text (an image tower), without
    the embedding matrix."""
    last_parameters: tuple[str, ...] = ()
    """Parameters outside the layers that act after them (the final norm), without the head."""
    entering: EdgeTensor
    """The hidden states that the first layer receives."""
    handed_on: tuple[EdgeTensor, ...]
    """The tensors that layers pass to each other, hidden states first."""
    extras: tuple[PassedTensor, ...] = ()
    """How layers of transformers pass the tensors other than the hidden states."""
    writes_to_input: bool = False
    """The forward changes its embedded tokens in place."""
    wants_token: int | None = None
    """The forward must get token ids, all equal to this one, since it treats embedded tokens differently (Falcon-H1
    scales only rows that it looks up itself). None: it treats both the same."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, after its heading if it has one, to quote in our messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):  # "Validation error for field 'hidden_size':"
        lines = [lines[1].removeprefix("TypeError: ").removeprefix("ValueError: ")]
    return (lines or [type(error).__name__])[0].rstrip(".")


def line_of_model(error: BaseException | None) -> str | None:
    """Return the last line of the model's own code, in transformers or a user's file, in an error's traceback."""
    frames = traceback.extract_tb(None if error is None else error.__traceback__)
    inside = [frame for frame in frames if not frame.filename.startswith(_NO_MODELS)]
    return f"`{inside[-1].line}` in {Path(inside[-1].filename).name}:{inside[-1].lineno}" if inside else None


def uncuttable(architecture: str, reason: str) -> InputError:
    """Return the error for a model that cannot be cut exactly."""
    return InputError(f"{architecture} cannot be cut into stages: {reason}.")


def build_skeleton(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    model_class: type[PreTrainedModel] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the whole model on the meta device: all shapes and names, no storage. `config` is not changed.

    Parameters and buffers have the dtypes that `from_pretrained(dtype=dtype)` gives them: some stay in fp32.
    """
    config = copy.deepcopy(config)
    with torch.device("meta"):
        if model_class is not None:
            model = model_class._from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    _keep_dtypes(model, dtype)
    return model


def _keep_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Apply transformers' own dtype plan, which it reads only when it loads weights."""
    tensors = dict((*model.named_parameters(), *persistent_buffers(model)))
    for name, planned in planned_dtypes(model, dtype, tensors).items():
        tensors[name].data = tensors[name].data.to(planned)


def planned_dtypes(model: PreTrainedModel, dtype: torch.dtype, names: Iterable[str]) -> dict[str, torch.dtype]:
    """Return the dtypes of the named tensors for which transformers has a plan in a model of `dtype`."""
    if not (plan := model._get_dtype_plan(dtype)):
        return {}
    pattern, key_of, _ = build_glob_alternation(list(plan))
    matches = {name: pattern.search(name) for name in names}
    return {name: plan[key_of[match.lastgroup]] for name, match in matches.items() if match and match.lastgroup}


def module_name(model: nn.Module, target: nn.Module) -> str:
    """Return the dotted name of a module inside `model`."""
    for name, module in model.named_modules():
        if module is target:
            return name
    raise uncuttable(type(model).__name__, f"its {type(target).__name__} is not one of its own modules")


def layers_of(model: nn.Module, layers_name: str) -> nn.ModuleList:
    layers = model.get_submodule(layers_name)
    assert isinstance(layers, nn.ModuleList)
    return layers


def embedding_of(model: nn.Module, embedding_module: str) -> nn.Embedding:
    embedding = model.get_submodule(embedding_module)
    assert isinstance(embedding, nn.Embedding)
    return embedding


def find_layers(model: PreTrainedModel) -> str:
    """Return the name of the list of transformer layers, found by structure or else by the pipeline plan."""
    base = model.base_model
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [(name, module) for name, module in base.named_modules() if isinstance(module, nn.ModuleList)]
    counted = [name for name, module in lists if len(module) == count]
    candidates = counted or [name for name, module in lists if len(module)]  # a config may count parts of its layers
    outermost = [name for name in candidates if not any(name.startswith(f"{parent}.") for parent in candidates)]
    if len(outermost) > 1:
        plan = getattr(base, "_pp_plan", None) or getattr(model.config, "base_model_pp_plan", None) or {}
        outermost = [name for name in outermost if name in plan]
    if len(outermost) != 1:
        shapes = ", ".join(f"{name} ({len(module)})" for name, module in lists[:6]) or "none"
        requirement = "it needs exactly one list of layers"
        raise uncuttable(type(model).__name__, f"{requirement}, and its module lists are {shapes}")
    prefix = module_name(model, base)
    return f"{prefix}.{outermost[0]}" if prefix else outermost[0]


def identity_forward(
    argument: str,
    returns: int,
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    extras: Sequence[torch.Tensor | None] = (),
):
    """Return a forward for layers of other stages: it returns its hidden states in the same form as a real layer.

    `extras` are the next entries of a tuple; the remaining entries are None.
    """

    def forward(*args, **kwargs):
        hidden = args[0] if args else kwargs[argument]
        if transform is not None:
            hidden = transform(hidden)
        return (hidden, *extras, *(None,) * (returns - 1 - len(extras))) if returns else hidden

    return forward


def stand_in(shape: torch.Size, dtype: torch.dtype, torch_device: str | torch.device = "cpu") -> torch.Tensor:
    """Return zeros that take no memory, for parameters of operations whose results are discarded."""
    return torch.zeros((), dtype=dtype, device=torch_device).expand(shape)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) of the buffers in a checkpoint, such as the bias that corrects a router's scores."""
    for prefix, submodule in module.named_modules():
        for key, buffer in submodule._buffers.items():
            if buffer is not None and key not in submodule._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def strip(module: nn.Module) -> None:
    """Remove all parameters and buffers from a module; plain attributes such as `attention_type` stay readable."""
    for child in module.modules():
        child._parameters.update(dict.fromkeys(child._parameters))
        child._buffers.update(dict.fromkeys(child._buffers))


class HeadStub(nn.Module):
    """Replaces the output layer: calls `receive` on its input and returns the result.

    Its `weight` (some forwards read its dtype, shape and device) is a `stand_in`.
    """

    def __init__(self, receive: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor):
        super().__init__()
        self._receive = receive
        self.weight = weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._receive(hidden)


def replace_head(
    model: nn.Module,
    head_module: str,
    receive: Callable[[torch.Tensor], torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    torch_device: str | torch.device = "cpu",
) -> None:
    """Replace the head by a `HeadStub` whose weight is in `dtype` (None: the head's own)."""
    parent, _, attribute = head_module.rpartition(".")
    holder = model.get_submodule(parent)
    weight = getattr(holder, attribute).weight
    setattr(holder, attribute, HeadStub(receive, stand_in(weight.shape, dtype or weight.dtype, torch_device)))


def hollow(model: PreTrainedModel, structure: Structure, receive: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Strip all layers, give buffers their values on the CPU, and open the ends with `open_ends`."""
    restore_buffers(model, structure.layers_name, range(0))
    for layer in layers_of(model, structure.layers_name):
        strip(layer)
    open_ends(model, structure, receive)


def open_ends(
    model: PreTrainedModel,
    structure: Structure,
    receive: Callable[[torch.Tensor], torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    torch_device: str | torch.device = "cpu",
) -> None:
    """Replace the head by a stub, and remove the embedding's matrix and a second name of the head's bias.

    `dtype` and `torch_device` apply to the stub's weight. The embedding's `weight` becomes a plain attribute, so that
    `embed_rows` can set it during a forward.
    """
    bias: Any = getattr(model.get_submodule(structure.head_module), "bias", None)
    replace_head(model, structure.head_module, receive, dtype=dtype, torch_device=torch_device)
    if bias is not None:
        without_storage = torch.empty_like(bias, requires_grad=False)  # for rules that write to it
        for owner, attribute, _ in outer_parameters(model):
            if owner._parameters[attribute] is bias:
                del owner._parameters[attribute]
                setattr(owner, attribute, without_storage)
    embedding = embedding_of(model, structure.embedding_module)
    del embedding._parameters["weight"]
    embedding.__dict__["weight"] = None


def embed_rows(embedding: nn.Embedding, rows: torch.Tensor) -> torch.Tensor:
    """Run the embedding module's own forward on a matrix of only the fetched rows [batch, sequence, h].

    This includes the module's other operations besides the look-up (a scale, a norm), without knowing their names.
    """
    if type(embedding).forward is nn.Embedding.forward:
        return rows
    padding, embedding.padding_idx = embedding.padding_idx, None
    embedding.__dict__["weight"] = rows.reshape(-1, rows.shape[-1])
    try:
        return embedding(torch.arange(rows.shape[:-1].numel(), device=rows.device).view(rows.shape[:-1]))
    finally:
        embedding.__dict__["weight"], embedding.padding_idx = None, padding


def call_embedded(
    model: nn.Module, embedding: nn.Embedding, wants_token: int | None, embedded: torch.Tensor, **arguments: Any
) -> Any:
    """Run a model's forward on embedded tokens [batch, sequence, hidden_size].

    Args:
        wants_token: `Structure.wants_token`. If it is set, the embedding module returns `embedded` for all ids.
    """
    if wants_token is None:
        return model(inputs_embeds=embedded, use_cache=False, **arguments)
    token_ids = torch.full(embedded.shape[:2], wants_token, device=embedded.device)
    embedding.__dict__["forward"] = lambda _: embedded
    try:
        return model(input_ids=token_ids, use_cache=False, **arguments)
    finally:
        del embedding.__dict__["forward"]


def neutral_token(config: PreTrainedConfig, padding_index: int | None) -> int:
    """Return the first token id without a special meaning in the config, such as images or padding."""
    return neutral_tokens(config, padding_index, 1)[0]


def neutral_tokens(config: PreTrainedConfig, padding_index: int | None, count: int, below: int = 2**31) -> list[int]:
    """Return the first `count` token ids below a limit that have no special meaning in the config."""
    configs = (config, config.get_text_config())
    meant = {padding_index}
    for name, value in itertools.chain.from_iterable(vars(settings).items() for settings in configs):
        if name.endswith(("token_id", "token_index")):
            meant.update(value if isinstance(value, (list, tuple)) else [value])  # GLM ends texts with one of three
    return list(itertools.islice((token for token in range(below) if token not in meant), count))


@contextlib.contextmanager
def meta_matrix(embedding: nn.Embedding) -> Iterator[None]:
    """Put a matrix without storage into the embedding, for rules that draw it."""
    embedding.__dict__["weight"] = torch.empty(embedding.num_embeddings, embedding.embedding_dim, device="meta")
    try:
        yield
    finally:
        embedding.__dict__["weight"] = None


def outer_parameters(model: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """Return (owner, attribute, full name) of every parameter that is still in a model."""
    return [
        (module, attribute, f"{prefix}.{attribute}" if prefix else attribute)
        for prefix, module in model.named_modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None
    ]
