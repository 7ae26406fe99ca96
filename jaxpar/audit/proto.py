"""Serialized HLO (`.pb`) as text, made by XLA in a child process that may die.

XLA's C++ trusts what it parses: a damaged file can take the process with it, or all memory. So a
child with limits on time, memory and output reads the file and writes text to a temporary file;
however it ends, the parent gets text or an AuditError. The child starts no backend of JAX.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jaxpar.errors import AuditError

MAX_PROTO_BYTES = 1 << 28
"""Largest serialized module that is read, decompressed: 256 MiB, about as much in text."""

MAX_TEXT_BYTES = 1 << 29
"""Longest text that the child may write."""

TIME_LIMIT_S = 60
"""Wall clock for the child. XLA needs 4 s for 48 MiB on a slow machine."""

_MEMORY_BASE = 1 << 31  # address space; JAX's libraries map 0.4 GiB before anything is read
_MEMORY_PER_BYTE = 32  # of the proto; XLA's own modules take 26
_MAX_DEPTH = 3  # HloSnapshot > HloProto > HloModuleProto
_MAX_SEARCHED = 1000  # collectives that are looked at for the number of devices
_BY_DEVICE = re.compile(r"^[^\n]* replica_groups=[^\n]*use_global_device_ids=true", re.MULTILINE)
_GROUPS = re.compile(r" replica_groups=((?:mesh\[[^\n]*?\]\s?|\{\{|\[)[^\n]*?)(?=, [a-z_]+=|$)")
_REFUSED = "jaxpar: "  # before what the child says itself, among what libraries print
_CHILD = """
import json, sys
path, limits = map(json.loads, sys.argv[1:])
sys.path[:] = path
from jaxpar.audit.proto import child
sys.exit(child(**limits))
"""
_SMALLER = "Dump a smaller program: scan over layers instead of writing them out."
_AGAIN = "Dump the program again, with xla_dump_hlo_as_proto or xla_dump_hlo_as_text."


def proto_text(path: Path) -> str:
    """HLO text of a serialized HloModuleProto, HloProto or HloSnapshot, gzipped or not.

    The header tells num_partitions where the file does, or where a collective's groups do; else
    `num_partitions=unknown`. AuditError for a file that cannot be read, is no such message, or
    needs more than the limits of this module.
    """
    with tempfile.TemporaryFile() as text:
        _run(path, text)
        text.seek(0)
        return text.read().decode("utf-8", "replace")


def _run(path: Path, text: IO[bytes]) -> None:
    """Fill `text` by a child; AuditError when it did not get to the end."""
    limits = {
        "proto_bytes": MAX_PROTO_BYTES,
        "text_bytes": MAX_TEXT_BYTES,
        "memory_bytes": _MEMORY_BASE,
        "memory_per_byte": _MEMORY_PER_BYTE,
    }
    imports = [os.fspath(folder) for folder in sys.path]
    command = [sys.executable, "-I", "-c", _CHILD, json.dumps(imports), json.dumps(limits)]
    try:
        with path.open("rb") as raw, tempfile.TemporaryFile() as said:
            process = subprocess.Popen(command, stdin=raw, stdout=text, stderr=said)
            try:
                code = process.wait(timeout=TIME_LIMIT_S)
            finally:
                process.kill()
                process.wait()
            said.seek(max(0, said.seek(0, io.SEEK_END) - 4096))
            last = said.read().decode("utf-8", "replace").rpartition(_REFUSED)
    except subprocess.TimeoutExpired as error:
        raise AuditError(
            f"{path} was not read within {TIME_LIMIT_S} s. Give the .txt that XLA writes with "
            "xla_dump_hlo_as_text, or scan over layers."
        ) from error
    except OSError as error:
        raise AuditError(f"{path} cannot be read: {error.strerror or error}.") from error
    if code == 0:
        return
    if last[1]:
        raise AuditError(f"{path} {last[2].strip()}")
    raise AuditError(
        f"{path} is damaged: XLA's reader ended with {_ending(code)}. Dump the program again, or "
        "give the .txt that XLA writes with xla_dump_hlo_as_text."
    )


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def child(*, proto_bytes: int, text_bytes: int, memory_bytes: int, memory_per_byte: int) -> int:
    """What the child does: a proto from stdin, its text to stdout, a sentence to stderr.

    The limits are those of this module, as the parent has them. Returns the exit code.
    """
    try:
        data = _given(sys.stdin.buffer, proto_bytes)
        _limit(memory_bytes + memory_per_byte * len(data), text_bytes)
        text = _text(find_module(data))
        if len(text) > text_bytes:
            raise AuditError(f"prints more than {text_bytes >> 20} MiB of text. {_SMALLER}")
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.flush()
    except MemoryError:
        return _refuse(f"needs too much memory for its size: it is damaged. {_AGAIN}")
    except OSError as error:
        return _refuse(f"cannot be kept as text: {error.strerror or error}.")
    except AuditError as error:
        return _refuse(str(error))
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        return _refuse(f"is no module that XLA reads ({reason}). {_AGAIN}")
    return 0


def _refuse(message: str) -> int:
    print(f"{_REFUSED}{message}", file=sys.stderr, flush=True)
    return 1


def _given(raw: IO[bytes], most: int) -> bytes:
    """All of `raw`, unpacked, of `most` bytes."""
    data = raw.read(most + 1)
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.open(io.BytesIO(data)) as stream:
                data = stream.read(most + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise AuditError(f"is a damaged .gz file ({error}). Copy it again.") from error
    if len(data) > most:
        raise AuditError(f"has more than {most >> 20} MiB. {_SMALLER}")
    return data


def _limit(memory_bytes: int, text_bytes: int) -> None:
    """From now on this process may not map more, write more or compute longer."""
    try:
        import resource
    except ImportError:
        return  # Windows: the parent's clock and the length of the text are the limits
    for what, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, text_bytes),
        (resource.RLIMIT_CPU, 4 * TIME_LIMIT_S),  # should the parent be gone
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        if hard == resource.RLIM_INFINITY or limit < hard:
            # macOS refuses a limit on the address space below what its libraries map.
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(what, (limit, hard))


def _text(module: memoryview) -> str:
    """The module's text, with the number of devices in its header."""
    from jaxpar.compat import hlo_text

    text = hlo_text(module.tobytes())
    header, newline, rest = text.partition("\n")
    if "num_partitions=" in header:
        return text
    return f"{header}{_devices(module, rest)}{newline}{rest}"


