"""`paceline watch`: the live page of a run in the browser, or the same on a terminal.

Without a name it is the newest run under `runs/`; a folder of runs shows all of them. Started by
`paceline run --watch` it waits for the run's folder, outlives the run, and ends when nobody looks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import env
from paceline.errors import UsageError
from paceline.explain.report.collect import find_runs
from paceline.observe.run_folder import RunFolder
from paceline.watch.follow import Watched

if TYPE_CHECKING:
    import uvicorn

RUNS = Path("runs")
RUNS_LIMIT = 64
LEFT_ALONE_S = 60.0
"""For so long the page of a training that has ended waits for somebody to open it again."""
POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "run",
        nargs="*",
        metavar="RUN",
        help="run folders, or a folder of runs (the newest one under runs/ if not given)",
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="the port on 127.0.0.1 (any that is free)"
    )
    parser.add_argument(
        "--no-open", action="store_true", help="print the address, and open no browser"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="keep the token in a file for this user alone, so that with --port the address stays "
        "the same when the page is started again",
    )
    parser.add_argument(
        "--terminal", action="store_true", help="show it here, a row for each worker"
    )


def main(args: argparse.Namespace) -> int:
    """Show the page until Ctrl-C; on a terminal, until the run ends."""
    announced = env.read_announcement() if not args.run else ""
    if args.terminal:
        from paceline.watch.terminal import show

        return show(Watched(find_paths(args.run)).first)
    try:
        import uvicorn

        from paceline.watch import server
    except ImportError:
        raise UsageError(
            "The live page needs starlette and uvicorn, which are not installed.",
            advice="Install them with `pip install 'paceline[watch]'`, or add --terminal.",
        ) from None
    paths = [] if announced else find_paths(args.run)
    with _listen(args.port) as listening, tempfile.TemporaryDirectory() as private:
        port = listening.getsockname()[1]
        token = server.keep_token(Path(args.token_file)) if args.token_file else server.make_token()
        address = f"http://127.0.0.1:{port}/?token={token}"
        # Beside a training, stdout is the training's.
        print(f"paceline watch: {address}", file=sys.stderr if announced else None, flush=True)
        if announced:
            _let_go_of_output()
            paths = _wait_for(Path(announced))
        else:
            print("Ctrl-C ends the page, and nothing else.", flush=True)
        if paths and not args.no_open:
            _open(address, Path(private))
        if paths:
            watched = Watched(paths)
            config = uvicorn.Config(
                server.make_app(watched, token, port),
                log_level="critical",
                access_log=False,
                server_header=False,
                date_header=False,
                limit_concurrency=server.CONNECTIONS_LIMIT,
                timeout_graceful_shutdown=1,
                ws="none",
            )
            running = uvicorn.Server(config)
            asyncio.run(_serve(running, listening, watched, is_left_alone=bool(announced)))
    return 0


async def _serve(
    running: uvicorn.Server, listening: socket.socket, watched: Watched, *, is_left_alone: bool
) -> None:
    """Serve until Ctrl-C; where that cannot reach, until nobody looks at a run that has ended."""
    watched.first.begin()
    serving = asyncio.create_task(running.serve(sockets=[listening]))
    idle_since_s, is_nice = time.monotonic(), False
    while not serving.done():
        await asyncio.wait([serving], timeout=1.0)
        if watched.first.is_shown and not is_nice:
            is_nice = True
            with contextlib.suppress(OSError):
                os.nice(5)  # from now on the training goes first
        if not watched.pages:
            await asyncio.to_thread(watched.first.read)
        if watched.pages or watched.first.state == "running":
            idle_since_s = time.monotonic()
        if is_left_alone and time.monotonic() - idle_since_s > LEFT_ALONE_S:
            running.should_exit = True
    await serving


def find_paths(given: Sequence[str]) -> list[Path]:
    """The run folders that are meant; a folder that holds no run is searched for some."""
    if not given:
        runs = sorted(find_runs(RUNS, RUNS_LIMIT) if RUNS.is_dir() else (), key=_last_written)
        if not runs:
            raise UsageError(
                f"There is no run in {str(RUNS)!r}.", advice="Name its folder: paceline watch RUN."
            )
        return runs[-1:]
    found = list[Path]()
    for path in map(Path, given):
        if not path.is_dir():
            raise UsageError(
                f"There is no run folder {str(path)!r}.",
                advice="Give the folder that a run wrote, the one with run.json and events/ in it.",
            )
        folder = RunFolder(path)
        is_run = folder.info.is_file() or folder.events.is_dir()
        around = [] if is_run else find_runs(path, RUNS_LIMIT)
        runs = [path] if is_run else [run for run in around if run != path.parent]
        if not runs:
            raise UsageError(
                f"{str(path)!r} holds no run: no run.json, no events.", advice="Train one first."
            )
        found += runs if is_run else sorted(runs, key=_last_written, reverse=True)
    return list(dict.fromkeys(found))


def _open(address: str, private: Path) -> None:
    """Open a browser where there is one with windows; elsewhere the address has to do.

    What it is called with everybody on the machine can see, so it is told by a file.
    """
    way = private / "open.html"
    way.write_text(f'<meta http-equiv="refresh" content="0; url={address}">\n')
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    # One that draws on the terminal is for those who have asked for it.
    if type(browser) is not webbrowser.GenericBrowser or env.has_browser():
        threading.Thread(target=browser.open, args=[way.as_uri()], daemon=True).start()


def _last_written(run: Path) -> float:
    try:
        return RunFolder(run).info.stat().st_mtime
    except OSError:
        return 0.0


def _wait_for(announcement: Path) -> list[Path]:
    """The folder of the run that the launcher has started; none if it ends without one."""
    launcher = os.getppid()
    while os.getppid() == launcher:
        with contextlib.suppress(OSError):
            return [Path(announcement.read_text())]
        time.sleep(POLL_S)
    return []


def _let_go_of_output() -> None:
    """Whoever reads what the training prints waits for all who could still print."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nothing, stream.fileno())
    os.close(nothing)


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen()  # two that may share an address may not both listen
    except (OSError, OverflowError) as error:
        listening.close()
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"Port {port} of 127.0.0.1 cannot be used: {why}.",
            advice="Leave --port out, and a free one is found.",
        ) from None
    return listening
