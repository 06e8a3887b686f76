"""Named, timed spans: what this rank did when, in one append-only file; free when off.

The file is a Chrome trace (JSON array format), so it opens in Perfetto as it is, also while it
grows and after a crash: the format lets the closing bracket be missing. One event is one line.
Times are microseconds of this machine's monotonic clock; `clock` events say how far rank 0's is.

    training thread: add() --> bounded queue --> writer thread: text --> file
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from paceline.errors import UsageError

SCHEMA = 1
FILE_NAME = "rank{rank}.trace.json"

COMPUTE, COMMUNICATION, OTHER = 1, 2, 3
LANES = {COMPUTE: "compute", COMMUNICATION: "communication"}
LANE_BY_NAME = {
    **dict.fromkeys(("data", "forward", "backward", "wait", "optimizer", "other"), COMPUTE),
    **dict.fromkeys(("batch", "blame"), COMPUTE),
    **dict.fromkeys(("transfer", "ready"), COMMUNICATION),
}
"""What the engine records. Spans of one lane must nest, or Perfetto leaves them out, so what
overlaps computing has a lane of its own; and so have the caller's spans, whatever their names."""
OWN_SPANS = "own spans"

_QUEUE_LIMIT = 100_000
_FILE_LIMIT_BYTES = 512 * 2**20
_PERIOD_S = 0.25
_TAIL_BYTES = 2**20
_CALIBRATION_CALLS = 500

now_ns = time.monotonic_ns
"""The clock of all spans; on Linux every process of a machine reads the same one."""


class Event(NamedTuple):
    """One span, or an instant where `end_ns` is None."""

    name: str
    begin_ns: int
    end_ns: int | None
    lane: int
    facts: dict[str, Any] | None


class _Context(Protocol):
    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
        /,
    ) -> None: ...


def start(path: str | os.PathLike[str], rank: int) -> None:
    """Record this process's spans from now on, as `rank`.

    `path` is a file whose name ends in `.json`, or a folder in which the file is called
    `rank{rank}.trace.json`. What is there already is kept: a restarted worker goes on after it.
    """
    global _recorder
    if _recorder is not None:
        raise UsageError(
            f"Spans are being recorded already, to {_recorder.path}.",
            advice="Call spans.stop() first: a process has one file.",
        )
    _recorder = Recorder(Path(path), rank)
    if not _registered:
        _registered.append(True)
        atexit.register(stop)
        # A data loader's worker is a copy of this process, and must not write to its file.
        os.register_at_fork(after_in_child=_forget)


