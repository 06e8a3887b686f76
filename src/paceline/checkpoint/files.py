"""Files that are whole or not there: private, flushed to the disk, never through a link.

Starts without torch.
"""

from __future__ import annotations

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
    while view:
        view = view[os.write(file, view[:_WRITE_BYTES]) :]


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
