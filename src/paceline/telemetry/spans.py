"""Named, timed spans: what this rank did when, in one append-only file; free when off.

The file is a Chrome trace (JSON array format), so it opens in Perfetto as it is, also while it
grows and after a crash: the format lets the closing bracket be missing. One event is one line.

    training thread: add() --> bounded queue --> writer thread: text --> file

Times are counted from the file's first recording, see Note [Nanoseconds as microseconds].
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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.telemetry.phases import Phase

SCHEMA = 1
FILE_NAME = "rank{rank}.trace.json"

IN_FLIGHT = "in flight"
"""A bucket, from when this rank is ready; the transfer begins only when the last rank is."""
COMPUTE, COMMUNICATION, OTHER = 1, 2, 3
LANE_BY_NAME: dict[str, int] = {
    **dict.fromkeys((*Phase, "batch", "blame"), COMPUTE),
    **dict.fromkeys((IN_FLIGHT, "ready"), COMMUNICATION),
}
"""What the engine records. Spans of one lane must nest, or Perfetto drops them, so what overlaps
computing has a lane of its own; so have the caller's spans, whatever their names."""

ROUNDING_GUARD_US = 0.00025
"""Added to every time that is written; see Note [Nanoseconds as microseconds]."""

Facts = dict[str, Any]

_QUEUE_LIMIT = 100_000
_FILE_LIMIT_BYTES = 512 * 2**20
_PERIOD_S = 0.25
_HEAD_BYTES = 2**12
_TAIL_BYTES = 2**20

now_ns = time.monotonic_ns
"""The clock of all spans; on Linux every process of a machine reads the same one."""


def start_spans(path: str | os.PathLike[str], rank: int) -> None:
    """Record this process's spans from now on, as `rank`.

    `path` is a file whose name ends in `.json`, or a folder in which the file is called
    `rank{rank}.trace.json`. An existing file is kept: a restarted worker appends to it.
    """
    global current
    if current is not None:
        raise UsageError(
            f"Spans are being recorded already, to {current.path}.",
            advice="Call spans.stop() first: a process has one file.",
        )
    current = SpanRecorder(Path(path), rank)


def stop_spans() -> None:
    """Write what is queued and close the file; does nothing when off."""
    global current
    recorder, current = current, None
    if recorder is not None:
        recorder.close()


def _drop_recorder() -> None:
    """After a fork, as in a data loader's worker: only the parent may write to the file."""
    global current
    current = None


atexit.register(stop_spans)
os.register_at_fork(after_in_child=_drop_recorder)


def spans_are_on() -> bool:
    return current is not None


def span(name: str, **facts: Any) -> AbstractContextManager[None]:
    """Record the block inside under `name`; `facts` are JSON values shown beside it."""
    return _OFF if current is None else _timed(name, facts)


@contextmanager
def _timed(name: str, facts: Facts) -> Iterator[None]:
    begin_ns = now_ns()
    try:
        yield
    finally:
        add(name, begin_ns, now_ns(), **facts)


def add(name: str, begin_ns: int, end_ns: int, **facts: Any) -> None:
    """Record a span that has ended, timed by the caller with `now_ns()`."""
    if current is not None:
        current.add_user_span(name, begin_ns, end_ns, facts or None)


def mark(name: str, at_ns: int | None = None, **facts: Any) -> None:
    """Record an instant."""
    if current is not None:
        current.add_user_span(name, now_ns() if at_ns is None else at_ns, None, facts or None)


_Span = tuple[str, int, int | None, int, Facts | None]
"""Name, begin, end (None for an instant), lane, facts."""


