"""Large buckets in shared memory: in huge pages on every rank, and given back when replaced."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel, World
from paceline.bucket_tuning import SCORED_STEPS, WARM_UP_STEPS
from paceline.buckets import BucketPlan, Slot
from paceline.testing import run_processes
from paceline.transport import TransportChoice
from paceline.transport.huge_pages import PAGE_BYTES, map_aligned, use_huge_pages

CPU = torch.device("cpu")
NUMEL = 4 * 2**20
"""Elements of a bucket that has 16 MiB."""


def mapped() -> tuple[int, int, int]:
    """Segments mapped by this process, what of them is in memory, what of that in huge pages."""
    inodes, resident, huge, is_ours = set(), 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = "memfd:paceline" in line
            if is_ours:
                inodes.add(line.split()[4])
        elif is_ours and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
        elif is_ours and line.startswith("ShmemPmdMapped:"):
            huge += int(line.split()[1]) * 1024
    return len(inodes), resident, huge


def sum_in_many_layouts(world: World, layouts: int) -> list[tuple[int, int, int]]:
    """What is mapped after the sums of each layout, all with as many bytes."""
    torch.set_num_threads(1)
    transport = TransportChoice(world.group, [CPU], "shared_memory").get()
    found = []
    for turn in range(layouts):
        numels = [NUMEL // (turn + 1)] * (turn + 1)
        plans = [BucketPlan(torch.float32, CPU, (Slot(0, 0, n),)) for n in numels]
        homes = transport.place(plans, "Placing")
        for number, home in enumerate(homes):
            assert home is not None
            assert not home.any()
            home.fill_(world.rank + turn)
            transport.start(number, home, 1.0, "A sum").wait()
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
        assert [segments for segments, _, _ in found] == [2] * 4


def kernel_makes_huge_pages() -> bool:
    descriptor = os.memfd_create("probe", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 2 * PAGE_BYTES)
    memory = map_aligned(descriptor, PAGE_BYTES)
    os.close(descriptor)
    use_huge_pages(memory, 0, PAGE_BYTES)
    return bool(re.search(r"ShmemPmdMapped: +[1-9]", Path("/proc/self/smaps").read_text()))


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_has_the_buckets_of_all_mapped_in_huge_pages(size: int) -> None:
    if not kernel_makes_huge_pages():
        pytest.skip("This kernel makes no huge pages of shared memory")
    for found in run_processes(size, sum_in_many_layouts, 3):
        # Now and then the kernel is using a page; it does not refuse most of them, in any layout.
        assert max(huge / resident for _, resident, huge in found) > 0.8


def map_without_room(_world: World, size_bytes: int) -> tuple[int | None, int]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size_bytes, resource.RLIM_INFINITY))
    descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes + PAGE_BYTES)
    code = None
    try:
        map_aligned(descriptor, size_bytes)
    except OSError as error:
        code = error.errno
    os.close(descriptor)
    return code, mapped()[0]


def test_without_room_for_addresses_there_is_an_os_error_and_no_mapping() -> None:
    assert run_processes(1, map_without_room, 2**32) == [(errno.ENOMEM, 0)]


def train_until_tuned(world: World) -> tuple[str, int, list[str]]:
    """What came of the search for a capacity, segments mapped then, and descriptors of any."""
    torch.set_num_threads(1)
    net = nn.Sequential(*(nn.Linear(1100, 1100, bias=False) for _ in range(4)))
    model = DistributedDataParallel(net)
    for _ in range(2 + 3 * (WARM_UP_STEPS + SCORED_STEPS)):
        model.zero_grad()
        model(torch.full((1, 1100), world.rank + 1.0)).sum().backward()
    links = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if link.is_symlink()]
    return model.bucket_tuning, mapped()[0], [link for link in links if "memfd:paceline" in link]


def test_a_search_for_the_best_capacity_leaves_only_the_memory_of_what_it_chose() -> None:
    for told, segments, descriptors in run_processes(2, train_until_tuned):
        assert told.startswith("buckets of ")
        assert segments == 2
        assert len(descriptors) == 2  # Python's mmap keeps one for each


def look_at_files(world: World) -> list[tuple[int, int, bool]]:
    """Of each segment's file: its mode, its seals, and whether another program would inherit it."""
    transport = TransportChoice(world.group, [CPU], "shared_memory").get()
    homes = transport.place([BucketPlan(torch.float32, CPU, (Slot(0, 0, NUMEL),))], "Placing")
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
