"""What ranks print: rank 0's goes on as it comes, others' into bounded buffers, or files."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from pathlib import Path

NUM_LINES = 20
"""Of a failing rank, shown."""

MAX_LINE = 400
"""Characters of a line that are shown."""

MAX_HELD_BYTES = 16_384
"""Of a line that has not ended yet."""

_NOISE = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. [^\r\n]*\r?\n")
_NOISE_START = b"[Gloo] Rank "
_CONTROL = re.compile(
    r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|.)"  # whole escape sequences
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


class Tail:
    """The last lines of a stream of bytes, whatever its length; fit for a terminal."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=NUM_LINES)
        self._open = b""

    def feed(self, data: bytes) -> None:
        *whole, self._open = (self._open + data).split(b"\n")
        self._lines.extend(line[-MAX_HELD_BYTES:] for line in whole)
        self._open = self._open[-MAX_HELD_BYTES:]

    def lines(self) -> list[str]:
        """At most NUM_LINES, without control characters, each as a terminal would leave it."""
        raw = [*self._lines, self._open] if self._open else list(self._lines)
        return [_shown(line) for line in raw[-NUM_LINES:]]


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
    text = _CONTROL.sub("", text)
    return text if len(text) <= MAX_LINE else text[:MAX_LINE] + " …"


class Stream:
    """One pipe that a rank writes into.

    `forward_to` is the file descriptor its bytes go on to, unchanged but for gloo's greetings, of
    which every process prints one per device to standard output.
    """

    def __init__(self, fd: int, tail: Tail, *, forward_to: int | None, log: Path | None) -> None:
        self.fd = fd
        self.forward_to = forward_to
        self._tail = tail
        self._log = log
        self._held = b""

    def take(self, max_bytes: int = 4096) -> bool:
        """Read once what is there; False when it was the last."""
        try:
            data = os.read(self.fd, max_bytes)
        except OSError:  # EIO is how a pseudo-terminal ends
            data = b""
        self._pass_on(self._quiet(data))
        return bool(data)

    def _quiet(self, data: bytes) -> bytes:
        """`data` without greetings; the beginning of what may become one waits for the rest."""
        at_end = not data
        data, self._held = _NOISE.sub(b"", self._held + data), b""
        start = data.rfind(b"\n") + 1
        last = data[start:]
        may_be = _NOISE_START.startswith(last) or last.startswith(_NOISE_START)
        if last and may_be and not at_end and len(last) < MAX_HELD_BYTES:
            data, self._held = data[:start], last
        return data

    def _pass_on(self, data: bytes) -> None:
        if not data:
            return
        self._tail.feed(data)
        if self._log is not None:
            with self._log.open("ab") as file:
                file.write(data)
        while data and self.forward_to is not None:
            try:
                data = data[os.write(self.forward_to, data) :]
            except BrokenPipeError:
                # Nobody reads any more. The rank finds out by itself, as it would without us.
                self.forward_to = None
                self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self.fd = -1


def open_channel(destination: int) -> tuple[int, int]:
    """(read, write) ends of a channel that looks like `destination`: a terminal if that is one."""
    if not os.isatty(destination):
        return os.pipe()
    import fcntl
    import pty
    import termios
    import tty

    read, write = pty.openpty()
    tty.setraw(write)  # what the rank writes arrives as it is; the real terminal does the rest
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(destination, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(write, termios.TIOCSWINSZ, size)
    return read, write
