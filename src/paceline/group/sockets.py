"""Listening on one address only, and closing connections that torch has opened.

torch's own store would listen on every interface. And a rank that waits in a Gloo group cannot be
called back by torch, but by the kernel: when its connections are shut, it gets an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import resource
import socket
import struct
from collections.abc import Iterator
from typing import Any

from paceline.errors import UsageError

_ANY_PORT = 9
_SIOCGIFADDR = 0x8915  # Linux: an interface's address
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1


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


def interface_towards(host: str, own_name: str | None = None) -> str | None:
    """The interface that leads to another machine; None if this machine's name says it already.

    Gloo tells the others the address that the machine's own name resolves to. As Debian sets that
    up it is loopback, where they meet themselves.
    """
    name = socket.gethostname() if own_name is None else own_name
    with contextlib.suppress(OSError):
        if not ipaddress.ip_address(socket.gethostbyname(name)).is_loopback:
            return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((_spelled(host), _ANY_PORT))  # nothing is sent
            address = route.getsockname()[0]
            interfaces = [name for _, name in socket.if_nameindex()]
            return next((n for n in interfaces if _address_of(n, route) == address), None)
    except OSError:
        return None


def find_peer_user(connection: socket.socket) -> int | None:
    """The user at the other end of a TCP connection, if that is on this machine; -1 if it has left.

    Linux tells this about the one socket with these two addresses; elsewhere nobody knows.
    """
    if not hasattr(socket, "AF_NETLINK"):
        return None
    near, far = connection.getsockname(), connection.getpeername()
    family, hosts = connection.family, [each[0].partition("%")[0] for each in (far, near)]
    addresses = [socket.inet_pton(family, host).ljust(16, b"\0") for host in hosts]
    wanted = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    wanted += struct.pack(">HH", far[1], near[1]) + b"".join(addresses) + bytes(4) + b"\xff" * 8
    head = struct.pack("=IHHII", 16 + len(wanted), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            kernel.send(head + wanted)
            found = kernel.recv(4096)
    except OSError:
        return None
    if struct.unpack_from("=H", found, 4)[0] != _SOCK_DIAG_BY_FAMILY:  # there is no such socket
        return -1 if ipaddress.ip_address(far[0]).is_loopback else None
    user, inode = struct.unpack_from("=II", found, 80)
    return user if inode else -1


def _address_of(interface: str, any_socket: socket.socket) -> str:
    """The IPv4 address of an interface, or nothing."""
    try:
        found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return ""
    return socket.inet_ntoa(found[20:24])


def _spelled(host: str) -> str | bytes:
    """The name as Python looks it up without loading its tables of international names."""
    return host.encode() if host.isascii() else host


class Connections:
    """The sockets that were opened in this process while something was done."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._before: dict[int, str] | None = None
        """What was open when a block began that is still being recorded."""
        self.kept_port = 0
        """Connections to this port are left alone: others than the group use them."""

    @contextlib.contextmanager
    def recorded(self, *, is_more: bool = False) -> Iterator[None]:
        """Remember what is opened inside the block, by any thread.

        Instead of what was opened before, unless there is `is_more` of the same.
        """
        self._before = _open_sockets()
        try:
            yield
        finally:
            found, self._before = self._opened_now(), None
            self._names = self._names | found if is_more else found

    def shut(self) -> None:
        """End every connection among them that is still open; whoever waits there gets an error.

        Those too that another thread opens just now.
        """
        for fd, name in (self._names | self._opened_now()).items():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") != name:
                    continue  # closed, and its number given to something else
                found = socket.socket(fileno=fd)  # no copy, for which there may be no number left
                try:
                    # Not that to the launcher, nor one that listens, which has no peer: Gloo ends
                    # the process when it cannot accept any more.
                    if found.family != socket.AF_UNIX and found.getpeername()[1] != self.kept_port:
                        # Gloo closes what it cannot read. What it has yet to write it would forget
                        # if it could not, and a thread would wait for that for ever.
                        found.shutdown(socket.SHUT_RD)
                finally:
                    found.detach()

    def _opened_now(self) -> dict[int, str]:
        """What was opened in the block that is being recorded."""
        if (before := self._before) is None:
            return {}
        return {fd: name for fd, name in _open_sockets().items() if before.get(fd) != name}


CONNECTIONS = Connections()
"""Those of the default group, if `init_process_group` made it."""


def _open_sockets() -> dict[int, str]:
    """By descriptor, the name that the kernel has for the socket."""
    try:
        numbers = list(map(int, os.listdir("/proc/self/fd")))
    except OSError:  # all numbers are taken, and listing them takes one
        numbers = list(range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 2**20)))
    found = {}
    for fd in numbers:
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                found[fd] = name
    return found
