"""Files that are whole or not there: private, flushed to the disk, never through a link.

Starts without torch.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import CheckpointError

# Linux writes at most 2 GiB in one call. Calls are few and large on purpose: between two of them
# a thread asks for Python's lock, which training wants too.
_WRITE_BYTES = 2**30

_DIRECT_BYTES = 2**20
BLOCK_BYTES = 4096
"""Memory that begins at a multiple of this can be written past the page cache."""

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def open_plain(path: Path) -> int:
    """Open a file that the user named. Something that is no file, such as a pipe, is refused."""
    try:
        return _only_plain(os.open(path, _READ_FLAGS), path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def open_inside(folder: int, name: str, path: Path) -> int:
    """Open a file in an open folder; a link is refused, wherever it leads."""
    try:
        return _only_plain(os.open(name, _READ_FLAGS | os.O_NOFOLLOW, dir_fd=folder), path)
    except OSError as error:
        reason = "it is a link" if os.path.islink(path) else error.strerror
        raise CheckpointError(f"{path} cannot be read: {reason}.") from error


def open_folder(path: Path) -> int:
    """Open a folder that is no link."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        reason = "it is a link" if os.path.islink(path) else error.strerror
        raise CheckpointError(f"{path} cannot be read: {reason}.") from error


def read_bounded(file: int, limit_bytes: int, path: Path) -> bytes:
    """All bytes of an open file, unless they are more than allowed."""
    size = os.fstat(file).st_size
    if size > limit_bytes:
        raise CheckpointError(
            f"{path} has {size:,} bytes, more than the {limit_bytes:,} allowed.",
            advice="It is damaged, or it was not written by paceline.",
        )
    return read_up_to(file, size)


def read_up_to(file: int, count: int) -> bytes:
    """The next `count` bytes of an open file, or what is left of it."""
    parts = []
    while count > 0 and (part := os.read(file, count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def create_inside(folder: int, name: str) -> int:
    """Create a file for this user alone in an open folder."""
    return os.open(name, _CREATE_FLAGS, 0o600, dir_fd=folder)


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


def sync_folder(path: Path) -> None:
    """Make renames inside a folder survive a power failure."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def replace_file(path: Path) -> Iterator[int]:
    """A new file that takes the place of `path` at the end of the block, if nothing fails in it."""
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    file = os.open(temporary, _CREATE_FLAGS, 0o600)
    try:
        try:
            yield file
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def _only_plain(file: int, path: Path) -> int:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path} is not a plain file.")
    return file


# Note [Past the page cache]
# A save writes some hundred megabytes that nobody will read soon. Through the page cache they cost
# a second copy and fresh pages: 50 to 600 ms of processor time for 210 MB, taken from training on a
# machine whose cores all train. Handed to the disk directly they cost 8 ms (ext4 in a virtual
# machine, AMD EPYC), and what training has in the cache stays there.
