"""`ModelSpec`: facts about a model family that probing does not find.

A family needs no spec if `describe` finds how to cut it. If `describe` cannot run a family without help, or reads it
wrongly, the spec gives the answers: the file of its type in `families/`, and `Pipeline(..., spec=...)`, which has
priority. The self-check compares the resulting gradients with those of the model in transformers, where no spec
applies, so that a wrong answer is refused like a wrong cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from transformers import PreTrainedConfig, PreTrainedModel

from evenpipe.declaration import Instance, ListOf, NonNegativeInt, Positive, PositiveInt, declare
from evenpipe.model.router_loss import RouterLoss


@declare("spec")
class ModelSpec:
    """Answers about a model family that replace what probing finds; None: probed. Names are the whole model's.

    Those that depend on sizes come from a function of the config, given in place of a `ModelSpec`: the self-check also
    calls it with the config of a small copy.

        Pipeline(model, spec=ModelSpec(layers_name="model.blocks"))
        Pipeline(model, spec=lambda config: ModelSpec(logit_scale=1 / config.logits_divisor))

    Raises InputError for a value that is not accepted; the sentence names it.
    """

    adapt: Annotated[Callable[[PreTrainedModel], object], Instance("function of a model", (Callable,))] | None = None
    """Changes every copy of the model that stages run in, without weights, before anything is looked up in it: replaces
    a forward, sets an attribute, turns a frozen table into a buffer that all stages have. The result must have the
    gradients of the unchanged model. Embedding, output layer and layers keep their names."""
    layers_name: str | None = None
    """The `nn.ModuleList` of transformer layers, e.g. "model.layers"."""
    embedding_module: str | None = None
    """The `nn.Embedding` of the tokens."""
    head_module: str | None = None
    """The `nn.Linear` that gives the logits."""
    layer_argument: str | None = None
    """The argument in which a layer gets hidden states, where the model passes them by keyword."""
    returns: NonNegativeInt | None = None
    """0: layers return a tensor; k > 0: a tuple of k entries, hidden states first."""
    last_parameters: ListOf[str] | None = None
    """Parameters outside the layers that act after them, without the output layer's; all others belong to the first
    stage."""
    wants_token: NonNegativeInt | None = None
    """Models that treat embedded tokens otherwise than those that they look up (Falcon-H1 scales only the latter) are
    given token ids, all equal to this one."""
    logit_scale: Positive | None = None
    """Factor on the logits, before the soft-cap. With this or `soft_cap`, neither is probed."""
    soft_cap: Positive | None = None
    """Logits become cap * tanh(logits / cap)."""
    router_loss: Annotated[RouterLoss, Instance("RouterLoss", (RouterLoss,))] | None = None
    """The loss that balances experts, where the config asks for it (`output_router_logits`)."""
    position_rows: PositiveInt | None = None
    """Position ids must be below this."""
    counts_positions: bool | None = None
    """Without position ids, the model numbers the tokens that are not padding, as RoBERTa does."""


Spec = ModelSpec | Callable[[PreTrainedConfig], ModelSpec]
