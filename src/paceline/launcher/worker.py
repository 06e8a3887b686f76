"""Inside a worker: what happens before, around and after the user's code.

The launcher runs this file by its path, with the user's program as arguments, so it imports only
the standard library and starts in milliseconds. In particular torch waits for the user to
import it: scripts set variables such as `OMP_NUM_THREADS` before they do.

    die with the launcher -> wait for torch to be imported -> the user's code -> say what failed
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import json
import os
import pkgutil
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn, cast

VARIABLE = "PACELINE_WORKER"
FAILED, ALIVE, ALONE = b"!", b".", b"1"
EXITS = b"x"
"""Its script has called `sys.exit()` with a code that says failure."""
FAILED_UNSAID, LOST_UNSAID = b"?", b"~"
"""Instead of `FAILED` where there is no room to write the error down: of this worker's own, and one
that only says that another is gone."""
WAITS, HANGS = b"w", b"h"
"""Instead of `ALIVE`: it has waited in a collective, or stood still elsewhere, too long."""
DUMP_SIGNAL = int(getattr(signal, "SIGRTMAX", 0))
"""Makes a worker write where its threads are, whatever they do."""
UNSAVED_VARIABLE = "PACELINE_UNSAVED"
"""The process in which a `Run` has left its loop although its last save had failed, and why."""
MOST_FOLDER_LENGTH = 85
"""A socket's path has at most 107 characters."""
MOST_WORDS = 2**16
"""So many characters are kept of each end of an exception's text."""
BEATS = 8
"""How often in a stall window (PACELINE_STALL_S) a worker that has imported torch says so."""