class SpanRecorder:
    """One rank's open file, its queue and the thread between them.

        open --(add ...)--> open --(close, or the disk is full)--> closed

    Invariant: `add` never blocks and never raises; spans that do not fit are counted, and the file
    says how many are missing.
    """

    def __init__(
        self, path: Path, rank: int, *, queue_limit: int = _QUEUE_LIMIT, zero_ns: int | None = None
    ) -> None:
        self.path = path if path.suffix == ".json" else path / FILE_NAME.format(rank=rank)
        self.rank = rank
        self._training_thread = threading.get_ident()
        self._lanes: dict[int, int] = {}
        self._queue: deque[_Span] = deque()
        self._metadata: deque[str] = deque()
        self._queue_limit = queue_limit
        self._count = self._dropped = self._writer_ns = self._bytes = 0
        self._file: int | None = open_for_appending(self.path)
        self._write_header(self._file, zero_ns)
        self._done = threading.Event()
        self._writer = threading.Thread(target=self._run, name="paceline spans", daemon=True)
        self._writer.start()

    def add(self, name: str, begin_ns: int, end_ns: int | None, facts: Facts | None = None) -> None:
        """Queue one span of the engine; the writer turns it into text later."""
        self._put(name, begin_ns, end_ns, LANE_BY_NAME[name], facts)

    def add_user_span(
        self, name: str, begin_ns: int, end_ns: int | None, facts: Facts | None = None
    ) -> None:
        """Queue one span of the caller, in a lane of its own for each thread."""
        thread = threading.get_ident()
        lane = self._lanes.get(thread)
        if lane is None:
            lane = self._lanes[thread] = OTHER + len(self._lanes)
            name_of_thread = threading.current_thread().name
            label = "own spans" if thread == self._training_thread else name_of_thread
            self._add_metadata("thread_name", {"name": label}, lane)
        self._put(name, begin_ns, end_ns, lane, facts)

    def _put(self, *span: *_Span) -> None:
        # No lock: a deque is thread-safe, and a limit that is off by a few spans is harmless.
        if len(self._queue) < self._queue_limit:
            self._queue.append(span)
        else:
            self._dropped += 1

    def describe_rank(self, facts: Facts) -> None:
        """Record facts about this rank that are true for the whole recording."""
        self._add_metadata("paceline_rank", facts)

    def close(self) -> None:
        """Write what is queued, what recording cost, and the closing bracket."""
        # The writer first: two threads must not drain the queue at once.
        self._done.set()
        self._writer.join()
        self._drain()
        self._add_metadata("paceline_cost", self.cost())
        self._write(self._metadata.pop().removesuffix(",\n") + "\n]\n")
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def cost(self) -> Facts:
        """How many spans there were, and the CPU time of the thread that writes them."""
        count, writer_ns = self._count, self._writer_ns
        return {"spans": count, "dropped": self._dropped, "writer_ns": writer_ns}

    def _add_metadata(self, name: str, args: Facts, lane: int = 0) -> None:
        event = {"name": name, "ph": "M", "ts": 0, "pid": self.rank, "tid": lane, "args": args}
        self._metadata.append(json.dumps(event) + ",\n")

    def _write_header(self, file: int, zero_ns: int | None) -> None:
        now = now_ns()
        unix_minus_monotonic_ns = time.time_ns() - now
        if zero_ns is None:  # a restarted rank keeps the file's zero, so that its times continue
            begun = re.search(rb'"zero_unix_ns": (\d{1,19})', os.pread(file, _HEAD_BYTES, 0))
            zero_ns = int(begun[1]) - unix_minus_monotonic_ns if begun else now
        self._zero_ns = min(zero_ns, now)
        self._add_metadata("process_name", {"name": f"worker {self.rank}"})
        self._add_metadata("process_sort_index", {"sort_index": self.rank})
        self._add_metadata("thread_name", {"name": "compute"}, COMPUTE)
        self._add_metadata("thread_name", {"name": "communication"}, COMMUNICATION)
        facts = {
            "schema": SCHEMA,
            "rank": self.rank,
            "machine": machine_id(),
            "unix_minus_monotonic_ns": unix_minus_monotonic_ns,
            "zero_unix_ns": self._zero_ns + unix_minus_monotonic_ns,
        }
        self._add_metadata("paceline", facts)
        self._drain()

    def _run(self) -> None:
        while not self._done.wait(_PERIOD_S):
            self._drain()

    def _drain(self) -> None:
        before = time.thread_time_ns()
        lines: list[str] = []
        while self._queue:
            lines.append(self._text(self._queue.popleft()))
        self._count += len(lines)
        while self._metadata:
            lines.append(self._metadata.popleft())
        if lines:
            self._write("".join(lines))
        self._writer_ns += time.thread_time_ns() - before

    def _text(self, span: _Span) -> str:
        """One event as a line. Formatted by hand: `json.dumps` for every span takes too long."""
        name, begin_ns, end_ns, lane, facts = span
        begin_ns = max(begin_ns, self._zero_ns)
        if end_ns is None:
            kind = '"ph":"i","s":"t"'
        else:
            kind = f'"ph":"X","dur":{_microseconds(end_ns - begin_ns)}'
        args = "" if facts is None else f',"args":{_json(facts)}'
        return (
            f'{{"name":{json.dumps(name)},"cat":"paceline",{kind},'
            f'"ts":{_microseconds(begin_ns - self._zero_ns)},'
            f'"pid":{self.rank},"tid":{lane}{args}}},\n'
        )

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
            print(f"paceline: Recording to {self.path} has stopped: {error}.", file=sys.stderr)
            os.close(self._file)
            self._file = None


