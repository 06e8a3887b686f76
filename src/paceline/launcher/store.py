"""The door to the store on a single machine: a loopback socket bound before anybody needs it.

Binding here ends the race for port 29500, and keeps the store off every other interface. Rank 0
inherits the socket and serves the store once it has imported torch. Where no rank 0 of ours ever
does (another program, or training in a child process), a keeper process takes over when the first
caller knocks. Whoever creates the claim file first is the one who serves.
"""

from __future__ import annotations

import os
import subprocess
import sys

from paceline.comm.sockets import listen
from paceline.env import LOOPBACK
from paceline.launcher.worker import Orders, claim_store

# A rank 0 that is still importing torch must not lose the store to a keeper.
SCRIPT_PATIENCE_S = 5.0


class StoreDoor:
    """The listening socket of one attempt, until somebody serves the store behind it."""

    def __init__(self, claim_file: str, host: str = "", port: int = 0) -> None:
        self.claim_file = claim_file
        self.host = host or LOOPBACK
        self.socket = listen(self.host, port)
        self.port: int = self.socket.getsockname()[1]
        self.keeper: subprocess.Popen[bytes] | None = None

    def fileno(self) -> int:
        return self.socket.fileno()

    def start_keeper(self) -> None:
        """Serve from a process of its own, unless somebody serves already."""
        if claim_store(self.claim_file):
            orders = Orders(parent=os.getpid(), listen_fd=self.fileno())
            place = {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port)}
            self.keeper = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline.launcher.keeper"],
                env={**os.environ, **place, **orders.as_variable()},
                pass_fds=[self.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        self.shut()

    def shut(self) -> None:
        """Let go of the socket: the one who serves has it, and callers notice when it dies."""
        self.socket.close()

    def close(self) -> None:
        self.shut()
        if self.keeper is not None:
            self.keeper.kill()
            self.keeper.wait()
