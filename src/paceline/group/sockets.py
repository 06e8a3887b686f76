"""Sockets: listening on one address, closing what torch has opened, asking the launcher's store.

torch's own store would listen on every interface. And a rank that waits in a Gloo group cannot be
called back by torch, but by the kernel: when its connections are shut, it gets an error.

A request to the store is one byte and its arguments: numbers of 8 bytes, texts with their length
before them. That is torch's protocol, so one server answers torch's clients too. Callers on the
launcher's machine use a socket in its private folder. Callers on other machines first prove that
they know the run's secret, and the launcher proves it to them; neither sends the secret.

Nothing here needs torch, because the launcher has none. `world` makes groups with this client:
torch's own connects to a port, which every user of the machine can reach.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import os
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any

from paceline import env
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
    """False if certainly nothing listens there; True if something does, or it cannot be known."""
    where: Any = (_spelled(host), port)
    try:
        with socket.create_connection(where, timeout_s) as found:
            # Where nothing listens, a socket can be given the very port it wants to reach.
            met_itself = found.getsockname() == found.getpeername()
            if met_itself:
                # Reset instead of closed, or the port would stay taken for a minute.
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

    Linux tells this about the one socket with these two addresses; other systems do not.
    """
    if not hasattr(socket, "AF_NETLINK"):
        return None
    near, far = connection.getsockname(), connection.getpeername()
    family, hosts = connection.family, [each[0].partition("%")[0] for each in (far, near)]
    addresses = [socket.inet_pton(family, host).ljust(16, b"\0") for host in hosts]
    # A struct inet_diag_req_v2: for the socket whose own address is the far one, in any state.
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
    # Behind a head of 16 bytes and 64 of the message; what no process holds any more has no inode.
    user, inode = struct.unpack_from("=II", found, 80)
    return user if inode else -1


def _address_of(interface: str, any_socket: socket.socket) -> str:
    """The IPv4 address of an interface, or nothing."""
    try:
        found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return ""
    # A struct ifreq: 16 bytes of name, then a socket address with family and port first.
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
        """End every connection among them that is still open; a thread that waits there gets an
        error.

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
                    found.detach()  # it is torch's to close

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


CONNECT_TIMEOUT_S = 2.0
_ANSWER_S = 60.0
"""How long the launcher may take for what needs no wait: it is busy, or the network is cut."""
NONCE_BYTES, PROOF_BYTES = 16, 32
STORE_CALLER = bytes(NONCE_BYTES)
"""The name of a caller that wants the store; launchers have random names."""
READY, NOT_READY = b"\0", b"\1"
GO_ON, CANCELLED = b"\0", b"\1"
_LONGEST_PATH = 100
_NUMBER = struct.Struct("<q")


class Query(IntEnum):
    """What a client asks for; the number is its first byte."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    COUNT_KEYS = 7
    DELETE = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    PUSH = 14
    POP = 15
    QUEUE_LENGTH = 16
    LIST_KEYS = 17
    BARRIER = 18
    PROVE = 100
    """Ours alone: the caller will prove that it belongs to the run."""


class Refused(ConnectionError):
    """The launcher does not take this caller for one of its run, or is not of that run itself."""


def pack_number(value: int) -> bytes:
    return _NUMBER.pack(value)


def unpack_number(data: bytes | bytearray) -> int:
    found: int = _NUMBER.unpack(data)[0]
    return found


def pack_text(value: bytes) -> bytes:
    return _NUMBER.pack(len(value)) + value


def make_key(secret: str, run_id: str) -> bytes:
    """What all launchers and workers of a run know."""
    data = f"paceline/{run_id}"  # any bytes, as the environment may have
    return hmac.digest(os.fsencode(secret), os.fsencode(data), "sha256")


def prove(key: bytes, whose: bytes, name: bytes, *nonces: bytes) -> bytes:
    """That `whose` side of a conversation knows the key; the nonces make it hold only once."""
    return hmac.digest(key, b"/".join([whose, name.hex().encode(), *nonces]), "sha256")


def call(place: str, key: bytes, name: bytes = STORE_CALLER) -> tuple[socket.socket, bytes]:
    """Connect with the launcher at `place`; the connection, and a key for it alone.

    A place is `host:port`, or the path of a socket, which only this user can reach.
    """
    if os.path.isabs(place):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(place) as path:
                connection.connect(path)
        except OSError:
            connection.close()
            raise
        return connection, b""
    host, _, port = place.rpartition(":")
    connection = socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S)
    try:
        # Otherwise a request after one without an answer waits for a delayed receipt.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(bytes([Query.PROVE]) + name + ours)
        theirs = bytes(receive_all(connection, NONCE_BYTES))
        connection.sendall(prove(key, b"caller", name, ours, theirs))
        try:
            answer = receive_all(connection, PROOF_BYTES)
        except ConnectionError as error:
            raise Refused("it has refused this caller") from error
        if not hmac.compare_digest(answer, prove(key, b"launcher", name, ours, theirs)):
            raise Refused("it does not know the secret of this run")
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection, prove(key, b"channel", name, ours, theirs)


