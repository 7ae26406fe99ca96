"""What `jaxpar audit` does between its options and its output."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from jaxpar import console
from jaxpar.audit.budget import Budget, check
from jaxpar.audit.diff import diff
from jaxpar.audit.grouping import GROUPINGS, by_outer_axis, grouped
from jaxpar.audit.result import Audit
from jaxpar.console import FAILED, INCOMPLETE
from jaxpar.errors import AuditError, in_a_line, require_choice, shown
from jaxpar.report import audit as report
from jaxpar.report.checks import budget_text, diff_text
from jaxpar.report.text import literal

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_SHOWN_DEVICES = 16
"""Rows of a matrix in a terminal; of more devices, it is shown by the outermost axis."""

MAX_JSON_DEVICES = 256

_REFERENCE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
_WANTED = (
    "a function without arguments that returns what can be audited: (jitted, *arguments), a "
    "Lowered, a Compiled, HLO text; or a jitted function without arguments"
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of one `jaxpar audit`; `options` are what `jaxpar.audit` takes by keyword."""

    what: str
    mesh: str | None = None
    group_by: str | None = None
    matrix: bool = False
    budget: Path | None = None
    against: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


class Answer(console.Answer):
    """Of an audit, in sections."""

    def add(self, parts: Iterable[RenderableType]) -> None:
        """A section below what is there, after an empty line (which a table brings along)."""
        new = list(parts)
        if new and self.shown and not isinstance(self.shown[-1], Table):
            self.shown.append(Text())
        self.shown += new


def answer(request: Request) -> Answer:
    """Audit, and check what was asked for. JaxparError for bad input of any kind."""
    if request.group_by is not None:
        require_choice(AuditError, "--group-by", request.group_by, GROUPINGS)
    budget = None if request.budget is None else Budget.load(request.budget)
    thing = target(request.what)
    result = _audited(thing, request, request.mesh)
    said = Answer(shown=list(_overview(result, request)), data=result.to_json())
    incomplete = not result.program.complete
    if request.group_by is not None:
        groups = [group.to_json() for group in grouped(result, request.group_by)]
        said.data["groups"] = {"by": request.group_by, "groups": groups}
    if request.matrix:
        _show_matrix(result, said)
    said.add(report.exposure_text(result))
    if result.memory is not None:
        said.add(report.memory_text(result.memory))
    said.add(report.findings_text(result.findings))
    if budget is not None:
        violations = check(budget, result)
        said.add(budget_text(violations))
        rows = [violation.to_json() for violation in violations]
        said.data["budget"] = {"kept": not violations and not incomplete, "violations": rows}
        said.code = FAILED if violations else said.code
    if request.against is not None:
        other, result = _on_one_mesh(request.against, request, thing, result)
        incomplete = incomplete or not other.program.complete
        changed = diff(other, result)
        said.add(diff_text(changed, request.against, request.what))
        said.data["against"] = {"what": request.against, **changed.to_json()}
        said.code = said.code if changed.same else FAILED
        if not other.program.complete:
            said.add([literal(f"{request.against} is incomplete:", style="bold red")])
            said.shown += report.findings_text(_errors(other))
    said.code = INCOMPLETE if incomplete else said.code
    return said


def _overview(result: Audit, request: Request) -> Iterable[RenderableType]:
    if request.group_by is None:
        yield report.audit_table(result)
    else:
        groups = grouped(result, request.group_by)
        yield report.groups_table(report.audit_title(result), request.group_by, groups)


def _errors(result: Audit) -> list[Any]:
    return [finding for finding in result.findings if finding.severity == "error"]


