"""Makes a block that holds a rank's parameters compute on its rows: its counts, and its exchange with other ranks.

The exchange stands in hooks, which torch.compile leaves out: it compiles what is between them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from evenpipe.model.linear import is_one_product, terms_of
from evenpipe.tensor.exchange import Exchange, Gather, OwnRows, Scatter
from evenpipe.tensor.gathered import Gathered, GatherInput, set_source
from evenpipe.tensor.norms import sum_over_ranks
from evenpipe.tensor.summed import Summed

if TYPE_CHECKING:
    from evenpipe.tensor.cuts import BlockCut


def make_local(
    block: nn.Module,
    cut: BlockCut,
    exchange: Exchange,
    hidden: Collection[int | str],
    *,
    groups: int,
    keeps: bool = False,
    dtype_of: Callable[[nn.Parameter], torch.dtype] = attrgetter("dtype"),
) -> None:
    """Change a block, whose parameters are already those of a rank.

    Args:
        hidden: which arguments are hidden states.
        groups: units of its first group, of all ranks.
        keeps: whether layers save their gathered input, and not a rank's rows: the block belongs to a checkpointed
            layer, so its forward is repeated at the beginning of the backward.
        dtype_of: returns the dtype in which products read a parameter.
    """
    divide(block, cut, exchange.size, groups)
    for name in cut.biases if exchange.rank else ():
        owner, _, leaf = name.rpartition(".")
        module = block.get_submodule(owner)
        module._parameters[leaf] = None
        if not isinstance(module, nn.Linear):  # others do not ask whether they have one
            weight = next(parameter for parameter in module.parameters() if parameter.dim() > 1)
            experts = weight.shape[:1] if weight.dim() == 3 else ()
            size = block_width(module, weight)
            module.__dict__[leaf] = torch.zeros((*experts, size), dtype=dtype_of(weight), device=weight.device)
    for name in cut.norms:
        sum_over_ranks(block.get_submodule(name), exchange)
    layers = [module for module in block.modules() if is_one_product(module)]
    block_input = _Input(exchange, tuple(hidden), layers, keeps=keeps)
    block.register_forward_pre_hook(block_input.gather, with_kwargs=True)
    block.register_forward_hook(block_input.close, always_call=True)
    if cut.sums_at is None:
        block.register_forward_hook(partial(exchange_output, Scatter, exchange))
        return
    end, summed = block.get_submodule(cut.sums_at), Summed(exchange)
    end.register_forward_hook(summed.sum)
    adds_bias = exchange.overlap is None or exchange.overlap.adds_biases or f"{cut.sums_at}.bias" not in cut.biases
    if adds_bias and not terms_of(end):  # those are added behind the product, and then all of it is summed
        end.__dict__["_sums"] = summed


def keep_whole(block: nn.Module, exchange: Exchange, hidden: Collection[int | str]) -> None:
    """Let every rank compute a block on all tokens, and keep its own rows."""
    block.register_forward_pre_hook(_Input(exchange, tuple(hidden)).gather, with_kwargs=True)
    block.register_forward_hook(partial(_keep_local_rows, exchange))


def block_width(module: nn.Module, weight: Tensor) -> int:
    """Return the entries of the output of a linear layer with inputs before outputs, or of experts."""
    if isinstance(module, Conv1D):
        return weight.shape[1]
    down = module.down_proj
    assert isinstance(down, Tensor)
    return down.shape[2 if module.is_transposed else 1]


def divide(block: nn.Module, cut: BlockCut, ranks: int, groups: int) -> None:
    """Set the counts and sizes of a block to those of a rank, whose parameters it has. groups: as of `make_local`."""
    for group in cut.groups:
        for name in group.splits:
            _fit(block.get_submodule(name.rpartition(".")[0]))
    for name, attribute in cut.counts:
        module = block.get_submodule(name)
        setattr(module, attribute, _divided(getattr(module, attribute), ranks))
    modules = {name: block.get_submodule(name) for name, _ in cut.settings}
    for config in {id(module.config): module.config for module in modules.values()}.values():
        local_config = copy.copy(config)  # the model's, and other blocks', stays as it is
        sharing = [name for name, module in modules.items() if module.config is config]
        for attribute in {attribute for name, attribute in cut.settings if name in sharing}:
            vars(local_config)[attribute] = _divided(vars(config)[attribute], ranks)
        for name in sharing:
            modules[name].config = local_config
    for name, attribute in cut.shares:
        module = block.get_submodule(name)
        setattr(module, attribute, getattr(module, attribute) * groups // ranks)


def _divided(value: int, ranks: int) -> int:
    """Return a rank's count: where there are fewer than ranks, several hold the same one."""
    return value // ranks if value % ranks == 0 else 1 if ranks % value == 0 else value


def _fit(module: nn.Module) -> None:
    """Set the sizes that a layer keeps besides its parameters."""
    weight = module._parameters.get("weight")
    if weight is None:
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, Conv1D):
        module.nx, module.nf = weight.shape
    elif isinstance(module, nn.Conv1d) and module.groups == module.in_channels:
        module.groups = module.in_channels = module.out_channels = weight.shape[0]


@dataclass(frozen=True, slots=True)
class _Input:
    """Gathers the hidden states that a block gets."""

    exchange: Exchange
    hidden: Collection[int | str]
    """Which of its arguments they are."""
    layers: Sequence[nn.Module] = ()
    """Layers inside that may multiply them, and then save only a rank's rows."""
    readers: list[nn.Module] = field(default_factory=list)
    """Those that have multiplied them so far, in the order in which they first did."""
    keeps: bool = False
    """They save all rows."""

    @torch.compiler.disable
    def gather(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        gathered: dict[int, Tensor] = {}  # the same hidden states may be queries, keys and values

        def gather_once(rows: Tensor) -> Tensor:
            if id(rows) not in gathered:
                gathered[id(rows)] = self._gather(rows, is_first=not gathered)
            return gathered[id(rows)]

        return (
            tuple(gather_once(argument) if index in self.hidden else argument for index, argument in enumerate(args)),
            {key: gather_once(argument) if key in self.hidden else argument for key, argument in kwargs.items()},
        )

    def _gather(self, rows: Tensor, *, is_first: bool) -> Tensor:
        all_rows: Tensor
        if is_first and self.layers and rows.requires_grad and torch.is_grad_enabled():
            gathered = Gathered(rows, self.exchange, keeps=self.keeps or self.exchange.repeats)
            all_rows = GatherInput.apply(rows, gathered, tuple(self.readers), self.exchange.size)
            set_source(self.layers, gathered)
        else:
            all_rows = Gather.apply(rows, self.exchange)
        return all_rows

    @torch.compiler.disable
    def close(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for gathered in {vars(layer).get("_source") for layer in self.layers}:
            if gathered is not None:
                self.readers.extend(reader for reader in gathered.readers if reader not in self.readers)
                gathered.close()
        set_source(self.layers, None)


@torch.compiler.disable
def exchange_output(function: Any, exchange: Exchange, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, (tuple, list)):
        return type(output)((function.apply(output[0], exchange), *output[1:]))
    return function.apply(output, exchange)


@torch.compiler.disable
def _keep_local_rows(exchange: Exchange, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Keep a rank's rows of all hidden states that a block returns (DBRX's also returns the residual)."""
    if not isinstance(output, (tuple, list)):
        return OwnRows.apply(output, exchange)
    shape = output[0].shape
    return type(output)(
        OwnRows.apply(value, exchange) if isinstance(value, Tensor) and value.shape == shape else value
        for value in output
    )
