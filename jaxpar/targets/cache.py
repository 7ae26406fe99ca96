"""Compiled programs on disk, found again by content: text, never anything that could run.

One file per program, `<sha256>.json.gz` in a folder of its own. Only such files are ever removed,
the ones that were not used for longest, and only to stay below MAX_CACHE_BYTES. Files appear
whole, so several processes may share the folder; what is damaged counts as not there.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = "jaxpar.compiled/2"
MAX_CACHE_BYTES = 1 << 29
MAX_ENTRY_BYTES = 1 << 29
"""Of one entry, unpacked."""

_NAME = re.compile(r"[0-9a-f]{64}\.json\.gz")


def default_folder() -> Path:
    """Where the user's programs keep what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "jaxpar" / "compiled"


def key_of(module: bytes, told: Mapping[str, Any]) -> str:
    """The name of a program: of its bytes, and of all that its compiler is told."""
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    digest.update(b"\0" + module)
    return digest.hexdigest()


class Cache:
    """The entries of one folder, which is made when the first is kept."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def get(self, key: str) -> dict[str, Any] | None:
        """What was kept under this key, or None."""
        path = self.folder / f"{key}.json.gz"
        try:
            with gzip.open(path) as stream:
                data = stream.read(MAX_ENTRY_BYTES + 1)
            entry = json.loads(data) if len(data) <= MAX_ENTRY_BYTES else None
        except (OSError, EOFError, zlib.error, ValueError, RecursionError):
            return None
        if not isinstance(entry, dict) or entry.get("schema") != SCHEMA or entry.get("key") != key:
            return None
        if entry.get("sha256") != _digest(entry.get("value")):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        value: dict[str, Any] = entry["value"]
        return value

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Keep `value` if there is room; a full or read-only disk is no reason to fail."""
        entry = {"schema": SCHEMA, "key": key, "sha256": _digest(value), "value": value}
        data = gzip.compress(json.dumps(entry).encode(), compresslevel=6, mtime=0)
        if len(data) > self.max_bytes:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(name, self.folder / f"{key}.json.gz")
            except BaseException:
                os.unlink(name)
                raise
            self._make_room()

    def _make_room(self) -> None:
        found = []
        for path in self.folder.iterdir():
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(OSError):  # another process may have removed it
                    status = path.stat()
                    found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
