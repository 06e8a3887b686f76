"""Listening on one address only: torch's own store would listen on every interface."""

from __future__ import annotations

import socket

from paceline.errors import UsageError


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` alone; port 0 is any free one."""
    server: socket.socket | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
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
