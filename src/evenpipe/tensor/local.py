"""Makes a block that holds a rank's parameters compute on its rows: adjusts its counts and adds the communication.

The communication is in hooks, which torch.compile does not trace: it compiles the code between them.
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
    """Modify a block whose parameters are already those of a rank.

    Args:
        hidden: keys of the arguments that are hidden states.
        groups: number of units of its first group, over all ranks.
        keeps: whether layers save their gathered input instead of a rank's rows: the block belongs to a checkpointed
            layer, so its forward is repeated at the beginning of the backward.
        dtype_of: returns the dtype in which products read a parameter.
    """
    divide(block, cut, exchange.size, groups)
    for name in cut.biases if exchange.rank else ():
        owner, _, leaf = name.rpartition(".")
        module = block.get_submodule(owner)
        module._parameters[leaf] = None
        if not isinstance(module, nn.Linear):  # others do not check whether they have a bias
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
    if adds_bias and not terms_of(end):  # terms are added after the product, and the total is summed
        end.__dict__["_sums"] = summed


def keep_whole(block: nn.Module, exchange: Exchange, hidden: Collection[int | str]) -> None:
    """Let every rank compute a block on all tokens and keep its local rows."""
    block.register_forward_pre_hook(_Input(exchange, tuple(hidden)).gather, with_kwargs=True)
    block.register_forward_hook(partial(_keep_local_rows, exchange))


def block_width(module: nn.Module, weight: Tensor) -> int:
    """Return the output size of a linear layer whose weight is [in, out], or of experts."""
    if isinstance(module, Conv1D):
        return weight.shape[1]
    down = module.down_proj
    assert isinstance(down, Tensor)
    return down.shape[2 if module.is_transposed else 1]


def divide(block: nn.Module, cut: BlockCut, ranks: int, groups: int) -> None:
    """Set the counts and sizes of a block to those of the rank whose parameters it has. groups: as in `make_local`."""
    for group in cut.groups:
        for name in group.splits:
            _fit(block.get_submodule(name.rpartition(".")[0]))
    for name, attribute in cut.counts:
        module = block.get_submodule(name)
        setattr(module, attribute, _divided(getattr(module, attribute), ranks))
    modules = {name: block.get_submodule(name) for name, _ in cut.settings}
    for config in {id(module.config): module.config for module in modules.values()}.values():
        local_config = copy.copy(config)  # the config of the model and of other blocks is not changed
        sharing = [name for name, module in modules.items() if module.config is config]
        for attribute in {attribute for name, attribute in cut.settings if name in sharing}:
            vars(local_config)[attribute] = _divided(vars(config)[attribute], ranks)
        for name in sharing:
            modules[name].config = local_config
    for name, attribute in cut.shares:
        module = block.get_submodule(name)
        setattr(module, attribute, getattr(module, attribute) * groups // ranks)


def _divided(value: int, ranks: int) -> int:
    """Return a rank's count. If there are fewer units than ranks, several ranks hold the same one."""
    return value // ranks if value % ranks == 0 else 1 if ranks % value == 0 else value


def _fit(module: nn.Module) -> None:
    """Set the sizes that a layer stores in addition to its parameters."""
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
    """Gathers the hidden states that are passed to a block."""

    exchange: Exchange
    hidden: Collection[int | str]
    """Keys of the arguments that are hidden states."""
    layers: Sequence[nn.Module] = ()
    """Layers of the block that may multiply them, and then save only a rank's rows."""
    readers: list[nn.Module] = field(default_factory=list)
    """The layers that have multiplied them so far, in order of first use."""
    keeps: bool = False
    """Whether the layers save all rows."""

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
    """Keep a rank's rows of all hidden states that a block returns (DBRX also returns the residual)."""
    if not isinstance(output, (tuple, list)):
        return OwnRows.apply(output, exchange)
    shape = output[0].shape
    return type(output)(
        OwnRows.apply(value, exchange) if isinstance(value, Tensor) and value.shape == shape else value
        for value in output
    )
