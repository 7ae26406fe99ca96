"""The launch files that users copy: what JAX's detection and the command line need of them."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml  # Flax needs it

from jaxpar.cli import app

FILES = sorted((Path(__file__).parent.parent / "examples" / "launch").iterdir())
MANIFESTS = [file for file in FILES if file.suffix == ".yaml"]
SCRIPTS = [file for file in FILES if file.suffix != ".yaml"]


def manifests(file):
    return {one["kind"]: one for one in yaml.safe_load_all(file.read_text())}


def job_spec(file):
    found = manifests(file)
    if "Job" in found:
        return found["Job"]["spec"]
    (replicated,) = found["JobSet"]["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1  # JAX counts the pods of one job
    return replicated["template"]["spec"]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_scripts_are_bash(file):
    done = subprocess.run(["bash", "-n", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "set -euo pipefail" in file.read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_command_is_one_of_ours(file):
    text = file.read_text().replace("\\\n", " ")
    (command,) = re.findall(r"jaxpar run (train\.py .*)", text)
    words = [word for word in shlex.split(command) if not word.startswith("$")]
    run = typer.main.get_command(app).commands["run"]
    with run.make_context("run", words) as context:
        assert context.params["mesh"] == "slice=2,fsdp=8"
        assert str(context.params["checkpoint"]).endswith("saved")
    with pytest.raises(Exception, match="No such option"):
        run.make_context("run", [*words, "--no-such-option"])
    assert "-e saved/jaxpar-checkpoints" in text or "-e /data/saved/jaxpar-checkpoints" in text


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_pods_are_as_jax_looks_for_them(file):
    spec = job_spec(file)
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] == 2
    assert spec["backoffLimit"] == 0  # nobody waits for one that failed
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["serviceAccountName"] == "jaxpar"
    (container,) = pod["containers"]
    assert "exec jaxpar run" in container["command"][-1]  # or SIGTERM ends at the shell


def test_the_job_s_pods_have_names_and_rights():
    found = manifests(next(file for file in MANIFESTS if "Job" in manifests(file)))
    name = found["Service"]["metadata"]["name"]
    assert found["Service"]["spec"]["clusterIP"] == "None"
    assert found["Service"]["spec"]["selector"] == {"job-name": found["Job"]["metadata"]["name"]}
    assert found["Job"]["spec"]["template"]["spec"]["subdomain"] == name
    may = {
        (what, verb)
        for r in found["Role"]["rules"]
        for what in r["resources"]
        for verb in r["verbs"]
    }
    assert {("pods", "list"), ("services", "list"), ("jobs", "get")} <= may
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