_OFF = nullcontext()
current: SpanRecorder | None = None
"""The recorder in use, if recording is on; read as `spans.current`, because it changes."""


def machine_id() -> str:
    """The same for all processes that read the same monotonic clock, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"{socket.gethostname()}/{round(time.time() - time.monotonic())}"


def open_for_appending(path: Path) -> int:
    """Open or create a trace, positioned after its last whole event."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(
            f"Spans cannot be recorded to {path}: {error.strerror}.",
            advice="Name a folder that this process may write to.",
        ) from error
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        os.close(fd)
        raise UsageError(f"Spans cannot be recorded to {path}: it is not a plain file.")
    begin = max(0, facts.st_size - _TAIL_BYTES)
    whole = list(re.finditer(rb"^\{.*\}(?=,?$)", os.pread(fd, _TAIL_BYTES, begin), re.MULTILINE))
    # A process that was killed may have left half an event, one that ended a closing bracket.
    end = begin + whole[-1].end() if whole else 0
    os.ftruncate(fd, end)
    os.lseek(fd, end, os.SEEK_SET)
    os.write(fd, b",\n" if whole else b"[\n")
    return fd


def _microseconds(ns: int) -> str:
    ns = max(0, ns)
    return f"{ns // 1000}.{ns % 1000:03d}25"


def _json(facts: Facts) -> str:
    try:
        return json.dumps(facts, default=str, allow_nan=False)
    except ValueError:  # JSON has no infinities, and a trace must stay readable
        return json.dumps({key: str(value) for key, value in facts.items()})


def register_recorder() -> None:
    """This process records steps, by a run or by the script's `record_step`."""
    _recorders.append(True)


_recorders: list[bool] = []


def expect_recording(step: int) -> None:
    """`step` should be recorded; if nothing in this process records steps, warn at exit."""
    atexit.unregister(_warn_of_missing_recorder)
    atexit.register(_warn_of_missing_recorder, step)


def _warn_of_missing_recorder(step: int) -> None:
    """In a script with a loop of its own, --trace-step has no effect: say so."""
    if not _recorders:
        print(
            f"paceline: Step {step} was not recorded: --trace-step is for scripts with "
            f"paceline.Run. Here, put paceline.record_step(model, optimizer, step={step}, "
            "folder=...) around a step.",
            file=sys.stderr,
        )


# Note [Nanoseconds as microseconds]
# The format wants microseconds, which importers read as floats, multiply by 1000, and round or cut
# off to whole nanoseconds. Cut off, 0.317 may become 316 ns, and adjacent spans would overlap.
# So a quarter of a nanosecond is added to every time: rounded or cut off, the result is the
# nanosecond that was measured. A float is precise enough for that up to three weeks; uptimes are
# longer, so times are counted from the beginning of the file.


start, stop, is_on = start_spans, stop_spans, spans_are_on
"""Their names in the public `paceline.spans`."""
