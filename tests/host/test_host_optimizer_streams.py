"""Moments that come to a GPU and go: the streams wait for all that they have to, and for nothing else."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from stand_in_streams import Device, played
from test_host_optimizer import groups, model
from torch import Tensor, nn

from evenpipe.host import optimizer as host_optimizer
from evenpipe.host.optimizer import MOMENTS, HostAdamW
from evenpipe.host.pool import PAGE, PinnedSlab


class OrdinarySlab(PinnedSlab):
    """Memory that is not locked."""

    made: list[int] = []  # noqa: RUF012  (emptied by each test)

    def __init__(self, size: int) -> None:
        assert size & (size - 1) == 0
        self.size, self._bytes = size, torch.zeros(size, dtype=torch.uint8)
        self.made.append(size)


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(host_optimizer, "PinnedSlab", OrdinarySlab)
    OrdinarySlab.made.clear()
    return OrdinarySlab.made


def on_a_gpu(module: nn.Module, device: Device, monkeypatch: pytest.MonkeyPatch) -> HostAdamW:
    """Parameters on the CPU, with moments that travel."""
    monkeypatch.setattr(HostAdamW, "_stream", lambda self, group, pieces: pieces and self._stream_to_gpu(group, pieces))
    return HostAdamW(groups(module), lr=1e-2, fused=True, bucket_bytes=1024)


def steps(device: Device, monkeypatch: pytest.MonkeyPatch, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a tensor that has been through the streams and of torch's, moments as a step leaves them."""
    ours, theirs = model(), model()
    optimizer = on_a_gpu(ours, device, monkeypatch)
    resident = torch.optim.AdamW(groups(theirs), lr=1e-2, fused=True)
    pairs = []
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        resident.step()
        with played(device, monkeypatch):
            optimizer.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):  # while the device still computes
            pairs += [(optimizer.state[one][name].clone(), resident.state[other][name].clone()) for name in MOMENTS]
        device.finish()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            pairs.append((one.detach().clone(), other.detach().clone()))
    return pairs


def test_no_order_that_the_events_allow_changes_a_bit(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in sample(range(30), 3):
        device = Device(seed)
        assert all(torch.equal(ours, theirs) for ours, theirs in steps(device, monkeypatch)), seed
        assert device.most_held == 3 * len(MOMENTS), "buckets"
        assert device.held == 0
        assert device.synchronizations == 4, "one in each step"


def test_without_the_events_it_is_noticed(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in sample(range(5), 1):
        pairs = steps(Device(seed, orderly=False), monkeypatch)
        assert not all(torch.equal(ours, theirs) for ours, theirs in pairs), seed


def test_copies_in_and_copies_out_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket's copies take 2, to and fro, and its update 2: all three at once, but for the first and the last."""
    device = Device(0)
    module = nn.Linear(64, 64, bias=False)
    optimizer = on_a_gpu(module, device, monkeypatch)
    module.weight.grad = torch.ones_like(module.weight)
    with played(device, monkeypatch):
        optimizer.step()
    buckets = module.weight.numel() * 4 // 1024
    assert max(stream.last.end for stream in device.streams if stream.last is not None) == 2 * (buckets + 2)


# --- where moments lie ------------------------------------------------------------------------------------------


def test_moments_share_locked_slabs(slabs: list[int]) -> None:
    module = model().to("meta")
    optimizer = HostAdamW(module.parameters(), fused=True)
    places = []
    for parameter in module.parameters():
        for name in MOMENTS:
            moment = optimizer.moment_on_host(parameter, name)
            assert moment is not None
            assert (moment.shape, moment.dtype) == (parameter.shape, parameter.dtype)
            assert moment.device.type == "cpu" and moment.is_contiguous()
            places.append((moment.data_ptr(), moment.data_ptr() + moment.nbytes))
    places.sort()
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(places))
    assert len(slabs) == 1
    assert sum(slabs) < 2 * sum(-(-(end - begin) // PAGE) * PAGE for begin, end in places)


def test_a_state_that_is_loaded_goes_to_the_host_at_once(slabs: list[int]) -> None:
    """A moment on the "meta" device, that has no values, would not come back."""
    whole, module = model(), model().to("meta")
    given = torch.optim.AdamW(whole.parameters(), fused=True)
    for parameter in whole.parameters():
        parameter.grad = torch.ones_like(parameter)
    given.step()
    optimizer = HostAdamW(module.parameters(), share=0.6, fused=True)
    saved = given.state_dict()
    before = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    assert 0 < len(optimizer.hosted) < len(list(module.parameters()))
    for one, other in zip(module.parameters(), whole.parameters(), strict=True):
        state = optimizer.state[one]
        assert state.keys() == given.state[other].keys()
        for name in MOMENTS:
            assert state[name].device.type == ("cpu" if one in optimizer.hosted else "meta")
            if one in optimizer.hosted:
                assert state[name] is optimizer.moment_on_host(one, name)
                assert torch.equal(state[name], given.state[other][name])
    assert before["state"].keys() == saved["state"].keys()
    assert all(saved["state"][number].keys() == state.keys() for number, state in before["state"].items())


def test_a_parameter_without_elements_has_nothing_on_the_host() -> None:
    """As a shard of rows may be."""
    empty, other = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.zeros(3, 4))
    optimizer = HostAdamW([empty, other], fused=True)
    assert optimizer.hosted == {other} and optimizer.moment_on_host(empty, "exp_avg") is None
    empty.grad, other.grad = torch.zeros_like(empty), torch.ones_like(other)
    optimizer.step()
    assert optimizer.state[empty]["exp_avg"].shape == (0, 4) and other.min() < 0