def stop() -> None:
    """Write what is left and close the file; does nothing when off."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


def is_on() -> bool:
    return _recorder is not None


def recorder() -> Recorder | None:
    """The recorder in use: hot paths look once per step, not at every call."""
    return _recorder


def span(name: str, **facts: Any) -> _Context:
    """Record the block inside under `name`; `facts` are JSON values shown beside it."""
    if _recorder is None:
        return _NOTHING
    return _Span(_recorder, name, facts)


def add(name: str, begin_ns: int, end_ns: int, **facts: Any) -> None:
    """Record a span that has ended, timed by the caller with `now_ns()`."""
    if _recorder is not None:
        _recorder.add_own(name, begin_ns, end_ns, facts or None)


def mark(name: str, at_ns: int | None = None, **facts: Any) -> None:
    """Record an instant."""
    if _recorder is not None:
        _recorder.add_own(name, now_ns() if at_ns is None else at_ns, None, facts or None)


class Recorder:
    """One rank's open file, its queue and the thread between them.

        open --(add ...)--> open --(close, or the disk is full)--> closed

    Invariant: `add` never blocks and never raises; what does not fit is counted, and the file
    says how many spans it lacks.
    """

    def __init__(self, path: Path, rank: int, *, queue_limit: int = _QUEUE_LIMIT) -> None:
        self.path = path if path.suffix == ".json" else path / FILE_NAME.format(rank=rank)
        self.rank = rank
        self.dropped = 0
        self._thread_id = threading.get_ident()
        self._lanes: dict[int, int] = {}
        self._queue: deque[Event] = deque()
        self._metadata: deque[dict[str, Any]] = deque()
        self._queue_limit = queue_limit
        self._count = 0
        self._begun_ns = now_ns()
        self._call_ns = _measure_call_ns()
        self._writer_ns = 0
        self._bytes = 0
        self._file: int | None = open_for_appending(self.path)
        self._write("".join(_line(event) for event in self._header()))
        self._done = threading.Event()
        self._writer = threading.Thread(target=self._run, name="paceline spans", daemon=True)
        self._writer.start()

    def add(
        self, name: str, begin_ns: int, end_ns: int | None, facts: dict[str, Any] | None = None
    ) -> None:
        """Queue one span of the engine; the writer turns it into text later."""
        self._put(Event(name, begin_ns, end_ns, LANE_BY_NAME[name], facts))

    def add_own(
        self, name: str, begin_ns: int, end_ns: int | None, facts: dict[str, Any] | None = None
    ) -> None:
        """Queue one span of the caller's, in a lane of the thread it is on."""
        self._put(Event(name, begin_ns, end_ns, self._lane_of_thread(), facts))

    def _put(self, event: Event) -> None:
        if len(self._queue) < self._queue_limit:
            self._queue.append(event)
        else:
            self.dropped += 1

    def set_clock(self, offset_ns: int, error_ns: int) -> None:
        """Say that rank 0's clock shows this much more, give or take `error_ns`."""
        facts = {"offset_ns": offset_ns, "error_ns": error_ns, "at_ns": now_ns()}
        self._metadata.append(_metadata("paceline_clock", self.rank, facts))

    def tell(self, facts: dict[str, Any]) -> None:
        """Say something about this rank that holds for the whole recording."""
        self._metadata.append(_metadata("paceline_rank", self.rank, facts))

    def close(self) -> None:
        """Write what is queued, what recording cost, and the closing bracket."""
        self._done.set()
        self._writer.join()
        self._drain()
        last = _line(_metadata("paceline_cost", self.rank, self.cost()))
        self._write(last.removesuffix(",\n") + "\n]\n")
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def cost(self) -> dict[str, Any]:
        """What recording has taken so far, measured: calls on the training thread, the writer."""
        return {
            "spans": self._count,
            "dropped": self.dropped,
            "call_ns": self._call_ns,
            "writer_ns": self._writer_ns,
            "wall_ns": now_ns() - self._begun_ns,
        }

    def _header(self) -> Iterable[dict[str, Any]]:
        rank = self.rank
        yield _metadata("process_name", rank, {"name": f"rank {rank}"})
        yield _metadata("process_sort_index", rank, {"sort_index": rank})
        for lane, name in LANES.items():
            yield _metadata("thread_name", rank, {"name": name}, lane)
            yield _metadata("thread_sort_index", rank, {"sort_index": lane}, lane)
        facts = {
            "schema": SCHEMA,
            "rank": rank,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "machine": machine_id(),
            "unix_minus_monotonic_ns": time.time_ns() - now_ns(),
        }
        yield _metadata("paceline", rank, facts)

    def _lane_of_thread(self) -> int:
        """A lane for each thread that records spans of its own, named after it."""
        thread = threading.get_ident()
        lane = self._lanes.get(thread)
        if lane is None:
            lane = self._lanes[thread] = OTHER + len(self._lanes)
            trains = thread == self._thread_id
            name = {"name": OWN_SPANS if trains else threading.current_thread().name}
            self._metadata.append(_metadata("thread_name", self.rank, name, lane))
        return lane

    def _run(self) -> None:
        while not self._done.wait(_PERIOD_S):
            self._drain()

    def _drain(self) -> None:
        before = time.thread_time_ns()
        lines: list[str] = []
        while self._queue:
            lines.append(_text(self._queue.popleft(), self.rank))
        self._count += len(lines)
        while self._metadata:
            lines.append(_line(self._metadata.popleft()))
        if lines:
            self._write("".join(lines))
        self._writer_ns += time.thread_time_ns() - before

    def _write(self, text: str) -> None:
        """Append whole lines; the first failure ends the recording, never the training."""
        if self._file is None:
            return
        data = text.encode()
        self._bytes += len(data)
        try:
            if self._bytes > _FILE_LIMIT_BYTES:
                raise OSError(f"the file has reached its limit of {_FILE_LIMIT_BYTES:,} bytes")
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            print(f"paceline: {self.path} is not recorded any further: {error}.", file=sys.stderr)
            os.close(self._file)
            self._file = None


