"""These tests compile programs for the HLO they print, and run them on a few numbers."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def machine_code_as_it_comes():
    """LLVM works on what comes after the HLO: leave its optimizations out."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