def receive_all(connection: socket.socket, count: int) -> bytearray:
    """Exactly so many bytes; a connection that ends before is a ConnectionError."""
    received = bytearray(count)
    receive_into(connection, memoryview(received))
    return received


def receive_into(connection: socket.socket, missing: memoryview) -> None:
    """Fill this memory, in one system call if the socket has no timeout."""
    while missing:
        if not (got := connection.recv_into(missing, 0, socket.MSG_WAITALL)):
            raise ConnectionError("the other end has closed the connection")
        missing = missing[got:]


@contextmanager
def short_path(path: str) -> Iterator[str]:
    """The path of a socket as the kernel takes it, which is at most about 100 bytes long."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


class StoreClient:
    """A caller of the launcher's store; each thread has a connection of its own.

    A wait that is given up closes its connection, so no answer of the past is ever taken for one
    of now.
    """

    gone: type[Exception]
    late: type[Exception]
    """What is raised where the launcher has gone, and where it has not answered in time."""
    timeout: timedelta
    """How long a wait may take; torch's, as are the errors: `world` has the other half."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._threads = threading.local()
        self._key = make_key(env.read(env.SECRET_VARIABLE), env.read("PACELINE_RUN_ID"))
        self._tell(b"")  # a launcher that cannot be reached is told of at once

    def clone(self) -> StoreClient:
        return self

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: Any) -> None:
        self._tell(_encode(Query.SET, key) + pack_text(_to_bytes(value)))

    def append(self, key: str, value: Any) -> None:
        self._tell(_encode(Query.APPEND, key) + pack_text(_to_bytes(value)))

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        with self._asked(_encode_several(Query.MULTI_GET, keys)) as connection:
            return [_receive_text(connection) for _ in keys]

    def add(self, key: str, amount: int) -> int:
        with self._asked(_encode(Query.ADD, key) + pack_number(amount)) as connection:
            return unpack_number(receive_all(connection, 8))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        values = [pack_text(_to_bytes(value)) for value in (expected, desired)]
        with self._asked(_encode(Query.COMPARE_SET, key) + b"".join(values)) as connection:
            return _receive_text(connection)

    def check(self, keys: Sequence[str]) -> bool:
        with self._asked(_encode_several(Query.CHECK, keys)) as connection:
            return receive_all(connection, 1) == READY

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = (self.timeout if timeout is None else timeout).total_seconds()
        with self._asked(_encode_several(Query.WAIT, keys), limit_s) as connection:
            if receive_all(connection, 1) != GO_ON:
                raise self.late(f"The launcher gave up the wait for {keys[0]!r}.")

    def num_keys(self) -> int:
        with self._asked(bytes([Query.COUNT_KEYS])) as connection:
            return unpack_number(receive_all(connection, 8))

    def delete_key(self, key: str) -> bool:
        with self._asked(_encode(Query.DELETE, key)) as connection:
            return bool(unpack_number(receive_all(connection, 8)))

    def list_keys(self) -> list[str]:
        with self._asked(bytes([Query.LIST_KEYS])) as connection:
            count = unpack_number(receive_all(connection, 8))
            return [_receive_text(connection).decode() for _ in range(count)]

    def _tell(self, request: bytes) -> None:
        with self._asked(request):
            pass  # there is no answer

    @contextmanager
    def _asked(self, request: bytes, timeout_s: float = _ANSWER_S) -> Iterator[socket.socket]:
        """This thread's connection, for the answer; one that fails is not used again."""
        connection = getattr(self._threads, "connection", None)
        try:
            if connection is None:
                connection, _ = call(self.place, self._key)
                self._threads.connection = connection
            connection.settimeout(max(timeout_s, 1e-3))  # 0 would mean not to wait
            connection.sendall(request)
            yield connection
        except BaseException as error:  # also an interrupt, which leaves the answer unread
            self._threads.__dict__.pop("connection", None)
            if connection is not None:
                connection.close()
            if not isinstance(error, OSError):
                raise
            if isinstance(error, TimeoutError):
                text = f"The launcher's store did not answer within {timeout_s:g} s."
                raise self.late(text) from error
            raise self.gone(f"The launcher's store is gone: {error}.") from error


def _to_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _encode(query: Query, key: str) -> bytes:
    return bytes([query]) + pack_text(key.encode())


def _encode_several(query: Query, keys: Sequence[str]) -> bytes:
    texts = [pack_text(key.encode()) for key in keys]
    return bytes([query]) + pack_number(len(texts)) + b"".join(texts)


def _receive_text(connection: socket.socket) -> bytes:
    return bytes(receive_all(connection, unpack_number(receive_all(connection, 8))))
