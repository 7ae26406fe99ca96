"""`import jaxpar` is cheap and starts nothing; every module stands alone and stays short."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar

PACKAGE = Path(jaxpar.__file__).parent
MODULES = ["jaxpar", *(m.name for m in pkgutil.walk_packages([str(PACKAGE)], "jaxpar."))]


def run_fresh(code: str) -> str:
    """What `code` prints in a Python of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_costs_little():
    """The best of three fresh processes, since a busy machine only makes it slower."""
    code = """
import time
import jax
started = time.perf_counter()
import jaxpar
print(time.perf_counter() - started)
"""
    assert min(float(run_fresh(code)) for _ in range(3)) < 1


def test_import_starts_no_backend():
    code = """
import sys, jaxpar
heavy = {"jax", "flax", "optax", "rich", "typer"} & sys.modules.keys()
from jaxpar.compat import backends_are_up
before = backends_are_up()
for name in jaxpar.__all__:
    getattr(jaxpar, name)
print(heavy, before, backends_are_up())
"""
    assert run_fresh(code) == "set() False False"


def test_import_of_everything_starts_no_backend():
    code = f"""
import importlib
for name in {MODULES}:
    importlib.import_module(name)
from jaxpar.compat import backends_are_up
print(backends_are_up())
"""
    assert run_fresh(code) == "False"


def test_every_module_can_be_imported_first():
    """No cycle that only the usual order hides: each in turn, with no other of ours loaded."""
    code = f"""
import importlib, sys
for first in {MODULES}:
    for name in [name for name in sys.modules if name.partition(".")[0] == "jaxpar"]:
        del sys.modules[name]
    try:
        importlib.import_module(first)
    except ImportError as error:
        print(first, error)
"""
    assert run_fresh(code) == ""


@pytest.mark.parametrize("name", jaxpar.__all__)
def test_public_names(name):
    assert name in dir(jaxpar)
    assert callable(getattr(jaxpar, name))
    assert getattr(jaxpar, name).__module__.startswith("jaxpar.")


def test_public_names_are_what_type_checkers_see():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("jaxpar.")
        for alias in node.names
    }
    assert sorted(imported) == sorted(jaxpar.__all__)
    for name, module in imported.items():
        assert getattr(jaxpar, name) is getattr(importlib.import_module(module), name)


def test_audit_is_the_function_whatever_was_imported_before():
    for first in ("import jaxpar", "import jaxpar.audit.compare", "import jaxpar.audit.source"):
        code = f"""
{first}
import types, jaxpar
assert isinstance(jaxpar.audit, types.FunctionType)
from jaxpar.audit.compare import compare
assert jaxpar.compare is compare
assert isinstance(jaxpar.audit, types.FunctionType)
from jaxpar import audit
print(audit is jaxpar.audit)
"""
        assert run_fresh(code) == "True"


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'jaxpar' has no attribute 'adit'"):
        jaxpar.adit  # noqa: B018
    assert not hasattr(jaxpar, "__wrapped__")
    with pytest.raises(ImportError, match="adit"):
        exec("from jaxpar import adit", {})


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_short(name):
    path = PACKAGE.parent.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= (300 if name.startswith("jaxpar.strategies") else 600)
