"""What opcodes mean: random programs on device numbers, evaluated and run by XLA on the CPU."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxpar.audit.plan import Unknown
from jaxpar.compat import compiled_text
from tests.audit.skeletons import returned

NUM_DEVICES = 8
DTYPES = ("int32", "uint32", "int8", "uint8")
SHAPES = ((), (3,), (2, 3))


def edges(dtype, chance):
    """Numbers at which integer arithmetic is special, one per device."""
    info = np.iinfo(dtype)
    bits = info.bits
    special = [0, 1, 2, 3, 7, info.max, info.max - 1, info.min, info.min + 1, bits - 1, bits]
    special += [bits + 1, chance.randrange(info.min, info.max + 1), -1 % (info.max + 1)]
    special += [-1, -2, -7] if info.min < 0 else []
    return np.array([chance.choice(special) for _ in range(NUM_DEVICES)], dtype)


def leaf(dtype, shape, device, chance):
    """Another number on each device, and in each element."""
    size = int(np.prod(shape))
    columns = np.stack([edges(dtype, chance) for _ in range(size)], axis=1)
    return jnp.asarray(columns)[device].reshape(shape)


def binary(x, y, chance):
    return chance.choice(
        (
            *(lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min),
            *(lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic),
            *(lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor),
        )
    )(x, y)


def compared(x, y, chance):
    test = chance.choice((lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge))(x, y)
    if chance.random() < 0.3:
        test = lax.bitwise_not(test)
    return lax.select(test, y, x)


def unary(x, y, chance):
    functions = [lax.bitwise_not, lax.abs if x.dtype.kind == "i" else lax.bitwise_not, lax.neg]
    return chance.choice([*functions, lax.sign])(x)


def clamped(x, y, chance):
    low, high = (jnp.asarray(number, x.dtype) for number in sorted(chance.sample(range(9), 2)))
    return lax.clamp(low, x, high)


def converted(x, y, chance):
    other = {"int32": "uint32", "uint32": "int32", "int8": "uint8", "uint8": "int8"}[x.dtype.name]
    if chance.random() < 0.5:
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, other) + 1, x.dtype)
    way = chance.choice(("int8", "int32", "uint32", "bool"))
    return lax.convert_element_type(lax.convert_element_type(x, way), x.dtype)


def moved(x, y, chance):
    """To another place in an array of the same shape."""
    if x.ndim == 0:
        return y
    axis = chance.randrange(x.ndim)
    start = [lax.convert_element_type(y.reshape(-1)[i], "int32") for i in range(x.ndim)]
    half = [1 if i == axis else size for i, size in enumerate(x.shape)]
    match chance.randrange(6):
        case 0:
            return lax.rev(x, (axis,))
        case 1:
            return lax.concatenate([x, y], axis)[tuple(slice(1, n + 1) if i == axis else slice(None)
                                                       for i, n in enumerate(x.shape))]  # fmt: skip
        case 2:
            return jnp.broadcast_to(lax.dynamic_slice(x, start, half), x.shape)
        case 3:
            return lax.dynamic_update_slice(x, lax.dynamic_slice(y, start, half), start)
        case 4:
            return x.T.reshape(x.shape) + lax.broadcasted_iota(x.dtype, x.shape, axis)
        case _:
            config = [(1, 0, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)]
            padded = lax.pad(x, jnp.asarray(5, x.dtype), config)
            return lax.slice(padded, [0] * x.ndim, x.shape)


def reduced(x, y, chance):
    if x.ndim == 0:
        return x
    function = chance.choice((jnp.sum, jnp.max, jnp.min))
    extra = {"dtype": x.dtype} if function is jnp.sum else {}
    return jnp.broadcast_to(function(x, axis=0, keepdims=True, **extra), x.shape)


def branched(x, y, chance):
    """Loops and branches that return a value."""
    limit = chance.randrange(4)
    if chance.random() < 0.5:
        index = lax.convert_element_type(y.reshape(-1)[0], "int32")
        return lax.switch(index, [lambda: x, lambda: y, lambda: x + y])
    one = jnp.asarray(1, x.dtype)
    first = lax.bitwise_and(x.reshape(-1)[0], one)

    def step(state):
        return state[0] + one, state[1] * state[0] + y

    return lax.while_loop(lambda state: state[0] < jnp.asarray(limit, x.dtype), step, (first, x))[1]


STEPS = (binary, binary, binary, compared, unary, clamped, converted, moved, reduced, branched)


def random_outputs(device, chance):
    outputs = []
    for _ in range(6):
        dtype, shape = chance.choice(DTYPES), chance.choice(SHAPES)
        x, y = (leaf(dtype, shape, device, chance) for _ in range(2))
        for _ in range(chance.randint(1, 5)):
            x, y = chance.choice(STEPS)(x, y, chance), x
        outputs.append(x)
    return outputs


def on_all_devices(function):
    """(what `function` of the device's number returns on each device, the compiled text)."""
    mesh = jax.make_mesh((NUM_DEVICES,), ("x",), axis_types=(AxisType.Auto,))

    def local():
        return [output[None] for output in function(lax.axis_index("x"))]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=PartitionSpec("x"))
    compiled = jax.jit(mapped).lower().compile()
    return [np.asarray(output) for output in compiled()], compiled_text(compiled)


def assert_evaluated(function):
    expected, text = on_all_devices(function)
    values = returned(text, NUM_DEVICES)
    assert len(values) == len(expected)
    for value, output in zip(values, expected, strict=True):
        assert not isinstance(value, Unknown), value.reason
        full = np.broadcast_to(value, (NUM_DEVICES, *value.shape[1:]))
        np.testing.assert_array_equal(full.reshape(output.shape), output)
        assert value.dtype == output.dtype


@pytest.mark.parametrize("seed", range(8))
def test_random_integer_programs_mean_what_xla_computes(seed):
    assert_evaluated(lambda device: random_outputs(device, random.Random(seed)))
