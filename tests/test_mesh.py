"""Mesh files, the meshes made from them, and what is said about those that cannot be."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from jaxpar.devices import MAX_CPU_DEVICES, use_cpu_devices
from jaxpar.errors import MeshError
from jaxpar.mesh import MAX_FILE_BYTES, PLATFORMS, ROLES, MeshSpec, shipped_meshes

REPOSITORY = Path(__file__).parent.parent


def run_fresh(code: str, **environment: str) -> str:
    """What `code` prints in a Python of its own, where JAX has not started yet."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- files


@pytest.mark.parametrize("name", shipped_meshes())
def test_shipped_file(name: str) -> None:
    spec = MeshSpec.load(name)
    assert spec.name == name
    assert spec.description
    assert (spec.target is None) == (spec.platform == "cpu")
    first_line = (REPOSITORY / "meshes" / f"{name}.toml").read_text(encoding="utf-8").split("\n")[0]
    assert first_line.startswith("# ")
    if spec.platform == "cpu":
        assert spec.num_devices in (4, 8)
        assert spec.build().devices.size == spec.num_devices


def test_a_size_with_more_digits_than_python_prints() -> None:
    with pytest.raises(MeshError, match=r"a huge number .int.*Nearest: 1048576"):
        MeshSpec(axes={"data": 10**5000})


def test_there_are_enough_shipped_files() -> None:
    assert len(shipped_meshes()) >= 12


def test_load_takes_a_path_a_name_and_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MeshSpec.load("data2-tensor4")
    assert MeshSpec.load("data2-tensor4.toml") == spec
    assert MeshSpec.load(REPOSITORY / "meshes" / "data2-tensor4.toml") == spec
    assert MeshSpec.load("data=2,tensor=4").axes == spec.axes

    monkeypatch.chdir(tmp_path)
    Path("data2-tensor4.toml").write_text("axes.data = 3\n", encoding="utf-8")
    assert MeshSpec.load("data2-tensor4.toml").size("data") == 3  # the user's own file wins
    assert MeshSpec.load("data2-tensor4") == spec  # a bare word is a shipped name


SIZES = st.integers(1, 4)
SPECS = st.builds(
    MeshSpec,
    axes=st.permutations(list(ROLES)).flatmap(
        lambda roles: st.lists(SIZES, min_size=1, max_size=len(roles)).map(
            lambda sizes: dict(zip(roles, sizes, strict=False))
        )
    ),
    name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    platform=st.sampled_from(PLATFORMS),
    description=st.text(st.characters(exclude_categories=["Cs"])),
) | st.builds(
    MeshSpec,
    axes=st.just({"fsdp": 16, "tensor": 4}),
    name=st.just("cube"),
    platform=st.just("tpu"),
    target=st.sampled_from(["v5p:4x4x4", "v5e:16x16", "h100:1x8", "tpu7x:8"]),
)


