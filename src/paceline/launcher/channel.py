"""The channel between two launchers: JSON messages, each numbered and signed.

It outlives its connection: where the network is cut for a while, the follower connects anew, and
what the other end has not confirmed is sent again, so every message is heard once and in order.

A connection goes to the port of the lead's store, which hands it on once the follower has proved
the run's secret: machines need one open port. A frame is its length, a signature and its JSON. The
signature covers the direction and the number of the frame too, with a key of this connection
alone, so that nothing can be altered, left out, repeated or sent back. A sender that breaks these
rules is cut off.

    {"heard": n}    that n messages have come: first of all on each connection, and as a beat
    anything else   a message
"""

from __future__ import annotations

import hmac
import json
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from paceline.group import Refused, call

MESSAGE_BYTES = 8 * 2**20
KEPT_BYTES = 4 * MESSAGE_BYTES
"""So much may wait until the other end can be reached again."""
BEAT_S = 0.5
RENEW_S = 2.0
"""After so long without a word a follower connects anew."""
_SIGNATURE_BYTES = 32
_HEAD = struct.Struct("<I")

Connected = tuple[socket.socket, bytes, bytes]
"""A connection, what was read from it before, and its key."""


class ChannelBroken(Exception):
    """The launcher at the other end is gone, or is not the one it should be."""


