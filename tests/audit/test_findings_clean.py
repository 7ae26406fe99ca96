"""Our own training steps: nothing to find in them, however small."""

import pytest
from helpers import step

from jaxpar.audit.findings import gathered, gathers, loops, placement, redundant, reshards
from jaxpar.audit.source import read

WORTH_A_WARNING = (*redundant.RULES, *loops.RULES)
WORTH_A_WORD = (*gathers.RULES, *reshards.RULES, *placement.RULES)


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("data=8", {}),
        ("data=2,tensor=4", {}),
        ("data=2,tensor=4", {"num_accumulation_steps": 2, "sequence": True}),
        ("data=2,fsdp=4", {"num_accumulation_steps": 2, "remat": "full"}),
    ],
)
def test_our_own_steps_have_no_finding(mesh, fields, monkeypatch):
    for module in (gathered, gathers, reshards):
        monkeypatch.setattr(module, "MIN_BYTES", 0)
    monkeypatch.setattr(gathers, "MIN_STACK_BYTES", 0)
    ours = step(mesh, **fields)
    text = ours.jitted.lower(*ours.abstract_inputs).compile().as_text()
    axes = {name: int(size) for name, size in (it.split("=") for it in mesh.split(","))}
    reading, problems = read(text, axes, devices_per_host=4)
    assert not problems
    assert [found for rule in WORTH_A_WORD for found in rule(reading)] == []
    found = [found for rule in WORTH_A_WARNING for found in rule(reading)]
    assert [one for one in found if one.severity == "warning"] == []
