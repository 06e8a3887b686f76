"""Memory mapped where huge pages can be: when it goes, and what the kernel makes of it."""

from __future__ import annotations

import gc
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.transport import huge_pages
from paceline.transport.huge_pages import PAGE_BYTES, map_aligned, use_huge_pages

NAME = "paceline-test"
SIZE = 3 * PAGE_BYTES + 4096
LAST = SIZE - 1
MADV_COLLAPSE = 25


@pytest.fixture
def descriptor() -> Iterator[int]:
    number = make_file(SIZE + PAGE_BYTES)
    yield number
    os.close(number)


def make_file(size_bytes: int) -> int:
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line]


def huge_bytes() -> int:
    """How much of the memory of these tests is mapped in huge pages."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = NAME in line
        elif is_ours and line.startswith("ShmemPmdMapped:"):
            total += int(line.split()[1]) * 1024
    return total


def address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


@pytest.mark.parametrize("pages", [0, 1, 5])
def test_memory_begins_at_a_huge_page_and_is_the_beginning_of_the_file(pages: int) -> None:
    size = pages * PAGE_BYTES + 4096
    descriptor = make_file(size + PAGE_BYTES)
    os.pwrite(descriptor, b"first", 0)
    os.pwrite(descriptor, b"last", size - 4)
    # Several at once, as the first one may be where it should be by chance.
    mapped = [map_aligned(descriptor, size) for _ in range(5)]
    for memory in mapped:
        assert address(memory) % PAGE_BYTES == 0
        assert len(memory) == size
        assert memory[:5] == b"first"
        assert memory[-4:] == b"last"
    mapped[0][:5] = b"other"
    os.close(descriptor)
    assert all(memory[:5] == b"other" for memory in mapped)


def test_memory_stays_until_the_last_tensor_or_view_of_it_is_gone(descriptor: int) -> None:
    memory = map_aligned(descriptor, SIZE)
    words = memory[:4096].cast("Q")
    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=10, offset=SIZE - 10)
    del memory
    gc.collect()
    words[511] = 7
    tensor[-1] = 9
    assert os.pread(descriptor, 8, 4096 - 8) == (7).to_bytes(8, "little")
    assert os.pread(descriptor, 1, LAST) == b"\x09"
    del words
    part = tensor[5:]
    del tensor
    assert mappings()
    assert part[-1] == 9
    del part
    assert mappings() == []


def test_nothing_that_was_mapped_stays_mapped_and_no_descriptor_stays_open(descriptor: int) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        memory = map_aligned(descriptor, SIZE)
        use_huge_pages(memory, 0, PAGE_BYTES)
        held = torch.frombuffer(memory, dtype=torch.float32).view(2, -1)[1]
        held.fill_(1.0)
        del memory, held
    assert mappings() == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_what_others_map_next_to_it_is_not_unmapped_with_it(descriptor: int) -> None:
    neighbours = []
    for _ in range(10):
        before = mmap.mmap(-1, PAGE_BYTES)
        memory = map_aligned(descriptor, SIZE)
        after = mmap.mmap(-1, 4096)
        neighbours += [before, after]
        del memory
    for neighbour in neighbours:
        neighbour[:] = b"x" * len(neighbour)
        neighbour.close()


def test_a_file_that_cannot_be_written_to_or_is_closed_is_an_os_error(descriptor: int) -> None:
    readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    with pytest.raises(PermissionError):
        map_aligned(readable, SIZE)
    os.close(readable)
    with pytest.raises(OSError, match="descriptor"):
        map_aligned(readable, SIZE)


def map_for_huge_pages(descriptor: int) -> memoryview:
    """Untouched memory; where the kernel makes no huge pages of it, the test is skipped."""
    probe = map_aligned(descriptor, SIZE)
    owner = probe.obj
    assert isinstance(owner, mmap.mmap)
    start = address(probe) - torch.frombuffer(owner, dtype=torch.uint8).data_ptr()
    probe[0] = 0
    try:
        owner.madvise(MADV_COLLAPSE, start, PAGE_BYTES)
    except OSError as error:
        pytest.skip(f"No huge pages here: {error}")
    os.truncate(descriptor, 0)
    os.truncate(descriptor, SIZE + PAGE_BYTES)
    return map_aligned(descriptor, SIZE)


def test_huge_pages_are_made_of_what_is_asked_for_and_of_no_more(descriptor: int) -> None:
    memory = map_for_huge_pages(descriptor)
    for _ in range(20):  # the kernel may have been using one of the pages
        use_huge_pages(memory, PAGE_BYTES, 3 * PAGE_BYTES)
        if huge_bytes() == 2 * PAGE_BYTES:
            break
    assert huge_bytes() == 2 * PAGE_BYTES


def test_another_mapping_of_huge_pages_has_them_too(descriptor: int) -> None:
    memory = map_for_huge_pages(descriptor)
    for _ in range(20):
        use_huge_pages(memory, 0, 3 * PAGE_BYTES)
        if huge_bytes() == 3 * PAGE_BYTES:
            break
    other = map_aligned(descriptor, SIZE)
    assert huge_bytes() == 3 * PAGE_BYTES
    torch.frombuffer(other, dtype=torch.uint8)[:: PAGE_BYTES // 2].fill_(1)
    assert huge_bytes() == 6 * PAGE_BYTES


def test_what_is_in_memory_stays_when_it_moves_to_huge_pages(descriptor: int) -> None:
    memory = map_aligned(descriptor, SIZE)
    values = torch.frombuffer(memory, dtype=torch.int32)
    values.copy_(torch.arange(len(values)))
    use_huge_pages(memory, 0, 3 * PAGE_BYTES)
    assert torch.equal(values, torch.arange(len(values), dtype=torch.int32))


def test_a_refusal_changes_nothing(tmp_path: Path) -> None:
    """A file that can be written, on a disk, is nothing that the kernel makes huge pages of."""
    path = tmp_path / NAME
    path.write_bytes(b"ab" * (SIZE // 2) + bytes(PAGE_BYTES))
    with path.open("r+b") as file:
        memory = map_aligned(file.fileno(), SIZE)
        use_huge_pages(memory, 0, 3 * PAGE_BYTES)
    assert huge_bytes() == 0
    assert memory[:4] == memory[-4:] == b"abab"


def test_a_kernel_that_takes_too_long_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, descriptor: int
) -> None:
    memory = map_for_huge_pages(descriptor)
    monkeypatch.setattr(huge_pages, "_PIECE_BYTES", PAGE_BYTES)
    monkeypatch.setattr(huge_pages, "PATIENCE_S", -1e9)
    use_huge_pages(memory, 0, 3 * PAGE_BYTES)
    assert huge_bytes() <= PAGE_BYTES


def test_no_pages_at_all_are_no_work(descriptor: int) -> None:
    memory = map_aligned(descriptor, SIZE)
    use_huge_pages(memory, 0, 0)
    use_huge_pages(memory, 2 * PAGE_BYTES, PAGE_BYTES)
    assert huge_bytes() == 0
    assert os.fstat(descriptor).st_blocks == 0


def test_a_forked_child_shares_the_memory_and_its_end_does_not_unmap_it(descriptor: int) -> None:
    memory = map_aligned(descriptor, SIZE)
    memory[0], memory[LAST] = 1, 2
    if (child := os.fork()) == 0:
        memory[0], memory[LAST] = memory[LAST], memory[0]
        del memory
        os._exit(len(mappings()))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (memory[0], memory[LAST]) == (2, 1)
