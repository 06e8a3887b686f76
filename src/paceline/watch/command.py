"""`paceline watch`: the live page of a run, opened in the browser."""

from __future__ import annotations

import argparse
import socket
import webbrowser
from pathlib import Path

from paceline.errors import UsageError
from paceline.observe.run_folder import RunFolder

RUNS = Path("runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "run", nargs="*", metavar="RUN", help="run folders (the newest under runs/ if not given)"
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="the port on 127.0.0.1 (any that is free)"
    )
    parser.add_argument(
        "--no-open", action="store_true", help="print the address, and open no browser"
    )


def main(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    paths = [Path(each) for each in args.run] or [_newest(RUNS)]
    for path in paths:
        if not path.is_dir():
            raise UsageError(
                f"There is no run folder {str(path)!r}.",
                advice="Give the folder that a run wrote, the one with run.json and events/ in it.",
            )
    try:
        import uvicorn

        from paceline.watch.server import CONNECTIONS_LIMIT, make_app, make_token
    except ImportError:
        raise UsageError(
            "The live page needs starlette and uvicorn, which are not installed.",
            advice="Install them with: pip install 'paceline[watch]'",
        ) from None
    from paceline.watch.follow import Watched

    listening = _listen(args.port)
    port, token = listening.getsockname()[1], make_token()
    address = f"http://127.0.0.1:{port}/?token={token}"
    print(f"{address}\nCtrl-C ends the page, and nothing else.", flush=True)
    if not args.no_open:
        webbrowser.open(address)
    config = uvicorn.Config(
        make_app(Watched(paths), token, port),
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        limit_concurrency=CONNECTIONS_LIMIT,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    uvicorn.Server(config).run(sockets=[listening])
    return 0


def _newest(folder: Path) -> Path:
    """The run under a folder that was written to last."""
    runs = [each.parent for each in folder.glob(f"*/{RunFolder('').info.name}")]
    if not runs:
        raise UsageError(
            f"There is no run in {str(folder)!r}.", advice="Name its folder: paceline watch RUN."
        )
    return max(runs, key=lambda run: RunFolder(run).info.stat().st_mtime)


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    try:
        listening.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise UsageError(
            f"Port {port} of 127.0.0.1 cannot be used: {error}.",
            advice="Leave --port out, and a free one is found.",
        ) from None
    return listening
