"""Which file of an XLA dump folder is read. The names are those that three backends write."""

import gzip

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.audit import audit, dump
from jaxpar.audit.dump import choose, modules
from jaxpar.audit.proto import proto_text
from jaxpar.errors import AuditError

QUIET = "ENTRY %main {\n  ROOT %r = f32[8] negate(%p)\n}\n"
BUSY = "ENTRY %main {\n  ROOT %r = f32[8] all-reduce(%p), channel_id=1\n}\n"

CPU = (
    "{}.before_optimizations.txt",
    "{}.cpu_after_optimizations-buffer-assignment-values.txt",
    "{}.cpu_after_optimizations-buffer-assignment.txt",
    "{}.cpu_after_optimizations-live-range.txt",
    "{}.cpu_after_optimizations-memory-usage-report.pb",
    "{}.cpu_after_optimizations-memory-usage-report.txt",
    "{}.cpu_after_optimizations.txt",
    "{}.debug_options",
    "{}.add_select_fusion_kernel_module.ir-no-opt.ll",
    "{}.obj-file.__compute_module_wrapped_add.o",
)
GPU = (
    "{}.before_optimizations.txt",
    "{}.sm_9.0_gpu_after_optimizations.txt",
    "{}.sm_9.0_gpu_after_optimizations-buffer-assignment.txt",
    "{}.sm_9.0_gpu_after_optimizations-memory-usage-report.txt",
    "{}.gpu_target_config.pbtxt",
    "{}.thunk_sequence.txt",
    "{}.ptx",
)
TPU = (
    "{}.cl_1014260217.after_codegen.txt",
    "{}.cl_1014260217.after_optimizations-buffer-assignment.txt",
    "{}.cl_1014260217.after_optimizations.txt",
    "{}.cl_1014260217.after_optimizations_after_buffer_assignment.txt",
    "{}.cl_1014260217.after_optimizations_before_buffer_assignment.txt",
    "{}.cl_1014260217.basic_compiler_metadata.txt",
    "{}.cl_1014260217.before_optimizations.txt",
    "{}.cl_1014260217.hlo_module_config.txt",
    "{}.cl_1014260217.transfer_stats.txt",
)
PASSES = (
    "{}.0000.spmd-partitioner.after_shardy-xla.before_spmd-partitioning.txt",
    "{}.0001.spmd-partitioner.after_spmd-partitioning.before_control-dep-rewriter.txt",
    "{}.0003.spmd-partitioner.after_call-inliner.before_pipeline-end.txt",
)
TPU_PASSES = (
    "{}.cl_1014260217.0000.xla-partitioner.after_dce.before_tpu-spmd-partitioning.txt",
    "{}.cl_1014260217.0001.xla-partitioner.after_tpu-spmd-partitioning.before_dce.txt",
)


def write(folder, names, module="module_0007.jit_step", content=BUSY):
    for name in names:
        (folder / name.format(module)).write_text(content)


@pytest.mark.parametrize(
    ("names", "final"),
    [(CPU, CPU[6]), (GPU, GPU[1]), (TPU, TPU[0]), (TPU[1:], TPU[2])],
)
def test_the_final_module_among_everything_else(tmp_path, names, final):
    write(tmp_path, names)
    assert choose(tmp_path).name == final.format("module_0007.jit_step")
    (one,) = modules(tmp_path)
    assert (one.number, one.name, one.label) == (7, "jit_step", "module_7.jit_step")
    assert one.partitioned is None


@pytest.mark.parametrize(
    ("names", "wanted"), [(PASSES + CPU, PASSES[1]), (TPU_PASSES + TPU, TPU_PASSES[1])]
)
def test_the_module_right_after_partitioning(tmp_path, names, wanted):
    write(tmp_path, names)
    assert choose(tmp_path, stage="partitioned").name == wanted.format("module_0007.jit_step")


def test_the_last_of_several_partitionings(tmp_path):
    names = [f"{{}}.{i:04}.a.after_spmd-partitioning.before_dce.txt" for i in (9, 2, 10)]
    write(tmp_path, names)
    assert choose(tmp_path, stage="partitioned").name.startswith("module_0007.jit_step.0010.")


def test_text_is_preferred_to_a_proto(tmp_path):
    write(tmp_path, ["{}.cpu_after_optimizations.hlo.pb.gz"])
    assert choose(tmp_path).suffix == ".gz"
    write(tmp_path, ["{}.cpu_after_optimizations.hlo.pb"])
    assert choose(tmp_path).suffix == ".pb"
    write(tmp_path, ["{}.cpu_after_optimizations.txt"])
    assert choose(tmp_path).suffix == ".txt"


def test_the_only_module_that_communicates_is_meant(tmp_path):
    write(tmp_path, CPU, "module_0000.jit_convert_element_type", QUIET)
    write(tmp_path, CPU, "module_0003.jit_step", BUSY)
    write(tmp_path, CPU, "module_0010.jit_broadcast_in_dim", QUIET)
    assert "module_0003" in choose(tmp_path).name
    assert [one.number for one in modules(tmp_path)] == [0, 3, 10]


