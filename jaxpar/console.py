"""What all verbs of the command line print and write with."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperCommand

from jaxpar.errors import JaxparError, shown

FAILED, BAD_INPUT, INCOMPLETE = 1, 2, 3
"""Exit codes: a check failed; what was asked for cannot be; only a part of a program was given."""

WIDTH_WHEN_PIPED = 160
"""Columns of what goes to a file, where there is no terminal to ask."""

Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON to this file.")]


class Verb(TyperCommand):
    """A verb whose errors name the options that were typed: `--steps`, and not `num_steps`.

    Its function's parameters are called like the fields that they fill, and its options may be
    called otherwise.
    """

    def invoke(self, ctx: Any) -> Any:
        options = {parameter.name: max(parameter.opts, key=len) for parameter in self.params}
        renamed = {
            field: (option, ctx.params[field])
            for field, option in options.items()
            if field in ctx.params and option.lstrip("-").replace("-", "_") != field
        }
        with typed(renamed):
            return super().invoke(ctx)


@contextmanager
def typed(options: Mapping[str, tuple[str, Any]]) -> Iterator[None]:
    """By field, which option it was filled with and by what value: so are they told in errors.

    Only where an error gives the field this value. Of a script, a mesh file or another option it
    may have another, and there its own name is right.
    """
    try:
        yield
    except JaxparError as error:
        text = str(error)
        for field, (option, value) in options.items():
            if re.search(rf"\b{re.escape(f'{field}={shown(value)}')}(?!\.?\w)", text):
                text = re.sub(rf"(?<![\w./'\"]){field}(?![\w/'\"]|\.\w)", option, text)
        error.args = (text,)
        raise


def open_console() -> Console:
    console = Console()
    if console.is_terminal:
        return console
    return Console(width=WIDTH_WHEN_PIPED, file=cast(TextIO, _WithoutTrailingSpace()))


@dataclass(kw_only=True)
class Answer:
    """What a verb prints, in order, what goes to its JSON file, and the exit code."""

    shown: list[RenderableType]
    data: dict[str, Any]
    code: int = 0


def tell(said: Answer, json_path: Path | None) -> None:
    """Print it, write its JSON where that is asked for, and end with its exit code."""
    show(said.shown)
    write_json(json_path, said.data)
    if said.code:
        raise typer.Exit(said.code)


def show(parts: Iterable[RenderableType], console: Console | None = None) -> None:
    """Print what a verb answers, in order: tables, and text that is not to be wrapped."""
    console = console or open_console()
    for part in parts:
        if isinstance(part, Table) and not part.show_header:  # prose, which may wrap
            console.print(part)
        elif isinstance(part, Table):
            print_table(console, part)
        else:
            console.print(part, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """As wide as it has to be: the terminal may wrap a line, but no number is cut off."""
    from jaxpar.report.text import MAX_WIDTH

    needed = console.measure(table, options=console.options.update(width=MAX_WIDTH)).maximum
    console.width = max(console.width, needed)
    console.print(table)


class _WithoutTrailingSpace:
    """Standard output for what is piped: tables pad their lines, and files need not."""

    def write(self, text: str) -> None:
        sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def flush(self) -> None:
        sys.stdout.flush()


def progress_bar() -> Progress:
    """On stderr, and gone when done: the table is what stays."""
    name = TextColumn("{task.description}", markup=False)
    columns = name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Ctrl-C ends the process here: in an orderly end Python takes from XLA's threads, which go on
    to compile, what they need, and they crash."""
    try:
        yield
    except KeyboardInterrupt:
        print("jaxpar: interrupted, and nothing was written.", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + signal.SIGINT)


def check_writable(*files: Path | None, folders: Iterable[Path | None] = ()) -> None:
    """Before minutes of work, not after it. Of `folders` each may be there or not.

    What they are in has to be there: a path with a slip of the pen would make a place that nobody
    looks into.
    """
    for path, is_folder in (*((f, False) for f in files), *((f, True) for f in folders)):
        if path is None:
            continue
        try:
            problem = _why_not_writable(path, is_folder)
        except OSError as error:  # such as a name that is too long
            problem = error.strerror
        if problem:
            raise JaxparError(f"Cannot write {path}: {problem}.")


def _why_not_writable(path: Path, is_folder: bool) -> str | None:
    parent = path.resolve().parent
    if not parent.is_dir():
        return f"no such folder as {parent}; make it first"
    if path.exists() and path.is_dir() != is_folder:
        return "it is a file, and has to be a folder" if is_folder else "it is a folder"
    may = os.access(path if path.exists() else parent, os.W_OK)
    return None if may else "permission denied"


def write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise JaxparError(f"Cannot write {path}: {error.strerror}.") from None


def write_json(path: Path | None, data: dict[str, Any]) -> None:
    if path is not None:
        write(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
