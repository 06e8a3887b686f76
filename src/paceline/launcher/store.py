"""The store of a single machine: a loopback socket that is bound before anybody needs it.

Binding here ends the race for port 29500, and keeps the store off every other interface. Rank 0
inherits the socket and serves the store once it has imported torch. Where no rank 0 of ours ever
does (another program, or training in a child process), this module is run as a process that
serves, when the first caller comes. Whoever creates the claim file first is the one who serves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from typing import Any

from paceline.comm.sockets import listen
from paceline.env import LOOPBACK, Placement
from paceline.launcher.worker import Instructions, claim_store, die_with

# A rank 0 that is still importing torch must not lose the store to another process.
SCRIPT_PATIENCE_S = 5.0


class StoreSocket:
    """The listening socket of one attempt, until somebody serves the store behind it."""

    def __init__(
        self, claim_file: str, host: str = "", port: int = 0, patience_s: float = SCRIPT_PATIENCE_S
    ) -> None:
        self.claim_file = claim_file
        self.host = host or LOOPBACK
        self.socket = listen(self.host, port)
        self.port: int = self.socket.getsockname()[1]
        self.patience_s = patience_s
        """How long the first caller waits for a rank 0 that may serve."""
        self.linger_reader, self.linger_writer = os.pipe()
        self.server: subprocess.Popen[bytes] | None = None

    def first_place(self, size: int) -> Placement:
        """The place of the first of `size` workers that meet here, all on this machine."""
        return Placement(size=size, local_size=size, master_addr=self.host, master_port=self.port)

    @property
    def instructions(self) -> dict[str, Any]:
        """What rank 0 must know to serve."""
        return {
            "listen_fd": self.fileno(),
            "claim_file": self.claim_file,
            "linger_fd": self.linger_reader,
        }

    def fileno(self) -> int:
        return self.socket.fileno()

    def start_server(self) -> None:
        """Serve from a process of its own, unless somebody serves already."""
        if claim_store(self.claim_file):
            instructions = Instructions(parent=os.getpid(), listen_fd=self.fileno())
            place = {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port)}
            self.server = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline.launcher.store"],
                env={**os.environ, **place, **instructions.as_variable()},
                pass_fds=[self.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        self.shut()

    def shut(self) -> None:
        """Let go of the socket: the one who serves has it, and callers notice when it dies."""
        self.socket.close()

    def release(self) -> None:
        """Let a rank 0 go that serves the store: nobody needs it any more."""
        if self.linger_writer >= 0:
            os.close(self.linger_writer)
            self.linger_writer = -1

    def close(self) -> None:
        self.shut()
        self.release()
        os.close(self.linger_reader)
        if self.server is not None:
            self.server.kill()
            self.server.wait()


def open_store(host: str, port: int, listen_fd: int = -1, timeout_s: float = 300.0) -> Any:
    """Connect to the store at an address, after serving it if there is a socket to serve it on.

    A store of torch's own would listen on every interface.
    """
    import torch.distributed as dist

    serving: dict[str, Any] = {} if listen_fd < 0 else {"master_listen_fd": listen_fd}
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        None,
        listen_fd >= 0,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        **serving,
    )


def main() -> None:
    """Serve until the launcher kills this process, or dies."""
    instructions = Instructions.take()
    die_with(instructions.parent)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = open_store(*address, instructions.listen_fd)
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    main()