def _show_matrix(result: Audit, said: Answer) -> None:
    num_devices = result.program.num_devices
    if num_devices is None:
        raise AuditError("The text does not say how many devices there are; name them by --mesh.")
    from jaxpar.audit.matrix import byte_matrix

    try:
        matrix = byte_matrix(result.collectives, num_devices)
    except AuditError as error:  # an unknown count, say: the rest of the audit is worth showing
        said.data["matrix"] = None
        said.shown.append(literal(f"No matrix: {error}", style="yellow"))
        return
    told = num_devices <= MAX_JSON_DEVICES
    said.data["matrix"] = matrix.tolist() if told else None
    outer = by_outer_axis(matrix, result.mesh)
    title = "Bytes from each device (row) to each (column), per step"
    if num_devices <= MAX_SHOWN_DEVICES:
        names = [str(device) for device in range(num_devices)]
        said.shown.append(report.matrix_table(matrix, names, title))
        return
    if outer is not None and len(outer[0]) <= MAX_SHOWN_DEVICES:
        title = "Bytes from all devices of a row to all of a column, per step"
        said.shown.append(report.matrix_table(outer[1], outer[0], title))
    where = "is in what --json writes" if told else f"has over {MAX_JSON_DEVICES} rows: not written"
    said.shown.append(Text(f"The matrix of all {num_devices} devices {where}."))


def _audited(thing: tuple[Any, ...], request: Request, mesh: Any) -> Audit:
    from jaxpar.audit import audit

    if isinstance(mesh, str) and "=" not in mesh:
        from jaxpar.mesh import MeshSpec  # imports JAX

        mesh = MeshSpec.load(mesh)
    return audit(*thing, mesh=mesh, **request.options)


def _on_one_mesh(
    against: str, request: Request, thing: tuple[Any, ...], result: Audit
) -> tuple[Audit, Audit]:
    """Both audits, with the same names of axes where one of them knows and both fit."""
    others = target(against)
    other = _audited(others, request, request.mesh)
    if other.program.num_devices == result.program.num_devices:
        if other.mesh is None and result.mesh is not None:
            other = _audited(others, request, result.mesh)
        elif result.mesh is None and other.mesh is not None:
            result = _audited(thing, request, other.mesh)
    return other, result


# --- module:fn -------------------------------------------------------------------------------


def target(what: str) -> tuple[Any, ...]:
    """What to audit, and its arguments: a path as it is, or what `module:fn` stands for.

    The module is imported from the current folder or wherever Python finds it. AuditError for one
    that cannot be imported, and for a function that gives nothing to audit.
    """
    match = _REFERENCE.fullmatch(what)
    if match is None or Path(what).exists():
        return (Path(what),)
    found = _imported(match[1])
    if not hasattr(found, match[2]):
        raise AuditError(f"Module {match[1]} has no {match[2]!r}. Name {_WANTED}.")
    found = getattr(found, match[2])
    if callable(found) and not callable(getattr(found, "lower", None)) and not _is_stage(found):
        found = _returned(found, what)
    things = found if isinstance(found, tuple) else (found,)
    auditable = things and (isinstance(things[0], str | Path) or _is_stage(things[0]))
    if not auditable and not (things and callable(getattr(things[0], "lower", None))):
        raise AuditError(f"{what} gives {shown(found)}, which is no program. Name {_WANTED}.")
    return things


def _is_stage(thing: Any) -> bool:
    from jax import stages

    return isinstance(thing, stages.Lowered | stages.Compiled)


def _imported(name: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise AuditError(
                f"There is no module {error.name!r} here or installed. Write a path, or "
                "module:function as in an import."
            ) from error
        raise AuditError(f"Module {name} cannot be imported: {in_a_line(error)}.") from error
    except (Exception, SystemExit) as error:
        raise AuditError(
            f"Module {name} cannot be imported: {in_a_line(error)}. "
            f'`python -c "import {name}"` shows where.'
        ) from error


def _returned(function: Any, what: str) -> Any:
    """What the function gives when it is called."""
    try:
        needed = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):  # something built in
        needed = []
    if needed:
        raise AuditError(f"{what} wants arguments ({', '.join(needed)}). Name {_WANTED}.")
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise AuditError(f"{what} failed: {in_a_line(error)}.") from error
