"""The run folder: the files that a training writes, and how to read them while it runs.

    run.json                  what is trained, and how far; rank 0 replaces it atomically
    events/rank{r}.jsonl      what happened, one JSON object per line, appended by rank r alone
    pipeline/step{n}.json     a recording of one batch through a step
    timeline/rank{r}.trace.json
    scaling.json  checkpoints/  report.html
    errors.txt                tracebacks of exceptions, each with its worker and step
    logs/output.log           what workers and the launcher printed, in order of time
    record.request            asks the run to record its next step; `paceline watch` writes it

Each file has one writer, and readers tail it. Steps count from 1, so `step` in an event is also the
number of steps applied. Starts without torch. See Note [What a restart undoes].
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from paceline.errors import UsageError, WireError
from paceline.files.documents import (
    FLOAT_BY_NAME,
    check_schema,
    parse_json,
    parse_lines,
    plain_json,
    read_json,
    read_value,
)

SCHEMA = 1
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
INFO_LIMIT_BYTES = 2**20
LINE_LIMIT_BYTES, PIECE_BYTES = 2**20, 2**16

Event = dict[str, Any]
"""A line of an event file: always with `kind`, `t` (seconds since 1970) and `rank`."""


class RunFolder:
    """The paths of one run's files. Creates nothing until `create()`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.shown = str(self.path)
        """As messages show it: from the working directory, if it lies there."""
        with suppress(ValueError, OSError):
            self.shown = str(self.path.relative_to(Path.cwd()))
        self.info = self.path / "run.json"
        self.events = self.path / "events"
        self.pipeline = self.path / "pipeline"
        self.timeline = self.path / "timeline"
        self.scaling = self.path / "scaling.json"
        self.checkpoints = self.path / "checkpoints"
        self.report = self.path / "report.html"
        self.errors = self.path / "errors.txt"
        self.logs = self.path / "logs"
        self.output = self.logs / "output.log"
        self.record_request = self.path / "record.request"

    @property
    def name(self) -> str:
        return os.path.basename(os.path.realpath(self.path))

    def check_name(self) -> None:
        """Refuse a name that cannot appear in file names and pages."""
        if not NAME.fullmatch(self.name):
            raise UsageError(
                f"A run cannot be named {self.name!r}.",
                advice="Use up to 64 letters, digits, dots, dashes and underscores for the folder.",
            )

    def create(self) -> None:
        """Make the folder, readable by this user only, if its name is allowed."""
        self.check_name()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        make_private(self.path)

    def create_for_output(self) -> None:
        """Make the folder that a flag names; a UsageError says why that fails."""
        try:
            self.create()
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be written: {error.strerror}.", advice="Name another folder."
            ) from error

    def events_of(self, rank: int) -> Path:
        return self.events / f"rank{rank}.jsonl"

    def timeline_of(self, rank: int) -> Path:
        return self.timeline / f"rank{rank}.trace.json"

    def pipeline_of(self, step: int) -> Path:
        return self.pipeline / f"step{step}.json"

    def event_ranks(self) -> list[int]:
        """The ranks that have written events, in order."""
        return _numbers_in(self.events, r"rank(\d{1,7})\.jsonl")

    def pipeline_steps(self) -> list[int]:
        """The steps that were recorded, in order."""
        return _numbers_in(self.pipeline, r"step(\d{1,15})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The contents of `run.json`."""

    name: str
    created: float
    updated: float
    status: Literal["running", "finished", "stopped", "failed"] = "running"
    reason: str = ""
    """Why the run ended, once it has."""
    failed_worker: int | None = None
    failed_step: int | None = None
    """The worker whose failure ended the run, and the step, if one did."""
    traceback: str = ""
    """The name of the file with the traceback, if there was one."""
    seed: int = 0
    epochs: int = 0
    global_batch: int = 0
    shards: int = 1
    workers: int = 1
    dataset_size: int | None = None
    """None where the dataset has no length."""
    steps_per_epoch: int | None = None
    steps: int | None = None
    """How many steps the whole run has; None where it cannot be known."""
    step: int = 0
    """How many steps are applied."""
    model: str = ""
    parameters: int = 0
    device: str = ""
    host: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    """The optimizer and its settings, options that differ from defaults, and the user's own."""
    policy: list[str] = field(default_factory=list)
    """What was decided about batch size and learning rate, and why, line by line."""
    command: str = ""
    """The command that starts the run again, from its working folder; empty if unknown."""
    schema: int = SCHEMA


def write_info(folder: RunFolder, info: RunInfo) -> None:
    """Replace `run.json` atomically: a reader sees the old one or the new one."""
    text = json.dumps(plain_json(asdict(info)), allow_nan=False, indent=1) + "\n"
    try:
        replace_file(folder.info, [text])
    except OSError as error:
        # A full disk has no room for a second file: overwrite the old one, if its blocks suffice.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with open(open_private(str(folder.info), os.O_WRONLY), "w") as file:
            if os.fstat(file.fileno()).st_blocks * 512 < len(text):  # the text is ASCII
                raise
            file.truncate(file.write(text))


def read_info(folder: RunFolder) -> RunInfo | None:
    """Read `run.json`; None where there is none. Unknown keys are ignored."""
    try:
        with open_plain(folder.info) as file:
            value = read_json(file, INFO_LIMIT_BYTES, folder.info)
    except FileNotFoundError:
        return None
    check_schema(value, SCHEMA, folder.info)
    info: RunInfo = read_value(RunInfo, value, str(folder.info))
    return info


def find_info(folder: RunFolder) -> RunInfo | None:
    """Like `read_info`, but a file that cannot be used is a warning, and None."""
    try:
        return read_info(folder)
    except WireError as error:
        warnings.warn(f"{error.what} The run continues, and replaces it.", stacklevel=2)
        return None


class EventWriter:
    """Appends the events of one rank. An event that cannot be written is lost, with one warning."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self.rank = rank
        self._path = folder.events_of(rank)
        self._file: int | None = None
        self._has_failed = False
        self._is_torn = False

    def write(self, kind: str, **facts: Any) -> None:
        """Write one event now, as one line; nan and inf become strings."""
        event = {"kind": kind, "t": time.time(), "rank": self.rank, **plain_json(facts)}
        line = json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            file = self._open()
            # After an incomplete line, end it first: readers would drop both as one line.
            data = b"\n" + line if self._is_torn else line
            self._is_torn = True  # also where this raises half way
            self._is_torn = os.write(file, data) < len(data)
        except OSError as error:
            if not self._has_failed:
                warnings.warn(f"Events cannot be written to {self._path}: {error}.", stacklevel=2)
            self._has_failed = True

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        if self._file is not None and not os.fstat(self._file).st_nlink:  # it was deleted
            self.close()
            if not self._has_failed:
                text = "was deleted; what happens from now on is in a new file"
                warnings.warn(f"{self._path} {text}.", stacklevel=3)
            self._has_failed = True
        if self._file is None:
            make_private(self._path.parent)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
            self._file = open_private(str(self._path), flags)
            size = os.fstat(self._file).st_size
            self._is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        return self._file


def parse_event(line: bytes) -> Event | None:
    """Parse one line as an event; None where it is incomplete, malformed or too long."""
    if len(line) > LINE_LIMIT_BYTES:
        return None
    try:
        event = parse_json(line, "An event")
    except WireError:
        return None
    if not _is_event(event) or not _has_float_names(line):
        return event if _is_event(event) else None
    # A text is a message: there "nan" is a word.
    return {key: each if key == "text" else _restored(each) for key, each in event.items()}


def _has_float_names(data: bytes) -> bool:
    """Whether the line may have nan or inf, which are written as strings."""
    return b'"nan"' in data or b'inf"' in data


def _is_event(value: Any) -> bool:
    return (
        type(value) is dict
        and type(value.get("kind")) is str
        and type(value.get("rank")) is int
        and type(value.get("t")) in (int, float)
    )


class EventTail:
    """Reads the events of one file from where the last reading ended, in constant memory.

    An incomplete last line is left for the next reading: the writer may still be writing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        """The end of the last line that was read, in bytes."""
        self._is_rest = False

    def read(self) -> Iterator[Event | None]:
        """The new events; None for a line that is not an event."""
        return (event for batch in self.batches() for event in batch)

    def batches(self) -> Iterator[list[Event | None]]:
        """The new events, some hundred at a time. The caller may stop after any batch."""
        return map(self._parse, self.pieces())

    def _parse(self, piece: bytes) -> list[Event | None]:
        is_rest, self._is_rest = self._is_rest, not piece.endswith(b"\n")
        if (
            not is_rest
            and not _has_float_names(piece)
            and (found := parse_lines(piece)) is not None
        ):
            return [event if _is_event(event) else None for event in found]
        lines = piece.split(b"\n")[:-1]
        rest: list[Event | None] = [None] if is_rest and lines else []
        return rest + [parse_event(line) for line in lines[len(rest) :] if line.strip()]

    def pieces(self) -> Iterator[bytes]:
        """The new bytes in pieces of whole lines, which can be searched without parsing."""
        with open_plain(self.path) as file:
            file.seek(self.position)
            while piece := file.read(PIECE_BYTES):
                if (end := piece.rfind(b"\n") + 1) == 0:
                    piece += file.read(LINE_LIMIT_BYTES - PIECE_BYTES)
                    end = piece.rfind(b"\n") + 1
                if end == 0:
                    if len(piece) < LINE_LIMIT_BYTES:
                        return
                    end = len(piece)  # inside a line that is too long: skip it piece by piece
                self.position += end
                if not piece.strip(b"\0"):  # a file may be mostly holes
                    self.position = _skip_hole(file, self.position)
                file.seek(self.position)
                yield piece[:end]


def _skip_hole(file: BinaryIO, position: int) -> int:
    """Where the next byte is that the disk has stored, or the end of the file."""
    try:
        return os.lseek(file.fileno(), position, os.SEEK_DATA)
    except OSError as error:
        return file.seek(0, os.SEEK_END) if error.errno == errno.ENXIO else position


def last_recorded_step(folder: RunFolder) -> int:
    """The last step in rank 0's events, whether saved or not; 0 for none."""
    try:
        with open_plain(folder.events_of(0)) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
            events = [parse_event(line) for line in file.readlines()]
    except (OSError, WireError):
        return 0
    steps = [event.get("step") for event in events if event and event["kind"] in ("step", "stop")]
    return next((step for step in reversed(steps) if type(step) is int), 0)


def record_end(
    folder: RunFolder,
    status: Literal["stopped", "failed"],
    reason: str,
    *,
    worker: int = -1,
    step: int = 0,
    traceback: str = "",
) -> None:
    """Record in a run's folder why it ended, for a run that could not do so itself.

    A "stopped" does not replace the end of a run that has ended by itself.
    """
    info = find_info(folder)
    if info is None or (status == "stopped" and info.status != "running"):
        return
    is_new = (info.status, info.reason) != (status, reason)
    if is_new:
        applied = max(info.step, last_recorded_step(folder))
        info = replace(info, status=status, reason=reason, step=applied, updated=time.time())
    if worker >= 0:
        info = replace(info, failed_worker=worker, failed_step=step or None)
    # `run.json` first: replacing it works on a full disk too.
    write_info(folder, replace(info, traceback=folder.errors.name if traceback else ""))
    if traceback:
        keep_traceback(folder, reason, traceback)
    if is_new:
        with EventWriter(folder, max(worker, 0)) as events:
            events.write("stop", step=info.step, reason=reason)


def keep_traceback(folder: RunFolder, reason: str, text: str) -> None:
    """Append a traceback to `errors.txt`, unless that file has reached its limit."""
    file = open_private(str(folder.errors), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        if os.fstat(file).st_size < INFO_LIMIT_BYTES:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            os.write(file, f"{when} {reason}\n{text.rstrip()}\n\n".encode("utf-8", "replace"))
    finally:
        os.close(file)


def read_events(folder: RunFolder) -> list[Event]:
    """All events of all ranks so far, in order of time."""
    tails = [EventTail(folder.events_of(rank)) for rank in folder.event_ranks()]
    found = [event for tail in tails for event in tail.read() if event is not None]
    return sorted(found, key=lambda event: event["t"])


def make_private(folder: Path) -> None:
    """Make a folder that only this user can read; an existing one is left as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def new_file(path: Path, is_synced: bool = False) -> Iterator[int]:
    """A file, readable by this user only, that replaces `path` if the block succeeds."""
    temporary = path.parent / f".tmp-{secrets.token_hex(8)}"
    file = open_private(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        try:
            yield file
            if is_synced:
                os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if is_synced:
        sync_folder(path.parent)


def replace_file(path: Path, parts: Iterable[str]) -> None:
    """Replace a text file atomically."""
    with new_file(path) as file, open(file, "w", encoding="utf-8", closefd=False) as stream:
        stream.writelines(parts)


def write_output(path: Path, parts: Iterable[str]) -> None:
    """Write a file that the user has named, a plain one atomically; a UsageError if it fails."""
    try:
        # Root could replace /dev/stdout, even where it leads to a plain file.
        if path.exists() and (not path.is_file() or path.parent == Path("/dev")):
            with open(path, "w", encoding="utf-8") as stream:
                stream.writelines(parts)
        else:
            replace_file(path, parts)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}.", advice="Name another file."
        ) from error


def sync_folder(path: Path) -> None:
    """Make renames inside a folder survive a power failure."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _numbers_in(folder: Path, pattern: str) -> list[int]:
    """The numbers of the plain files in a folder; none if the folder is a link."""
    return [] if folder.is_symlink() else list(numbered_files(folder, pattern))


def numbered_files(folder: Path, pattern: str) -> dict[int, Path]:
    """The plain files whose name matches a pattern, by the number in it, in order."""
    found = {
        int(match[1]): Path(entry)
        for entry in (os.scandir(folder) if folder.is_dir() else ())
        if (match := re.fullmatch(pattern, entry.name)) and entry.is_file(follow_symlinks=False)
    }
    return dict(sorted(found.items()))


def open_private(path: str, flags: int) -> int:
    """Open a file, created for this user only, and never through a link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading: never through a link, and never a pipe, which would block."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except NotADirectoryError:
        raise FileNotFoundError(path) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise WireError(f"{path} is not a plain file.")
    return os.fdopen(file, "rb")


def _restored(value: Any) -> Any:
    """Undo `plain_json`: strings that name a float become that float."""
    if isinstance(value, str):
        return FLOAT_BY_NAME.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_restored(each) for each in value]
    return value


# Note [What a restart undoes]
# A run that was killed continues from its last checkpoint, some steps back. Those steps are trained
# again, and their events are appended after the old ones. So an event `start` of rank 0 with step s
# invalidates every earlier event of any rank whose step is above s.
