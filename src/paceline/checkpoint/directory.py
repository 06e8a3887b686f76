"""The folder of checkpoints: listing, verifying, publishing and removing them.

    step-00000050.0001/       step 50, the first save into this folder
        state.safetensors     every tensor
        state.json            the state without its tensors
        manifest.json         step, facts, size and hash of the other two; written last
    .tmp-4f1c.../             being written, being removed, or left behind by a killed writer

The second number counts saves, so the newest is known even after training went back to an earlier
step, and no save has to replace another. Starts without torch.
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
# Where locks do not work, as on some network drives, a temporary folder older than this is taken to
# be left by a writer that died.
_ABANDONED_AFTER_S = 24 * 3600

_NAME = re.compile(r"step-(\d{8,15})\.(\d{4,10})")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The size and hash that a file must have."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's description of itself."""

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
    """One published checkpoint, valid or damaged."""

    path: Path
    step: int
    serial: int

    @property
    def name(self) -> str:
        return self.path.name


def list_entries(folder: Path) -> list[CheckpointEntry]:
    """The checkpoints in a folder, newest first; empty where the folder does not exist."""
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
    """The checkpoints, or the newest `most`, each with its manifest or with the error in it."""
    found: list[tuple[CheckpointEntry, Manifest | CheckpointError]] = []
    for entry in list_entries(folder)[:most]:
        try:
            with open_checkpoint(entry) as checkpoint:
                found.append((entry, checkpoint.manifest))
        except CheckpointError as error:
            found.append((entry, error))
    return found


def find_folder(path: Path) -> Path:
    """The folder of checkpoints, given that folder or the run folder around it."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() and not list_entries(path) else path


def find_entry(path: Path, step: int | None = None) -> CheckpointEntry:
    """The checkpoint that a path means: itself, or the newest in a folder of them."""
    if (path / MANIFEST).exists():
        # The user may name a link; inside a checkpoint none is followed.
        path = Path(os.path.realpath(path))
        with open_folder(path) as folder:
            # If the user has renamed it, the manifest has the step.
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
                f"{path} has step {self.manifest.step}, in a folder for step {entry.step}."
            )

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[BufferedIOBase, Path]]:
        """Open one of its files; raises unless it has the size in the manifest."""
        path, stated = self.entry.path / name, self.manifest.files[name].bytes
        with open_file(path, self._folder) as file:
            if size_of(file) != stated:
                raise CheckpointError(
                    f"{path} has {size_of(file):,} bytes; it was written with {stated:,}."
                )
            yield file, path

    def read_skeleton(self) -> bytes:
        """The state without its tensors, verified by its hash."""
        with self.open(SKELETON) as (file, path):
            if self.manifest.files[SKELETON].bytes > MAX_SKELETON_BYTES:
                raise CheckpointError(f"{path} is larger than {MAX_SKELETON_BYTES:,} bytes.")
            skeleton = file.read()
        self.compare(SKELETON, hashlib.sha256(skeleton).hexdigest())
        return skeleton

    def compare(self, name: str, found: str) -> None:
        """Raise unless `found` is the file's hash in the manifest."""
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
        except OSError as error:  # the disk fails while reading
            raise CheckpointError(f"{entry.path} cannot be read: {error.strerror}.") from error


def verify(entry: CheckpointEntry) -> Manifest:
    """Read every byte of a checkpoint and compare the hashes; returns the manifest."""
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
    """Write a checkpoint atomically: into a temporary folder, which is then renamed."""
    if not folder.is_dir():
        os.makedirs(folder, 0o700, exist_ok=True)
        sync_folder(folder.parent)
    disk = os.statvfs(folder)
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < sum(map(len, contents.values())):
        # Do not begin to fill the disk: other programs that write to it would fail too.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    temporary, inside = _make_temporary(folder)
    try:
        # Contents before the manifest, all synced before the rename, the folder after it: after a
        # power cut the name either does not exist or stands for a whole checkpoint.
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
    """Remove a checkpoint; renamed first, so that no reader finds half of it under its name."""
    gone = entry.path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        os.rename(entry.path, gone)
    except FileNotFoundError:  # another process has removed it
        return
    with suppress(FileNotFoundError):  # another process sweeps concurrently
        if gone.is_symlink():
            gone.unlink()
        else:
            shutil.rmtree(gone)


