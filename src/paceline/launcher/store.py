"""The store of a single machine: a loopback socket that is bound before anybody needs it.

Binding here ends the race for port 29500, and keeps the store off every other interface. Rank 0
inherits the socket and serves the store once it has imported torch. Where no rank 0 of ours ever
does (another program, or training in a child process), the launcher imports torch and serves,
some time after the first caller came. Whoever takes the one byte out of a pipe serves.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from paceline.comm.sockets import listen
from paceline.env import LOOPBACK, Placement

# A rank 0 that is still importing torch must not lose the store to the launcher.
SCRIPT_PATIENCE_S = 5.0


class StoreSocket:
    """The listening socket of one attempt, until somebody serves the store behind it."""

    def __init__(
        self, host: str = "", port: int = 0, patience_s: float = SCRIPT_PATIENCE_S
    ) -> None:
        self.host = host or LOOPBACK
        self.socket = listen(self.host, port)
        self.port: int = self.socket.getsockname()[1]
        self.patience_s = patience_s
        """How long the first caller waits for a rank 0 that may serve."""
        self.claim_fd, claim_writer = os.pipe()
        os.write(claim_writer, b"1")
        os.close(claim_writer)
        self.linger_reader, self.linger_writer = os.pipe()
        self.store: Any = None

    def first_place(self, size: int) -> Placement:
        """The place of the first of `size` workers that meet here, all on this machine."""
        return Placement(size=size, local_size=size, master_addr=self.host, master_port=self.port)

    @property
    def instructions(self) -> dict[str, Any]:
        """What rank 0 must know to serve."""
        return {
            "listen_fd": self.fileno(),
            "claim_fd": self.claim_fd,
            "linger_fd": self.linger_reader,
        }

    def fileno(self) -> int:
        return self.socket.fileno()

    def serve(self) -> None:
        """Serve from this process, unless rank 0 does."""
        if os.read(self.claim_fd, 1):
            self.store = open_store(self.host, self.port, self.socket.detach())
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
        os.close(self.claim_fd)
        os.close(self.linger_reader)
        self.store = None


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
