"""AdamW with moments on the host has the bits of torch's, whatever the share, through a checkpoint and back."""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenpipe.errors import InputError
from evenpipe.host.optimizer import MOMENTS, HostAdamW
from evenpipe.host.pool import unnamed_file

SHARES = (0.0, 0.3, 0.5, 1.0)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(37, 129), nn.GELU(), nn.LayerNorm(129), nn.Linear(129, 65), nn.Linear(65, 3, bias=False)
    )


def groups(module: nn.Module) -> list[dict[str, object]]:
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """With accumulation over three microbatches, clipping, and a rate that changes."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad(set_to_none=True)
        for _ in range(3):
            loss = module(torch.randn(8, 37, generator=generator)).square().mean()
            loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
    return losses


def assert_same_bits(*trained: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """Parameters and state of two optimizers."""
    ours, theirs = (
        {
            f"{key}.{name}": value
            for name, parameter in module.named_parameters()
            for key, value in [("value", parameter.detach()), *optimizer.state[parameter].items()]
        }
        for module, optimizer in trained
    )
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.sampled(3)
def test_fifty_steps_have_the_bits_of_torch(share: float, fused: bool) -> None:
    """The state goes through a dictionary into other optimizers, of another share and back."""
    ours, theirs = model(), model()
    optimizer = HostAdamW(groups(ours), share=share, lr=1e-2, fused=fused, bucket_bytes=4096)
    resident = torch.optim.AdamW(groups(theirs), lr=1e-2, fused=fused)
    for other, steps in ((share, range(20)), (1.0 - share, range(20, 35)), (share, range(35, 50))):
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = HostAdamW(groups(ours), share=other, lr=1e-2, fused=fused, bucket_bytes=4096)
        optimizer.load_state_dict(saved)
        assert train(ours, optimizer, steps) == train(theirs, resident, steps)
    assert_same_bits((ours, optimizer), (theirs, resident))


def test_parameters_that_are_frozen_or_thawed_between_steps() -> None:
    """A thawed one has its moments on the device; a frozen one keeps its, and moves on with them when it is thawed."""
    ours, theirs = model(), model()
    optimizers = []
    for module, make in ((ours, HostAdamW), (theirs, torch.optim.AdamW)):
        next(module.parameters()).requires_grad_(False)
        optimizers.append(make(module.parameters(), lr=1e-2, fused=True))
    for number, frozen in enumerate(((0,), (4, 5), (), (0, 6))):
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            for index, parameter in enumerate(module.parameters()):
                parameter.requires_grad_(index not in frozen)
            train(module, optimizer, range(3 * number, 3 * number + 3))
    assert_same_bits(*zip((ours, theirs), optimizers, strict=True))


def test_no_more_than_the_share_is_on_the_host(tmp_path: Path) -> None:
    module = model()
    whole = sum(parameter.numel() for parameter in module.parameters())
    for share in SHARES:
        optimizer = HostAdamW(module.parameters(), share=share, directory=tmp_path)
        hosted = sum(parameter.numel() for parameter in optimizer.hosted)
        others = [parameter.numel() for parameter in module.parameters() if parameter not in optimizer.hosted]
        assert hosted <= share * whole and all(hosted + size > share * whole for size in others)
        assert (share == 1) == (hosted == whole)
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_pages_of_the_file_are_let_go() -> None:
    module = nn.Linear(1024, 4096, bias=False)  # 16 MiB, and as much for each moment
    optimizer = HostAdamW(module.parameters(), fused=True)
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    gc.collect()
    before = resident_file_bytes()
    optimizer.step()
    assert resident_file_bytes() - before < 2**20
    first, second = (optimizer.state[module.weight][name] for name in MOMENTS)
    assert float(first.mean()) == pytest.approx(1 - 0.9**2)
    assert float(second.mean()) == pytest.approx(1 - 0.999**2)
    assert resident_file_bytes() - before > 2**24  # looked at, they are there


def resident_file_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return (int(lines["RssFile"].split()[0]) + int(lines["RssShmem"].split()[0])) * 1024


def test_a_full_disk_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    """16 MiB of moments, and a file system of 1 MiB, which only a forked process sees."""
    module = nn.Linear(1024, 2048, bias=False)
    module.weight.grad = torch.ones_like(module.weight)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        said = "mounting is not allowed here"
        try:
            if mounted(tmp_path, "size=1m"):
                HostAdamW(module.parameters(), directory=tmp_path).step()
                said = "it fits"
        except InputError as error:
            said = str(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the process died of signal {status & 127}"
    if said == "mounting is not allowed here":
        pytest.skip(said)
    assert said == f"directory: {str(tmp_path)!r}, no file of {2**24} bytes can be made there: No space left on device"


def mounted(directory: Path, options: str) -> bool:
    """Mounts a file system of its own for this process, which has one thread; False where that is not allowed."""
    user, group, libc = os.getuid(), os.getgid(), ctypes.CDLL(None)
    new_user_and_mounts = 0x10000000 | 0x00020000
    if libc.unshare(new_user_and_mounts):
        return False
    own = Path("/proc/self")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        (own / name).write_text(text, encoding="ascii")
    return not libc.mount(b"none", bytes(directory), b"tmpfs", 0, options.encode())


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_cannot_reserve_room_is_written_to(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    size = 3 * 2**20 + 17
    with unnamed_file(size, tmp_path, "directory") as file:
        assert os.fstat(file.fileno()).st_size == size <= 512 * os.fstat(file.fileno()).st_blocks
        file.seek(0)
        assert not any(file.read())


def test_wrong_options() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"share": 1.5}, "share is 1.5; it must be a number from 0 to 1"),
        ({"share": True}, "share is true; it must be a number from 0 to 1"),
        ({"amsgrad": True}, "amsgrad is True; it must be False with moments on the host"),
        ({"directory": "/nowhere"}, "directory: '/nowhere', no file of"),
    ]
    for options, sentence in refused:
        with pytest.raises(InputError, match=sentence):
            HostAdamW(model().parameters(), **options)
