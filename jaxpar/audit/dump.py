"""Folders that XLA writes under `xla_dump_to`: which modules they hold, and which file to read.

XLA names its files `module_<id>.<name>.<target>_after_optimizations.txt` and so on. A program
leaves many of them, and a process many programs: the one that was meant is found by what it does.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxpar.errors import AuditError, shown

MAX_ENTRIES = 100_000
"""Most entries of a folder that are looked at."""

MAX_SEARCHED_BYTES = 1 << 30
"""Most bytes that are searched for communication, in all files together."""

STAGES = ("final", "partitioned")
"""The module as it runs, and the module right after SPMD partitioning."""

_FORMS = (".txt", ".hlo", ".hlo.pb", ".pb")  # text first: its header knows the number of devices
_FORM = r"(?P<form>\.txt|\.hlo|\.hlo\.pb|\.pb)(?P<zipped>\.gz)?"
_MODULE = r"(?:\d+\.)?module_(?P<id>\d+)\.(?P<name>.+?)(?:\.cl_\d+)?"  # a TPU compiler's version
_FINAL = re.compile(
    rf"{_MODULE}\.(?P<pass>(?:(?:(?:sm_|gfx)[\w.]+?_)?(?:cpu|gpu|tpu)_)?after_optimizations"
    rf"|after_codegen){_FORM}"
)
_PARTITIONED = re.compile(
    rf"{_MODULE}\.(?P<pass>\d+)\.[^.]+\.after_[\w-]*spmd-partitioning\.before_[^.]+{_FORM}"
)
_COMMUNICATION = re.compile(
    rb"all-(?:reduce|gather|to-all)|reduce-scatter|collective-(?:permute|broadcast)"
    rb"|_xla_megascale|_xla_send_recv"
)
_OVERLAP = 32  # bytes of a chunk that are searched again with the next
_CHUNK = 1 << 22
_MOST_LISTED = 20
_HOW = "Compile with xla_dump_to and xla_dump_hlo_as_text"
_PASS = 'xla_dump_hlo_pass_re=".*spmd-partitioning"'


@dataclass(frozen=True, kw_only=True)
class DumpedModule:
    """One module of a dump: its number, its name, and the best file of each stage, if any."""

    number: int
    name: str
    final: Path | None
    partitioned: Path | None

    @property
    def label(self) -> str:
        """As XLA writes it, but for leading zeros: `module_7.jit_step`."""
        return f"module_{self.number}.{self.name}"

    def file(self, stage: str) -> Path | None:
        return self.final if stage == "final" else self.partitioned


def modules(folder: Path) -> list[DumpedModule]:
    """The modules that `folder` holds, in the order they were compiled.

    AuditError for a folder that cannot be read, has more than MAX_ENTRIES entries, or holds none.
    """
    best: dict[tuple[int, str], dict[str, tuple[tuple[int, ...], Path]]] = {}
    for name in _names(folder):
        for stage, pattern in zip(STAGES, (_FINAL, _PARTITIONED), strict=True):
            found = pattern.fullmatch(name)
            if found is None:
                continue
            files = best.setdefault((int(found["id"]), found["name"]), {})
            rank = _rank(stage, found)
            if stage not in files or rank > files[stage][0]:
                files[stage] = (rank, folder / name)
    if not best:
        raise AuditError(
            f"{folder} holds no module that XLA compiled (module_0001.jit_step."
            f"…after_optimizations.txt, for example). {_HOW}, and give that folder."
        )
    return [
        DumpedModule(
            number=number,
            name=name,
            final=files["final"][1] if "final" in files else None,
            partitioned=files["partitioned"][1] if "partitioned" in files else None,
        )
        for (number, name), files in sorted(best.items())
    ]


def choose(folder: Path, module: str | None = None, stage: str = "final") -> Path:
    """The file of `folder` to audit.

    `module` is a name (`jit_step`), a number, or both (`module_0007.jit_step`). Without it the
    only module is meant, or the only one that communicates: a process compiles many small programs
    beside the one step. `stage` is one of STAGES. AuditError, with the modules there are, where
    that leaves none or several.
    """
    if stage not in STAGES:
        raise AuditError(f"stage={shown(stage)} must be one of {', '.join(map(repr, STAGES))}.")
    found = modules(folder)
    if module is not None:
        named = [one for one in found if _is_named(one, module)]
        if not named:
            raise AuditError(f"{folder} has no module {shown(module)}. It has {_listed(found)}.")
        found = named
    files = [(one, file) for one in found if (file := one.file(stage)) is not None]
    if not files:
        have = "the final modules, and none" if stage == "partitioned" else "no final module, only"
        raise AuditError(
            f"{folder} has {have} right after partitioning of {_listed(found)}. "
            + (f"{_HOW} and {_PASS}." if stage == "partitioned" else f"{_HOW}, or read that stage.")
        )
    if len(files) > 1:
        files = _communicating(files) or files
    if len(files) > 1:
        raise AuditError(
            f"{folder} has several modules that may be meant: {_listed(one for one, _ in files)}. "
            "Say which with module= (--module on the command line), by name or number."
        )
    return files[0][1]


def _names(folder: Path) -> list[str]:
    names = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) > MAX_ENTRIES:
                    raise AuditError(
                        f"{folder} has more than {MAX_ENTRIES} entries. Give the one file of it "
                        "that you want read, or dump into an empty folder."
                    )
    except OSError as error:
        raise AuditError(f"{folder} cannot be read: {error.strerror or error}.") from error
    return names


def _rank(stage: str, found: re.Match[str]) -> tuple[int, ...]:
    """The higher, the better: later passes before earlier ones, text before protos."""
    form = -_FORMS.index(found["form"]), found["zipped"] is None
    if stage == "final":
        return (found["pass"] == "after_codegen", *form)  # TPU: with the backend's configuration
    return (int(found["pass"]), *form)


def _is_named(one: DumpedModule, module: str) -> bool:
    number = re.fullmatch(r"(?:module_)?0*(\d{1,9})(?:\.(.+))?", module)
    if number is not None:
        return int(number[1]) == one.number and number[2] in (None, one.name)
    return module == one.name


def _communicating(files: list[tuple[DumpedModule, Path]]) -> list[tuple[DumpedModule, Path]]:
    """Those whose file shows communication; all of them when there is too much to search."""
    if sum(_size(file) for _, file in files) > MAX_SEARCHED_BYTES:
        return files
    return [(one, file) for one, file in files if _communicates(file)]


def _communicates(file: Path) -> bool:
    rest = b""
    searched = 0
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            while (chunk := stream.read(_CHUNK)) and searched < MAX_SEARCHED_BYTES:
                if _COMMUNICATION.search(rest + chunk):
                    return True
                rest = chunk[-_OVERLAP:]
                searched += len(chunk)
    except (EOFError, OSError, zlib.error):
        return True  # whoever reads it says what is wrong
    return False


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _listed(found: Iterable[DumpedModule]) -> str:
    """The modules with the sizes of their files, the largest first, as the end of a sentence."""
    sized = [(_size(one.final or one.partitioned or Path()), one.label) for one in found]
    sized.sort(key=lambda pair: -pair[0])
    shortest = [f"{label} ({size:,} bytes)" for size, label in sized[:_MOST_LISTED]]
    more = len(sized) - len(shortest)
    return ", ".join(shortest) + (f", and {more} more" if more else "")
