"""`paceline watch`: the live page of a run in the browser, or the same on a terminal.

Without a name it shows the newest run under `runs/`; a folder of runs shows all of them. Started by
`paceline run --watch` it waits for the run's folder, outlives the run, and ends when no page is
open. It listens before it prints its address, so that address always answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import env
from paceline.errors import UsageError
from paceline.files import RunFolder
from paceline.launcher import private_folder
from paceline.show.report.collect import check_folder, find_runs
from paceline.show.watch.follow import Watched

if TYPE_CHECKING:
    import uvicorn

RUNS = Path("runs")
RUNS_LIMIT = 256
IDLE_S = 60.0
"""How long the server of a training that has ended continues without an open page."""
POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help = (
        "run folders, or a folder of runs, also of those that begin later (the newest one under "
        "runs/ if not given)"
    )
    add("run", nargs="*", metavar="RUN", help=help)
    help = "the port on 127.0.0.1 (any that is free)"
    add("--port", type=int, default=0, metavar="N", help=help)
    add("--no-open", action="store_true", help="print the address, and open no browser")
    help = (
        "keep the token in a file for this user alone, so that with --port the address stays the "
        "same when the page is started again"
    )
    add("--token-file", metavar="FILE", help=help)
    add("--terminal", action="store_true", help="show it here, a row for each worker")
    # Set by `paceline run --watch`, which writes the run folder's path to the file on standard
    # input.
    add("--beside-training", action="store_true", help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Show the page until Ctrl-C; on a terminal, until the run ends."""
    if args.terminal:
        from paceline.show.watch.terminal import show

        return show(Watched(find_paths(args.run, must_be_there=True)).first)
    try:
        import starlette.applications  # noqa: F401, by the server, once it makes its application
        import uvicorn

        from paceline.show.watch import server
    except ImportError:
        raise UsageError(
            "The live page needs starlette and uvicorn, which are not installed.",
            advice="Install them with `pip install 'paceline[watch]'`, or add --terminal.",
        ) from None
    paths = _wait_for(sys.stdin.fileno()) if args.beside_training else find_paths(args.run)
    if not paths:
        print("paceline watch: no run has begun, so there is no page.", file=sys.stderr)
        return 0
    with server.listen(args.port) as listening, private_folder() as private:
        port = listening.getsockname()[1]
        token = server.keep_token(Path(args.token_file)) if args.token_file else server.make_token()
        address = f"http://127.0.0.1:{port}/?token={token}"
        # Beside a training, stdout is the training's.
        stream = sys.stderr if args.beside_training else sys.stdout
        print(f"paceline watch: {address}", file=stream, flush=True)
        if args.beside_training:
            _close_output()
        else:
            print("Ctrl-C ends the page; the training continues.", flush=True)
        if not args.no_open:
            _open(address, Path(private))
        folders = [each for each in args.run if not _is_run(Path(each))]
        watched = Watched(paths, partial(find_paths, folders) if folders else list)
        guard = server.make_app(watched, token, port)
        config = uvicorn.Config(
            guard,
            http=server.bound_connections(guard),
            backlog=server.QUEUE_LENGTH,
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=1,
            ws="none",
        )
        running = uvicorn.Server(config)
        # Uvicorn shuts down and then raises the signal again: by default that would end the
        # process before the private folder is removed.
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, lambda *_: None)
        asyncio.run(_serve(running, listening, watched, ends_when_idle=args.beside_training))
    return 0


async def _serve(
    running: uvicorn.Server, listening: socket.socket, watched: Watched, *, ends_when_idle: bool
) -> None:
    """Serve until Ctrl-C; beside a training, until it has ended and no page is open."""
    watched.first.begin()
    serving = asyncio.create_task(running.serve(sockets=[listening]))
    idle_since_s, is_nice = time.monotonic(), False
    while not serving.done():
        await asyncio.wait([serving], timeout=1.0)
        if watched.first.is_shown and not is_nice:
            is_nice = True
            with contextlib.suppress(OSError):
                os.nice(5)  # after the first page: the training has priority
        await asyncio.to_thread(watched.refresh)
        if not watched.pages:
            await asyncio.to_thread(watched.first.read)
        if watched.pages or watched.first.state == "running":
            idle_since_s = time.monotonic()
        if ends_when_idle and time.monotonic() - idle_since_s > IDLE_S:
            running.should_exit = True
    await serving


def _is_run(path: Path) -> bool:
    folder = RunFolder(path)
    return folder.info.is_file() or folder.events.is_dir()


def find_paths(given: Sequence[str], *, must_be_there: bool = False) -> list[Path]:
    """The run folders for the arguments; a folder that is not a run is searched for runs.

    A folder without runs is returned itself: one may begin there.
    """
    if not given:
        runs = sorted(find_runs(RUNS, RUNS_LIMIT) if RUNS.is_dir() else (), key=_last_written)
        if not runs:
            raise UsageError(
                f"There is no run in {str(RUNS)!r}.", advice="Name its folder: paceline watch RUN."
            )
        return runs[-1:]
    found = list[Path]()
    for path in map(Path, given):
        check_folder(path)
        around = [path] if _is_run(path) else find_runs(path, RUNS_LIMIT)
        runs = [run for run in around if run != path.parent]
        if not runs and must_be_there:
            raise UsageError(
                f"{str(path)!r} has no run: no run.json, no events.", advice="Train one first."
            )
        found += sorted(runs, key=_last_written, reverse=True) or [path]
    return list(dict.fromkeys(found))


def _open(address: str, private: Path) -> None:
    """Open a graphical browser, if there is one.

    Other users can see a process's arguments, so the address with its token is passed in a file.
    """
    page = private / "open.html"
    page.write_text(f'<meta http-equiv="refresh" content="0; url={address}">\n')
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    # A browser in the terminal only if BROWSER asks for it.
    if type(browser) is not webbrowser.GenericBrowser or env.read("BROWSER"):
        threading.Thread(target=browser.open, args=[page.as_uri()], daemon=True).start()


def _last_written(run: Path) -> float:
    try:
        return RunFolder(run).info.stat().st_mtime
    except OSError:
        return 0.0


def _wait_for(announcement: int) -> list[Path]:
    """Wait for the folder of the run that the launcher has started; empty if it ends without.

    The file has the launcher's process id in its first line, and a folder in each line after it.
    """
    while True:
        # Before the file is read: the launcher may write the folder and end in between.
        parent = os.getppid()
        launcher, *folders = os.pread(announcement, 2**16, 0).split(b"\n")
        if len(folders) > 1:
            return [Path(os.fsdecode(folders[0]))]
        if parent != int(launcher):
            return []
        time.sleep(POLL_S)


def _close_output() -> None:
    """Close standard output and error, whose reader would wait for this process to end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nothing, stream.fileno())
    os.close(nothing)