def _devices(module: memoryview, text: str) -> str:
    """What XLA prints in a header about replicas and partitions.

    Known to a module that was compiled for particular devices (field 15); else the groups of any
    collective over device ids name every device once.
    """
    assignment = dict(fields(module)).get(15)
    if isinstance(assignment, memoryview):
        numbers = dict(fields(assignment))
        replicas, partitions = numbers.get(1), numbers.get(2)
        if isinstance(replicas, int) and isinstance(partitions, int):
            return f", replica_count={replicas}, num_partitions={partitions}"
    from jaxpar.audit.groups import parse_groups

    for number, line in enumerate(_BY_DEVICE.finditer(text)):
        groups = _GROUPS.search(line[0])
        if groups is not None:
            return f", num_partitions={sum(map(len, parse_groups(groups[1], None)))}"
        if number == _MAX_SEARCHED:
            break
    return ", num_partitions=unknown"


def find_module(data: bytes) -> memoryview:
    """The HloModuleProto in `data`, which may be wrapped as an HloProto or HloSnapshot.

    A module is recognised by its entry: field 2 names one of the computations in field 3. What
    wraps one has it in field 1. AuditError where there is none.
    """
    message = memoryview(data)
    for depth in range(_MAX_DEPTH):
        try:
            inner, is_module = _look_into(message)
        except AuditError:
            if depth == 0:
                raise
            break  # what looked like a message is a text
        if is_module:
            return message
        if inner is None:
            break
        message = inner
    raise AuditError(f"holds no HLO module. {_AGAIN}")


def _look_into(message: memoryview) -> tuple[memoryview | None, bool]:
    """The first field 1 of a message, and whether the message is a module."""
    inner = entry = None
    names = set()
    for number, value in fields(message):
        if not isinstance(value, memoryview):
            continue
        if number == 1 and inner is None:
            inner = value
        elif number == 2:
            entry = value.tobytes()
        elif number == 3:
            names.add(_name(value))
    return inner, entry in names


def _name(computation: memoryview) -> bytes:
    """The first field of a computation; anything else than its name there matches no entry."""
    try:
        number, value = next(fields(computation), (0, b""))
    except AuditError:
        return b""  # a wrapper's field 3 is another message
    return value.tobytes() if number == 1 and isinstance(value, memoryview) else b""


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of each field of a protocol buffer: an int, or the bytes of one with length.

    AuditError where the bytes are none.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(message, at)
        if size is None or size > len(message) - at:
            raise _damaged(at)
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number of at most ten bytes that starts at `at`, and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise _damaged(at)


def _damaged(at: int) -> AuditError:
    return AuditError(f"is no protocol buffer, or cut off (at byte {at} of a message). {_AGAIN}")
