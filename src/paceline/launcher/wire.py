"""The line between two launchers: JSON messages, each numbered and signed.

It is a connection to the port of the lead's store, which hands it on: machines need one open port.
A message is its length, a signature and its JSON. The signature covers the direction and the
number of the message too, with a key of this line alone, so that nothing can be altered, left out,
repeated or sent back. A line that breaks these rules is closed like one whose cable is cut.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from paceline.launcher.store import CONNECT_TIMEOUT_S, MAGIC, Query

MESSAGE_BYTES = 8 * 2**20
BEAT_S = 0.5
SEND_TIMEOUT_S = 1
"""A machine that takes nothing for so long is gone."""
_SIGNATURE_BYTES = 32
_HEAD = struct.Struct("<I")


class LineBroken(Exception):
    """The launcher at the other end is gone, or is not the one it should be."""


class Wire:
    """One end of a line; `key` is known to the launchers at both ends alone."""

    def __init__(
        self, connection: socket.socket, arrived: bytes, key: bytes, *, is_lead: bool
    ) -> None:
        """`arrived` was read from the connection before."""
        self.heard_s = time.monotonic()
        """When something last came."""
        self._connection, self._key = connection, key
        self._connection.settimeout(None)
        limit = struct.pack("ll", SEND_TIMEOUT_S, 0)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._arrived = bytearray(arrived)
        self._out, self._in = (b"lead", b"follower") if is_lead else (b"follower", b"lead")
        self._sent = self._taken = 0
        self._beat_at_s = 0.0

    @classmethod
    def connect(cls, host: str, port: int, node: int, key: bytes) -> Wire:
        """The line of machine `node` to the launcher that serves the store there."""
        connection = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        connection.sendall(bytes([Query.LINE]) + MAGIC + struct.pack("<q", node))
        return cls(connection, b"", key, is_lead=False)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send it; to a machine that is gone it goes nowhere, which `receive` will tell."""
        body = json.dumps(message).encode()
        signature = self._sign(self._out, self._sent, body)
        self._sent += 1
        try:
            self._connection.sendall(_HEAD.pack(len(body)) + signature + body)
        except OSError:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def beat(self, now_s: float) -> None:
        """Say that this launcher lives, if it has not for a while."""
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + BEAT_S
            self.send({})

    def receive(self) -> list[dict[str, Any]]:
        """What has come, without waiting; a line is broken once nothing is left to be heard."""
        why = self._read()
        messages = []
        while (message := self._take()) is not None:
            self.heard_s = time.monotonic()
            if message:  # not only a beat
                messages.append(message)
        if why and not messages:
            raise LineBroken(why)
        return messages

    def _read(self) -> str:
        """Take in what has arrived; why no more will, if so."""
        try:
            while data := self._connection.recv(2**16, socket.MSG_DONTWAIT):
                self._arrived += data
        except BlockingIOError:
            return ""
        except ConnectionResetError:
            pass  # it ended with something of ours unread
        except OSError as error:
            return f"the connection is broken: {error.strerror or error}"
        return "its launcher has ended"

    def close(self) -> None:
        self._connection.close()

    def _take(self) -> dict[str, Any] | None:
        head = _HEAD.size + _SIGNATURE_BYTES
        if len(self._arrived) < head:
            return None
        (length,) = _HEAD.unpack_from(self._arrived)
        if length > MESSAGE_BYTES:
            raise LineBroken(f"it sent a message of {length:,} bytes")
        if len(self._arrived) < head + length:
            return None
        signature = bytes(self._arrived[_HEAD.size : head])
        body = bytes(self._arrived[head : head + length])
        del self._arrived[: head + length]
        if not hmac.compare_digest(signature, self._sign(self._in, self._taken, body)):
            raise LineBroken("what it sent was not signed by a launcher of this run")
        self._taken += 1
        message = json.loads(body)
        if not isinstance(message, dict):
            raise LineBroken("it sent what is not a message")
        return message

    def _sign(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, b"%s/%d/%s" % (direction, number, body), "sha256")


def make_key(secret: str, token: str, attempt: int, node: int) -> bytes:
    """The key of one line: from what the machines were given, and what the lead has drawn."""
    return hmac.digest(secret.encode(), f"{token}/{attempt}/{node}".encode(), "sha256")
