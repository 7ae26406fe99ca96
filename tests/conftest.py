"""All tests: 8 virtual CPU devices, strict dtype promotion."""

import jax
import pytest

from jaxpar.mesh import use_cpu_devices

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# LLVM works on what comes after the HLO; without its optimizations tests compile a third faster.
jax.config.update("jax_disable_most_optimizations", True)
use_cpu_devices(8)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    """Nothing a test writes lands in the checkout."""
    monkeypatch.chdir(tmp_path)