def sweep(folder: Path) -> None:
    """Remove temporary folders of writers that were killed; a live writer's is locked, and kept."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError, CheckpointError), open_folder(path) as inside:
            try:
                fcntl.flock(inside, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:
                if time.time() - os.fstat(inside).st_mtime < _ABANDONED_AFTER_S:
                    continue
            # Removed while locked: a writer that has just made it and waits for the lock then finds
            # that the folder is gone (`_make_temporary`).
            shutil.rmtree(path)


def plan_removals(
    found: Sequence[tuple[CheckpointEntry, Manifest | CheckpointError]],
    damaged: Collection[str],
    *,
    keep: int,
    keep_best: int,
    better: Literal["lower", "higher"],
) -> list[CheckpointEntry]:
    """Which of the checkpoints to remove: neither the newest valid ones nor the best.

    Damaged ones, including those named in `damaged`, do not count towards `keep`, so they never
    displace a valid one. Those newer than the oldest kept one stay, for inspection.
    """
    metric_by_entry = {
        entry: manifest.metric
        for entry, manifest in found
        if isinstance(manifest, Manifest) and entry.name not in damaged
    }
    sign = 1 if better == "lower" else -1
    rated = [
        # Of equal ones the newest.
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
        except FileNotFoundError:  # another process has swept it already
            continue
        except OSError:
            os.rmdir(path)
            raise
        # The kernel drops the lock when this process dies: then `sweep` removes the folder.
        with suppress(OSError):
            fcntl.flock(inside, fcntl.LOCK_EX)
        if os.fstat(inside).st_nlink > 0:
            return path, inside
        os.close(inside)  # another process swept it between `mkdir` and `flock`


def _write(folder: int, name: str, data: bytes | memoryview) -> FileFacts:
    file = os.open(name, files.CREATE_FLAGS, 0o600, dir_fd=folder)
    try:
        files.write_fully(file, data)
        os.fsync(file)
    finally:
        os.close(file)
    return FileFacts(len(data), hashlib.sha256(data).hexdigest())


def _rename(temporary: Path, folder: Path, step: int) -> CheckpointEntry:
    """Publish under the next free number; another process may take it first."""
    serial = max((entry.serial for entry in list_entries(folder)), default=0) + 1
    while True:
        entry = CheckpointEntry(folder / f"step-{step:08}.{serial:04}", step, serial)
        try:
            os.rename(temporary, entry.path)
        except OSError as error:
            # A rename replaces no folder with something in it, so no checkpoint is replaced.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            serial += 1
        else:
            return entry


def plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts as strict JSON: nan and inf become strings; what JSON lacks is refused."""
    try:
        text = json.dumps(plain_json(facts), allow_nan=False).encode()
        document: dict[str, Any] = read_json(
            # Half of it: in the manifest they are indented, and not alone.
            io.BytesIO(text),
            MAX_MANIFEST_BYTES // 2,
            "What they say",
            UsageError,
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"The facts of a checkpoint cannot be written: {error}",
            advice="Put tensors, long values and other objects into the state.",
        ) from None
    return document


def _write_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON, with a hash of itself, so that any changed bit is noticed."""
    document = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    document["metric"] = plain_json(manifest.metric)
    return json.dumps({"manifest": document, "sha256": _hash(document)}, indent=1).encode() + b"\n"


def _read_manifest(folder: int, path: Path) -> Manifest:
    """Read and check a manifest; it must name the two files and no others."""
    with open_file(path, folder) as file:
        whole = read_json(file, MAX_MANIFEST_BYTES, path, CheckpointError)
    match whole:
        case {"manifest": {"format": kind, "version": version} as document, "sha256": stated}:
            pass
        case _:
            raise CheckpointError(f"{path} is not a manifest of Paceline's, or it is damaged.")
    if stated != _hash(document):
        raise CheckpointError(f"{path} is damaged: its contents do not match its hash.")
    if (kind, version) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path} is version {version!r:.20} of {kind!r:.40}; this paceline reads version "
            f"{VERSION} of {FORMAT!r}.",
            advice="Read it with the version that wrote it.",
        )
    try:
        manifest: Manifest = read_value(Manifest, document, str(path))
    except WireError as error:
        raise CheckpointError(error.what) from None
    if manifest.files.keys() != {TENSORS, SKELETON}:
        raise CheckpointError(
            f"{path} does not describe exactly {TENSORS} and {SKELETON}.",
            advice="Nothing of this checkpoint was used: it may have been made to do harm.",
        )
    return manifest


def _hash(document: Any) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
