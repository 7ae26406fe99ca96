"""What all verbs of the command line print and write with."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxpar.errors import JaxparError

WIDTH_WHEN_PIPED = 160
"""Columns of what goes to a file, where there is no terminal to ask."""

Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON to this file.")]


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
        if isinstance(part, Table):
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


def check_writable(*paths: Path | None) -> None:
    """Before minutes of work, not after it."""
    for path in paths:
        if path is None:
            continue
        try:
            if path.is_dir() or not path.resolve().parent.is_dir():
                raise JaxparError(f"Cannot write {path}: no such folder, or a folder itself.")
            if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
                raise JaxparError(f"Cannot write {path}: permission denied.")
        except OSError as error:  # such as a name that is too long
            raise JaxparError(f"Cannot write {path}: {error.strerror}.") from None


def write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise JaxparError(f"Cannot write {path}: {error.strerror}.") from None


def write_json(path: Path | None, data: dict[str, Any]) -> None:
    if path is not None:
        write(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
