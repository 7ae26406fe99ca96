"""The pytest plugin: a test that fails when a step communicates otherwise than it used to.

    def test_step(comm_audit):
        comm_audit(step, state, batch, mesh=mesh)
        comm_audit.expect("all-reduce", axis="tensor", count=4)

compares the step with the signature stored in `__comm__/<test file>/<test>.json` beside the test
file; `pytest --comm-update` writes it, and it belongs into version control. Installed projects have
the plugin by its entry point; it imports JAX and the auditor only when a test uses the fixture.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jaxpar.audit.budget import Budget
    from jaxpar.audit.result import Audit, Collective

FOLDER = "__comm__"

MAX_NAME = 100
"""Characters of a test's name that its file keeps; file systems take 255 bytes."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("jaxpar").addoption(
        "--comm-update",
        action="store_true",
        default=False,
        help="store what comm_audit sees as what it has to be",
    )


@pytest.fixture
def comm_audit(request: pytest.FixtureRequest) -> CommAudit:
    """Audits a step and compares its communication with the stored snapshot of this test."""
    update = bool(request.config.getoption("--comm-update"))
    return CommAudit(path=snapshot_path(request.node), update=update)


class CommAudit:
    """The fixture's value, one for each test."""

    def __init__(self, *, path: Path, update: bool) -> None:
        self.path = path
        self.update = update
        self.audit: Audit | None = None
        self._num_calls = 0

    def __call__(
        self,
        thing: Any,
        *args: Any,
        budget: Budget | str | os.PathLike[str] | None = None,
        snapshot: bool = True,
        **kwargs: Any,
    ) -> Audit:
        """`jaxpar.audit(thing, *args, **kwargs)`, compared with the snapshot, and with a budget.

        `budget` is a Budget or the path of one, seen from the test file's folder. A test's second
        call has a snapshot of its own; `snapshot=False` compares with none. AssertionError for a
        program that is incomplete, differs, exceeds the budget, or has no snapshot yet.
        """
        __tracebackhide__ = True
        from jaxpar.audit import audit

        self._num_calls += 1
        result = audit(thing, *args, **kwargs)
        self.audit = result
        _fail(_incomplete(result))
        if snapshot:
            number = f"-call{self._num_calls}" if self._num_calls > 1 else ""
            path = self.path.with_name(f"{self.path.name.removesuffix('.json')}{number}.json")
            if self.update:
                _update(path, result)
            _fail(_changed(path, result))
        if budget is not None:
            _fail(_exceeded(budget, self.path.parent.parent.parent, result))
        return result

    def expect(
        self,
        kind: str,
        *,
        axis: str | None = None,
        phase: str | None = None,
        count: int | None = None,
        payload_bytes: int | None = None,
    ) -> None:
        """Assert what the last audited program does: executions and bytes per step on a device.

        `axis` is exactly the axes, such as "tensor" or "data,tensor". Without numbers, it is enough
        that there is such a collective; `count=0` says that there is none.
        """
        __tracebackhide__ = True
        if self.audit is None:
            raise AssertionError("expect is about the last audited step; call comm_audit(…) first.")
        _fail(_unexpected(self.audit, kind, axis, phase, count, payload_bytes))