class Channel:
    """One end of a channel.

    `renew` returns a connection that has been made since the last one, if there is one; it is
    told whether one is needed.
    """

    def __init__(self, renew: Callable[[bool], Connected | None], *, is_lead: bool) -> None:
        self.heard_s = time.monotonic()
        """When something last came."""
        self._renew = renew
        self._out, self._in = (b"lead", b"follower") if is_lead else (b"follower", b"lead")
        self._ready = selectors.DefaultSelector()
        self._connection: socket.socket | None = None
        self._is_resumed = False
        """Whether the other end has said, on this connection, what it has heard."""
        self._key = b""
        self._arrived, self._unsent = bytearray(), bytearray()
        self._frames_out = self._frames_in = 0
        self._kept: deque[bytes] = deque()
        """Messages that the other end has not confirmed."""
        self._kept_bytes = self._confirmed = self._taken = 0
        self._beat_at_s = 0.0

    def fileno(self) -> int:
        """Readable when something has come; the same for every connection."""
        return self._ready.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send it, now or when the other end can be reached again."""
        body = json.dumps(message).encode()
        self._kept.append(body)
        self._kept_bytes += len(body)
        if self._is_resumed:
            self._write(body)
        self._flush()

    def beat(self, now_s: float) -> None:
        """Say that this launcher lives, if it has not for a while; connect anew where it must."""
        is_needed = self._connection is None or now_s - self.heard_s > RENEW_S
        if (connected := self._renew(is_needed)) is not None:
            self._attach(connected)
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + BEAT_S
            if not self._unsent:  # or it has been said before
                self._write_heard()
        self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """What has come, without waiting; a channel is broken once nothing is left to be heard."""
        why = self._read()
        if why and (connected := self._renew(True)) is not None:  # it has connected anew
            self._attach(connected)
            why = self._read()
        messages: list[dict[str, Any]] = []
        while (message := self._take()) is not None:
            self.heard_s = time.monotonic()
            if message.keys() == {"heard"}:
                self._confirm(message["heard"])
            else:
                self._taken += 1
                messages.append(message)
        if why and not messages:
            raise ChannelBroken(why)
        if self._kept_bytes > KEPT_BYTES:
            raise ChannelBroken(f"it has not taken {self._kept_bytes:,} bytes")
        return messages

    def close(self, linger_s: float = 0.0) -> None:
        """Close it; up to so many seconds are spent until the other end has read the last word."""
        deadline_s = time.monotonic() + linger_s
        is_shut = False
        while (connection := self._connection) is not None:
            self._flush()
            if not self._unsent and not is_shut:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
                is_shut = True
            left_s = deadline_s - time.monotonic()
            # What comes is read to the end: closed with something unread, a connection is reset,
            # and what was just sent may be lost.
            if left_s <= 0 or self._read():
                break
            select.select([connection], [] if is_shut else [connection], [], left_s)
        self._detach()
        self._ready.close()

    def _attach(self, connected: Connected) -> None:
        self._detach()
        self._connection, arrived, self._key = connected
        self._connection.setblocking(False)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ready.register(self._connection, selectors.EVENT_READ)
        self._arrived, self._unsent = bytearray(arrived), bytearray()
        self._frames_out = self._frames_in = 0
        self._write_heard()

    def _detach(self) -> None:
        """Let go of a connection; what has not been taken from it will come again."""
        if self._connection is not None:
            self._ready.unregister(self._connection)
            self._connection.close()
            self._connection = None
        self._is_resumed = False

    def _confirm(self, heard: int) -> None:
        """Forget what the other end has heard; on a new connection, say the rest again."""
        while self._kept and self._confirmed < heard:
            self._kept_bytes -= len(self._kept.popleft())
            self._confirmed += 1
        if not self._is_resumed:
            self._is_resumed = True
            for body in self._kept:
                self._write(body)
            self._flush()

    def _write_heard(self) -> None:
        self._write(json.dumps({"heard": self._taken}).encode())

    def _write(self, body: bytes) -> None:
        if self._connection is not None:
            signature = self._sign(self._out, self._frames_out, body)
            self._frames_out += 1
            self._unsent += _HEAD.pack(len(body)) + signature + body

    def _flush(self) -> None:
        """Send as much as goes without waiting; what a connection does not take, the next will."""
        try:
            while self._unsent and self._connection is not None:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # `receive` finds out whether its launcher has ended
            self._unsent.clear()
            with suppress(OSError):
                assert self._connection is not None
                self._connection.shutdown(socket.SHUT_WR)

    def _read(self) -> str:
        """Take in what has arrived; why no more will, if so."""
        if self._connection is None:
            return ""
        try:
            while data := self._connection.recv(2**16):
                self._arrived += data
        except BlockingIOError:
            return ""
        except ConnectionResetError:
            pass  # it ended with something of ours unread
        except OSError:  # the network is cut, and may come back
            self._detach()
            return ""
        return "its launcher has ended"

    def _take(self) -> dict[str, Any] | None:
        head = _HEAD.size + _SIGNATURE_BYTES
        if len(self._arrived) < head:
            return None
        (length,) = _HEAD.unpack_from(self._arrived)
        if length > MESSAGE_BYTES:
            raise ChannelBroken(f"it sent a message of {length:,} bytes")
        if len(self._arrived) < head + length:
            return None
        signature = bytes(self._arrived[_HEAD.size : head])
        body = bytes(self._arrived[head : head + length])
        del self._arrived[: head + length]
        if not hmac.compare_digest(signature, self._sign(self._in, self._frames_in, body)):
            raise ChannelBroken("what it sent was not signed by a launcher of this run")
        self._frames_in += 1
        message = json.loads(body)
        if not isinstance(message, dict):
            raise ChannelBroken("it sent what is not a message")
        return message

    def _sign(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, b"%s/%d/%s" % (direction, number, body), "sha256")


class Connector:
    """Connects a follower with the lead at `place`, again and again, from threads of its own.

    Nothing that supervises workers may wait for a network.
    """

    def __init__(self, place: str, key: bytes, name: bytes) -> None:
        self.problem: OSError | None = None
        """Why the last try failed."""
        self._call = partial(call, place, key, name)
        self._thread: threading.Thread | None = None
        self._made: deque[Connected] = deque()

    def __call__(self, is_needed: bool) -> Connected | None:
        if self._made:
            return self._made.popleft()
        if is_needed and (self._thread is None or not self._thread.is_alive()):
            thread = threading.Thread(target=self._connect, daemon=True)
            with suppress(RuntimeError):  # as many run as may: tried again at the next beat
                thread.start()
                self._thread = thread
        return None

    def _connect(self) -> None:
        started_s = time.monotonic()
        try:
            connection, key = self._call()
            self.problem = None
            self._made.append((connection, b"", key))
        except OSError as error:
            self.problem = error
        # Not all the time: where nothing listens, the answer comes at once.
        time.sleep(max(0.0, started_s + 0.2 - time.monotonic()))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
        for connection, _, _ in self._made:
            connection.close()

    @property
    def is_refused(self) -> bool:
        return isinstance(self.problem, Refused)