@settings(deadline=None)
@example(spec=MeshSpec(axes={"data": 2}, name='\x00\x7f"\\é', description="a\r\n\tb\x85"))
@given(spec=SPECS)
def test_toml_comes_back_equal(spec: MeshSpec, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    path.write_text(spec.to_toml(), encoding="utf-8", newline="")
    assert MeshSpec.load(path) == spec
    assert MeshSpec.parse(str(spec)).axes == spec.axes


@given(
    content=st.binary(max_size=200) | st.text("[]{}=.\"'#\n1_dataxes ", max_size=80).map(str.encode)
)
def test_no_file_gets_past_mesh_error(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    try:
        MeshSpec.load(path)
    except MeshError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[axes\ndata = 1", ["not TOML", "line 1, column 6"]),
        ("axes.data = 1\nname =", ["not TOML", "end of document, line 2"]),
        ("x = " + "[" * 9000, ["not TOML"]),
        ("x = " + "9" * 9000, ["not TOML"]),
        ("#" * (MAX_FILE_BYTES + 1), ["65,536 bytes"]),
        ("platfrm = 'cpu'\naxes.data = 1", ["unknown key 'platfrm'", "Did you mean 'platform'?"]),
        ("data = 2", ["unknown key 'data'", "below [axes]"]),
        ("", ["[axes] is missing or empty"]),
        ("[axes]", ["[axes] is missing or empty"]),
        ("axes = 8", ["axes is 8", "role = size"]),
        ("[axes]\ntensr = 8", ["'tensr'", "Did you mean 'tensor'?"]),
        ("[axes]\nmodel = 8", ["'model'", "data", "fsdp", "tensor"]),
        ("[axes]\ndata = 0", ["'data'", "0 (int)", "1 to 1,048,576", "Nearest: 1."]),
        ("[axes]\ndata = 2.5", ["'data'", "2.5 (float)", "Nearest: 2."]),
        ("[axes]\ndata = nan", ["nan (float)", "Nearest: 1."]),
        ("[axes]\ndata = -inf", ["-inf (float)", "Nearest: 1."]),
        ("[axes]\ndata = '8'", ["'8' (str)", "Nearest: 8."]),
        ("[axes]\ndata = true", ["True (bool)", "Nearest: 1."]),
        ("[axes]\ndata = [8]", ["[8] (list)"]),
        ("[axes]\ndata = 0x" + "f" * 9000, ["a huge number", "Nearest: 1048576."]),
        ("[axes]\ndata = 2048\nfsdp = 2048", ["4,194,304 devices", "1,048,576"]),
        ("platform = 'cuda'\naxes.data = 1", ["'cuda'", "cpu, gpu, tpu"]),
        ("platform = 3\naxes.data = 1", ["platform is 3", "string"]),
        ("name = 3\naxes.data = 1", ["name is 3", "string"]),
        ("platform = 'tpu'\ntarget = 'v5p-64'\naxes.data = 1", ["'v5p-64'", "v5p:4x4x4"]),
        ("platform = 'tpu'\ntarget = 'v5p:4x0'\naxes.data = 1", ["'v5p:4x0'"]),
        ("platform = 'tpu'\ntarget = 64\naxes.data = 1", ["target 64"]),
        ("target = 'v5p:4x4x4'\naxes.data = 1", ["'v5p:4x4x4'", '"cpu"', '"tpu"']),
    ],
)
def test_bad_file(content: str, said: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(MeshError) as caught:
        MeshSpec.load(path)
    for words in [str(path), *said]:
        assert words in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


@pytest.mark.parametrize("given", ["nothing", "nothing.toml", "no/where.toml", ".", "/dev/null"])
def test_missing_file_lists_shipped_names(given: str) -> None:
    with pytest.raises(MeshError, match=r"no mesh file.*context8, data2-context4") as caught:
        MeshSpec.load(given)
    assert given in str(caught.value)


def test_unreadable_name() -> None:
    with pytest.raises(MeshError, match="cannot be read: File name too long"):
        MeshSpec.load("x" * 5000 + ".toml")


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9")
    with pytest.raises(MeshError, match=r"not UTF-8 text \(byte 5\)"):
        MeshSpec.load(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not an axis"),
        ("data", "'data' in 'data' is not an axis; write role=size"),
        ("data=2;tensor=4", "is not an axis"),
        ("data=2.5", "is not an axis"),
        ("data=2,data=4", "'data' is given twice"),
        ("tensr=2", "Did you mean 'tensor'"),
        ("data=-2", "size -2"),
    ],
)
def test_bad_axes(text: str, said: str) -> None:
    with pytest.raises(MeshError, match=said):
        MeshSpec.parse(text)


# --- specs


def test_spec_is_a_value() -> None:
    spec = MeshSpec(axes={"data": 2, "tensor": 4})
    assert str(spec) == "data=2 × tensor=4"
    assert spec == MeshSpec.parse("data=2, tensor=4") == MeshSpec.parse(str(spec))
    assert hash(spec) == hash(MeshSpec.parse("data=2,tensor=4"))
    assert spec != MeshSpec.parse("tensor=4,data=2"), "the order says which links are slow"
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    assert dataclasses.replace(spec, axes={"data": 8}).num_devices == 8


def test_spec_does_not_follow_the_users_dict() -> None:
    axes = {"data": 2}
    spec = MeshSpec(axes=axes)
    axes["data"] = 4
    spec.named_axes["data"] = 4
    assert spec.size("data") == 2


def test_sizes() -> None:
    spec = MeshSpec(axes={"tensor": 4, "data": 2, "pipe": 1})
    assert spec.num_devices == 8
    assert spec.size("tensor") == 4
    assert spec.size("context") == 1
    assert list(spec.named_axes.items()) == [("tensor", 4), ("data", 2), ("pipe", 1)]
    assert list(spec.all_axes)[:4] == ["tensor", "data", "pipe", "replica"]
    assert set(spec.all_axes) == set(ROLES)
    with pytest.raises(MeshError, match=r"'tensors'\. Did you mean 'tensor'"):
        spec.size("tensors")


# --- devices


def test_built_mesh_has_every_role() -> None:
    mesh = MeshSpec(axes={"tensor": 4, "data": 2}).build()
    assert mesh.axis_names == (
        *("tensor", "data"),
        *("replica", "slice", "pipe", "fsdp", "expert", "context", "ulysses"),
    )
    assert dict(mesh.shape) == {**dict.fromkeys(ROLES, 1), "tensor": 4, "data": 2}
    assert mesh.axis_types == (AxisType.Auto,) * len(ROLES)
    # The last named axis runs over neighbours: its links are the fastest.
    assert [d.id for d in mesh.devices[:, 0].flat] == [0, 2, 4, 6]
    assert [d.id for d in mesh.devices[0].flat] == [0, 1]


@pytest.mark.parametrize("num", [0, -1, 2.0, True, "8", MAX_CPU_DEVICES + 1])
def test_impossible_number_of_cpu_devices(num: object) -> None:
    with pytest.raises(MeshError, match=f"1 to {MAX_CPU_DEVICES}. Nearest: "):
        use_cpu_devices(num)  # type: ignore[arg-type]


def test_more_cpu_devices_than_jax_started_with() -> None:
    have = len(jax.devices("cpu"))
    use_cpu_devices(have)
    with pytest.raises(MeshError, match=f"started with {have} CPU devices, and {have + 1} are"):
        MeshSpec(axes={"data": have + 1}).build()


def test_target_without_its_hardware() -> None:
    spec = MeshSpec.load("v5p-64-fsdp-tensor")
    with pytest.raises(MeshError, match="fsdp=16 × tensor=4 needs 64 tpu devices, and JAX finds"):
        spec.build()


def test_a_fresh_process_gets_as_many_cpu_devices_as_the_mesh_needs() -> None:
    code = """
        import jax
        from jaxpar.mesh import MeshSpec
        MeshSpec.parse("data=3").build()
        print(len(jax.devices()))
        MeshSpec.parse("data=2").build()
    """
    assert run_fresh(code, XLA_FLAGS="") == "3"


@pytest.mark.parametrize("how", ["flag", "config"])
def test_a_larger_number_of_cpu_devices_stays(how: str) -> None:
    code = """
        import jax, sys
        from jaxpar.devices import use_cpu_devices
        if {config}: jax.config.update("jax_num_cpu_devices", 5)
        use_cpu_devices(2)
        print(len(jax.devices()))
    """
    flags = "--xla_force_host_platform_device_count=5" if how == "flag" else ""
    assert run_fresh(code.format(config=how == "config"), XLA_FLAGS=flags) == "5"


def test_importing_the_package_starts_no_backend() -> None:
    code = """
        import jaxpar.mesh, jaxpar.text
        from jaxpar.compat import backends_are_up
        print(backends_are_up())
    """
    assert run_fresh(code) == "False"