@pytest.mark.parametrize("form", ["all-gather-start", "_xla_megascale_target", "reduce-scatter"])
def test_communication_is_found_wherever_it_stands(tmp_path, monkeypatch, form):
    monkeypatch.setattr(dump, "_CHUNK", 64)
    for number in range(70):
        (tmp_path / f"module_{number}.a.cpu_after_optimizations.txt").write_text(QUIET)
        folder = tmp_path / f"at{number}"
        folder.mkdir()
        busy = folder / "module_1.b.cpu_after_optimizations.txt"
        busy.write_text("x" * number + form)
        (folder / "module_2.c.cpu_after_optimizations.txt").write_text(QUIET)
        assert choose(folder) == busy


def test_several_that_communicate_are_listed_with_sizes(tmp_path):
    write(tmp_path, CPU, "module_0003.jit_step", BUSY)
    write(tmp_path, CPU, "module_0005.jit_init", BUSY * 30)
    with pytest.raises(AuditError) as caught:
        choose(tmp_path)
    size = len(BUSY) * 30
    assert f"module_5.jit_init ({size:,} bytes), module_3.jit_step" in str(caught.value)
    assert "--module" in str(caught.value)
    for given in ("jit_init", "5", "0005", "module_0005", "module_5.jit_init"):
        assert "module_0005" in choose(tmp_path, given).name
    with pytest.raises(AuditError, match="no module 'jit'.* It has module_5.jit_init"):
        choose(tmp_path, "jit")
    with pytest.raises(AuditError, match="has no module"):
        choose(tmp_path, "module_5.jit_step")


def test_a_program_compiled_twice_is_two_modules(tmp_path):
    write(tmp_path, CPU, "module_0003.jit_step")
    write(tmp_path, CPU, "module_0005.jit_step")
    with pytest.raises(AuditError, match="several modules"):
        choose(tmp_path, "jit_step")
    assert "module_0003" in choose(tmp_path, "3").name


def test_none_communicates(tmp_path):
    write(tmp_path, CPU, "module_0003.jit_a", QUIET)
    assert "jit_a" in choose(tmp_path).name
    write(tmp_path, CPU, "module_0005.jit_b", QUIET)
    with pytest.raises(AuditError, match="several modules"):
        choose(tmp_path)


def test_a_stage_that_was_not_dumped(tmp_path):
    write(tmp_path, CPU)
    with pytest.raises(AuditError, match="xla_dump_hlo_pass_re"):
        choose(tmp_path, stage="partitioned")
    for name in CPU:
        (tmp_path / name.format("module_0007.jit_step")).unlink()
    write(tmp_path, PASSES)
    with pytest.raises(AuditError, match="no final module"):
        choose(tmp_path)
    with pytest.raises(AuditError, match="stage='first' must be one of"):
        choose(tmp_path, stage="first")


def test_folders_without_modules(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text(BUSY)
    write(tmp_path, CPU[:6])
    with pytest.raises(AuditError, match="holds no module"):
        choose(tmp_path)
    for path in (tmp_path / "none", tmp_path / "notes.txt"):
        with pytest.raises(AuditError, match="cannot be read"):
            modules(path)
    monkeypatch.setattr(dump, "MAX_ENTRIES", 3)
    with pytest.raises(AuditError, match="more than 3 entries"):
        modules(tmp_path)


def test_a_damaged_file_is_left_to_its_reader(tmp_path):
    write(tmp_path, CPU, "module_0001.jit_a", QUIET)
    broken = tmp_path / "module_0002.jit_b.cpu_after_optimizations.hlo.pb.gz"
    broken.write_bytes(gzip.compress(b"x" * 1000)[:-9])
    assert choose(tmp_path) == broken


def test_too_much_to_search_is_asked_for(tmp_path, monkeypatch):
    write(tmp_path, CPU, "module_0001.jit_a", QUIET)
    write(tmp_path, CPU, "module_0002.jit_b", BUSY)
    monkeypatch.setattr(dump, "MAX_SEARCHED_BYTES", 10)
    with pytest.raises(AuditError, match="several modules"):
        choose(tmp_path)


def test_what_this_jax_writes(tmp_path):
    """Text and protos of a real compilation; the partitioned stage counts as the final one."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    function = jax.shard_map(
        lambda x: lax.psum(jnp.sin(x), "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    options = {
        "xla_dump_to": str(tmp_path / "dump"),
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_as_proto": True,
        "xla_dump_hlo_pass_re": ".*spmd-partitioning",
    }
    lowered = jax.jit(function).lower(jax.ShapeDtypeStruct((8, 4), jnp.float32))
    compiled = lowered.compile(compiler_options=options)
    expected = audit(compiled, mesh=mesh).collectives
    for stage in ("final", "partitioned"):
        text = choose(tmp_path / "dump", stage=stage)
        proto = text.with_suffix(".hlo.pb")
        for found in (audit(text, mesh=mesh), audit(proto_text(proto), mesh=mesh)):
            assert [(one.kind, one.axes, one.payload_bytes) for one in found.collectives] == [
                (one.kind, one.axes, one.payload_bytes) for one in expected
            ]
            assert found.program.scheduled == (stage == "final")
            assert found.program.num_devices == 8
