"""The README's programs run as they stand there, each in a process of its own."""

import re
from pathlib import Path

import pytest

from tests.helpers import run_program

README = (Path(__file__).parent.parent / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["audit", "train"])
def test_program_runs(program, tmp_path):
    output = run_program(program, tmp_path)
    if "jaxpar.audit(" in program:
        assert "all-reduce ('tensor',) 1 2048" in output
    else:
        losses = [float(line.split()[1]) for line in output.splitlines()]
        assert len(losses) == 3 and losses[2] < losses[0]
