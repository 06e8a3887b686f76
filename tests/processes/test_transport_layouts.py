"""The memory of layouts: given back when they are replaced, and nobody else's."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel, World
from paceline.group import Membership
from paceline.testing import run_processes
from paceline.transport import TransportChoice, place
from paceline.transport.interface import Flat

CPU = torch.device("cpu")
NUMEL = 4 * 2**20
"""Elements of a bucket that has 16 MiB."""


def mapped() -> int:
    """How many segments this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "memfd:paceline" in line})


def sum_in_many_layouts(world: World, layouts: int) -> list[int]:
    """How many segments are mapped after the sums of each layout, all with as many bytes."""
    torch.set_num_threads(1)
    transport = TransportChoice(Membership.of(world.group), [CPU], "shared_memory").get()
    found = []
    for turn in range(layouts):
        numels = [NUMEL // (turn + 1)] * (turn + 1)
        plans = [Flat(n, torch.float32, CPU) for n in numels]
        buckets = place(transport, plans, "Placing")
        homes = buckets.homes
        for number, home in enumerate(homes):
            assert home is not None
            assert not home.any()
            home.fill_(world.rank + turn)
            buckets.start(number, home, 1.0, "A sum").wait()
        expected = sum(rank + turn for rank in range(world.size))
        for home in homes:
            assert home is not None
            assert home.min() == home.max() == expected
        found.append(mapped())
        del homes, home
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_only_the_last_layout_stays_mapped(size: int) -> None:
    for found in run_processes(size, sum_in_many_layouts, 4):
        # The other one is the channel, through which parameters are copied.
        assert found == [2] * 4


class Crossed(nn.Module):
    """Uses its layers in the order in which they were not made, so that buckets change once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1100, 1100, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def train_until_laid_out_anew(world: World) -> tuple[list[list[str]], int, list[str]]:
    """The buckets after two steps, segments mapped then, and descriptors of any."""
    torch.set_num_threads(1)
    model = DistributedDataParallel(Crossed())
    before = [bucket.names for bucket in model.reducer.buckets]
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 1100), world.rank + 1.0)).sum().backward()
    after = [bucket.names for bucket in model.reducer.buckets]
    assert after == before[::-1]
    links = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if link.is_symlink()]
    return after, mapped(), [link for link in links if "memfd:paceline" in link]


def test_buckets_that_are_laid_out_anew_leave_only_the_memory_of_the_new_ones() -> None:
    for names, segments, descriptors in run_processes(2, train_until_laid_out_anew):
        assert len(names) == 4
        assert segments == 2
        assert len(descriptors) == 2  # Python's mmap keeps one for each


def look_at_files(world: World) -> list[tuple[int, int, bool]]:
    """Of each segment's file: its mode, its seals, and whether another program would inherit it."""
    transport = TransportChoice(Membership.of(world.group), [CPU], "shared_memory").get()
    buckets = place(transport, [Flat(NUMEL, torch.float32, CPU)], "Placing")
    homes = buckets.homes
    assert homes[0] is not None
    numbers = [int(entry) for entry in os.listdir("/proc/self/fd")]
    ours = [n for n in numbers if "memfd:paceline" in str(Path(f"/proc/self/fd/{n}").resolve())]
    return [
        (os.fstat(n).st_mode & 0o777, fcntl.fcntl(n, fcntl.F_GET_SEALS), os.get_inheritable(n))
        for n in ours
    ]


def test_a_segment_is_for_this_user_and_program_only_and_can_be_neither_cut_nor_unsealed() -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    for found in run_processes(2, look_at_files):
        assert found == [(0o600, seals, False)] * 2
