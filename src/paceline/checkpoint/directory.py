"""The folder with the checkpoints: what is there, what is sound, what goes.

    step-00000050.0001/       step 50, the first save into this folder
        state.safetensors     every tensor
        state.json            the state without its tensors
        manifest.json         what it is; size and hash of the other two; written last
    .tmp-4f1c.../             being written, being removed, or left behind by a killed writer

The second number counts saves, so the newest is known even after training went back to an earlier
step, and no save ever has to take the place of another. Starts without torch.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoint import files
from paceline.checkpoint.files import open_file, open_folder, size_of
from paceline.errors import CheckpointError, UsageError, WireError
from paceline.files import MAX_SKELETON_BYTES, plain_json, read_json, read_value, sync_folder

MANIFEST = "manifest.json"
TENSORS = "state.safetensors"
SKELETON = "state.json"
TEMPORARY = ".tmp-"
FORMAT, VERSION = "paceline checkpoint", 1
MAX_MANIFEST_BYTES = 4 * 2**20
# Where locks do not work, as on some network drives, only age tells the dead from the living.
_ABANDONED_AFTER_S = 24 * 3600

_NAME = re.compile(r"step-(\d{8,15})\.(\d{4,10})")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """How a file must look."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    created: float
    """Seconds since 1970."""
    metric: float | None
    facts: dict[str, Any]
    files: dict[str, FileFacts]

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True, slots=True, order=True)
class CheckpointEntry:
    """One published checkpoint, whether sound or not."""

    path: Path
    step: int
    serial: int

    @property
    def name(self) -> str:
        return self.path.name


def list_entries(folder: Path) -> list[CheckpointEntry]:
    """The checkpoints in a folder, newest first; none where there is no folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}.") from error
    found = [entry for name in names if (entry := _entry_at(folder / name))]
    return sorted(found, key=lambda entry: (entry.serial, entry.step), reverse=True)


def list_manifests(
    folder: Path, most: int | None = None
) -> list[tuple[CheckpointEntry, Manifest | CheckpointError]]:
    """The same, or the newest of them, each with its manifest, or with what is wrong with that."""
    found: list[tuple[CheckpointEntry, Manifest | CheckpointError]] = []
    for entry in list_entries(folder)[:most]:
        try:
            with open_checkpoint(entry) as checkpoint:
                found.append((entry, checkpoint.manifest))
        except CheckpointError as error:
            found.append((entry, error))
    return found


def find_folder(path: Path) -> Path:
    """The folder with the checkpoints, given it or the run folder around it."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() and not list_entries(path) else path


def find_entry(path: Path, step: int | None = None) -> CheckpointEntry:
    """The checkpoint that a path means: itself, or the newest in a folder of them."""
    if (path / MANIFEST).exists():
        path = path.resolve()  # the user may name a link; inside a checkpoint none is followed
        with open_folder(path) as folder:
            # Copied or renamed by its owner, its manifest says which step it is.
            return _entry_at(path) or CheckpointEntry(
                path, _read_manifest(folder, path / MANIFEST).step, 0
            )
    folder_path = find_folder(path)
    entries = [each for each in list_entries(folder_path) if step in (None, each.step)]
    if entries:
        return entries[0]
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    there = ", ".join(str(entry.step) for entry in reversed(list_entries(folder_path)))
    raise CheckpointError(
        f"There is {wanted} in {folder_path}.", f"There are: {there}." if there else ""
    )


def _entry_at(path: Path) -> CheckpointEntry | None:
    match = _NAME.fullmatch(path.name)
    return CheckpointEntry(path, int(match[1]), int(match[2])) if match else None


