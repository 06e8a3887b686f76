"""Shared memory in huge pages: a fault, and a place in the processor's table of pages, per 2 MiB.

Only speed depends on it. The kernel refuses for many reasons (too old, told not to, memory in too
small pieces), and then ordinary pages stay where they are.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import time
from typing import Any

PAGE_BYTES = 2**21
"""Of a huge page on x86-64, the only processor that memory is shared on."""
MIN_BYTES = 2 * PAGE_BYTES
"""Less than this, of one rank's buckets, is left alone."""
PATIENCE_S = 0.1
"""In fragmented memory the kernel first moves other pages away. This is how much more of this
thread's time than ordinary pages would take it may spend on that.
"""

_ORDINARY_S_PER_BYTE = 4e-10
_PIECE_BYTES = 16 * PAGE_BYTES  # every call drains lists of all processors, so not page by page
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25  # since Linux 6.1; in spite of shmem_enabled=never, which only stops faults


def map_aligned(descriptor: int, size_bytes: int) -> memoryview:
    """Map the beginning of a file at an address that is a multiple of a huge page's size.

    The file must be larger by PAGE_BYTES, which are never touched and so cost nothing.
    """
    whole = mmap.mmap(descriptor, size_bytes + PAGE_BYTES)
    address = _address(whole)
    skipped = -address % PAGE_BYTES
    if skipped:
        # Over a part of what `whole` has mapped already, so it goes when that does: once, after
        # the last view or tensor of it. Python's own mmap cannot choose an address.
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        found = _libc().mmap(address + skipped, size_bytes, access, kind, descriptor, 0)
        if found != address + skipped:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    return memoryview(whole)[skipped : skipped + size_bytes]


def use_huge_pages(memory: memoryview, start: int, stop: int) -> None:
    """Have the whole huge pages from `start` to `stop`, of memory mapped here, as such.

    They are taken at once, near the processor that this runs on. What is in them stays.
    """
    address = _address(memory)
    deadline_s = time.thread_time() + PATIENCE_S
    for begin in range(start, stop, _PIECE_BYTES):
        end = min(stop, begin + _PIECE_BYTES)
        bytes(memory[begin:end:PAGE_BYTES])  # refused where nothing was ever touched
        is_refused = _libc().madvise(address + begin, end - begin, _MADV_COLLAPSE) != 0
        if is_refused and ctypes.get_errno() != errno.EAGAIN:  # that is about single pages in use
            return
        deadline_s += (end - begin) * _ORDINARY_S_PER_BYTE
        if time.thread_time() > deadline_s:
            return


def _address(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    place, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = place
    libc.mmap.argtypes = [place, size, number, number, number, ctypes.c_long]
    libc.madvise.argtypes = [place, size, number]
    return libc
