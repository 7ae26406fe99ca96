"""Control that depends on the device is executed: exact counts, or what they depend on."""

from pathlib import Path

import numpy as np
import pytest

from tests.audit.skeletons import (
    NUM_DATA,
    PROGRAMS,
    decided_of,
    runs_per_device,
    text_of,
)

HLO = Path(__file__).parent / "hlo"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_each_device_is_counted_as_by_hand(program):
    expected = np.repeat(PROGRAMS[program](), NUM_DATA).tolist()
    assert len(set(expected)) > 1
    text = text_of(program)
    _, runs, skeleton = decided_of(text)
    assert (runs.undecided, runs.unknown_loops, skeleton.events_end) == ((), (), None)
    found = runs_per_device(text, "all-reduce")
    if program.__name__ == "told_by_others":  # and one that tells them
        expected = [count + 1 for count in expected]
    assert found == expected