def snapshot_path(node: pytest.Item) -> Path:
    """`__comm__/<test file>/<test>.json` beside the test file, whatever the test is called.

    Characters that a file name had better not have are replaced, and then a digest of the whole
    name keeps different tests apart.
    """
    inside = node.nodeid.partition("::")[2] or node.name
    safe = _UNSAFE.sub("-", inside.replace("::", ".")).strip("-.")[:MAX_NAME]
    if safe != inside.replace("::", "."):
        digest = hashlib.sha256(inside.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        safe = f"{safe}-{digest}"
    return node.path.parent / FOLDER / node.path.stem / f"{safe}.json"


def _fail(message: str) -> None:
    __tracebackhide__ = True
    if message:
        raise AssertionError(message)


def _incomplete(result: Audit) -> str:
    if result.program.complete:
        return ""
    from jaxpar.report.audit import findings_text
    from jaxpar.report.text import as_text

    errors = [finding for finding in result.findings if finding.severity == "error"]
    return f"The audit is incomplete, so its numbers say little.\n{as_text(findings_text(errors))}"


def _changed(path: Path, result: Audit) -> str:
    """How the program differs from the snapshot; "" when it does not."""
    from jaxpar.audit.diff import compared
    from jaxpar.audit.signature import from_text, signature
    from jaxpar.errors import AuditError

    try:
        text = _stored(path)
    except FileNotFoundError:
        return (
            f"There is no snapshot {path}. Run this test with --comm-update, look at what it "
            "writes, and put it into version control."
        )
    try:
        before = from_text(text)
    except AuditError as error:
        raise AuditError(f"{path}: {error} Write it anew with --comm-update.") from None
    after = signature(result)
    if before == after:
        return ""
    from jaxpar.report.checks import diff_text
    from jaxpar.report.text import as_text

    shown = as_text(diff_text(compared(before, after), "snapshot", "now"))
    return (
        f"The communication is not that of {path}.\n\n{shown}\n"
        "If this is meant, run the test with --comm-update."
    )


def _stored(path: Path) -> str:
    from jaxpar.audit.signature import MAX_SNAPSHOT_BYTES
    from jaxpar.errors import AuditError

    with path.open("rb") as file:
        content = file.read(MAX_SNAPSHOT_BYTES + 1)
    if len(content) > MAX_SNAPSHOT_BYTES:
        raise AuditError(f"{path} has more than {MAX_SNAPSHOT_BYTES:,} bytes; it is no snapshot.")
    return content.decode("utf-8", "replace")


def _update(path: Path, result: Audit) -> None:
    """Write the snapshot, at once or not at all: several workers may run, and one be stopped."""
    from jaxpar.audit.signature import signature, to_text

    text = to_text(signature(result)).encode("utf-8", "backslashreplace")
    with contextlib.suppress(OSError):
        if path.read_bytes() == text:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        Path(temporary).chmod(0o644)  # mkstemp makes it private; this is source code
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _exceeded(budget: Budget | str | os.PathLike[str], folder: Path, result: Audit) -> str:
    from jaxpar.audit.budget import Budget, check
    from jaxpar.report.checks import budget_text
    from jaxpar.report.text import as_text

    limits = budget if isinstance(budget, Budget) else Budget.load(folder / budget)
    violations = check(limits, result)
    return as_text(budget_text(violations)) if violations else ""


def _unexpected(
    result: Audit,
    kind: str,
    axis: str | None,
    phase: str | None,
    count: int | None,
    payload_bytes: int | None,
) -> str:
    """What is otherwise than expected, and what there is; "" when all is as expected."""
    from jaxpar.audit.budget import Limit, check_axes
    from jaxpar.audit.grouping import add_up, divided
    from jaxpar.report.audit import audit_table, sum_text
    from jaxpar.report.text import as_text

    where = Limit(kind=kind, axis=axis, phase=phase)  # checks that they can be
    check_axes(where, result)
    portions = [
        portion
        for found in result.collectives
        if found.kind == kind and _is_over(found, where.axes)
        for key, portion in divided(found, lambda buffer: phase in (None, buffer.phase)).items()
        if key
    ]
    actual = add_up(portions)
    wanted = {"count": count, "payload_bytes": payload_bytes}
    wrong = [
        f"{key} is {sum_text(getattr(actual, key))}, not {value}"
        for key, value in wanted.items()
        if value is not None and getattr(actual, key).exact != value
    ]
    if not portions and all(value is None for value in wanted.values()):
        wrong = ["there is none"]
    if not wrong:
        return ""
    return f"{where}: {' and '.join(wrong)}.\n\n{as_text([audit_table(result)])}"


def _is_over(found: Collective, axes: tuple[str, ...]) -> bool:
    return not axes or (found.axes is not None and set(axes) == set(found.axes))
