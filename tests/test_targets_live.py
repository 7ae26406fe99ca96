"""Real compilers, where they are installed; where not, what says so.

pip install "jaxpar[tpu,cuda13]" && python -m pytest tests/test_targets_live.py
"""

import importlib.metadata

import pytest

from jaxpar.errors import OutOfDeviceMemoryError, TargetError
from jaxpar.targets import Cache, Target, compile_for
from jaxpar.targets.changes import changes
from jaxpar.targets.compiler import compile_module
from jaxpar.targets.placement import place
from tests.helpers import step

TARGETS = {
    "v5e:2x4": ("libtpu", {"fsdp": "ICI y", "tensor": "ICI x"}),
    "h100:2x4": ("jax-cuda13-plugin", {"fsdp": "between hosts + NVLink", "tensor": "NVLink"}),
}


def _is_installed(target: str) -> bool:
    names = {found.name for found in importlib.metadata.distributions()}
    return TARGETS[target][0] in names


def _step():
    return step("fsdp=4,tensor=2", sequence=True, zero=3, compute_dtype="bfloat16")


@pytest.mark.parametrize("target", TARGETS)
def test_a_step_is_compiled_and_moves_what_its_closed_form_says(target, tmp_path):
    cache = Cache(tmp_path)
    if not _is_installed(target):
        with pytest.raises(TargetError, match=r'Install .* pip install "jaxpar\['):
            compile_for(_step(), target, cache=cache)
        return
    stages = []
    result = compile_for(
        _step(), target, cache=cache, progress=lambda stage, seconds, rss: stages.append(stage)
    )
    assert result.changes.agrees and len(result.changes.over) >= 3
    closed = changes(result.expected, result.audit)
    assert closed.agrees
    links = {
        it.axes[0]: result.links(it)
        for it in result.audit.collectives
        if it.axes and len(it.axes) == 1
    }
    assert links == TARGETS[target][1]
    assert result.fits and 0 < result.compiled.device_bytes < 1 << 30
    assert result.audit.program.platform == Target.parse(target).platform
    assert {"compiling", "auditing"} <= set(stages)
    again = compile_for(_step(), target, cache=cache)
    assert again.compiled.from_cache and again.compiled.text == result.compiled.text


@pytest.mark.parametrize("target", TARGETS)
def test_an_option_that_the_compiler_does_not_know_is_told(target):
    known = _is_installed(target)
    told = r"does not take option xla_no_such=True" if known else "which is not installed"
    with pytest.raises(TargetError, match=told):
        compile_for(_step(), target, options={"xla_no_such": True})


def test_a_program_that_does_not_fit_says_by_how_much():
    import jax
    import jax.numpy as jnp

    from jaxpar import compat

    target = Target.parse("v5e:1x1")
    x = jax.ShapeDtypeStruct((3 << 30,), jnp.float32)
    lowered = jax.jit(lambda x: x + 1.0).trace(x).lower(lowering_platforms=("tpu",))
    kind = OutOfDeviceMemoryError if _is_installed("v5e:2x4") else TargetError
    with pytest.raises(kind) as caught:
        compile_module(
            compat.portable_module(lowered),
            target=target,
            placement=place({"data": 1}, target.dims, str(target)),
        )
    if kind is OutOfDeviceMemoryError:
        error = caught.value
        assert error.used_bytes >= 24 << 30 and error.available_bytes < 16 << 30
