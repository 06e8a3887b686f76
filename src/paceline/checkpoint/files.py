"""Opening and writing a checkpoint's files: private, never through a link, past the page cache.

Starts without torch.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path

from paceline.errors import CheckpointError

# Linux writes at most 2 GiB in one call. Calls are few and large on purpose: after each the thread
# needs Python's lock again, and competes for it with training.
_WRITE_BYTES = 2**30

_DIRECT_BYTES = 2**20
BLOCK_BYTES = 4096
"""Memory that begins at a multiple of this can be written past the page cache."""

# Not blocking: opening a pipe would wait until a process writes into it.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def open_file(path: Path, folder: int | None = None) -> Iterator[BufferedIOBase]:
    """Open a file for reading. Anything but a plain file, such as a pipe, is refused.

    With `folder`, the open folder that it lies in, a link is refused too; without, the user has
    named the path, so links are followed.
    """
    file = _open(path, _READ_FLAGS | (0 if folder is None else os.O_NOFOLLOW), folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path} is not a plain file.")
    with open(file, "rb") as stream:
        yield stream


def size_of(file: BufferedIOBase) -> int:
    return os.fstat(file.fileno()).st_size


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """Open a folder, not through a link."""
    folder = _open(path, FOLDER_FLAGS)
    try:
        yield folder
    finally:
        os.close(folder)


def _open(path: Path, flags: int, folder: int | None = None) -> int:
    try:
        return os.open(path if folder is None else path.name, flags, dir_fd=folder)
    except OSError as error:
        is_link = flags & os.O_NOFOLLOW and os.path.islink(path)
        reason = "it is a link" if is_link else error.strerror
        raise CheckpointError(f"{path} cannot be read: {reason}.") from error


def write_fully(file: int, data: bytes | memoryview) -> None:
    """Write all bytes, in as few calls as possible."""
    view = memoryview(data)
    # ctypes gives the address of memory only if it can be written to.
    if len(view) >= _DIRECT_BYTES and not view.readonly:
        view = view[_write_directly(file, view) :]
    while view:
        view = view[os.write(file, view[:_WRITE_BYTES]) :]


def _write_directly(file: int, view: memoryview) -> int:
    """Write whole blocks past the page cache, where the file system allows; returns their bytes.

    See Note [Past the page cache].
    """
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    if not hasattr(os, "O_DIRECT") or address % BLOCK_BYTES or os.lseek(file, 0, os.SEEK_CUR):
        return 0
    # O_DIRECT wants the memory, the place in the file and the length in whole blocks.
    whole = len(view) // BLOCK_BYTES * BLOCK_BYTES
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < whole and done % BLOCK_BYTES == 0:
            done += os.write(file, view[done : min(done + _WRITE_BYTES, whole)])
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this file system has no O_DIRECT
            raise
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return done


# Note [Past the page cache]
# A save writes some hundred megabytes that will not be read soon. Through the page cache they need
# a second copy and new pages: 50 to 600 ms of CPU time for 210 MB, at the expense of training where
# all cores train. Written directly they need 8 ms (ext4 in a virtual machine, AMD EPYC), and
# training's own pages stay in the cache.
