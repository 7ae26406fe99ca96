"""What the tests of findings share: a mesh, programs compiled on it, what rules find in a text."""

import gzip
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.audit.source import read

AXES = {"data": 2, "tensor": 4}
ROWS = P("tensor")
BOTH = P(("data", "tensor"))
HLO = Path(__file__).parent / "hlo"


def compiled(function, *shapes, into=ROWS, out=BOTH, without=""):
    """The HLO of a function of arrays; `without` names passes of XLA that do not run."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes or [(32, 8)]]
    options = {"xla_disable_hlo_passes": without} if without else {}
    if jax.__version_info__ < (0, 11):  # what a user's program becomes, not what conftest asks for
        options["xla_cpu_use_fusion_emitters"] = True
    return jax.jit(mapped).lower(*args).compile(compiler_options=options).as_text()


def found(text, rules, mesh=AXES):
    """All that `rules` find, in a text that is intact."""
    reading, problems = read(text, mesh)
    assert not [problem for problem in problems if problem.severity == "error"]
    return [finding for rule in rules for finding in rule(reading)]


def dump(name):
    return gzip.open(HLO / f"{name}.txt.gz", "rt").read()


def vary(x, axis="tensor"):
    """`x`, which is the same along an axis, as a value that may differ there."""
    return lax.pcast(x, axis, to="varying")
