"""The folder with the checkpoints: what is there, what is sound, what goes.

    step-00000050.0001/       step 50, the first save into this folder
        state.safetensors  state.json  manifest.json
    .tmp-4f1c.../             being written, being removed, or left behind by a killed writer

The second number counts saves, so the newest is known even after training went back to an earlier
step, and no save ever has to take the place of another. Starts without torch.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.checkpoint.files import (
    create_inside,
    open_folder,
    open_inside,
    open_plain,
    read_bounded,
    sync_folder,
    write_fully,
)
from paceline.checkpoint.manifest import (
    FILE_NAME,
    MAX_MANIFEST_BYTES,
    FileFacts,
    Manifest,
    read_manifest,
    write_manifest,
)
from paceline.errors import CheckpointError

TEMPORARY = ".tmp-"
_NAME = re.compile(r"step-(\d{8,15})\.(\d{4,10})")
_HASH_BYTES = 4 * 2**20
# Where locks do not work, as on some network drives, only age tells the dead from the living.
_ABANDONED_AFTER_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class Entry:
    """One published checkpoint, whether sound or not."""

    path: Path
    step: int
    serial: int

    @property
    def name(self) -> str:
        return self.path.name


def entry_at(path: Path) -> Entry | None:
    """The checkpoint at a path, by its name alone."""
    match = _NAME.fullmatch(path.name)
    return Entry(path, int(match[1]), int(match[2])) if match else None


def list_entries(folder: Path) -> list[Entry]:
    """The checkpoints in a folder, newest first; none where there is no folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}.") from error
    found = [entry for name in names if (entry := entry_at(folder / name))]
    return sorted(found, key=lambda entry: (entry.serial, entry.step), reverse=True)


@contextmanager
def opened(entry: Entry) -> Iterator[tuple[int, Manifest]]:
    """The open folder of a checkpoint and its manifest."""
    folder = open_folder(entry.path)
    try:
        path = entry.path / FILE_NAME
        file = open_inside(folder, FILE_NAME, path)
        try:
            manifest = read_manifest(read_bounded(file, MAX_MANIFEST_BYTES, path), path)
        finally:
            os.close(file)
        if manifest.step != entry.step:
            raise CheckpointError(
                f"{path} is about step {manifest.step}, in a folder for step {entry.step}."
            )
        yield folder, manifest
    finally:
        os.close(folder)


@contextmanager
def opened_file(
    folder: int, entry: Entry, name: str, facts: FileFacts
) -> Iterator[tuple[int, Path]]:
    """One open file of a checkpoint, if it has the size that the manifest states."""
    path = entry.path / name
    file = open_inside(folder, name, path)
    try:
        size = os.fstat(file).st_size
        if size != facts.bytes:
            raise CheckpointError(
                f"{path} has {size:,} bytes; it was written with {facts.bytes:,}."
            )
        yield file, path
    finally:
        os.close(file)


def check_hash(path: Path, facts: FileFacts, found: str) -> None:
    if found != facts.sha256:
        raise CheckpointError(
            f"{path} is damaged: its sha256 begins with {found[:12]}, and with "
            f"{facts.sha256[:12]} when it was written."
        )


def verify(entry: Entry) -> Manifest:
    """Read every byte of a checkpoint and compare; the manifest if all is well."""
    try:
        return _verify(entry)
    except OSError as error:  # a disk that fails in the middle
        raise CheckpointError(f"{entry.path} cannot be read: {error.strerror}.") from error


def _verify(entry: Entry) -> Manifest:
    with opened(entry) as (folder, manifest):
        for name, facts in manifest.files.items():
            with opened_file(folder, entry, name, facts) as (file, path):
                digest = hashlib.sha256()
                while data := os.read(file, _HASH_BYTES):
                    digest.update(data)
                check_hash(path, facts, digest.hexdigest())
        return manifest


def publish(
    folder: Path,
    step: int,
    files: Mapping[str, Sequence[bytes | memoryview]],
    *,
    metric: float | None,
    facts: dict[str, object],
) -> tuple[Entry, Manifest]:
    """Write a checkpoint so that it is there as a whole or not at all."""
    if not folder.is_dir():
        os.makedirs(folder, 0o700, exist_ok=True)
        sync_folder(folder.parent)
    _check_room(folder, sum(len(piece) for pieces in files.values() for piece in pieces))
    with _new_temporary(folder) as (temporary, inside):
        written = {name: _write(inside, name, pieces) for name, pieces in files.items()}
        manifest = Manifest(step, round(time.time(), 3), metric, facts, written)
        _write(inside, FILE_NAME, [write_manifest(manifest)])
        os.fsync(inside)
        entry = _rename(temporary, folder, step)
    sync_folder(folder)
    return entry, manifest


