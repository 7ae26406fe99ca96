"""From a path to HLO text: plain or gzipped text, a serialized module, a folder of dumps.

Sizes are limited before anything is read, and text is never handed to XLA's own parser, which can
kill the process on text that it did not print.
"""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Callable
from pathlib import Path

from jaxpar.audit.dump import choose
from jaxpar.audit.proto import proto_text
from jaxpar.errors import AuditError

MAX_TEXT_BYTES = 1 << 29
"""Largest HLO text that is read, decompressed: 512 MiB, a hundred times a large program."""

MAX_RATIO = 200
"""A .gz that unpacks to more than this times its size, and more than MIN_BOMB_BYTES, is refused."""

MIN_BOMB_BYTES = 1 << 24

_CHUNK = 1 << 22


def file_text(path: Path, *, module: str | None = None, stage: str = "final") -> tuple[Path, str]:
    """The file that is meant by `path`, and its HLO text.

    `module` and `stage` choose among the modules of a dump folder. AuditError for what is missing,
    too large, no regular file, or no HLO.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            path = choose(path, module, stage)
        elif module is not None or stage != "final":
            raise AuditError(f"{path} is a file; module= and stage= choose within a dump folder.")
        elif not stat.S_ISREG(mode):
            raise AuditError(f"{path} is neither a file nor a folder. Copy its content to a file.")
        if path.name.endswith((".pb", ".pb.gz")):
            return path, checked_text(proto_text(path))
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not zipped:
                return path, _text(raw.read, path, MAX_TEXT_BYTES)
            most = max(MIN_BOMB_BYTES, MAX_RATIO * path.stat().st_size)
            with gzip.open(raw) as stream:
                return path, _text(stream.read, path, min(most, MAX_TEXT_BYTES))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise AuditError(f"{path} is a damaged .gz file ({error}). Copy it again.") from error
    except OSError as error:
        raise AuditError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # a path with a NUL in it
        if isinstance(error, AuditError):
            raise
        raise AuditError(f"{str(path)!r} is no path: {error}.") from error


def checked_text(text: str) -> str:
    """`text`, unless it is larger than what is read."""
    if len(text) > MAX_TEXT_BYTES:
        raise _too_large("The text", MAX_TEXT_BYTES)
    return text


def _text(read: Callable[[int], bytes], path: Path, most: int) -> str:
    content = bytearray()
    while chunk := read(_CHUNK):
        content += chunk
        if len(content) > most:
            raise _too_large(str(path), most)
        if b"\0" in chunk:
            raise AuditError(
                f"{path} is binary. Give HLO text, as compiled.as_text() prints it, or name a "
                "serialized module .pb."
            )
    return content.decode("utf-8", "replace")


def _too_large(what: str, most: int) -> AuditError:
    return AuditError(
        f"{what} has more than {most >> 20} MiB of text. Print HLO without large constants, or "
        "scan over layers."
    )
