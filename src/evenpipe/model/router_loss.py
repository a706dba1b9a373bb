"""Computes the load-balancing loss of a mixture of experts across the stages of a model.

transformers adds this loss if the config sets `output_router_logits` (Switch Transformer, arXiv 2101.03961, equations
4-6, over the rows of all layers together):

    coefficient * E * sum_e (counts_e / rows) * (probabilities_e / rows)

    counts_e          how often expert e is chosen, over all layers and all tokens that the mask includes
    probabilities_e   the sum of its softmax probabilities over the same layers and tokens
    rows              layers times tokens

It is a product of sums over layers, so it cannot be split by layer. But only the probabilities are differentiable: a
layer's gradient depends on other layers only through the counts. So each stage adds its layers to three running totals,
which travel forwards with the hidden states and are complete at the last stage; one gradient [E], the same for the
probabilities of every row of every layer, travels back with the gradient of the hidden states.

Everything is in fp32 and in the order of the layers, as in transformers, so the bits are equal.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from evenpipe.errors import InputError
from evenpipe.model.structure import PROBE_BATCH, PROBE_SEQUENCE, Structure, call_embedded, embedding_of, replace_head

OPTION = "output_router_logits"
FUNCTION = "load_balancing_loss_func"
"""Name of the loss function in the modelling file of every family that has it."""


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """The constants of a family's loss, as used in its own forward."""

    coefficient: float
    experts: int
    choices: int
    """Experts per token."""

    def start(self, torch_device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the totals before the first layer: [2 * experts + 1] fp32, counts, probabilities and rows."""
        return torch.zeros(2 * self.experts + 1, dtype=torch.float32, device=torch_device)

    def add(
        self, totals: torch.Tensor, logits: Sequence[torch.Tensor], mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add layers to the totals of the previous layers.

        Args:
            logits: router logits of each layer, [tokens, experts].
            mask: 1 for tokens that count and 0 for padding, with as many elements as tokens; None: all count.

        Returns: the new totals, without a graph, and their probabilities with the graph of these layers.
        """
        counts, probabilities, rows = self._parts(totals)
        flat = None if mask is None else mask.reshape(-1).to(dtype=torch.float32)
        for layer in logits:
            weights = layer.softmax(dim=-1)
            chosen = nn.functional.one_hot(weights.detach().topk(self.choices, dim=-1).indices, self.experts)
            chosen = chosen.sum(dim=1).float()
            if flat is None:
                counts = counts + chosen.sum(dim=0)
                probabilities = probabilities + weights.float().sum(dim=0)
                rows = rows + weights.shape[0]
            else:
                counts = counts + (chosen * flat.unsqueeze(-1)).sum(dim=0)
                probabilities = probabilities + (weights.float() * flat.unsqueeze(-1)).sum(dim=0)
                rows = rows + flat.sum()
        return torch.cat([counts, probabilities.detach(), rows]), probabilities

    def value(self, totals: torch.Tensor) -> torch.Tensor:
        """Return the loss of complete totals, a scalar, without the coefficient."""
        counts, probabilities, rows = self._parts(totals)
        return torch.sum((counts / rows) * (probabilities / rows)) * self.experts

    def gradient(self, totals: torch.Tensor, share: float) -> torch.Tensor:
        """Return the gradient [experts] of `share * coefficient * value` by a layer's sum of probabilities."""
        counts, probabilities, rows = self._parts(totals)
        with torch.enable_grad():
            probabilities = probabilities.detach().requires_grad_()
            loss = self.coefficient * self.value(torch.cat([counts, probabilities, rows]))
            (gradient,) = torch.autograd.grad(loss, probabilities, torch.full_like(loss, share))
        return gradient

    def _parts(self, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return totals[: self.experts], totals[self.experts : -1], totals[-1:]


def wants_router_loss(config: Any) -> bool:
    return bool(getattr(config, OPTION, False) or getattr(config.get_text_config(), OPTION, False))


def without_router_loss(config: Any) -> Any:
    """Return a copy of a config with the option off, so that a forward on stand-ins computes no loss."""
    config = copy.deepcopy(config)
    for configuration in (config, config.get_text_config()):
        if getattr(configuration, OPTION, False):
            setattr(configuration, OPTION, False)
    return config


def probe_router_loss(model: PreTrainedModel, structure: Structure) -> RouterLoss:
    """Find out how a family's forward uses the option.

    During one forward its loss function is replaced by a stub that shows the function's arguments and the factor on its
    result. The function is then compared with ours on random numbers.

    Args:
        model: as `probe` leaves it: it runs on fp64 hidden states without layers or weights. Its head is replaced.

    Raises:
        InputError: transformers has no router loss for the family, or a different one.
    """
    architecture = type(model).__name__
    names = _globals_of_forward(model)
    theirs = names.get(FUNCTION)
    if theirs is None or not router_modules(model, structure.layers_name):
        raise _refused(architecture, "transformers computes no loss of its routers that could be trained")
    arguments: dict[str, Any] = {}
    value = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def stand_in(*args: Any, **kwargs: Any) -> torch.Tensor:
        arguments.update(inspect.signature(theirs).bind(*args, **kwargs).arguments)
        return value

    embedding = embedding_of(model, structure.embedding_module)
    hidden = torch.ones(PROBE_BATCH, PROBE_SEQUENCE, embedding.embedding_dim, dtype=torch.float64)
    head: Any = model.get_submodule(structure.head_module)
    logits = torch.zeros(PROBE_BATCH, PROBE_SEQUENCE, len(head.weight), dtype=torch.float64)
    replace_head(model, structure.head_module, lambda hidden: logits)
    labels = torch.zeros(PROBE_BATCH, PROBE_SEQUENCE, dtype=torch.int64)
    mask = torch.ones_like(labels)

    def loss(on: bool) -> torch.Tensor:
        kwargs = {"labels": labels, "attention_mask": mask, OPTION: on, "return_dict": True}
        return call_embedded(model, embedding, structure.wants_token, hidden, **kwargs).loss

    try:
        with _replaced(names, FUNCTION, stand_in):
            plain, with_it = loss(False), loss(True)
        (coefficient,) = torch.autograd.grad(with_it, value)
        router_loss = RouterLoss(float(coefficient), int(arguments["num_experts"]), int(arguments["top_k"]))
        loss_unchanged = torch.equal(plain.detach().double(), with_it.detach().double())
    except Exception as error:  # families raise many types on a forward without layers
        raise _refused(architecture, f"what it does with it is not seen ({type(error).__name__})") from error
    if not loss_unchanged or arguments.get("attention_mask") is not mask or not _agrees(router_loss, theirs):
        raise _refused(architecture, "its loss of the routers is another than Mixtral's")
    return router_loss


def router_modules(
    model: PreTrainedModel, layers_name: str, kept_layers: range | None = None
) -> list[tuple[nn.Module, int]]:
    """Return (module, index in its output) of all modules whose output transformers records as router logits.

    Args:
        kept_layers: indices of the layers to search; None: all.
    """
    recorders = getattr(type(model.base_model), "_can_record_outputs", None) or {}
    recorders = recorders.get("router_logits", [])
    recorders = recorders if isinstance(recorders, list) else [recorders]
    modules = []
    for name, module in model.named_modules():
        if not name.startswith(f"{layers_name}."):
            continue
        layer = name.removeprefix(f"{layers_name}.").partition(".")[0]
        if kept_layers is not None and int(layer) not in kept_layers:
            continue
        modules += [
            (module, getattr(recorder, "index", 1)) for recorder in recorders if _matches(recorder, name, module)
        ]
    return modules


def _matches(recorder: Any, name: str, module: nn.Module) -> bool:
    """Return whether a recorder of transformers selects this module: by its class, by the end of its name, or both."""
    if isinstance(recorder, str):
        return name.endswith(recorder)
    if isinstance(recorder, type):
        return isinstance(module, recorder)
    by_class = recorder.target_class is not None and isinstance(module, recorder.target_class)
    by_name = recorder.class_name is not None and name.endswith(recorder.class_name)
    inside = recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{name}."
    return (by_class or by_name) and inside


def _globals_of_forward(model: nn.Module) -> dict[str, Any]:
    """Return the globals of a model's undecorated forward."""
    return getattr(inspect.unwrap(type(model).forward), "__globals__", {})


@contextlib.contextmanager
def _replaced(names: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    original = names[name]
    names[name] = value
    try:
        yield
    finally:
        names[name] = original


def _agrees(ours: RouterLoss, theirs: Callable[..., torch.Tensor]) -> bool:
    """Compare value and gradient, with and without a mask, on two layers of random logits."""
    if [*inspect.signature(theirs).parameters] != ["gate_logits", "num_experts", "top_k", "attention_mask"]:
        return False
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(6, ours.experts, generator=generator, requires_grad=True) for _ in range(2)]
    for mask in (None, torch.tensor([[1, 1, 0], [1, 1, 1]])):
        expected = theirs(tuple(logits), ours.experts, ours.choices, mask)
        expected_gradients = torch.autograd.grad(ours.coefficient * expected, logits)
        totals, probabilities = ours.add(ours.start(), logits, mask)
        gradients = torch.autograd.grad(probabilities, logits, ours.gradient(totals, 1.0))
        pairs = zip((*gradients, ours.value(totals)), (*expected_gradients, expected.detach()), strict=True)
        if not all(torch.allclose(actual, reference, rtol=1e-5, atol=1e-7) for actual, reference in pairs):
            return False
    return True


def _refused(architecture: str, reason: str) -> InputError:
    return InputError(
        f"{OPTION} = true asks for a loss that {architecture} cannot be trained with: {reason}; set it to false."
    )