def sweep(folder: Path) -> None:
    """Remove what killed writers have left. What a living one is writing is locked, and stays."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError, CheckpointError):
            _remove_if_abandoned(path)


def remove(entry: Entry) -> None:
    """Remove a checkpoint; nobody ever sees half of it under its name."""
    gone = entry.path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        os.rename(entry.path, gone)
    except FileNotFoundError:  # another process has removed it
        return
    with suppress(FileNotFoundError):  # another process sweeps at the same time
        if gone.is_symlink():
            gone.unlink()
        else:
            shutil.rmtree(gone)


@dataclass(frozen=True, slots=True)
class Standing:
    """What decides whether a checkpoint stays: from its manifest, None where it has none."""

    entry: Entry
    is_sound: bool
    metric: float | None = None


def standings(folder: Path, damaged: Collection[str] = ()) -> list[Standing]:
    """All checkpoints of a folder, newest first; `damaged` names those known to be unsound."""
    found = []
    for entry in list_entries(folder):
        try:
            with opened(entry) as (_, manifest):
                found.append(Standing(entry, entry.name not in damaged, manifest.metric))
        except CheckpointError:
            found.append(Standing(entry, False))
    return found


def plan_removals(
    found: Sequence[Standing], *, keep: int, keep_best: int, better: Literal["lower", "higher"]
) -> list[Entry]:
    """Which checkpoints go: all but the `keep` newest sound ones and the `keep_best` best.

    Damaged ones count for nothing, so they never push a sound one out. Those among the kept
    newest ones stay, for somebody to look at.
    """
    sound = [each for each in found if each.is_sound]
    rated = [each for each in sound if each.metric is not None and each.metric == each.metric]
    sign = 1 if better == "lower" else -1
    rated.sort(key=lambda each: (sign * (each.metric or 0.0), -each.entry.serial))
    stay = {each.entry for each in [*sound[:keep], *rated[:keep_best]]}
    oldest = sound[min(keep, len(sound)) - 1].entry.serial if sound else 0
    return [
        each.entry
        for each in found
        if each.entry not in stay and (each.is_sound or each.entry.serial < oldest)
    ]


def _check_room(folder: Path, needed_bytes: int) -> None:
    """Do not even begin to fill a disk: whoever else writes to it would fail too."""
    disk = os.statvfs(folder)
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


@contextmanager
def _new_temporary(folder: Path) -> Iterator[tuple[Path, int]]:
    """A new locked folder inside `folder`; removed if the block fails."""
    path, inside = _make_temporary(folder)
    try:
        yield path, inside
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        os.close(inside)


def _make_temporary(folder: Path) -> tuple[Path, int]:
    while True:
        path = folder / f"{TEMPORARY}{secrets.token_hex(8)}"
        os.mkdir(path, 0o700)
        with suppress(CheckpointError):  # gone already, see below
            inside = open_folder(path)
            # The kernel drops the lock when this process dies: then `sweep` removes the folder.
            with suppress(OSError):
                fcntl.flock(inside, fcntl.LOCK_EX)
            if os.fstat(inside).st_nlink > 0:
                return path, inside
            # Another saver swept it between our two calls.
            os.close(inside)


def _write(folder: int, name: str, pieces: Sequence[bytes | memoryview]) -> FileFacts:
    digest, size = hashlib.sha256(), 0
    file = create_inside(folder, name)
    try:
        for piece in pieces:
            write_fully(file, piece)
            # Both calls let other threads run for as long as they take.
            digest.update(piece)
            size += len(piece)
        os.fsync(file)
    finally:
        os.close(file)
    return FileFacts(size, digest.hexdigest())


def _rename(temporary: Path, folder: Path, step: int) -> Entry:
    """Publish under the next free number; another saver may take it first."""
    serial = max((entry.serial for entry in list_entries(folder)), default=0) + 1
    while True:
        entry = Entry(folder / f"step-{step:08}.{serial:04}", step, serial)
        try:
            os.rename(temporary, entry.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            serial += 1
        else:
            return entry


def _remove_if_abandoned(path: Path) -> None:
    file = open_folder(path)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            if time.time() - os.fstat(file).st_mtime < _ABANDONED_AFTER_S:
                return
        # Still locked, so that a writer who had only just made it notices that it is gone.
        shutil.rmtree(path)
    finally:
        os.close(file)


def find_folder(path: Path) -> Path:
    """The folder with the checkpoints, given it or the run folder around it."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() and not list_entries(path) else path


def find_entry(path: Path, step: int | None = None) -> Entry:
    """The checkpoint that a path means: itself, or the newest in a folder of them."""
    if (path / FILE_NAME).exists():
        # The user may name a link; inside a checkpoint none is followed.
        path = path.resolve()
        # Copied or renamed by its owner, its manifest says which step it is.
        return entry_at(path) or Entry(path, _stated_step(path), 0)
    folder = find_folder(path)
    entries = [each for each in list_entries(folder) if step in (None, each.step)]
    if entries:
        return entries[0]
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointError(
        f"There is {wanted} in {folder}.", advice="`paceline ckpt ls` lists what is there."
    )


def _stated_step(path: Path) -> int:
    file = open_plain(path / FILE_NAME)
    try:
        data = read_bounded(file, MAX_MANIFEST_BYTES, path / FILE_NAME)
    finally:
        os.close(file)
    return read_manifest(data, path / FILE_NAME).step
