"""Live bytes: by hand where the answer is known, and against XLA's own analysis."""

import gzip
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpar.audit import audit
from jaxpar.audit.memory import live_peak, memory
from jaxpar.audit.reader import read_hlo

HLO = Path(__file__).parent / "hlo"
MIB = 1 << 20

ENTRY = """HloModule m, is_scheduled=true, num_partitions=1{header}

{others}ENTRY %main (p: f32[262144]) -> f32[262144] {{
  %p = f32[262144]{{0}} parameter(0)
{lines}
}}
"""


def module(lines, header="", others=""):
    return read_hlo(ENTRY.format(lines=lines.strip("\n"), header=header, others=others))


def peak(lines, **kwargs):
    live = live_peak(module(lines, **kwargs))
    return live.nbytes / MIB, [found.name for _, found in live.largest]


def test_a_chain_holds_argument_value_and_next_value():
    lines = """
  %a = f32[262144]{0} negate(%p)
  %b = f32[262144]{0} negate(%a)
  %c = f32[262144]{0} negate(%b)
  ROOT %d = f32[262144]{0} negate(%c)"""
    assert peak(lines) == (3.0, ["p", "a", "b"])


def test_a_value_read_late_stays_alive():
    lines = """
  %a = f32[262144]{0} negate(%p)
  %b = f32[262144]{0} negate(%a)
  %c = f32[262144]{0} negate(%b)
  ROOT %d = f32[262144]{0} add(%c, %a)"""
    assert peak(lines) == (4.0, ["p", "a", "b", "c"])


def test_the_same_memory_counts_once():
    lines = """
  %a = f32[262144]{0} negate(%p)
  %v = f32[512,512]{1,0} bitcast(%a)
  %t = (f32[512,512]{1,0}, f32[262144]{0}) tuple(%v, %p)
  %e = f32[512,512]{1,0} get-tuple-element(%t), index=0
  ROOT %r = f32[262144]{0} bitcast(%e)"""
    assert peak(lines) == (2.0, ["p", "a"])


def test_an_element_does_not_keep_the_others_alive():
    lines = """
  %t = (f32[262144]{0}, f32[524288]{0}) custom-call(%p), custom_call_target="f"
  %e = f32[262144]{0} get-tuple-element(%t), index=0
  %big = f32[1048576]{0} custom-call(%e), custom_call_target="g"
  ROOT %r = f32[262144]{0} custom-call(%big), custom_call_target="h"
"""
    # p, e and big; the second result of %t is gone by then.
    assert peak(lines) == (6.0, ["big", "p", "t"])


def test_an_update_in_place_takes_no_memory():
    lines = """
  %i = s32[] constant(0)
  %u = f32[8]{0} broadcast(%i), dimensions={}
  %a = f32[262144]{0} negate(%p)
  ROOT %r = f32[262144]{0} dynamic-update-slice(%a, %u, %i)"""
    assert peak(lines)[0] == pytest.approx(2.0, abs=1e-4)
    read_later = lines.replace("ROOT %r", "%r") + "\n  ROOT %s = f32[262144]{0} add(%r, %a)"
    assert peak(read_later)[0] == pytest.approx(4.0, abs=1e-4)


def test_a_donated_argument_is_the_output():
    line = "  ROOT %r = f32[262144]{0} negate(%p)"
    donated = ", input_output_alias={ {}: (0, {}, may-alias) }"
    assert peak(line)[0] == 2.0
    assert peak(line, header=donated)[0] == 1.0


def test_host_memory_is_not_device_memory():
    line = "  ROOT %r = f32[262144]{0:S(5)} copy(%p)"
    assert peak(line)[0] == 1.0


LOOP = """%body (s: (s32[], f32[262144])) -> (s32[], f32[262144]) {
  %s = (s32[], f32[262144]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[262144]{0} get-tuple-element(%s), index=1
  %t = f32[524288]{0} custom-call(%x), custom_call_target="f"
  %y = f32[262144]{0} custom-call(%t), custom_call_target="g"
  ROOT %n = (s32[], f32[262144]{0}) tuple(%i, %y)
}

%cond (c: (s32[], f32[262144])) -> pred[] {
  %c = (s32[], f32[262144]{0}) parameter(0)
  ROOT %k = pred[] constant(false)
}

"""


def test_a_loop_holds_its_state_and_what_one_trip_needs():
    lines = """
  %z = s32[] constant(0)
  %a = f32[262144]{0} negate(%p)
  %t0 = (s32[], f32[262144]{0}) tuple(%z, %a)
  %w = (s32[], f32[262144]{0}) while(%t0), condition=%cond, body=%body
  ROOT %r = f32[262144]{0} get-tuple-element(%w), index=1"""
    size, names = peak(lines, others=LOOP)
    assert size == pytest.approx(4.0, abs=1e-4)  # p, a (the state), t; y takes the place of x
    assert names[:3] == ["t", "p", "a"]


def test_what_starts_and_what_is_done_are_one_buffer():
    lines = """
  %s = (f32[262144]{0}, f32[524288]{0}) all-gather-start(%p), replica_groups={{0,1}}, dimensions={0}
  %d = f32[524288]{0} all-gather-done(%s)
  ROOT %r = f32[262144]{0} custom-call(%d), custom_call_target="f"
"""
    assert peak(lines)[0] == 4.0


def test_without_a_schedule_nothing_is_said():
    with gzip.open(HLO / "fsdp.postspmd.cpu.txt.gz", "rt") as file:
        told = memory(read_hlo(file.read()))
    assert told.argument_bytes > 0
    assert (told.live_bytes, told.largest, told.temp_bytes) == (None, (), None)


def layers(x, ws):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


PROGRAMS = {
    "scan": (layers, [(64, 256), (6, 256, 256)]),
    "gradient of a scan": (
        lambda x, ws: jax.grad(lambda w: layers(x, w).sum())(ws),
        [(64, 256), (6, 256, 256)],
    ),
    "recomputed": (
        lambda x, ws: jax.grad(lambda w: jax.checkpoint(layers)(x, w).sum())(ws),
        [(64, 256), (6, 256, 256)],
    ),
    "accumulated": (
        lambda xs, w: lax.scan(
            lambda g, x: (g + jax.grad(lambda v: jnp.tanh(x @ v).sum())(w), None),
            jnp.zeros_like(w),
            xs,
        )[0],
        [(4, 32, 256), (256, 512)],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_close_to_what_xla_allocates(name):
    """Within 10 % of arguments + temporaries + outputs; the rest is alignment and reuse."""
    function, shapes = PROGRAMS[name]
    inputs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    told = audit(jax.jit(function), *inputs).memory
    allocated = told.argument_bytes + told.temp_bytes + told.output_bytes
    assert told.live_bytes == pytest.approx(allocated, rel=0.1)
    assert 1 <= len(told.largest) <= 5
    assert [b.nbytes for b in told.largest] == sorted(b.nbytes for b in told.largest)[::-1]
    assert any(buffer.source for buffer in told.largest)
