"""Targets: names, placement, links, kinds that change, failures of compilers, the cache."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxpar import MeshSpec, audit, cli_target
from jaxpar.audit.asked import Asked
from jaxpar.audit.result import Audit, Buffer, Collective, Program
from jaxpar.cli import main
from jaxpar.errors import CompilerError, OutOfDeviceMemoryError, TargetError
from jaxpar.hardware import chips
from jaxpar.mesh import shipped_meshes
from jaxpar.targets import Limits, Target, compiler
from jaxpar.targets.cache import Cache, key_of
from jaxpar.targets.changes import changes
from jaxpar.targets.compiler import compile_module
from jaxpar.targets.links import Where, coordinates
from jaxpar.targets.placement import place

HERE = Path(compiler.__file__).parent

# --- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "num_slices", "num_devices", "dims"),
    [
        ("v5e:2x4", 1, 8, {"x": 2, "y": 4}),
        ("v5e:16x16", 2, 512, {"slice": 2, "x": 16, "y": 16}),
        ("v6e:16x16", 1, 256, {"x": 16, "y": 16}),
        ("v5p:4x4x4", 1, 64, {"x": 4, "y": 4, "z": 4}),
        ("v5p:16x16x16", 1, 4096, {"x": 16, "y": 16, "z": 16}),
        ("v4:4x4x4", 1, 128, {"x": 4, "y": 4, "z": 4, "core": 2}),
        ("TPU7x:4x4x4", 2, 256, {"slice": 2, "x": 4, "y": 4, "z": 4, "core": 2}),
        ("h100:2x8", 1, 16, {"host": 2, "device": 8}),
        ("a100:1x4", 1, 4, {"host": 1, "device": 4}),
        ("h200:1x8", 1, 8, {"host": 1, "device": 8}),
        ("b200:128x8", 1, 1024, {"host": 128, "device": 8}),
    ],
)
def test_a_name_says_how_many_devices_lie_along_which_dims(text, num_slices, num_devices, dims):
    target = Target.parse(text, num_slices=num_slices)
    assert target.dims == dims and list(target.dims) == list(dims)
    assert target.num_devices == num_devices
    assert target.platform == chips()[target.chip].platform


@pytest.mark.parametrize(
    ("text", "num_slices", "told"),
    [
        ("v5p", 1, r"'v5p' is not chip:NxN; write something like 'v5p:4x4x4'"),
        ("v5p:0x4x4", 1, "is not chip:NxN"),
        ("v5p:4x4x4x4x4", 1, "is not chip:NxN"),
        ("h10:1x8", 1, r"no chip 'h10'. Did you mean 'h100'\?"),
        ("v5e:4x4x4", 1, r"3 dims, and the torus of v5e has 2. .* 'v5e:4x4'"),
        ("v5p:4x4", 1, "2 dims, and the torus of v5p has 3"),
        ("v5e:3x4", 1, "have to be even, and 3 is not. Nearest: 2 or 4"),
        ("v5e:32x32", 1, "1,024 chips, and the largest pod of v5e has 256"),
        ("h100:8", 1, "1 numbers; write hosts × devices of each, such as 'h100:1x8'"),
        ("h100:1x16", 1, "NVLink joins 8 h100 in a host, and 16 are given"),
        ("h100:1x8", 2, "num_slices=2 goes with TPUs; .* 'h100:2x8'"),
        ("v5e:2x4", 0, "num_slices=0 must be a whole number from 1 to 64"),
        ("v5e:2x4", True, "num_slices=True must be a whole number"),
        (7, 1, "target 7 is not chip:NxN"),
    ],
)
def test_what_cannot_be_built_is_told_with_what_could(text, num_slices, told):
    with pytest.raises(TargetError, match=told):
        Target.parse(text, num_slices=num_slices)


def test_every_mesh_file_with_a_target_fits_it():
    meshes = [MeshSpec.load(name) for name in shipped_meshes()]
    with_target = [mesh for mesh in meshes if mesh.target]
    assert len(with_target) >= 5
    for mesh in with_target:
        target = Target.of_mesh(mesh)
        assert target.platform == mesh.platform
        found = place(mesh.axes, target.dims, str(target))
        assert len(np.unique(found.coordinates, axis=0)) == mesh.num_devices
    with pytest.raises(TargetError, match=r"names no target. Give one"):
        Target.of_mesh(MeshSpec.parse("data=8"))


def test_a_chip_of_two_devices_shares_its_figures_among_them():
    for name in ("v4", "tpu7x"):
        target = Target.parse(f"{name}:2x2x1")
        assert target.hardware.flops_per_s("bf16") * 2 == chips()[name].peak_flops["bf16"]


def test_links_close_only_where_whole_cubes_or_a_pod_are_there():
    rings = {
        "v5e:2x4": "",
        "v5e:16x16": "xy",
        "v5e:4x16": "y",
        "v6e:16x16": "xy",
        "v5p:4x4x8": "xyz",
        "v5p:2x4x4": "yz",
        "tpu7x:4x4x4": "xyz",
        "h100:2x8": "",
    }
    assert {name: "".join(sorted(Target.parse(name).rings)) for name in rings} == rings


# --- placement -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "num_slices", "axes", "told"),
    [
        ("v5p:4x4x4", 1, {"fsdp": 16, "tensor": 4}, ["x·y", "z"]),
        ("v5e:2x4", 1, {"data": 4, "tensor": 2}, ["y", "x"]),
        ("v5e:2x4", 1, {"fsdp": 8}, ["x·y"]),
        ("v5e:2x4", 1, {"pipe": 2, "fsdp": 2, "tensor": 2}, ["2 of y (4)", "2 of y (4)", "x"]),
        ("v5p:8x4x4", 1, {"fsdp": 4, "tensor": 8, "data": 4}, ["y", "x", "z"]),
        ("v5p:16x16x16", 1, {"data": 16, "fsdp": 32, "tensor": 8},
         ["x", "y·2 of z (16)", "8 of z (16)"]),
        ("v5p:12x4x4", 1, {"data": 3, "fsdp": 64}, ["3 of x (12)", "4 of x (12)·y·z"]),
        ("v5e:4x4", 2, {"slice": 2, "fsdp": 16}, ["slice", "x·y"]),
        ("v5e:4x4", 2, {"data": 8, "tensor": 4}, ["slice·x", "y"]),
        ("tpu7x:2x2x2", 1, {"fsdp": 4, "tensor": 4}, ["x·y", "z·core"]),
        ("h100:2x8", 1, {"fsdp": 2, "tensor": 8}, ["host", "device"]),
        ("h100:2x8", 1, {"fsdp": 8, "tensor": 2}, ["host·4 of device (8)", "2 of device (8)"]),
    ],
)  # fmt: skip
def test_axes_lie_on_whole_dims_where_they_can(text, num_slices, axes, told):
    target = Target.parse(text, num_slices=num_slices)
    found = place(axes, target.dims, str(target))
    assert [found.told(axis) for axis in axes] == told
    rows = {tuple(row) for row in found.coordinates.tolist()}
    assert len(rows) == len(found.coordinates) == target.num_devices
    assert found.coordinates.max(axis=0).tolist() == [n - 1 for n in target.dims.values()]


def test_groups_of_an_axis_differ_only_along_what_it_lies_on():
    target = Target.parse("v5p:4x4x4")
    found = place({"fsdp": 16, "tensor": 4}, target.dims, str(target))
    grid = found.coordinates.reshape(16, 4, 3)
    assert (grid[:, :, :2] == grid[:, :1, :2]).all()  # tensor: z alone
    assert (grid[:, :, 2] == grid[:1, :, 2]).all()  # fsdp: never z


@pytest.mark.parametrize("text", ["v5e:2x4", "v5e:4x4", "v5p:4x4x4", "v5e:16x16"])
def test_a_ring_over_several_dims_goes_from_neighbour_to_neighbour(text):
    target = Target.parse(text)
    for axis, is_ring in (("context", True), ("pipe", True), ("fsdp", False), ("tensor", False)):
        found = place({axis: target.num_devices}, target.dims, str(target))
        steps = np.abs(np.diff(found.coordinates, axis=0)).sum(axis=1)
        assert (steps == 1).all() == is_ring
        in_order = np.indices(target.shape).reshape(len(target.shape), -1).T
        assert np.array_equal(found.coordinates, in_order) != is_ring


@pytest.mark.parametrize(
    ("text", "num_slices", "axes", "told"),
    [
        ("v5e:2x4", 1, {"fsdp": 16, "tensor": 4}, "has 64 devices, and target v5e:2x4 has 8.*"
         "Make it fsdp=2, or take a target of 64 devices"),
        ("v5e:2x4", 1, {"data": 3, "fsdp": 5}, "data=3 could be 2 or 4, the others what is left"),
        ("v5e:6x4", 2, {"data": 3, "fsdp": 16}, "2 slices, and they go to the outermost axis, "
         "data=3, which is not a multiple of 2"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_fit_is_told_what_would(text, num_slices, axes, told):
    target = Target.parse(text, num_slices=num_slices)
    with pytest.raises(TargetError, match=told):
        place(axes, target.dims, str(target))


# --- links -----------------------------------------------------------------------------------


def _where(text: str, axes: dict[str, int], num_slices: int = 1) -> Where:
    target = Target.parse(text, num_slices=num_slices)
    found = place(axes, target.dims, str(target))
    return Where(dims=target.dims, coordinates=found.coordinates, rings=target.rings)


def _collective(groups, kind="all-reduce", axes=("tensor",), **fields) -> Collective:
    payload = fields.pop("payload_bytes", 1024)
    dtype = fields.pop("dtype", "f32")
    buffers = fields.pop("buffers", (Buffer(dtype=dtype, payload_bytes=payload, phase="forward"),))
    known = {
        "kind": kind, "axes": axes, "axes_note": None, "group_size": len(groups[0]),
        "num_groups": len(groups), "dtype": dtype, "program_dtype": dtype, "count": 1,
        "count_min": 1, "count_max": 1, "payload_bytes": payload, "wire_bytes": payload,
        "phase": "forward", "scope": "", "source": None, "is_async": False,
        "exposed_fraction": 1.0, "buffers": buffers, "groups": np.array(groups),
    }  # fmt: skip
    return Collective(**{**known, **fields})


def _groups(axes: dict[str, int], over: str) -> np.ndarray:
    grid = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    return np.moveaxis(grid, list(axes).index(over), -1).reshape(-1, axes[over])


@pytest.mark.parametrize(
    ("text", "num_slices", "axes", "links"),
    [
        ("v5p:4x4x4", 1, {"fsdp": 16, "tensor": 4}, {"fsdp": "ICI x+y", "tensor": "ICI z"}),
        ("v5p:16x16x16", 1, {"data": 16, "fsdp": 32, "tensor": 8},
         {"data": "ICI x", "fsdp": "ICI y + ICI z (2 of 16)", "tensor": "ICI z (8 of 16)"}),
        ("v5e:4x4", 2, {"data": 2, "tensor": 16}, {"data": "between slices", "tensor": "ICI x+y"}),
        ("v5e:4x4", 2, {"data": 8, "tensor": 4}, {"data": "between slices + ICI x"}),
        ("tpu7x:2x2x2", 1, {"fsdp": 8, "tensor": 2}, {"tensor": "inside a chip"}),
        ("h100:2x8", 1, {"fsdp": 2, "tensor": 8}, {"fsdp": "between hosts", "tensor": "NVLink"}),
        ("h100:2x8", 1, {"fsdp": 8, "tensor": 2}, {"fsdp": "between hosts + NVLink"}),
    ],
)  # fmt: skip
def test_the_links_of_each_axis_are_named(text, num_slices, axes, links):
    where = _where(text, axes, num_slices)
    found = {axis: where.links(_collective(_groups(axes, axis))) for axis in links}
    assert found == links


def test_a_permute_says_how_far_it_goes_where_that_is_not_the_neighbour():
    axes = {"pipe": 4, "data": 2}
    ring = [[i, (i + 2) % 8] for i in range(8)]  # pipe +1, closing
    permute = {"kind": "collective-permute", "axes": ("pipe",)}
    line = _where("v5e:2x4", axes)  # 4 along y: a line, so closing takes three hops back
    assert line.links(_collective(ring, **permute)) == "ICI y (3 hops)"
    assert line.links(_collective(ring[:6], **permute)) == "ICI y"
    nobody = _collective([[i, i] for i in range(8)], **permute)
    assert line.links(nobody) == ""
    closed = _where("v5p:4x4x4", {"pipe": 4, "data": 16})
    ring = [[i, (i + 16) % 64] for i in range(64)]
    assert closed.links(_collective(ring, **permute)) == "ICI x"


def test_where_devices_are_is_taken_from_the_topology_and_not_guessed():
    dims = {"slice": 2, "x": 2, "y": 2, "core": 2}
    device = {"id": 5, "coords": [1, 0, 0], "core": 1, "process": 3, "local": 2, "slice": 1}
    assert coordinates(dims, device) == (1, 1, 0, 1)
    assert coordinates({"host": 4, "device": 8}, device) == (3, 2)
    with pytest.raises(TargetError, match="does not say where device 5 is along x, y"):
        coordinates(dims, {**device, "coords": []})


# --- kinds that change -----------------------------------------------------------------------

AXES = {"fsdp": 8}


def _asked(kind, count, payload_bytes, dtype="f32", **fields) -> Asked:
    known = {"axes": ("fsdp",), "loops": (count,), "phase": "backward", "scope": ""}
    return Asked(kind=kind, payload_bytes=payload_bytes, dtype=dtype, **{**known, **fields})


def _compiled(kind, count, payload_bytes, dtype="f32", **fields) -> Collective:
    return _collective(
        [list(range(8))], kind, ("fsdp",), count=count, payload_bytes=payload_bytes, dtype=dtype,
        **fields,
    )  # fmt: skip


def _changes(asked, compiled):
    program = Program(name="p", platform="tpu", num_devices=8, scheduled=True, complete=True)
    found = Audit(program=program, mesh=AXES, collectives=tuple(compiled), memory=None, findings=())
    return changes(asked, found)


def test_the_same_elements_agree_however_they_are_merged_or_narrowed():
    asked = [_asked("all-gather", 4, 800), _asked("all-gather", 4, 400)]
    merged = (Buffer(dtype="f32", payload_bytes=800, phase="forward"),
              Buffer(dtype="bf16", payload_bytes=200, phase="forward"))  # fmt: skip
    (over,) = _changes(asked, [_compiled("all-gather", 4, 1000, "f32+bf16", buffers=merged)]).over
    assert over.agrees and over.payload_bytes == over.normalised_bytes == 4800
    assert not over.changes and over.narrowed_bytes == 800


@pytest.mark.parametrize(
    ("was", "extra_wire_bytes"),
    [("reduce-scatter", 700), ("all-gather", 700), ("collective-permute", 600)],
)
def test_an_all_reduce_instead_is_named_with_what_it_costs(was, extra_wire_bytes):
    asked = [_asked(was, 2, 400), _asked("all-reduce", 1, 80)]
    (over,) = _changes(asked, [_compiled("all-reduce", 1, 880)]).over
    (change,) = over.changes
    assert over.agrees and over.payload_bytes == over.normalised_bytes == 880
    assert (change.was, change.now, change.payload_bytes) == (was, "all-reduce", 800)
    assert change.extra_wire_bytes == extra_wire_bytes and over.narrowed_bytes == 0


def test_only_a_part_that_changed_is_counted_as_changed():
    asked = [_asked("reduce-scatter", 2, 400), _asked("reduce-scatter", 2, 100)]
    got = [_compiled("reduce-scatter", 2, 400), _compiled("all-reduce", 2, 100)]
    (over,) = _changes(asked, got).over
    (change,) = over.changes
    assert (change.payload_bytes, change.extra_wire_bytes) == (200, 175)


def test_an_all_reduce_in_two_halves_costs_nothing():
    got = [_compiled("reduce-scatter", 1, 800), _compiled("all-gather", 1, 800)]
    (over,) = _changes([_asked("all-reduce", 1, 800)], got).over
    (change,) = over.changes
    assert over.agrees and str(change) == "all-reduce → reduce-scatter + all-gather"
    assert change.extra_wire_bytes == 0 and over.normalised_bytes == 800
    assert over.narrowed_bytes == 0


@pytest.mark.parametrize(
    ("asked", "compiled", "told", "normalised"),
    [
        ([_asked("all-gather", 4, 80)], [_compiled("all-gather", 3, 80)],
         "20 elements of all-gather missing", 240),
        ([_asked("all-gather", 4, 80), _asked("all-gather", 4, 160)],
         [_compiled("all-gather", 4, 80), _compiled("all-gather", 1, 160)],
         "120 elements of all-gather missing, just those of trips of a loop: it runs once", 480),
        ([_asked("all-gather", 1, 80)], [_compiled("all-gather", 2, 80)],
         "20 elements of all-gather more", 160),
        ([_asked("all-gather", 1, 80)],
         [_compiled("all-gather", 1, 80), _compiled("collective-permute", 2, 8)],
         "4 elements of collective-permute more, none of them asked for", 96),
        ([], [_compiled("all-to-all", 2, 80)], "40 elements of all-to-all more", 160),
        ([_asked("all-to-all", 2, 80)], [], "40 elements of all-to-all missing", 0),
        ([_asked("all-reduce", 1, 8)], [_compiled("all-reduce", None, 8)],
         "compiled: how often an all-reduce runs is not known", None),
    ],
)  # fmt: skip
def test_other_elements_than_asked_for_disagree_and_say_what(asked, compiled, told, normalised):
    found = _changes(asked, compiled)
    assert not found.agrees and found.over[0].reason.startswith(told)
    assert found.over[0].normalised_bytes == normalised
    assert json.loads(json.dumps(found.to_json()))[0]["agrees"] is False


def test_an_all_reduce_in_layers_between_slices_is_one():
    """As libtpu made it of a psum over both axes of two slices."""
    path = HERE.parents[1] / "tests/audit/hlo/multislice_psum_both.tpu_v5e_2x4_x2.txt.gz"
    found = audit(path, mesh={"slice": 2, "b": 8})
    assert len(found.collectives) == 3
    both, once = ("slice", "b"), {"loops": (), "axes": ("slice", "b")}
    asked = [_asked("all-reduce", 1, 8 << 20, **once)]
    told = changes(asked, found)
    assert told.agrees and [over.axes for over in told.over] == [both, ("b",), ("slice",)]
    (change,) = told.over[0].changes
    assert change.payload_bytes == 8 << 20 and change.extra_wire_bytes == 0
    assert change.now.startswith("reduce-scatter over b + all-reduce over slice + all-gather")
    where = _where("v5e:2x4", {"slice": 2, "b": 8}, 2)
    links = {it.axes: where.links(it) for it in found.collectives}
    assert links == {("b",): "ICI x+y", ("slice",): "between slices"}
    more = [_asked("all-reduce", 1, 9 << 20, **once)]  # a part is missing
    assert not changes(more, found).agrees


def test_layers_with_padding_are_told_as_such():
    asked = [_asked("all-reduce", 1, 4, axes=("data", "fsdp")), _asked("all-reduce", 1, 80)]
    got = [
        _compiled("all-reduce", 1, 592),
        replace(_compiled("all-reduce", 1, 512), axes=("data",)),
    ]
    both, inner, outer = _changes(asked, got).over
    assert (
        both.reason == "1 elements of all-reduce missing: it is cut into layers, which are padded"
    )
    for row in (inner, outer):
        assert row.reason.startswith("128 elements of all-reduce more: padded layers of what goes")


def test_what_one_device_does_alone_is_counted_there():
    mine, theirs = (2, 0, 0, 0, 0, 0, 0, 0), (0, 2, 0, 0, 0, 0, 0, 0)
    asked = [_asked("all-reduce", 1, 80, loops=None, device_counts=mine)]
    same = _compiled("all-reduce", None, 80, device_counts=mine)
    other = _compiled("all-reduce", None, 80, device_counts=theirs)
    assert _changes(asked, [same]).agrees
    assert not _changes(asked, [other]).agrees


# --- compilers that fail ---------------------------------------------------------------------

ONE = Target.parse("v5e:1x1")


def _run_child(program: str, tmp_path, monkeypatch, limits: Limits | None = None, cache=None):
    """`compile_module` with another program in place of the child."""
    before = "import json, sys\nfolder = json.loads(sys.argv[2])\n"
    monkeypatch.setattr(compiler, "_CHILD", before + program)
    monkeypatch.setattr(compiler, "require_compiler", lambda target: {"libtpu": "0"})
    placement = place({"data": 1}, ONE.dims, str(ONE))
    options = {"xla_tpu_good": True}
    return compile_module(
        b"module", target=ONE, placement=placement, options=options, limits=limits, cache=cache
    )


def _answers(text: str) -> str:
    return f"open(folder + '/answer.json', 'w').write(json.dumps({{'error': {text!r}}}))"


OOM = (
    "JaxRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
    "memory space hbm. Used 27.23G of 15.75G hbm. Exceeded hbm capacity by 11.48G."
)
OOM_NEW = (
    "JaxRuntimeError: RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: the program needs (27.23G) "
    "exceeds available HBM (15.75G)"
)


@pytest.mark.parametrize("text", [OOM, OOM_NEW])
def test_a_target_without_room_says_how_much_is_missing(text, tmp_path, monkeypatch):
    with pytest.raises(
        OutOfDeviceMemoryError, match=r"27.23 GiB .* 15.75 GiB, 11.48 GiB"
    ) as caught:
        _run_child(_answers(text), tmp_path, monkeypatch)
    assert caught.value.used_bytes == round(27.23 * 2**30)
    assert caught.value.available_bytes == round(15.75 * 2**30)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("program", "kind", "told"),
    [
        ("import os, signal\nprint('F1129 01:02 a.cc:3] Check failed: n == 1', file=sys.stderr, "
         "flush=True)\nos.kill(os.getpid(), signal.SIGABRT)", CompilerError,
         r"ended with signal 6 \(SIGABRT\).*said last: F1129 .*Check failed: n == 1"),
        ("sys.exit(3)", CompilerError, "ended with exit code 3 .*It said last: nothing"),
        ("print('libtpu: lockfile is held', file=sys.stderr); sys.exit(1)", CompilerError,
         "Another process uses the TPU compiler .* Nothing was removed"),
        (_answers("INVALID_ARGUMENT: No such compile option: 'xla_tpu_good'"), TargetError,
         "does not take option xla_tpu_good=True"),
        (_answers("INTERNAL: Mosaic failed"), CompilerError, "refused the program: INTERNAL"),
        (_answers("RuntimeError: JAX TPU support not installed; cannot"), TargetError,
         r'found no compiler .* pip install "jaxpar\[tpu\]"'),
        (_answers("NotImplementedError: topology not implemented for cuda"), TargetError,
         "found no compiler"),
        (_answers("Misplaced: the topology has no device at (1, 0)"), TargetError,
         "does not build v5e:1x1"),
        ("open(folder + '/answer.json', 'w').write('{\"mem')", CompilerError, "ended with exit"),
    ],
)  # fmt: skip
def test_a_compiler_that_fails_is_told_in_words(program, kind, told, tmp_path, monkeypatch):
    with pytest.raises(TargetError, match=told) as caught:
        _run_child(program, tmp_path, monkeypatch)
    assert type(caught.value) is kind


def test_a_compiler_is_stopped_at_its_limits_and_leaves_nothing(tmp_path, monkeypatch):
    marker = tmp_path / "pid"
    write = f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\n"
    with pytest.raises(CompilerError, match=r"stopped after \d s \(time limit 1 s\)"):
        _run_child(write + "time.sleep(60)", tmp_path, monkeypatch, Limits(time_s=1.0))
    with pytest.raises(CompilerError, match=r"memory \(limit 0.1 GiB\)"):
        big = "x = bytearray(200_000_000)\nx[::4096] = b'1' * len(x[::4096])\ntime.sleep(60)"
        _run_child(write + big, tmp_path, monkeypatch, Limits(memory_bytes=100_000_000))
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_a_compiler_does_not_outlive_whoever_started_it(tmp_path):
    pid = tmp_path / "pid"
    (tmp_path / "request.json").write_text("{}")
    child = (
        f"import os, pathlib, sys, time; sys.path.insert(0, {str(HERE.parents[1])!r})\n"
        f"from jaxpar.targets import child\n"
        f"def compiled(request, folder):\n"
        f"    (folder / 'pid').write_text(str(os.getpid()))\n"
        f"    time.sleep(60)\n"
        f"child._compiled = compiled\n"
        f"child.main(pathlib.Path({str(tmp_path)!r}), os.getppid())"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys\n"
         f"subprocess.run([sys.executable, '-c', {child!r}])"],
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    number = int(pid.read_text())
    while _is_alive(number) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(number)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_child_sees_none_of_the_users_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_nonsense")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--nonsense")
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0")
    told = compiler._environment(Target.parse("v5e:2x4"), tmp_path)
    assert not {"XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_VISIBLE_CHIPS"} & set(told)
    assert told["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1" and told["PATH"] == os.environ["PATH"]


def test_without_a_compiler_it_is_said_which_to_install(monkeypatch, capsys):
    monkeypatch.setitem(compiler._PACKAGES, "tpu", ("no-such-package",))
    monkeypatch.setitem(compiler._PACKAGES, "gpu", ("no-such-package",))
    for target, extra in (("v5e:2x4", "tpu"), ("h100:1x8", "cuda13")):
        monkeypatch.setattr(
            sys, "argv", ["jaxpar", "tour", "--target", target, "--only", "data", "--no-cache"]
        )
        with pytest.raises(SystemExit) as exit:
            main()
        assert exit.value.code == 2
        assert f'pip install "jaxpar[{extra}]"' in capsys.readouterr().err


# --- the cache -------------------------------------------------------------------------------

GOOD = (
    "open(folder + '/answer.json', 'w').write(json.dumps({'memory': {'argument_bytes': 1}, "
    "'devices': []}))\nopen(folder + '/program.txt', 'w').write('HloModule x')"
)


def test_what_was_compiled_is_found_again_by_content(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache")
    first = _run_child(GOOD, tmp_path, monkeypatch, cache=cache)
    again = _run_child("sys.exit(1)", tmp_path, monkeypatch, cache=cache)
    assert not first.from_cache and again.from_cache
    assert replace(again, from_cache=False) == first
    assert 0 < first.cpu_s < 60 and 0 < first.seconds < 60
    with pytest.raises(CompilerError):  # without a cache it is compiled
        _run_child("sys.exit(1)", tmp_path, monkeypatch)


def test_a_program_that_does_not_fit_is_remembered_as_such(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache")
    for program in (_answers(OOM), "sys.exit(1)"):
        with pytest.raises(OutOfDeviceMemoryError, match="11.48 GiB too much"):
            _run_child(program, tmp_path, monkeypatch, cache=cache)


def test_keys_differ_with_all_that_a_compiler_is_told():
    told = {"options": {"xla_a": 1}}
    keys = {key_of(b"m", told), key_of(b"n", told), key_of(b"m", {"options": {"xla_a": True}}),
            key_of(b"m", {}), key_of(b"m", {"options": {"xla_a": 1}, "versions": "2"})}  # fmt: skip
    assert len(keys) == 5 and key_of(b"m", told) in keys


def test_a_damaged_or_foreign_entry_counts_as_not_there(tmp_path):
    cache = Cache(tmp_path)
    cache.put("a" * 64, {"text": "x"})
    path = tmp_path / f"{'a' * 64}.json.gz"
    whole = path.read_bytes()
    assert cache.get("a" * 64) == {"text": "x"}
    path.rename(tmp_path / f"{'b' * 64}.json.gz")
    assert cache.get("b" * 64) is None  # its own key is inside
    for damaged in (b"", whole[:20], whole[:-9], b"not gzip", b"\x1f\x8b" + bytes(40)):
        path.write_bytes(damaged)
        assert cache.get("a" * 64) is None
    cache.put("a" * 64, {"text": "y"})
    assert cache.get("a" * 64) == {"text": "y"}


def test_the_cache_stays_small_and_removes_nothing_else(tmp_path):
    cache = Cache(tmp_path, max_bytes=3000)
    (tmp_path / "mine.txt").write_bytes(b"x" * 10_000)
    text = [os.urandom(500).hex() for _ in range(6)]
    for i, name in enumerate("abcdef"):
        cache.put(name * 64, {"text": text[i]})
        os.utime(tmp_path / f"{name * 64}.json.gz", (i + 1, i + 1))
        cache.get("a" * 64)  # in use all the time
    kept = sorted(path.name[0] for path in tmp_path.glob("*.json.gz"))
    assert "a" in kept and "f" in kept and len(kept) < 6
    assert sum(path.stat().st_size for path in tmp_path.glob("*.json.gz")) <= 3000
    assert (tmp_path / "mine.txt").exists() and not list(tmp_path.glob("*.tmp"))


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    cache.put("a" * 64, {"text": "x"})
    assert cache.get("a" * 64) is None


# --- the command line ------------------------------------------------------------------------


V5P = Target.parse("v5p:4x4x4")


def test_options_are_read_as_what_they_look_like():
    given = ["xla_a=true", "xla_b=8", "xla_c=0.5", "xla_d=ON", "xla_e=a=b"]
    options = cli_target.compiler_options(given, V5P)
    assert options == {"xla_a": True, "xla_b": 8, "xla_c": 0.5, "xla_d": "ON", "xla_e": "a=b"}
    assert type(options["xla_b"]) is int


@pytest.mark.parametrize("given", [["fast=1"], ["xla_a"], ["xla_a=1", "xla_a=2"]])
def test_an_option_that_is_none_is_told(given):
    with pytest.raises(TargetError, match="--option"):
        cli_target.compiler_options(given, V5P)


def test_a_set_of_options_is_given_by_its_name():
    options = cli_target.compiler_options(["sparse-core", "xla_a=1"], V5P)
    assert options["xla_a"] == 1 and len(options) == 4
    with pytest.raises(TargetError, match="v5p has no option set 'latency-hiding'"):
        cli_target.compiler_options(["latency-hiding"], V5P)


def test_every_option_set_is_for_chips_that_exist_and_says_why():
    for name, row in tomllib.loads((HERE / "options.toml").read_text()).items():
        assert set(row) == {"chips", "why", "options"} and len(row["why"]) > 20, name
        assert row["chips"] and set(row["chips"]) <= set(chips())
        assert all(it.startswith("xla_") or it == "optimization_level" for it in row["options"])


def test_every_gpu_is_described_to_its_compiler():
    described = tomllib.loads((HERE / "gpus.toml").read_text())
    assert set(described) == {name for name, it in chips().items() if it.platform == "gpu"}
    for name, gpu in described.items():
        told = compiler._topology(Target.parse(f"{name}:2x8"))
        assert told["topology"] == "1x2x8" and gpu["name"] in told["target_config"]
        assert abs(gpu["memory_bytes"] / chips()[name].hbm_bytes - 1) < 0.08
        assert abs(gpu["memory_bytes_per_s"] / chips()[name].hbm_bytes_per_s - 1) < 0.01


def test_a_mesh_file_names_a_target():
    assert str(cli_target.Request(target="v5p-64-fsdp-tensor").parsed()) == "v5p:4x4x4"
    assert str(cli_target.Request(target="v5e:2x4", num_slices=2).parsed()) == "v5e:2x4 × 2 slices"
