"""All tests: 8 virtual CPU devices, strict dtype promotion."""

import os

import jax
import pytest

from jaxpar.mesh import use_cpu_devices

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# LLVM works on what comes after the HLO; without its optimizations tests compile a third faster.
jax.config.update("jax_disable_most_optimizations", True)
if jax.__version_info__ < (0, 11):
    # This XLA can still emit fusions the old way, which halves a test's time; newer ones can not.
    os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"
use_cpu_devices(8)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    """Nothing a test writes lands in the checkout."""
    monkeypatch.chdir(tmp_path)