class OpenCheckpoint:
    """A checkpoint whose folder is open, so that all its files are of the same checkpoint."""

    def __init__(self, entry: CheckpointEntry, folder: int) -> None:
        self.entry = entry
        self._folder = folder
        path = entry.path / MANIFEST
        self.manifest = _read_manifest(folder, path)
        if self.manifest.step != entry.step:
            raise CheckpointError(
                f"{path} is about step {self.manifest.step}, in a folder for step {entry.step}."
            )

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[BufferedIOBase, Path]]:
        """One of its files, if it has the size that the manifest states."""
        path, stated = self.entry.path / name, self.manifest.files[name].bytes
        with open_file(path, self._folder) as file:
            if size_of(file) != stated:
                raise CheckpointError(
                    f"{path} has {size_of(file):,} bytes; it was written with {stated:,}."
                )
            yield file, path

    def read_skeleton(self) -> bytes:
        """The state without its tensors, compared with its hash."""
        with self.open(SKELETON) as (file, path):
            if self.manifest.files[SKELETON].bytes > MAX_SKELETON_BYTES:
                raise CheckpointError(f"{path} is larger than {MAX_SKELETON_BYTES:,} bytes.")
            skeleton = file.read()
        self.compare(SKELETON, hashlib.sha256(skeleton).hexdigest())
        return skeleton

    def compare(self, name: str, found: str) -> None:
        """Raise if this is not the hash that a file was written with."""
        stated = self.manifest.files[name].sha256
        if found != stated:
            raise CheckpointError(
                f"{self.entry.path / name} is damaged: its sha256 begins with {found[:12]}, and "
                f"with {stated[:12]} when it was written."
            )


