"""Listening on one address only, where torch's own store would listen on every interface."""

from __future__ import annotations

import socket
import struct
from typing import Any

from paceline.errors import UsageError


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` alone; port 0 is any free one."""
    server: socket.socket | None = None
    try:
        found = socket.getaddrinfo(_spelled(host), port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        server = socket.socket(family, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(4096)
    except OSError as error:
        if server is not None:
            server.close()
        raise UsageError(
            f"Cannot listen on {host}, port {port}: {error.strerror or error}.",
            advice="Another program has that port, or the address is not this machine's. Start "
            "with `paceline run` without --master-addr and --master-port to get a free port on "
            "loopback.",
        ) from error
    return server


def is_served(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether somebody listens there, or nothing can be said about it; False if surely nobody."""
    where: Any = (_spelled(host), port)
    try:
        with socket.create_connection(where, timeout_s) as found:
            # Where nobody listens, a socket can be given the very port it wants to reach.
            met_itself = found.getsockname() == found.getpeername()
            if met_itself:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return not met_itself
    except ConnectionRefusedError:
        return False
    except OSError:
        return True


def _spelled(host: str) -> str | bytes:
    """The name as Python looks it up without loading its tables of international names."""
    return host.encode() if host.isascii() else host
