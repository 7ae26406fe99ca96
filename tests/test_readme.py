"""The README's programs run as they stand there, each in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["audit", "train"])
def test_program_runs(program, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if "jaxpar.audit(" in program:
        assert "all-reduce ('tensor',) 1 2048" in done.stdout
    else:
        losses = [float(line.split()[1]) for line in lines]
        assert len(losses) == 3 and losses[2] < losses[0]