_PR_SET_PDEATHSIG = 1
# What Gloo, NCCL and the store say when the real trouble is another rank's.
_PEER_WORDS = re.compile(
    r"connection (was likely )?(closed|reset|refused)|broken pipe|socket (timeout|closed)"
    r"|timed out waiting|wait timeout|communicator was aborted|remote process exited"
    r"|failed to (recv|send)|application timeout|connectFullMesh",
    re.IGNORECASE,
)
# What torch's loader says when a process of its own was killed.
_LOADER_WORDS = re.compile(r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions:
    """What the launcher tells a worker beyond torchrun's variables. Never a secret."""

    parent: int
    """The launcher's process id; the worker ends when that process does."""
    kind: str = "script"
    """`script`, `module` or `program`: what the first argument names."""
    status_fd: int = -1
    """Where one byte tells the launcher at once that this worker failed, that it is alive, or that
    it trains without the others."""
    as_torch: bool = False
    numa: str = ""
    stall_end_s: float = 0.0
    """After how long a worker that hangs says so; 0 for never."""
    survival: dict[str, Any] = field(default_factory=dict)
    """Of a worker that can be replaced: `line`, the descriptor where the launcher announces
    generations; `ledger`, that of memory in which it leaves what others need if it dies;
    `is_replacement`; and `survives_errors`, whether exceptions are survived too."""

    @classmethod
    def take(cls) -> Instructions:
        """Read them and remove them, so that the user's own children do not see them."""
        return cls(**json.loads(os.environ.pop(VARIABLE)))

    @property
    def fds(self) -> list[int]:
        """The descriptors among them that the worker inherits."""
        shared = [self.survival[name] for name in ("line", "ledger") if name in self.survival]
        return [self.status_fd, *shared] if self.status_fd >= 0 else shared

    def as_variable(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


def main(arguments: list[str]) -> int:
    """Run the user's program as if Python had been started with it."""
    instructions = Instructions.take()
    die_with(instructions.parent)
    for fd in instructions.fds:
        os.set_inheritable(fd, False)
    if instructions.survival:
        # Processes that it starts inherit the variable, but not the descriptors.
        inode = os.fstat(instructions.survival["line"]).st_ino
        survival = {"pid": os.getpid(), "inode": inode, **instructions.survival}
        os.environ["PACELINE_SURVIVAL"] = json.dumps(survival)
    if instructions.kind == "program":
        os.execvp(arguments[0], arguments)
    worker = Worker(instructions)
    worker.prepare()
    run = run_module if instructions.kind == "module" else run_script
    return worker.call(lambda: run(arguments[0], arguments[1:]))


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel signal this process when its parent dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(128 + signal.SIGKILL)


class Worker:
    """One worker's side of the bargain with its launcher.

    Invariant: after the user's code has failed, the error file is complete before the launcher
    hears of it, whether the process then ends or hangs while the script cleans up.
    """

    def __init__(self, instructions: Instructions) -> None:
        self.instructions = instructions
        self.pid = os.getpid()
        self.store_port = int(os.environ.get("MASTER_PORT", "0"))
        self.beat_s = float(os.environ.get("PACELINE_STALL_S", "0")) / BEATS
        self.where: tuple[int, bool] | None = None
        self.still = 0
        """At how many beats in a row it was there."""

    def prepare(self) -> None:
        """Everything that must be in place before the user's code runs."""
        faulthandler.enable(file=2)
        if DUMP_SIGNAL and (path := os.environ.get("TORCHELASTIC_ERROR_FILE", "")):
            with contextlib.suppress(OSError):
                fd = os.open(stack_file(path), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
                faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True)
        # Hooks of the user's that call the one before them must not print the traceback either:
        # the launcher prints it, once.
        sys.excepthook = self.excepthook
        when_imported("torch", self.on_torch_imported)
        when_imported("multiprocessing.spawn", self.on_spawning_imported)

    def call(self, user_code: Callable[[], object]) -> int:
        """Run the user's code; its exit code, with what failed in the error file."""
        try:
            user_code()
        except SystemExit as stop:
            if stop.code and os.getpid() == self.pid:
                self.tell(EXITS)
            raise
        except BaseException as error:
            if os.getpid() != self.pid:  # a child the user forked came back here
                traceback.print_exception(_without_launcher_frames(error))
                return 1
            if type(error).__name__ == "OutOfMemoryError" and "NCCL_HOSTID" in os.environ:
                from paceline.group import describe_gpu_memory

                error.add_note(describe_gpu_memory())
            self.record(_without_launcher_frames(error))
            sys.last_value = error  # as Python sets it before it calls the hook
            sys.excepthook(type(error), error, error.__traceback__)
            return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        return 0

    def excepthook(self, *_: object) -> None:
        """Stands for Python's own, which prints."""

    def record(self, error: BaseException) -> None:
        """Write the error where the launcher looks for it, then say so."""
        path, is_written = os.environ.get("TORCHELASTIC_ERROR_FILE", ""), False
        with contextlib.suppress(OSError):
            if path:
                write_error(path, error)
                is_written = True
        if is_written:
            self.tell(FAILED)
        elif is_secondary(error) or is_accident(error):
            self.tell(LOST_UNSAID)
        else:  # its disk is full, and nothing else would print it
            traceback.print_exception(error)
            self.tell(FAILED_UNSAID)

    def tell(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone, and soon so are we
            os.write(self.instructions.status_fd, word)

    def beat(self) -> None:
        """Say now and then that this process still runs, whatever the user's code waits for."""
        pause = threading.Event()
        while True:
            self.tell(self.look())
            pause.wait(self.beat_s)

    def look(self) -> bytes:
        """Whether this worker trains, as far as its stopwatch tells; beats are counted, because a
        clock does not know that all processes were stopped meanwhile."""
        stopwatch = sys.modules.get("paceline.telemetry.stopwatch")
        # Not there while another thread is still importing the module.
        last_change = getattr(stopwatch, "last_change", None)
        before, self.where = self.where, None if last_change is None else last_change()
        self.still = self.still + 1 if self.where == before and before is not None else 0
        end_s = self.instructions.stall_end_s
        if before is None or not end_s or self.still * self.beat_s < end_s:
            return ALIVE
        return WAITS if before[1] else HANGS

    def on_torch_imported(self) -> None:
        """Do what needs torch, at the moment the user's code has imported it."""
        if self.beat_s and os.getpid() == self.pid:
            threading.Thread(target=self.beat, name="paceline alive", daemon=True).start()
        if self.instructions.numa:
            _bind_to_numa_node(self.instructions.numa, int(os.environ["LOCAL_RANK"]))
        self.keep_sockets_together()
        from paceline.launcher.as_torch import prepare_torch, tell_if_alone

        prepare_torch(self.store_port, self.instructions.as_torch)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            tell_if_alone(partial(self.tell, ALONE))

    def keep_sockets_together(self) -> None:
        """Have processes that load data make their sockets in the launcher's folder.

        It is removed in the end, while one of their own would stay behind a worker that is killed.
        """
        from multiprocessing import current_process

        folder = os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        if len(folder) > MOST_FOLDER_LENGTH:  # under a name that is short, and known to children
            with contextlib.suppress(OSError):
                folder = f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"
        if 0 < len(folder) <= MOST_FOLDER_LENGTH:
            vars(current_process())["_config"].setdefault("tempdir", folder)

    def on_spawning_imported(self) -> None:
        from paceline.launcher.as_torch import prepare_spawning

        prepare_spawning(self.store_port, self.instructions.as_torch)


def run_script(path: str, arguments: list[str]) -> None:
    """Run a file, folder or zip archive as `python path arguments` does."""
    sys.argv = [path, *arguments]
    if pkgutil.get_importer(path) is not None:  # a folder or an archive with a __main__.py
        _fresh_main(path, is_searched=True)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    main_module = _fresh_main(os.path.dirname(os.path.realpath(path)))
    path = os.path.abspath(path)
    main_module.__file__ = path
    main_module.__loader__ = SourceFileLoader("__main__", path)
    main_module.__dict__["__cached__"] = None
    with open(path, "rb") as file:
        source = file.read()
    # This file's own `from __future__ import annotations` must not reach the user's code.
    exec(compile(source, path, "exec", dont_inherit=True), main_module.__dict__)


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module as `python -m name arguments` does."""
    sys.argv = ["-m", *arguments]
    _fresh_main(os.getcwd())
    # What `python -m` itself calls; the public run_module() would put back our own __main__
    # when it returns, while exit handlers and pickling still need the user's.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _fresh_main(folder: str, *, is_searched: bool = False) -> ModuleType:
    """Replace this file as `__main__`, so that pickling and spawning find the user's module, and
    its folder by the user's as the first to import from."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    module.__annotations__ = {}
    sys.modules["__paceline_worker__"] = sys.modules["__main__"]
    sys.modules["__main__"] = module
    if not sys.flags.safe_path:
        sys.path[0] = folder
    elif is_searched:
        sys.path.insert(0, folder)
    return module


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Call back right after the module has been imported, or now if it already is."""
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _ImportListener(name, callback))


class _ImportListener:
    """A module finder that finds nothing itself, but hears when one module is loaded."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name = name
        self.callback = callback

    def find_spec(self, name: str, *where: Any) -> ModuleSpec | None:
        if name != self.name:
            return None
        specs = (f.find_spec(name, *where) for f in list(sys.meta_path) if f is not self)
        spec = next(filter(None, specs), None)
        # Libraries look for a module without loading it, so only its own code's run counts.
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = partial(self._load, loader, loader.exec_module)
        return spec

    def _load(self, loader: Any, load: Callable[[ModuleType], None], module: ModuleType) -> None:
        del loader.exec_module
        load(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self.callback()


def stack_file(error_file: str) -> str:
    """Where a worker writes what its threads do, next to the file for its error."""
    return os.path.join(os.path.dirname(error_file), "stack")


def write_error(path: str, error: BaseException) -> None:
    """Write the error as JSON: torch's format, so that its tools read it, plus what we need.

    All of it is there or nothing: the launcher may read at any moment.
    """
    text = shorten(format_error(error))
    words = f"{type(error).__name__}: {message_of(error)}".rstrip(": ")
    record = {
        "message": {
            "message": shorten(words),
            "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
        },
        "rank": int(os.environ.get("RANK", "-1")),
        "time_ns": time.monotonic_ns(),
        "type": type(error).__name__,
        "at": f"{type(error).__name__} at {place_of(error)}",
        "named": named_by(error),
        "is_secondary": is_secondary(error),
        "is_accident": is_accident(error),
        "ends_run": bool(getattr(error, "ends_run", False)),
    }
    temporary = f"{path}.{os.getpid()}"
    with open(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
        json.dump(record, file)
    os.replace(temporary, path)


def format_error(error: BaseException) -> str:
    """Its traceback. For an error that Paceline raises on purpose, the calls inside torch and
    Paceline that led to it are left out: the line of the user's code is what matters."""
    shown: Any = traceback.TracebackException.from_exception(error)
    torch_file = getattr(sys.modules.get("torch"), "__file__", None) or __file__
    folders = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch_file)
    inside = (*(folder + os.sep for folder in folders), "<string>")  # what dataclasses generate
    each, raised = shown, cast("BaseException | None", error)
    while each is not None and raised is not None:
        users = [at for at, call in enumerate(each.stack) if not call.filename.startswith(inside)]
        if users and "paceline.errors.PacelineError" in _names(raised):
            del each.stack[users[-1] + 1 : -1]
        is_caused = each.__cause__ is not None
        each = each.__cause__ if is_caused else each.__context__
        raised = raised.__cause__ if is_caused else raised.__context__
    return "".join(shown.format())


def message_of(error: BaseException) -> str:
    """As `errors.message_of`, which cannot be imported here."""
    try:
        return str(error)
    except Exception:
        return ""


def shorten(text: str) -> str:
    """Its beginning and its end, where an exception has a whole dataset in it."""
    left_out = len(text) - 2 * MOST_WORDS
    if left_out <= 0:
        return text
    return f"{text[:MOST_WORDS]}\n[... {left_out:,} characters ...]\n{text[-MOST_WORDS:]}"


def place_of(error: BaseException) -> str:
    """The line that raised an exception."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "" if frame is None else f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"


def named_by(error: BaseException) -> int:
    """The worker at fault, where an error that all raise names it; else -1."""
    named = getattr(error, "rank", None)
    is_known = "paceline.errors.NotFiniteError" in _names(error) and isinstance(named, int)
    return named if is_known and named is not None else -1


def _names(error: BaseException) -> set[str]:
    """Its classes; torch may not be imported for them."""
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}


def is_accident(error: BaseException) -> bool:
    """Whether an error says that a device has failed or computes wrong, or that a loader's process
    was killed.

    A device-side assert is the script's own: it has asked for an element that is not there.
    """
    if "torch.AcceleratorError" in _names(error):
        return "device-side assert" not in message_of(error)
    if "paceline.errors.AuditError" in _names(error):
        return not getattr(error, "ends_run", False)
    return isinstance(error, RuntimeError) and bool(_LOADER_WORDS.search(message_of(error)))


def is_secondary(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    while error.__cause__ is not None:
        error = error.__cause__
    names = _names(error)
    if "paceline.errors.PeerError" in names or "torch.distributed.DistError" in names:
        return True
    return isinstance(error, RuntimeError) and bool(_PEER_WORDS.search(message_of(error)))


def _without_launcher_frames(error: BaseException) -> BaseException:
    ours = (os.path.dirname(__file__) + os.sep, runpy.__file__, "<frozen runpy>")
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(ours):
        frame = frame.tb_next
    return error.with_traceback(frame)


def _bind_to_numa_node(mode: str, gpu: int) -> None:
    from paceline.torch_private import bind_to_numa_node

    try:
        bind_to_numa_node(mode, gpu)
    except Exception as error:
        print(f"--numa-binding {mode} was not applied: {error}", file=sys.stderr)


def leave(code: object) -> NoReturn:
    """End this process as Python would, but without taking the interpreter apart.

    torch's threads may still be letting go of the last collective's tensors. One that asks for
    the interpreter while it is being taken apart is ended by force, and the process aborts.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    pid, _, reason = os.environ.get(UNSAVED_VARIABLE, "").partition(" ")
    if not code and pid == str(os.getpid()):
        from paceline.errors import CheckpointError

        code = 1
        with contextlib.suppress(OSError, KeyError):
            write_error(os.environ["TORCHELASTIC_ERROR_FILE"], CheckpointError(reason))
    handler = signal.getsignal(signal.SIGCHLD)
    if str(getattr(handler, "__module__", "")).startswith("torch.utils.data."):
        # An exception may keep a loader alive, whose processes Python ends below: torch would raise
        # another one for each of them.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    try:
        exit_code: object = main(sys.argv[1:])
    except SystemExit as stop:
        exit_code = stop.code
    leave(exit_code)
