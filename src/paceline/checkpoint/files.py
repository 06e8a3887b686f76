"""Files that are whole or not there: private, flushed to the disk, never through a link.

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

# Linux writes at most 2 GiB in one call. Calls are few and large on purpose: between two of them
# a thread asks for Python's lock, which training wants too.
_WRITE_BYTES = 2**30

_DIRECT_BYTES = 2**20
BLOCK_BYTES = 4096
"""Memory that begins at a multiple of this can be written past the page cache."""

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def open_file(path: Path, folder: int | None = None) -> Iterator[BufferedIOBase]:
    """An open file. What is not a plain file, such as a pipe, is refused.

    With the open `folder` it lies in, a link is refused too; without, the user has named it.
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
    """An open folder that is not a link."""
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
    """Write all of it, in as few calls as possible."""
    view = memoryview(data)
    if len(view) >= _DIRECT_BYTES and not view.readonly:
        view = view[_write_directly(file, view) :]
    while view:
        view = view[os.write(file, view[:_WRITE_BYTES]) :]


def _write_directly(file: int, view: memoryview) -> int:
    """Write past the page cache as far as blocks and the file system allow; how many bytes.

    See Note [Past the page cache].
    """
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    if not hasattr(os, "O_DIRECT") or address % BLOCK_BYTES or os.lseek(file, 0, os.SEEK_CUR):
        return 0
    whole = len(view) // BLOCK_BYTES * BLOCK_BYTES
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < whole and done % BLOCK_BYTES == 0:
            done += os.write(file, view[done : min(done + _WRITE_BYTES, whole)])
    except OSError as error:
        if error.errno != errno.EINVAL:  # that one says: not on this file system
            raise
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return done


# Note [Past the page cache]
# A save writes some hundred megabytes that will not be read soon. Through the page cache they cost
# a second copy and fresh pages: 50 to 600 ms of processor time for 210 MB, taken from training on a
# machine whose cores all train. Handed to the disk directly they cost 8 ms (ext4 in a virtual
# machine, AMD EPYC), and what training has in the cache stays there.