class _Span:
    """A block being timed."""

    __slots__ = ("_begin_ns", "_facts", "_name", "_recorder")

    def __init__(self, recorder: Recorder, name: str, facts: dict[str, Any]) -> None:
        self._recorder = recorder
        self._name = name
        self._facts = facts

    def __enter__(self) -> None:
        self._begin_ns = now_ns()

    def __exit__(self, *_: object) -> None:
        self._recorder.add_own(self._name, self._begin_ns, now_ns(), self._facts or None)


class _Nothing:
    """A block that nobody times."""

    __slots__ = ()

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


_NOTHING = _Nothing()
_recorder: Recorder | None = None
_registered: list[bool] = []


def machine_id() -> str:
    """The same for all processes that read the same monotonic clock, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"{socket.gethostname()}/{round(time.time() - time.monotonic())}"


def open_for_appending(path: Path) -> int:
    """Open or create a trace so that the next event can be written behind the last whole one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(
            f"Spans cannot be recorded to {path}: {error.strerror}.",
            advice="Name a folder that this process may write to.",
        ) from error
    size = os.fstat(fd).st_size
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"Spans cannot be recorded to {path}: it is not a plain file.")
    tail_begin = max(0, size - _TAIL_BYTES)
    tail = os.pread(fd, _TAIL_BYTES, tail_begin)
    whole = [match.end() for match in re.finditer(rb"^\{.*\},?$", tail, re.MULTILINE)]
    if whole:
        end = tail_begin + whole[-1]
        os.ftruncate(fd, end)
        os.lseek(fd, end, os.SEEK_SET)
        os.write(fd, b"\n" if tail[: whole[-1]].endswith(b",") else b",\n")
    else:
        os.ftruncate(fd, 0)
        os.write(fd, b"[\n")
    return fd


def _measure_call_ns() -> int:
    """What one `add` costs the thread that calls it, here and now."""
    queue: deque[Event] = deque()
    before = now_ns()
    for _ in range(_CALIBRATION_CALLS):
        lane = LANE_BY_NAME["forward"]
        if len(queue) < _QUEUE_LIMIT:
            queue.append(Event("forward", now_ns(), now_ns(), lane, None))
    return (now_ns() - before) // _CALIBRATION_CALLS


def _metadata(name: str, rank: int, args: dict[str, Any], lane: int = 0) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": rank, "tid": lane, "args": args}


def _text(event: Event, rank: int) -> str:
    """One event as a line. Written by hand where it is simple, because there are many."""
    name, begin_ns, end_ns, lane, facts = event
    if end_ns is None:
        kind = '"ph":"i","s":"t"'
    else:
        kind = f'"ph":"X","dur":{_microseconds(end_ns - begin_ns)}'
    args = "" if facts is None else f',"args":{_json(facts)}'
    return (
        f'{{"name":{json.dumps(name)},"cat":"paceline",{kind},"ts":{_microseconds(begin_ns)},'
        f'"pid":{rank},"tid":{lane}{args}}},\n'
    )


def _microseconds(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}" if ns >= 0 else "0"


def _json(facts: dict[str, Any]) -> str:
    try:
        return json.dumps(facts, default=str, allow_nan=False)
    except ValueError:  # JSON has no infinities, and a trace must stay readable
        return json.dumps({key: str(value) for key, value in facts.items()})


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event) + ",\n"


def _forget() -> None:
    global _recorder
    _recorder = None
