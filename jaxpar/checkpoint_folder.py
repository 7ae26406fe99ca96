"""A folder of checkpoints: what is whole, what is a leftover, what may be deleted.

    FOLDER/jaxpar-checkpoints              empty: says that the folder is ours
    FOLDER/step_00000040/about/metadata    JSON, `SCHEMA`: step, model, plan, data, leaves
    FOLDER/step_00000040/state/            the arrays (orbax, OCDBT)
    FOLDER/step_00000050.orbax-checkpoint-tmp/     a save that was cut short
    FOLDER/step_00000010.deleting/                 a deletion that was

A save is written under another name and renamed once all of it is there, so that a folder called
step_* is whole whenever the process ends; a deletion renames first. Leftovers are removed by the
next save. Nothing is ever deleted but folders with these names in a folder with the marker, and of
whole ones only those whose JSON says that they are ours.

Of several processes all call `save`, `restore` and `wait`; the first one lists and deletes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

import jax
import orbax.checkpoint as ocp
from absl import logging as absl_logging

from jaxpar.errors import CheckpointError, require_whole, shown

SCHEMA = "jaxpar.checkpoint/1"
MARKER = "jaxpar-checkpoints"
MAX_ABOUT_BYTES = 16 << 20

_WHOLE = re.compile(r"step_(\d{8})")
_LEFTOVER = re.compile(r"step_\d{8}\.(?:orbax-checkpoint-tmp.*|deleting)")
_ABOUT, _STATE = "about", "state"


class CheckpointFolder:
    """Checkpoints by number in `path`, of which the last `keep` stay (None: all).

    Raises CheckpointError where `path` is a file, or a folder that holds something else; nothing
    is created before the first `save`. Only one run at a time may save to a folder.
    """

    def __init__(self, path: str | Path, *, keep: int | None = None) -> None:
        if keep is not None:
            require_whole(CheckpointError, "keep", keep)
        self.path = Path(path).absolute()
        self.keep = keep
        self._lock: IO[bytes] | None = None
        self._pending: int | None = None
        with self._told("read"):
            if self.path.exists() and not self.path.is_dir():
                raise CheckpointError(f"{self._name} is a file, and has to be a folder.")
            entries = [entry.name for entry in self.path.iterdir()] if self.path.exists() else []
        if entries and MARKER not in entries:
            raise CheckpointError(
                f"{self._name} holds something else ({shown(sorted(entries)[0])}) and no "
                f"{MARKER} file, so it is not a folder of checkpoints. Give a new or empty one."
            )

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what is there -----------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Numbers of the checkpoints that are whole, in order, damaged ones among them."""
        with self._told("read"):
            entries = list(self.path.iterdir()) if self.path.is_dir() else []
            names = [e.name for e in entries if e.is_dir() and not e.is_symlink()]
        found = filter(None, map(_WHOLE.fullmatch, names))
        return sorted(int(match[1]) for match in found)

    @property
    def is_begun(self) -> bool:
        """Whether a run has begun to save here, be it that it never came to an end."""
        return (self.path / MARKER).is_file()

    def latest(self) -> int:
        """The last one. Raises CheckpointError where there is none."""
        if not (numbers := self.numbers()):
            problem = "holds no complete checkpoint" if self.path.exists() else "does not exist"
            raise CheckpointError(
                f"{self._name} {problem}. Give a folder that a run with --checkpoint has saved to."
            )
        return numbers[-1]

    def about(self, number: int) -> dict[str, Any]:
        """What was saved beside the arrays.

        Raises CheckpointError for what is missing, damaged, or of a schema not known here.
        """
        file = self.folder(number) / _ABOUT / "metadata"
        try:
            with file.open("rb") as opened:
                content = opened.read(MAX_ABOUT_BYTES + 1)
            if len(content) > MAX_ABOUT_BYTES:
                raise ValueError(f"more than {MAX_ABOUT_BYTES} bytes")
            about = json.loads(content)
        except (OSError, ValueError, RecursionError) as error:
            raise self.damaged(
                number, f"its {_ABOUT}/metadata cannot be read", _reason(error)
            ) from None
        schema = about.get("schema") if isinstance(about, dict) else None
        if schema == SCHEMA:
            return dict(about)
        family, _, version = str(schema).partition("/")
        if family == SCHEMA.partition("/")[0] and version.isdecimal():
            raise CheckpointError(
                f"{self.folder(number)} has schema {shown(schema)}, and this version of jaxpar "
                f"reads {SCHEMA!r}. Use the jaxpar that wrote it, or a newer one."
            )
        raise self.damaged(number, f"its {_ABOUT}/metadata has no schema {SCHEMA!r}")

    def folder(self, number: int) -> Path:
        return self.path / f"step_{number:08d}"

    # --- saving and restoring ----------------------------------------------------------------

    def save(self, number: int, tree: Any, about: Mapping[str, Any]) -> None:
        """Start to save arrays and JSON under `number`; `wait` or the next save ends it.

        The arrays are copied before this returns: their buffers may be donated then. An earlier
        save has to be over first, and its errors are raised here.
        """
        require_whole(CheckpointError, "number", number, at_least=0)
        self.wait()
        if number in self.numbers():
            raise CheckpointError(f"{self.folder(number)} is there already.")
        self.claim()
        with self._told("saved to"):
            self._orbax.save(
                self.folder(number),
                args=ocp.args.Composite(
                    **{
                        _STATE: ocp.args.StandardSave(tree),
                        _ABOUT: ocp.args.JsonSave({"schema": SCHEMA, **about}),
                    }
                ),
            )
        self._pending = number

    def wait(self) -> None:
        """Until the last save is complete, and what is too old deleted."""
        if self._pending is None:
            return
        number, self._pending = self._pending, None
        with self._told("saved to"):
            self._orbax.wait_until_finished()
        if jax.process_index() == 0:
            self._prune(number)

    def restore(self, number: int, abstract: Any) -> Any:
        """Arrays as `abstract` has them: ShapeDtypeStructs with shardings, named as when saved.

        Each process reads what its own devices hold. Raises CheckpointError for what is damaged.
        """
        self.wait()
        before = sys.unraisablehook
        sys.unraisablehook = partial(_unless_late, before)
        try:
            args = ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(abstract)})
            found = self._orbax.restore(self.folder(number), args=args)[_STATE]
        except Exception as error:  # whatever orbax, tensorstore and zarr find wrong with a file
            why = _file_that_failed(error, self.folder(number)) or _reason(error)
            raise self.damaged(number, "its arrays cannot be read", why) from error
        sys.unraisablehook = before
        return found

    def damaged(self, number: int, what: str, reason: str = "") -> CheckpointError:
        """The error that tells `what` is the matter with a checkpoint, why, and how to go on."""
        others = ", ".join(f"step_{n:08d}" for n in self.numbers() if n != number)
        go_on = (
            f"Other checkpoints there: {others}; to go on from the last of these, move this one "
            f"away."
            if others
            else "There is no other one to go on from: start anew, with another folder for "
            "--checkpoint and without --resume."
        )
        return CheckpointError(
            f"{self.folder(number)} is no checkpoint, or is damaged: {what}. Nothing was changed. "
            f"{go_on}" + (f"\nReason: {reason}." if reason else "")
        )

    def close(self) -> None:
        """Wait for the last save, and let others save here."""
        try:
            self.wait()
        finally:
            if "_orbax" in vars(self):
                self._orbax.close()
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    # --- inside ------------------------------------------------------------------------------

    @cached_property
    def _orbax(self) -> ocp.AsyncCheckpointer:
        """Made when it is used, for it starts JAX."""
        absl_logging.get_absl_logger().addFilter(_is_not_of_orbax)  # once, however often
        return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())

    @property
    def _name(self) -> str:
        return f"Checkpoint folder {shown(str(self.path))}"

    @contextlib.contextmanager
    def _told(self, done: str) -> Iterator[None]:
        """Errors of files and of orbax as one of ours."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self._name} cannot be {done}: {_reason(error)}. Checkpoints that were complete "
                f"stay as they are. Make room, or give a folder that can be written."
            ) from error

    def claim(self) -> None:
        """Ours alone from here on, with what earlier runs left behind removed; saving does it too.

        Raises CheckpointError where another run saves there, and where nothing can be written.
        """
        if self._lock is not None or jax.process_index() != 0:
            return
        import fcntl  # not on every system that JAX imports on

        with self._told("saved to"):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / MARKER).open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                raise CheckpointError(
                    f"{self._name} is being saved to by another run. Give this one another folder."
                ) from None
            self._lock = lock
            for entry in list(self.path.iterdir()):
                if _LEFTOVER.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)

    def _prune(self, saved: int) -> None:
        """Delete what is older than the last `keep`; not what is no checkpoint of this schema."""
        if self.keep is None:
            return
        ours = [number for number in self.numbers() if self._is_ours(number)]
        for number in ours[: -self.keep]:
            if number == saved:  # by somebody who went back
                continue
            doomed = self.folder(number).with_suffix(".deleting")
            with self._told("saved to"):
                self.folder(number).rename(doomed)
                shutil.rmtree(doomed)

    def _is_ours(self, number: int) -> bool:
        try:
            self.about(number)
        except CheckpointError:
            return False
        return True


def _reason(error: BaseException) -> str:
    """One line; orbax and tensorstore write long ones, with source locations."""
    text = getattr(error, "strerror", None) or str(error)
    line = next(iter(text.strip().splitlines()), "")
    line = re.sub(r" *\[source locations=.*", "", line)[:300].rstrip(". ")
    return line or type(error).__name__


def _file_that_failed(error: BaseException, folder: Path) -> str:
    """Of orbax's and tensorstore's pages: the file they are about, and what is the matter with it.

    "" where it is about no file. They tell causes last, and folders around the file before it.
    """
    told = str(error)
    for match in reversed(re.findall(re.escape(f"{folder}/") + r"([\w./-]+)", told)):
        name = match.rstrip("./")
        if not (folder / name).exists():
            return f"there is no {name}"
        if (folder / name).is_file():
            return f"{name} is damaged, or may not be read"
    is_of_files = re.search(f"tensorstore|zarr|{re.escape(str(folder))}", told, re.IGNORECASE)
    return f"a file in {_STATE} is missing or damaged" if is_of_files else ""


def _unless_late(before: Callable[[Any], None], problem: Any) -> None:
    """Reads that go on after another one has failed find nobody who waits for them."""
    code = getattr(problem.object, "cr_code", None)
    is_read = code is not None and _is_of_orbax(code.co_filename)
    if not is_read and str(problem.exc_value) != "Event loop is closed":
        before(problem)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Orbax logs each error, with a traceback, that it raises as well."""
    return not _is_of_orbax(record.pathname)


def _is_of_orbax(file: str) -> bool:
    return "orbax" in Path(file).parts