@contextmanager
def open_checkpoint(entry: CheckpointEntry) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint and read its manifest."""
    with open_folder(entry.path) as folder:
        try:
            yield OpenCheckpoint(entry, folder)
        except OSError as error:  # a disk that fails in the middle
            raise CheckpointError(f"{entry.path} cannot be read: {error.strerror}.") from error


def verify(entry: CheckpointEntry) -> Manifest:
    """Read every byte of a checkpoint and compare; the manifest if all is well."""
    with open_checkpoint(entry) as checkpoint:
        for name in checkpoint.manifest.files:
            with checkpoint.open(name) as (file, _):
                digest = hashlib.file_digest(file, "sha256")
            checkpoint.compare(name, digest.hexdigest())
        return checkpoint.manifest


def publish(
    folder: Path,
    step: int,
    contents: Mapping[str, bytes | memoryview],
    metric: float | None,
    facts: dict[str, Any],
) -> tuple[CheckpointEntry, Manifest]:
    """Write a checkpoint so that it is there as a whole or not at all."""
    if not folder.is_dir():
        os.makedirs(folder, 0o700, exist_ok=True)
        sync_folder(folder.parent)
    disk = os.statvfs(folder)
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < sum(map(len, contents.values())):
        # Do not even begin to fill a disk: whatever else writes to it would fail too.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    temporary, inside = _make_temporary(folder)
    try:
        written = {name: _write(inside, name, data) for name, data in contents.items()}
        manifest = Manifest(step, round(time.time(), 3), metric, facts, written)
        _write(inside, MANIFEST, _write_manifest(manifest))
        os.fsync(inside)
        entry = _rename(temporary, folder, step)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(inside)
    sync_folder(folder)
    return entry, manifest


def remove(entry: CheckpointEntry) -> None:
    """Remove a checkpoint; no reader ever sees half of it under its name."""
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


def sweep(folder: Path) -> None:
    """Remove what killed writers have left. What a living one is writing is locked, and stays."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError, CheckpointError), open_folder(path) as inside:
            try:
                fcntl.flock(inside, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:
                if time.time() - os.fstat(inside).st_mtime < _ABANDONED_AFTER_S:
                    continue
            # Still locked, so that a writer who had only just made it notices that it is gone.
            shutil.rmtree(path)


def plan_removals(
    found: Sequence[tuple[CheckpointEntry, Manifest | CheckpointError]],
    damaged: Collection[str],
    *,
    keep: int,
    keep_best: int,
    better: Literal["lower", "higher"],
) -> list[CheckpointEntry]:
    """Which of the checkpoints found go: not the newest sound ones, nor the best of them.

    Damaged ones, also those named in `damaged`, count for nothing, so they never push a sound one
    out; those among the kept newest ones stay, to be looked at.
    """
    metric_by_entry = {
        entry: manifest.metric
        for entry, manifest in found
        if isinstance(manifest, Manifest) and entry.name not in damaged
    }
    sign = 1 if better == "lower" else -1
    rated = [
        (sign * metric, -entry.serial, entry)
        for entry, metric in metric_by_entry.items()
        if metric is not None and not math.isnan(metric)
    ]
    newest = list(metric_by_entry)[:keep]
    stay = {*newest, *(entry for _, _, entry in sorted(rated)[:keep_best])}
    oldest = newest[-1].serial if newest else 0
    return [
        entry
        for entry, _ in found
        if entry not in stay and (entry in metric_by_entry or entry.serial < oldest)
    ]


def _make_temporary(folder: Path) -> tuple[Path, int]:
    """A new locked folder inside `folder`, and its descriptor."""
    while True:
        path = folder / f"{TEMPORARY}{secrets.token_hex(8)}"
        os.mkdir(path, 0o700)
        try:
            inside = os.open(path, files.FOLDER_FLAGS)
        except FileNotFoundError:  # another saver has swept it already
            continue
        except OSError:
            os.rmdir(path)
            raise
        # The kernel drops the lock when this process dies: then `sweep` removes the folder.
        with suppress(OSError):
            fcntl.flock(inside, fcntl.LOCK_EX)
        if os.fstat(inside).st_nlink > 0:
            return path, inside
        os.close(inside)  # another saver swept it between our two calls


def _write(folder: int, name: str, data: bytes | memoryview) -> FileFacts:
    file = os.open(name, files.CREATE_FLAGS, 0o600, dir_fd=folder)
    try:
        files.write_fully(file, data)
        os.fsync(file)
    finally:
        os.close(file)
    return FileFacts(len(data), hashlib.sha256(data).hexdigest())


def _rename(temporary: Path, folder: Path, step: int) -> CheckpointEntry:
    """Publish under the next free number; another saver may take it first."""
    serial = max((entry.serial for entry in list_entries(folder)), default=0) + 1
    while True:
        entry = CheckpointEntry(folder / f"step-{step:08}.{serial:04}", step, serial)
        try:
            os.rename(temporary, entry.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            serial += 1
        else:
            return entry


def plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts as strict JSON can say them: nan and inf become words, everything else must fit."""
    try:
        text = json.dumps(plain_json(facts), allow_nan=False).encode()
        said: dict[str, Any] = read_json(
            io.BytesIO(text), MAX_MANIFEST_BYTES // 2, "What they say", UsageError
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"The facts of a checkpoint cannot be written: {error}",
            advice="Put tensors, long values and others into the state.",
        ) from None
    return said


def _write_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON, with a hash of itself, so that no bit of it can change unnoticed."""
    said = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    said["metric"] = plain_json(manifest.metric)
    return json.dumps({"manifest": said, "sha256": _hash(said)}, indent=1).encode() + b"\n"


def _read_manifest(folder: int, path: Path) -> Manifest:
    """A checked manifest; it cannot name any file but the two that there are."""
    with open_file(path, folder) as file:
        whole = read_json(file, MAX_MANIFEST_BYTES, path, CheckpointError)
    match whole:
        case {"manifest": {"format": kind, "version": version} as said, "sha256": stated}:
            pass
        case _:
            raise CheckpointError(f"{path} is not a manifest we write, or it is damaged.")
    if stated != _hash(said):
        raise CheckpointError(f"{path} is damaged: it does not have the hash it states.")
    if (kind, version) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path} is version {version!r:.20} of {kind!r:.40}; this paceline reads version "
            f"{VERSION} of {FORMAT!r}.",
            advice="Read it with the version that wrote it.",
        )
    try:
        manifest: Manifest = read_value(Manifest, said, str(path))
    except WireError as error:
        raise CheckpointError(error.what) from None
    if manifest.files.keys() != {TENSORS, SKELETON}:
        raise CheckpointError(
            f"{path} does not describe {TENSORS} and {SKELETON}, and these alone.",
            advice="Nothing of this checkpoint was used: it may have been made to do harm.",
        )
    return manifest


def _hash(said: Any) -> str:
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
