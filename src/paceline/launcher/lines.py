"""A stream of bytes as lines worth showing, progress bars included.

It does not know where the lines go, so a test can feed it bytes and a clock.
"""

from __future__ import annotations

MAX_LINE_BYTES = 64 * 2**10


class Lines:
    """Cuts the bytes of one stream into lines worth showing.

    A progress bar rewrites its line after a carriage return: only what it says last is shown, at
    most once in `patience_s`. A line that is not finished by then is shown as far as it is.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.rest = b""
        self.shown = b""
        self.due_s: float | None = None
        """When to call `overdue`; None while there is nothing to show."""

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        *whole, self.rest = (self.rest + data).split(b"\n")
        lines = [text for text in map(self._finish, whole) if text is not None]
        visible = _last_rewrite(self.rest)
        if b"\r" in self.rest:
            # Only the last rewrite is kept; the return in front says that the next one replaces it.
            self.rest = b"\r" + visible
        if len(self.rest) > MAX_LINE_BYTES:
            lines.append(visible)
            self.rest = b""
        if not self.rest or visible == self.shown:
            self.due_s = None
        elif self.due_s is None:
            self.due_s = now_s + self.patience_s
        return lines

    def overdue(self, now_s: float) -> list[bytes]:
        """The unfinished line, if it has waited long enough."""
        if self.due_s is None or now_s < self.due_s:
            return []
        visible = _last_rewrite(self.rest)
        if b"\r" in self.rest:
            self.shown = visible
        else:
            self.rest = b""
        self.due_s = None
        return [visible]

    def close(self) -> list[bytes]:
        """What is left at the end of the stream."""
        text, self.rest, self.due_s = self._finish(self.rest), b"", None
        return [text] if text else []

    def _finish(self, line: bytes) -> bytes | None:
        """A whole line as it would look; None if it looks like what was shown before it ended."""
        visible = _last_rewrite(line)
        repeats = bool(self.shown) and visible == self.shown
        self.shown = b""
        return None if repeats else visible


def _last_rewrite(line: bytes) -> bytes:
    """What a terminal would show of a line with carriage returns in it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
